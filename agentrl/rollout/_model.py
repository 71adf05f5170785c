"""A transformers model as HFPolicy uses it: hidden states with our cache and mask, and float32 logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.modeling_utils import AttentionInterface

from agentrl.errors import ConfigError
from agentrl.rollout.kv import DecodeCache, LayerShape, PrefillCache, Slab

_ATTENTION = "agentrl_grouped"
_PROBE_TOKENS = 12
_NOT_DONE = ("softcap", "s_aux", "position_bias")
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest logit; 0.05 for coarser types


def grouped_attention(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention in which query heads that share a key head become more queries of that head.

    The usual way copies keys and values once for each of these query heads, at every step: with 9 query heads over
    3 key heads that takes several times as long as the attention itself on a CPU.

    Args:
        module: The attention layer.
        query: [B, heads, T, D].
        key: [B, key heads, L, D].
        value: [B, key heads, L, D'].
        attention_mask: [B, 1, T, L] added to the scores.
        scaling: Factor of the scores; 1 / sqrt(D) where not given.
        **kwargs: What the model passes besides.

    Returns:
        [B, T, heads, D'] and no weights.

    Raises:
        ConfigError: If the model asks for something that changes the scores.
    """
    if needed := {name for name in _NOT_DONE if kwargs.get(name) is not None}:
        raise ConfigError(
            f"this model's attention needs {', '.join(sorted(needed))}, which local sampling does not do: choose"
            " another model for training, or evaluate this one behind an OpenAI-compatible endpoint."
        )
    rows, heads, length, units = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        query = query.reshape(rows, key.shape[1], groups * length, units)
        attention_mask = attention_mask if length == 1 else attention_mask.repeat(1, 1, groups, 1)
    out = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, heads, length, -1).transpose(1, 2), None


def _longest(config: Any) -> int | None:
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"the model {config.model_type!r} has layers of the kind {', '.join(sorted(unknown))}: expected attention"
            " in all of them, because keys and values are kept for every position. Choose another model for training,"
            " or evaluate this one behind an OpenAI-compatible endpoint."
        )
    # Inside its window, sliding attention is full attention: such a model is used up to there.
    slides = "sliding_attention" in kinds or not kinds
    window = getattr(config, "sliding_window", None) if slides else None
    limits = (getattr(config, "max_position_embeddings", None), window)
    return min((int(limit) for limit in limits if limit is not None), default=None)


class Backbone:
    """The decoder and the head of a causal language model.

    Attributes:
        config: The model's configuration.
        device: Where the model is.
        n_vocab: Tokens that it embeds.
        max_positions: The longest sequence that it takes, tokens; None where its configuration does not say.
        layers: Shapes of keys and values.
        dtype: Type of keys and values.
    """

    def __init__(self, model: Any) -> None:
        """Takes a model apart and checks that the parts give what the whole gives.

        Args:
            model: A transformers causal language model, or a peft model around one; it stays the caller's.

        Raises:
            ConfigError: If keys and values of this model cannot be kept by position, or its logits are not its head's.
        """
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._decoder: Any = self._model.base_model
        self._head: nn.Module = self._model.get_output_embeddings()
        self._head_weight: Tensor | None = None
        self.config: Any = self._model.config
        embedded: Tensor = self._decoder.get_input_embeddings().weight
        self.device, self.n_vocab = embedded.device, embedded.shape[0]
        AttentionInterface.register(_ATTENTION, grouped_attention)
        self.max_positions = _longest(self.config)
        ids_1T = torch.arange(_PROBE_TOKENS, device=self.device)[None] % self.n_vocab
        was_training = self._model.training
        self._model.eval()
        with torch.no_grad():
            whole = self._model(input_ids=ids_1T, past_key_values=DynamicCache(), use_cache=True)
        self._model.train(was_training)
        held = whole.past_key_values.layers
        self.layers = tuple(LayerShape(h.keys.shape[1], h.keys.shape[3], h.values.shape[3]) for h in held)
        self.dtype: torch.dtype = held[0].keys.dtype
        self._check(ids_1T, whole.logits[0, -1].float())

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Evaluation mode, no gradients, our attention; all put back afterwards."""
        was_training = self._model.training
        attention = self.config._attn_implementation
        self._model.eval()
        if self._model._supports_sdpa:
            self.config._attn_implementation = _ATTENTION
        try:
            with torch.no_grad():
                yield
        finally:
            self.config._attn_implementation = attention
            self._model.train(was_training)

    def weights_changed(self) -> None:
        """Forgets what was derived from the weights."""
        self._head_weight = None

    def hidden(
        self, ids_BT: Tensor, positions_BT: Tensor, mask_B1TL: Tensor, cache: DecodeCache | PrefillCache
    ) -> Tensor:
        """Last hidden states.

        Args:
            ids_BT: [B, T] int64 new tokens.
            positions_BT: [B, T] int64 their positions.
            mask_B1TL: [B, 1, T, L] added to attention scores: 0 or minus infinity.
            cache: Holds what came before, and takes the new keys and values.

        Returns:
            [B, T, H].
        """
        out = self._decoder(
            input_ids=ids_BT,
            attention_mask=mask_B1TL,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Logits in float32, multiplied in float32: in bfloat16 their logprobs would be off by about 1e-2.

        Args:
            hidden_BH: [B, H] last hidden states.

        Returns:
            [B, V] float32.
        """
        if type(self._head) is not nn.Linear:
            logits: Tensor = self._head(hidden_BH).float()
            return logits
        if self._head_weight is None:
            self._head_weight = self._head.weight.detach().float()
        bias = self._head.bias
        return nn.functional.linear(hidden_BH.float(), self._head_weight, None if bias is None else bias.float())

    def mask(self, positions_BT: Tensor, width: int) -> Tensor:
        """[B, 1, T, width] mask: the token at position p sees the positions up to p."""
        at_L = torch.arange(width, device=self.device)
        shape = (*positions_BT.shape, width)
        mask_BTL = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return mask_BTL.masked_fill_(at_L > positions_BT[:, :, None], float("-inf"))[:, None]

    def _check(self, ids_1T: Tensor, expected_V: Tensor) -> None:
        n = ids_1T.shape[1]
        at_N = torch.arange(n, device=self.device)
        slab = Slab(self.layers, self.dtype, self.device, budget=2**40)
        slab.gather(["probe"], n)
        first_N = torch.zeros_like(at_N)
        cache = PrefillCache(slab, first_N[:1], (first_N, at_N), (first_N, at_N), n)
        with self.generating():
            hidden_1TH = self.hidden(ids_1T, at_N[None], self.mask(at_N[None], n), cache)
            found_V = self.logits(hidden_1TH[:, -1])[0]
        gap = (found_V - expected_V).abs().max().item()
        if not gap <= _TOLERANCE.get(self.dtype, 0.05) * expected_V.abs().max().item():
            raise ConfigError(
                f"the model {self.config.model_type!r} is not a plain decoder with a linear head: its own logits and"
                f" those of its parts differ by {gap:.3g}. Choose another model for training, or evaluate this one"
                " behind an OpenAI-compatible endpoint."
            )
