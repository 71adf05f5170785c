"""From a rollout to what the losses compare with: old logprobs, advantages, value targets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import AdvantageConfig
from agentrl.learner import invariants
from agentrl.learner.advantages import boundary_gae, explained_variance, whiten
from agentrl.learner.batch import MicroBatch, Rollout
from agentrl.learner.losses import kl_k1, kl_k3
from agentrl.learner.model import ActorCritic, PolicyScores, ValueScores


@dataclass(frozen=True, slots=True)
class Scored:
    """What policy and critic say of a rollout before they learn from it; float64, on the CPU.

    Attributes:
        logprob_N: The policy's logprobs, 0 where `known_N` is False.
        known_N: bool; where the logprob was computed. Elsewhere the update's own, detached, stands for it.
        value_N: The critic's values.
        final_B: The critic's values of the final states.
    """

    logprob_N: Tensor
    known_N: Tensor
    value_N: Tensor
    final_B: Tensor

    @classmethod
    def blank(cls, rollout: Rollout) -> Scored:
        """Nothing scored yet."""
        n, b = rollout.n_actions, len(rollout.rows)
        zeros_N, zeros_B = torch.zeros(n, dtype=torch.float64), torch.zeros(b, dtype=torch.float64)
        return cls(zeros_N, torch.zeros(n, dtype=torch.bool), zeros_N.clone(), zeros_B)

    def keep_policy(self, micro: MicroBatch, scores: PolicyScores) -> None:
        """Writes down the policy's logprobs of a micro-batch."""
        self.logprob_N[micro.index_N] = scores.logprob_N.double().cpu()
        self.known_N[micro.index_N] = True

    def keep_values(self, micro: MicroBatch, values: ValueScores) -> None:
        """Writes down the critic's values of a micro-batch."""
        self.value_N[micro.index_N] = values.value_N.double().cpu()
        self.final_B[micro.row_B] = values.final_B.double().cpu()


@dataclass(frozen=True, slots=True)
class Targets:
    """What the losses compare with, for each model token. Fields as in `Scored`, and the advantages and returns."""

    old_logprob_N: Tensor
    known_N: Tensor
    old_value_N: Tensor
    advantage_N: Tensor
    return_N: Tensor

    def take(self, index_N: Tensor, device: torch.device, dtype: torch.dtype) -> Targets:
        """The targets of a micro-batch, where and in the type in which the losses read them."""
        floats = (self.old_value_N, self.advantage_N, self.return_N)
        return Targets(
            self.old_logprob_N[index_N].to(device, dtype),
            self.known_N[index_N].to(device),
            *(values_N[index_N].to(device, dtype) for values_N in floats),
        )


@torch.no_grad()
def score(
    model: ActorCritic,
    micros: Iterable[MicroBatch],
    temperature: float,
    scored: Scored,
    *,
    what: Literal["policy", "critic", "both"],
) -> None:
    """Fills in what policy, critic or both say of some micro-batches; `both` is one pass where they share a trunk.

    Raises:
        InvariantError: If a logprob or value is not finite.
    """
    for micro in micros:
        if what == "both":
            scores, values = model.score(micro, temperature)
            scored.keep_policy(micro, scores)
            scored.keep_values(micro, values)
        elif what == "policy":
            scored.keep_policy(micro, model.policy_logprobs(micro, temperature))
        else:
            scored.keep_values(micro, model.values(micro))
    invariants.check_finite(scored.logprob_N, "of the policy's logprobs")
    invariants.check_finite(torch.cat([scored.value_N, scored.final_B]), "of the critic's values")


@torch.no_grad()
def kl_penalty(
    model: ActorCritic, micros: Iterable[MicroBatch], temperature: float, scored: Scored
) -> tuple[Tensor, dict[str, float]]:
    """k1 estimate of KL(policy, reference) on each token, which times its coefficient is taken off the reward.

    k1 in the reward has the gradient of the true KL, what a token does to later ones included; k3 there has not.

    Returns:
        k1_N, float64, and metrics.

    Source: arXiv:2510.01555; arXiv:2512.21852.
    """
    reference_N = torch.zeros_like(scored.logprob_N)
    for micro in micros:
        reference_N[micro.index_N] = model.reference_logprobs(micro, temperature).double().cpu()
    invariants.check_finite(reference_N, "of the reference's logprobs")
    k1_N = kl_k1(scored.logprob_N, reference_N)
    k3 = float(kl_k3(scored.logprob_N, reference_N).mean())
    return k1_N, {"ppo/kl_ref": k3, "ppo/kl_ref_k1": float(k1_N.mean())}


def make_targets(
    rollout: Rollout, scored: Scored, penalty_N: Tensor | float, config: AdvantageConfig
) -> tuple[Targets, dict[str, float]]:
    """Assigns credit to every model token. Pure.

    Args:
        rollout: Rewards, turns and ends.
        scored: Values; bootstraps are read from `final_B` where the row's end asks for one.
        penalty_N: Taken off the rewards, token by token.
        config: Boundary GAE and whitening.

    Returns:
        The targets, and the critic's diagnostics: how well it foresaw these episodes.
    """
    advantage_N, return_N = boundary_gae(
        rollout.reward_N - penalty_N,
        scored.value_N,
        rollout.turn_id_N,
        rollout.episode_id_N,
        torch.where(rollout.bootstraps_B, scored.final_B, 0.0),
        config,
    )
    advantage_N, metrics = whiten(advantage_N, config.whitening, config.min_std)
    is_start_N = _turn_starts(rollout)
    metrics |= {
        "critic/explained_variance": explained_variance(scored.value_N, return_N),
        "critic/explained_variance_turn_start": explained_variance(scored.value_N[is_start_N], return_N[is_start_N]),
        "critic/value_mean": float(scored.value_N.mean()),
        "critic/return_mean": float(return_N.mean()),
        "critic/return_std": float(return_N.std()) if return_N.numel() > 1 else math.nan,
    }
    return Targets(scored.logprob_N, scored.known_N, scored.value_N, advantage_N, return_N), metrics


def mean_return(rollout: Rollout, config: AdvantageConfig) -> float:
    """Mean over tokens of what was still to come, without any critic: where a fresh critic's bias starts."""
    blank = Scored.blank(rollout)
    monte_carlo = config.model_copy(update={"lambda_value": 1.0})
    return float(make_targets(rollout, blank, 0.0, monte_carlo)[0].return_N.mean())


def _turn_starts(rollout: Rollout) -> Tensor:
    is_start_N = torch.ones(rollout.n_actions, dtype=torch.bool)
    same_episode_N = rollout.episode_id_N[1:] == rollout.episode_id_N[:-1]
    is_start_N[1:] = ~(same_episode_N & (rollout.turn_id_N[1:] == rollout.turn_id_N[:-1]))
    return is_start_N
