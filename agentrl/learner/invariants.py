"""What must hold while PPO runs, and what it means where it does not.

Each check raises InvariantError with the likely causes, in the order in which they have been met, or returns its
figures as metrics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentrl.errors import InvariantError
from agentrl.learner.batch import Rollout
from agentrl.learner.losses import kl_k3

MAX_ENGINE_GAP = 1e-4
"""Mean |engine - learner| of logprobs, one process, float32."""
MAX_CORRECTED_GAP = 0.5
"""Mean |engine - learner| of logprobs where importance weights correct it, any type: a factor of 1.6 for each token is
no rounding any more, and weights truncated at 2 are mostly noise then. A bfloat16 engine is off by 1e-3 to 1e-2."""
MAX_RATIO_GAP = 1e-4
"""Largest |ratio - 1| of the first minibatch, float32."""
MAX_FIRST_K3 = 1e-8
"""k3 estimate of the first minibatch, float32."""
MAX_RATIO_GAP_LOW_PRECISION = 0.1
"""Mean |ratio - 1| of the first minibatch, bfloat16: SmolLM2's rounding alone gives 0.03 in another batch."""
MAX_DRIFT_LOW_PRECISION = 1e-2
"""|mean log ratio| of the first minibatch, bfloat16, beside three of its standard errors: rounding has no direction."""


def check_engine_gap(
    rollout: Rollout, logprob_N: Tensor, dtype: torch.dtype, *, corrected: bool = False
) -> dict[str, float]:
    """Compares the engine's logprobs with the learner's, before the learner has moved.

    Args:
        rollout: What was collected; the engine's logprobs are in it.
        logprob_N: The learner's, of the same tokens.
        dtype: Of the policy's trunk. Uncorrected, the bound holds for float32; other types are only reported.
        corrected: Whether importance weights make up for the gap: then only MAX_CORRECTED_GAP stops the run.

    Returns:
        `ppo/engine_gap` (mean |difference|, nats), `ppo/engine_gap_max`, `ppo/engine_kl` (k3 of engine to learner).

    Raises:
        InvariantError: If they differ by more than MAX_ENGINE_GAP, or corrected MAX_CORRECTED_GAP, on average.
    """
    learner_N = logprob_N.double().cpu()
    gap_N = (rollout.logprob_N - learner_N).abs()
    mean, largest = float(gap_N.mean()), float(gap_N.max())
    bound = MAX_CORRECTED_GAP if corrected else MAX_ENGINE_GAP
    if (corrected or _is_exact(dtype)) and not mean <= bound:
        worst = int(gap_N.argmax())
        versions = sorted({version for row in rollout.rows for version in row.versions})
        episode = rollout.rows[int(rollout.episode_id_N[worst])].episode
        raise InvariantError(
            f"the engine's logprobs and the learner's differ by {mean:.3g} on average (expected at most"
            f" {bound:g}), most in episode {episode}: {float(rollout.logprob_N[worst]):.4f} against"
            f" {float(logprob_N[worst]):.4f}. The episodes were sampled by policy version"
            f" {' and '.join(map(str, versions))}. Either they were sampled with other weights (update the policy"
            " before each collection), or at another temperature than rollout.sampling.temperature, or from other"
            " tokens than were recorded. An engine that is another program differs by its arithmetic too:"
            " ppo.importance.weight = 'token' corrects for that."
        )
    kl = float(kl_k3(rollout.logprob_N, learner_N).mean())
    return {"ppo/engine_gap": mean, "ppo/engine_gap_max": largest, "ppo/engine_kl": kl}


def check_first_minibatch(old_logprob_N: Tensor, new_logprob_N: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Before any step, the ratio must be 1: the old logprobs, computed in another batch, are those of the update.

    Args:
        old_logprob_N: From a batch of their own; taken from the update itself they would prove nothing.
        new_logprob_N: From the update, the same tokens.
        dtype: Of the policy's trunk.

    Raises:
        InvariantError: If they are not the same to within the type's precision.
    """
    old_N, new_N = old_logprob_N.double().cpu(), new_logprob_N.double().cpu()
    gap_N = torch.expm1(new_N - old_N).abs()
    largest, mean, k3 = float(gap_N.max()), float(gap_N.mean()), float(kl_k3(old_N, new_N).mean())
    if _is_exact(dtype):
        holds = largest <= MAX_RATIO_GAP and k3 <= MAX_FIRST_K3
        bound = f"max |ratio - 1| <= {MAX_RATIO_GAP:g} and k3 <= {MAX_FIRST_K3:g}"
    else:
        drift = MAX_DRIFT_LOW_PRECISION + 3.0 * float((new_N - old_N).std(correction=0)) / math.sqrt(new_N.numel())
        holds = mean <= MAX_RATIO_GAP_LOW_PRECISION and abs(float((new_N - old_N).mean())) <= drift
        bound = f"mean |ratio - 1| <= {MAX_RATIO_GAP_LOW_PRECISION:g} and |mean log ratio| <= {drift:.2g}"
    if not holds:
        raise InvariantError(
            "the first minibatch's ratios are not 1 though the policy has not moved: expected"
            f" {bound}, found max {largest:.3g}, mean {mean:.3g}, k3 {k3:.3g}. The same tokens score differently in"
            " another batch: dropout is on, padding reaches the states, or the weights changed since they were scored."
        )
    return {"ppo/first_ratio_gap": largest, "ppo/first_kl": k3}


def check_finite(values: Tensor, what: str) -> None:
    """Stops before numbers that are not finite reach an advantage.

    Raises:
        InvariantError: If any is not.
    """
    n_bad = int((~torch.isfinite(values)).sum())
    if n_bad:
        raise InvariantError(
            f"{n_bad} {what} (of {values.numel()}) are not finite: expected finite numbers, so the weights are damaged."
            " Go back to the last good checkpoint with a lower learning rate."
        )


def _is_exact(dtype: torch.dtype) -> bool:
    return dtype in {torch.float32, torch.float64}
