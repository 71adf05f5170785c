"""Correction of the gap between the engine that sampled and the learner, as constants on the policy's token losses.

Three policies meet in an update: mu, that sampled (the engine's own arithmetic, perhaps another program); pi_old, the
learner's view of the same weights, which anchors the clip; and pi, which learns. The losses correct from pi_old to pi;
w = pi_old / mu corrects the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.config import ImportanceConfig
from agentrl.learner.losses import MAX_LOG_RATIO


def importance_weights(
    engine_N: Tensor, old_N: Tensor, episode_id_N: Tensor, config: ImportanceConfig
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Truncated importance weights of tokens, and a mask of episodes that are too far off.

    w = exp(old - engine), at most `cap`: truncated, its variance is bounded and its bias is small. An episode is masked
    whole where the geometric mean of its w leaves the band; the mean and not the product, whose spread grows with the
    length, so that long episodes would be masked for being long.

    Args:
        engine_N: Logprobs of the sampled tokens as the engine that sampled them reported them.
        old_N: The learner's, before it moved.
        episode_id_N: Integers from 0.
        config: Which of the two, the cap and the band.

    Returns:
        weight_N, float64, 1 where `config.weight` is `none`; keep_N, bool, False in masked episodes; and metrics:
        `ppo/importance_mean` (of w before it is truncated: 1 where the engine sampled what it reports),
        `ppo/importance_ess` (effective sample size of these, as a share of the tokens), `ppo/importance_capped` and
        `ppo/importance_masked` (shares of tokens).

    Source: truncation, Ionides 2008 and fengyao.notion.site/off-policy-rl; the decoupled objective, arXiv:2110.00641.
    """
    log_weight_N = old_N.double() - engine_N.double()
    raw_N = log_weight_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight_N = raw_N.clamp(max=config.cap) if config.weight == "token" else torch.ones_like(raw_N)
    keep_N = torch.ones(raw_N.shape, dtype=torch.bool)
    if config.band is not None and raw_N.numel():
        length_B = torch.bincount(episode_id_N)
        sum_B = torch.zeros(length_B.shape, dtype=torch.float64).index_add(0, episode_id_N, log_weight_N)
        geometric_B = (sum_B / length_B.clamp(min=1)).exp()
        low, high = config.band
        keep_N = ((geometric_B >= low) & (geometric_B <= high))[episode_id_N]
    if not raw_N.numel():
        return weight_N, keep_N, {}
    return (
        weight_N,
        keep_N,
        {
            "ppo/importance_mean": float(raw_N.mean()),
            "ppo/importance_ess": effective_share(raw_N),
            "ppo/importance_capped": float((weight_N < raw_N).double().mean()) if config.weight == "token" else 0.0,
            "ppo/importance_masked": float((~keep_N).double().mean()),
        },
    )


def effective_share(weight_N: Tensor) -> float:
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2); 1 for equal weights."""
    # Scaled by the largest, so that no square overflows.
    scaled_N = weight_N / weight_N.max()
    return float(scaled_N.sum().square() / (scaled_N.square().sum() * weight_N.numel()))
