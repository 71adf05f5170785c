"""The losses: pure functions over model tokens that return the loss and its metrics.

A micro-batch is a part of a minibatch, and a loss of a part must know the whole: `Share` says what each token counts in
the minibatch, with denominators taken over all of it. Losses and metrics of the parts then add up (`merge_metrics`),
and the gradient does not depend on how the minibatch was split. Masked slots are removed with `where` before any exp or
sum, so that a NaN in one changes neither value nor gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import LossConfig

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
Metrics = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before the exponential."""


@dataclass(frozen=True, slots=True)
class Share:
    """What each model token counts in the loss of its minibatch.

    Attributes:
        mask_N: bool; False removes the token from losses and metrics.
        weight_N: Factor of the token's loss in the minibatch's loss; global denominators are in it.
        n_tokens: Tokens of the whole minibatch, the denominator of metrics.
    """

    mask_N: Tensor
    weight_N: Tensor
    n_tokens: int

    def keep(self, keep_N: Tensor | None) -> Share:
        """Without some more tokens, at unchanged weights and denominators: nobody else counts for more."""
        return self if keep_N is None else Share(self.mask_N & keep_N, self.weight_N, self.n_tokens)

    def take(self, index_N: Tensor) -> Share:
        """The share of some tokens (a micro-batch): same weights, same denominators."""
        return Share(self.mask_N[index_N], self.weight_N[index_N], self.n_tokens)

    def to(self, device: torch.device) -> Share:
        """The same on another device."""
        return Share(self.mask_N.to(device), self.weight_N.to(device), self.n_tokens)


def make_share(episode_id_N: Tensor, mask_N: Tensor, aggregation: Aggregation, norm_length: int) -> Share:
    """Weights of all tokens of a minibatch, from the whole of it.

    With n_j valid tokens in episode j and B episodes that have any:

        token_mean 1 / sum_j n_j;  seq_mean_token_mean 1 / (B n_j);  seq_mean_token_sum 1 / B;
        seq_mean_token_sum_norm 1 / (B L)

    Args:
        episode_id_N: Integers from 0.
        mask_N: bool; tokens of the minibatch.
        aggregation: Which of the four.
        norm_length: L, tokens; a constant, since a padded width would depend on the batch.

    Returns:
        The share, float64; weights are 0 where the mask is False.
    """
    length_B = torch.bincount(episode_id_N[mask_N])
    n_tokens, n_episodes = int(mask_N.sum()), int((length_B > 0).sum())
    weight_N = torch.zeros(mask_N.shape, dtype=torch.float64)
    if n_tokens == 0:
        return Share(mask_N, weight_N, 0)
    if aggregation == "token_mean":
        weight_N[mask_N] = 1.0 / n_tokens
    elif aggregation == "seq_mean_token_mean":
        weight_N[mask_N] = 1.0 / (n_episodes * length_B[episode_id_N[mask_N]].double())
    elif aggregation == "seq_mean_token_sum":
        weight_N[mask_N] = 1.0 / n_episodes
    else:
        weight_N[mask_N] = 1.0 / (n_episodes * norm_length)
    return Share(mask_N, weight_N, n_tokens)


def aggregate(loss_N: Tensor, share: Share) -> Tensor:
    """This part's contribution to the minibatch's loss: the weighted sum over its unmasked tokens."""
    return (torch.where(share.mask_N, loss_N, 0.0) * share.weight_N.to(loss_N.dtype)).sum()


