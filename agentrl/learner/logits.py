"""Logprobs and entropies of chosen tokens from hidden states, never holding [tokens, vocabulary] at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


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
    by 8e-3 on average. They are made again in the backward pass, so that those of one chunk exist at a time.

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
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    weight_VH: Tensor = head.weight
    bias_V: Tensor | None = head.bias
    if weight_VH.requires_grad:
        # Cast out here, so that the gradients of a bfloat16 head add up in float32 over the chunks.
        weight_VH, bias_V = weight_VH.to(dtype), None if bias_V is None else bias_V.to(dtype)
    logprob_N, entropy_N = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden_NH.to(dtype), target_N, weight_VH, bias_V, temperature, chunk
    )
    return logprob_N, entropy_N if entropy_grad else entropy_N.detach()


class _Chunked(torch.autograd.Function):
    """Keeps the states and two numbers a token for the backward pass, and no logits.

    With z = log pi, y the target and H the entropy: d logprob / d logit = (1[y] - pi) / T, d H / d logit =
    -pi (z + H) / T.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        target_N: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        norm_N, logprob_N, entropy_N = (hidden_NH.new_empty(target_N.numel()) for _ in range(3))
        for part, logits_NV in _logits(hidden_NH, weight_VH, bias_V, temperature, chunk):
            norm_N[part] = logits_NV.logsumexp(-1)
            logprob_N[part] = logits_NV.gather(-1, target_N[part, None]).squeeze(-1) - norm_N[part]
            pi_NV = (logits_NV - norm_N[part, None]).exp_()
            entropy_N[part] = norm_N[part] - pi_NV.mul_(logits_NV).sum(-1)
        ctx.save_for_backward(hidden_NH, target_N, weight_VH, bias_V, norm_N, entropy_N)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprob_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprob_N, grad_entropy_N = grads
        hidden_NH, target_N, weight_VH, bias_V, norm_N, entropy_N = ctx.saved_tensors
        weight_VH = weight_VH.to(hidden_NH.dtype)
        of_hidden, _, of_weight, of_bias, _, _ = ctx.needs_input_grad
        d_hidden_NH = torch.empty_like(hidden_NH) if of_hidden else None
        d_weight_VH = torch.zeros_like(weight_VH) if of_weight else None
        d_bias_V = torch.zeros_like(bias_V) if of_bias else None
        has_entropy = bool(grad_entropy_N.any())
        for part, logits_NV in _logits(hidden_NH, weight_VH, bias_V, ctx.temperature, ctx.chunk):
            log_pi_NV = logits_NV.sub_(norm_N[part, None])
            pull_N1 = -grad_logprob_N[part, None]
            if has_entropy:
                pull_NV = (log_pi_NV + entropy_N[part, None]).mul_(-grad_entropy_N[part, None]).add_(pull_N1)
                d_logits_NV = log_pi_NV.exp_().mul_(pull_NV)
            else:
                d_logits_NV = log_pi_NV.exp_().mul_(pull_N1)
            d_logits_NV.scatter_add_(-1, target_N[part, None], grad_logprob_N[part, None]).div_(ctx.temperature)
            if d_hidden_NH is not None:
                torch.mm(d_logits_NV, weight_VH, out=d_hidden_NH[part])
            if d_weight_VH is not None:
                d_weight_VH.addmm_(d_logits_NV.T, hidden_NH[part])
            if d_bias_V is not None:
                d_bias_V += d_logits_NV.sum(0)
        return d_hidden_NH, None, d_weight_VH, d_bias_V, None, None


def _logits(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float, chunk: int
) -> Iterator[tuple[slice, Tensor]]:
    weight_VH = weight_VH.to(hidden_NH.dtype)
    for start in range(0, hidden_NH.shape[0], chunk):
        part = slice(start, start + chunk)
        logits_NV = torch.mm(hidden_NH[part], weight_VH.T)
        if bias_V is not None:
            logits_NV += bias_V
        yield part, logits_NV.div_(temperature)
