"""A decoder without its head: the states that logprobs and values are read from, and what the learner needs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agentrl.errors import ConfigError
from agentrl.learner.batch import MicroBatch

Around = Callable[[nn.Module], AbstractContextManager[None]]
"""From a decoder layer to what must surround its second forward pass."""

_PROBE_TOKENS = 8


def decoder_layers(trunk: Any) -> list[nn.Module]:
    """The layers of a transformers decoder, first to last."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in trunk.modules() if isinstance(module, GradientCheckpointingLayer)]


def trunk_states(trunk: Any, batch: MicroBatch) -> Tensor:
    """[N + B, H]: the states before the sampled tokens, then the rows' final states."""
    hidden_BTH = _hidden(trunk, batch.token_ids_BT, batch.position_ids)
    return hidden_BTH.flatten(0, 1).index_select(0, torch.cat([batch.state_N, batch.final_B]))


def _hidden(trunk: Any, token_ids_BT: Tensor, position_ids: Tensor) -> Tensor:
    # Without a cache and a mask, transformers lets the attention kernel be causal by itself, and tells packed rows
    # apart by their positions; with either of the two it would do neither.
    out = trunk(token_ids_BT, attention_mask=None, position_ids=position_ids, use_cache=False)
    hidden_BTH: Tensor = out.last_hidden_state
    return hidden_BTH


@contextmanager
def checkpointed(trunk: Any, around: Around | None = None) -> Iterator[None]:
    """For a while, forward passes keep the states between layers only; the backward pass computes the rest again.

    The switch of transformers' own works in training mode alone, in which dropout is on, and it would stay on for
    whoever shares the model. This one replaces each layer's `forward` and puts it back.

    Args:
        trunk: The decoder.
        around: What must surround a layer's second forward pass, which comes whenever `backward` is called: the adapter
            of the first one.
    """
    before = [(layer, vars(layer).get("forward")) for layer in decoder_layers(trunk)]
    try:
        for layer, _ in before:
            vars(layer)["forward"] = partial(_checkpointed_forward, layer, layer.forward, around)
        yield
    finally:
        for layer, forward in before:
            vars(layer).pop("forward", None)
            if forward is not None:
                vars(layer)["forward"] = forward


def _checkpointed_forward(
    layer: nn.Module, forward: Callable[..., Any], around: Around | None, *args: Any, **kwargs: Any
) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), nullcontext() if around is None else around(layer)

    return checkpoint(
        partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
    )


def check_layers(policy: Any) -> None:
    """Refuses gradient checkpointing for models whose layers cannot be told.

    Raises:
        ConfigError: If so.
    """
    if not decoder_layers(policy.base_model):
        raise ConfigError(
            f"{type(policy).__name__} names no decoder layers that could be checkpointed: expected a model such as"
            " Llama, Qwen, Mistral or SmolLM, or model.gradient_checkpointing = false."
        )


@torch.no_grad()
def check_head(policy: Any) -> None:
    """Refuses models that scale or cap their logits after the output embedding: every ratio would be wrong.

    Raises:
        ConfigError: If so.
    """
    policy.eval()
    token_ids_BT = torch.arange(1, 1 + _PROBE_TOKENS, device=policy.device)[None] % policy.config.vocab_size
    expected = policy(token_ids_BT, use_cache=False).logits.float()
    hidden = policy.base_model(token_ids_BT, use_cache=False).last_hidden_state
    found = policy.get_output_embeddings()(hidden).float()
    tolerance = 1e-4 if policy.dtype in {torch.float32, torch.float64} else 2e-2
    if found.shape != expected.shape or float((found - expected).abs().max()) > tolerance * float(expected.abs().max()):
        raise ConfigError(
            f"{type(policy).__name__} does not compute its logits as output embedding times last hidden state (it"
            " scales or caps them): expected a model such as Llama, Qwen, Mistral or SmolLM."
        )


@torch.no_grad()
def check_packing(trunk: Any, n_vocab: int, device: torch.device) -> None:
    """Refuses models in which episodes that share a line see each other, or are told their places wrongly.

    Two lines of two rows each differ in their first row alone. The second row's states must then be the same bit for
    bit, in any type, and must be those that the row has when it is alone.

    Raises:
        ConfigError: If they are not.
    """
    n = _PROBE_TOKENS
    at = torch.arange(2 * n, device=device)
    rows = torch.stack([torch.cat([at[:n] + shift, at[n:]]) for shift in (1, 3)]) % n_vocab
    places = at[:n].repeat(2)
    try:
        first, second = (_hidden(trunk, row[None], places[None])[0, n:] for row in rows)
        alone = _hidden(trunk, rows[0, None, n:], at[None, :n])[0]
    except TypeError as error:
        raise ConfigError(_refusal(trunk, f"it takes no positions ({error})")) from error
    tolerance = 1e-3 if alone.dtype in {torch.float32, torch.float64} else 5e-2
    gap = float((first - alone).abs().max()) / float(alone.abs().max())
    if not torch.equal(first, second) or gap > tolerance:
        raise ConfigError(_refusal(trunk, f"a row's states change by {gap:.2g} of their size when another precedes it"))


def _refusal(trunk: Any, why: str) -> str:
    return (
        f"ppo.packing: {type(trunk).__name__} does not keep the episodes of a packed line apart: {why}. Expected a"
        " model such as Llama, Qwen, Mistral or SmolLM with attention 'sdpa' or 'eager', or ppo.packing = false."
    )