def policy_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    share: Share,
    config: LossConfig,
    *,
    weight_N: Tensor | None = None,
    keep_N: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with clip-higher and dual clip.

    With rho = exp(logprob - old):  max(-A rho, -A clip(rho, 1 - low, 1 + high)), and at most -c A where A < 0; that
    times the token's importance weight.

    Args:
        logprob_N: Of the sampled tokens under the policy that learns; carries the gradient.
        old_logprob_N: Under the policy as it was when the batch was collected.
        advantage_N: Advantages.
        share: What each token counts.
        config: Clip ranges.
        weight_N: Importance weights, constants; None for 1.
        keep_N: bool; False takes a token out of the loss, after the denominators were counted. None keeps all.

    Returns:
        The loss (a scalar) and metrics. As shares of the minibatch's tokens: `clip_fraction` and its parts `_upper` and
        `_lower` (where clipping took the gradient away from a kept token), `clip_fraction_dual`. As means over the
        minibatch's tokens, kept or not, since all of them drift: the KL estimates `kl` (k3) and `kl_k1`. And
        `ratio_max`.

    Source: arXiv:1707.06347; dual clip, arXiv:1912.09729; clip-higher, arXiv:2503.14476; weights, arXiv:2110.00641.
    """
    kept = share.keep(keep_N)
    log_ratio_N = _log_ratio(logprob_N, old_logprob_N, kept.mask_N)
    advantage_N = torch.where(kept.mask_N, advantage_N, 0.0).to(log_ratio_N.dtype)
    ratio_N = log_ratio_N.exp()
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    loss_N = torch.maximum(-advantage_N * ratio_N, -advantage_N * clipped_N)
    is_dual_N = torch.zeros_like(kept.mask_N)
    if config.dual_clip is not None:
        bound_N = -config.dual_clip * advantage_N
        is_dual_N = (advantage_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(is_dual_N, bound_N, loss_N)
    with torch.no_grad():
        upper_N = (advantage_N > 0) & (ratio_N > 1.0 + config.clip_high)
        lower_N = (advantage_N < 0) & (ratio_N < 1.0 - config.clip_low)
        metrics = {
            "clip_fraction": _mean(upper_N | lower_N, kept),
            "clip_fraction_upper": _mean(upper_N, kept),
            "clip_fraction_lower": _mean(lower_N, kept),
            "clip_fraction_dual": _mean(is_dual_N, kept),
            **_drift(_log_ratio(logprob_N, old_logprob_N, share.mask_N), share),
        }
    return aggregate(_weighted(loss_N, weight_N), kept), metrics


def kl_loss(
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    reference_N: Tensor,
    share: Share,
    *,
    weight_N: Tensor | None = None,
    keep_N: Tensor | None = None,
) -> Tensor:
    """KL(policy, reference) as a loss, whose gradient is that of the KL in each visited state: rho k2, rho detached.

    With rho = exp(logprob - old), a constant, this holds however far the policy has moved from the one that sampled:
    E_old[rho (logprob - reference) grad logprob] = E_policy[(logprob - reference) grad logprob] = grad KL.

    Args:
        logprob_N: Of the sampled tokens under the policy that learns; carries the gradient.
        old_logprob_N: Under the policy as it was when the batch was collected.
        reference_N: Under the reference.
        share: What each token counts.
        weight_N: Importance weights, constants: old / engine, where the engine sampled from another policy still.
        keep_N: bool; as in `policy_loss`.

    Returns:
        The loss (a scalar), before its coefficient. Its value is no estimate of the KL; its gradient is.

    Source: arXiv:2510.01555; arXiv:2512.21852.
    """
    kept = share.keep(keep_N)
    ratio_N = _log_ratio(logprob_N.detach(), old_logprob_N, kept.mask_N).exp()
    k2_N = kl_k2(*(torch.where(kept.mask_N, x_N, 0.0) for x_N in (logprob_N, reference_N)))
    return aggregate(_weighted(ratio_N * k2_N, weight_N), kept)


def value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, share: Share, clip: float | None
) -> tuple[Tensor, Metrics]:
    """Half the squared error of the values; with `clip`, the worse of it and that of values moved by at most `clip`.

    Args:
        value_N: Of the critic that learns; carries the gradient.
        old_value_N: As they were when the batch was collected; read only where `clip` is given.
        return_N: Value targets, never whitened.
        share: What each token with a value loss counts; its denominators are those of these tokens.
        clip: Range of the change, or None.

    Returns:
        The loss (a scalar), and `clip_fraction`: where the clipped error was the worse.

    Source: clipping as in OpenAI baselines; off by default after arXiv:2006.05990.
    """
    mask_N = share.mask_N
    value_N = torch.where(mask_N, value_N, 0.0)
    return_N = torch.where(mask_N, return_N, 0.0).to(value_N.dtype)
    error_N = (value_N - return_N).square()
    is_clipped_N = torch.zeros_like(mask_N)
    if clip is not None:
        old_N = torch.where(mask_N, old_value_N, 0.0).to(value_N.dtype)
        clipped_error_N = (old_N + (value_N - old_N).clamp(-clip, clip) - return_N).square()
        is_clipped_N = clipped_error_N > error_N
        error_N = torch.maximum(error_N, clipped_error_N)
    return aggregate(0.5 * error_N, share), {"clip_fraction": _mean(is_clipped_N, share)}


def entropy_loss(
    entropy_N: Tensor, share: Share, coef: float, *, keep_N: Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """The entropy bonus as a loss: -coef times the aggregated entropy of the kept tokens, nats.

    The metric `entropy` is the mean over the minibatch's tokens, kept or not.
    """
    return -coef * aggregate(entropy_N, share.keep(keep_N)), {"entropy": _mean(entropy_N.detach(), share)}


def kl_k1(logprob_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimates KL(p, q) as log(p / q) of tokens drawn from p: unbiased, may be negative. For the reward."""
    return logprob_N - other_N


def kl_k2(logprob_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimates KL(p, q) as half the squared log ratio: on policy, its gradient is that of the KL. For the loss."""
    return 0.5 * (logprob_N - other_N).square()


def kl_k3(logprob_N: Tensor, other_N: Tensor) -> Tensor:
    """Estimates KL(p, q) as q / p - 1 - log(q / p) of tokens drawn from p: unbiased, never negative. For metrics.

    Source: Schulman, "Approximating KL divergence", 2020.
    """
    log_ratio_N = other_N - logprob_N
    return torch.expm1(log_ratio_N) - log_ratio_N


def merge_metrics(total: Metrics, part: Mapping[str, Tensor]) -> None:
    """Adds the metrics of one micro-batch to those of its minibatch: `..._max` by maximum, all others by sum."""
    for name, value in part.items():
        if name not in total:
            total[name] = value
        elif name.endswith("_max"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def _log_ratio(logprob_N: Tensor, old_logprob_N: Tensor, mask_N: Tensor) -> Tensor:
    return torch.where(mask_N, logprob_N - old_logprob_N, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _weighted(loss_N: Tensor, weight_N: Tensor | None) -> Tensor:
    return loss_N if weight_N is None else loss_N * weight_N.detach().to(loss_N.dtype)


def _drift(log_ratio_N: Tensor, share: Share) -> Metrics:
    ratio_max = log_ratio_N.max().exp() if log_ratio_N.numel() else torch.ones(())
    return {
        "kl": _mean(kl_k3(-log_ratio_N, torch.zeros_like(log_ratio_N)), share),
        "kl_k1": _mean(-log_ratio_N, share),
        "ratio_max": ratio_max,
    }


def _mean(x_N: Tensor, share: Share) -> Tensor:
    x_N = x_N if x_N.is_floating_point() else x_N.double()
    return torch.where(share.mask_N, x_N, 0.0).sum() / max(share.n_tokens, 1)
