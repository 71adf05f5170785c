"""Logprobs and entropies of chosen tokens from hidden states, never holding [tokens, vocabulary] at once."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def logprob_and_entropy(
    hidden_NH: Tensor,
    target_N: Tensor,
    head: torch.nn.Linear,
    *,
    temperature: float,
    chunk: int,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Scores targets: log pi(target) and the entropy of pi, with pi = softmax(head(hidden) / temperature).

    Logits are float32 (float64 for float64 states) whatever the weights are: a bfloat16 matrix product alone is wrong
    by 8e-3 on average. Where a gradient is needed and there is more than one chunk, logits are made again in the
    backward pass, so that those of one chunk exist at a time.

    Args:
        hidden_NH: Last hidden state before each target.
        target_N: Token ids.
        head: The output embedding, with or without bias.
        temperature: Of sampling; above 0.
        chunk: Tokens whose logits exist at once.
        entropy_grad: Whether the entropy carries a gradient.

    Returns:
        logprob_N and entropy_N, nats.
    """
    n = target_N.numel()
    of_chunk = partial(_of_chunk, head=head, temperature=temperature, entropy_grad=entropy_grad)
    if n <= chunk:
        return of_chunk(hidden_NH, target_N)
    pieces: list[tuple[Tensor, Tensor]] = []
    for start in range(0, n, chunk):
        part_NH, part_N = hidden_NH[start : start + chunk], target_N[start : start + chunk]
        if torch.is_grad_enabled():
            pieces.append(checkpoint(of_chunk, part_NH, part_N, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(of_chunk(part_NH, part_N))
    return torch.cat([logprob for logprob, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def _of_chunk(
    hidden_NH: Tensor, target_N: Tensor, *, head: torch.nn.Linear, temperature: float, entropy_grad: bool
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    bias_V = None if head.bias is None else head.bias.to(dtype)
    logits_NV = torch.nn.functional.linear(hidden_NH.to(dtype), head.weight.to(dtype), bias_V)
    if temperature != 1.0:
        logits_NV = logits_NV / temperature
    norm_N = logits_NV.logsumexp(-1)
    logprob_N = logits_NV.gather(-1, target_N[:, None]).squeeze(-1) - norm_N
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        probability_NV = (logits_NV - norm_N[:, None]).exp()
        entropy_N = norm_N - (probability_NV * logits_NV).sum(-1)
    return logprob_N, entropy_N
