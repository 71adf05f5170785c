"""From a rollout to what the losses compare with: old logprobs, advantages, value targets."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import AdvantageConfig, PpoConfig
from agentrl.learner import invariants
from agentrl.learner.advantages import action_gae, adaptive_lambda, boundary_gae, turn_gae, turn_starts, whiten
from agentrl.learner.batch import MicroBatch, Rollout
from agentrl.learner.critic_free import Groups, episode_returns, grpo, refuse_cut, reinforce_pp, rloo
from agentrl.learner.diagnostics import calibration_error, calibration_table, explained_by_turn, explained_variance
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
    """What the losses compare with, for each model token; float64 and bool, on the CPU.

    Attributes:
        old_logprob_N: As `Scored.logprob_N`.
        known_N: As `Scored.known_N`.
        old_value_N: As `Scored.value_N`; 0 without a critic.
        advantage_N: Advantages, whitened where the config says so.
        return_N: Value targets, never whitened; without a critic the returns that were compared.
        weight_N: Constant weight of the token's policy loss, 1 where there is none.
        keep_N: bool; False takes a token out of the policy's loss, but never out of a denominator.
        value_keep_N: bool; tokens that have a value loss, and that its denominators count.
    """

    old_logprob_N: Tensor
    known_N: Tensor
    old_value_N: Tensor
    advantage_N: Tensor
    return_N: Tensor
    weight_N: Tensor
    keep_N: Tensor
    value_keep_N: Tensor

    def take(self, index_N: Tensor, device: torch.device, dtype: torch.dtype) -> Targets:
        """The targets of a micro-batch, where and in the type in which the losses read them."""

        def part(x_N: Tensor) -> Tensor:
            return x_N[index_N].to(device, dtype if x_N.is_floating_point() else torch.bool)

        return Targets(*(part(getattr(self, field.name)) for field in fields(self)))


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


def make_targets(
    rollout: Rollout, scored: Scored, penalty_N: Tensor | float, ppo: PpoConfig
) -> tuple[Targets, dict[str, float]]:
    """Assigns credit to every model token. Pure.

    A token that leaves the policy's loss has advantage 0 and no part in the whitening.

    Args:
        rollout: Rewards, turns, ends, and which episodes attempted the same task.
        scored: Values; bootstraps are read from `final_B` where the row's end asks for one.
        penalty_N: Taken off the rewards, token by token. Whether a group has spread is told without it.
        ppo: The estimator, whitening, and which groups leave the policy's loss.

    Returns:
        The targets, and metrics: `ppo/advantage_mean` and `ppo/advantage_std` before whitening; how many groups left
        the policy's loss; with a critic, how well it foresaw these episodes.

    Raises:
        InvariantError: If an episode was cut and the estimator has no critic.
    """
    config = ppo.advantage
    reward_N = rollout.reward_N - penalty_N
    keep_N, metrics = _kept(rollout, ppo)
    if config.is_critic_free:
        raw_N, return_N = _compared(rollout, reward_N, config)
        value_keep_N = torch.zeros_like(keep_N)
    else:
        raw_N, return_N = _foreseen(rollout, reward_N, scored, config)
        value_keep_N = _starts(rollout) if config.estimator == "turn" else torch.ones_like(keep_N)
        metrics |= _diagnose(rollout, reward_N, scored, (return_N, value_keep_N), config)
    advantage_N = torch.zeros_like(raw_N)
    advantage_N[keep_N], found = whiten(raw_N[keep_N], config.whitening, config.min_std)
    parts = (scored.logprob_N, scored.known_N, scored.value_N, advantage_N, return_N, torch.ones_like(raw_N))
    return Targets(*parts, keep_N, value_keep_N), metrics | found


def mean_return(rollout: Rollout, config: AdvantageConfig) -> float:
    """Mean over the critic's tokens of what was still to come, without any critic: where its bias starts."""
    monte_carlo = config.model_copy(update={"lambda_value": 1.0})
    _, return_N = _foreseen(rollout, rollout.reward_N, Scored.blank(rollout), monte_carlo)
    return float((return_N[_starts(rollout)] if config.estimator == "turn" else return_N).mean())


def _foreseen(rollout: Rollout, reward_N: Tensor, scored: Scored, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Advantages and value targets by the estimators that have a critic."""
    bootstrap_B = torch.where(rollout.bootstraps_B, scored.final_B, 0.0)
    ends = (rollout.episode_id_N, bootstrap_B, config)
    if config.estimator == "action":
        return action_gae(reward_N, scored.value_N, *ends)
    gae = turn_gae if config.estimator == "turn" else boundary_gae
    return gae(reward_N, scored.value_N, rollout.turn_id_N, *ends)


def _compared(rollout: Rollout, reward_N: Tensor, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """Advantages by the estimators without a critic, and the returns that they compare."""
    refuse_cut(rollout.bootstraps_B, tuple(row.episode for row in rollout.rows), config.estimator)
    if config.estimator == "reinforce_pp":
        return_N = reinforce_pp(reward_N, rollout.episode_id_N, config.gamma_turn)
        return return_N, return_N
    return_B = episode_returns(reward_N, rollout.episode_id_N, len(rollout.rows))
    groups = Groups.of(return_B, rollout.group_B)
    if config.estimator == "rloo":
        advantage_B = rloo(groups)
    else:
        advantage_B = grpo(groups, config.min_std if config.group_scale else None)
    return advantage_B[rollout.episode_id_N], return_B[rollout.episode_id_N]


def _kept(rollout: Rollout, ppo: PpoConfig) -> tuple[Tensor, dict[str, float]]:
    """Tokens that stay in the policy's loss, and how many groups leave it.

    A group leaves as a whole, episodes that were cut included, though these never count in its deviation. A group with
    a single return has no deviation: the filter lets it stay, and estimators that compare attempts do not.
    """
    return_B = episode_returns(rollout.reward_N, rollout.episode_id_N, len(rollout.rows))
    groups = Groups.of(return_B, rollout.group_B, ~rollout.bootstraps_B)
    leaves_B = torch.zeros_like(rollout.bootstraps_B)
    metrics = {}
    if ppo.advantage.estimator in {"grpo", "rloo"}:
        is_small_B = groups.size_B < 2
        metrics["ppo/groups_too_small"] = _count(rollout.group_B[is_small_B])
        leaves_B |= is_small_B
    if ppo.min_group_std is not None:
        is_flat_B = (groups.size_B > 1) & (groups.std_B <= ppo.min_group_std)
        metrics["ppo/groups_filtered"] = _count(rollout.group_B[is_flat_B])
        leaves_B |= is_flat_B
    return ~leaves_B[rollout.episode_id_N], metrics


def _diagnose(
    rollout: Rollout, reward_N: Tensor, scored: Scored, wanted: tuple[Tensor, Tensor], config: AdvantageConfig
) -> dict[str, float]:
    """How well the critic foresaw these episodes, where it is trained to: (value targets, tokens that have one)."""
    return_N, value_keep_N = wanted
    is_start_N, turn_id_N = _starts(rollout), rollout.turn_id_N
    value_K, return_K = scored.value_N[value_keep_N], return_N[value_keep_N]
    outcome_N = return_N
    if config.lambda_value != 1.0:  # Such targets hold the critic's own values, and are no outcome.
        _, outcome_N = _foreseen(rollout, reward_N, scored, config.model_copy(update={"lambda_value": 1.0}))
    ended_N = is_start_N & ~rollout.bootstraps_B[rollout.episode_id_N]
    metrics = {
        "critic/explained_variance": explained_variance(value_K, return_K),
        "critic/explained_variance_turn_start": explained_variance(scored.value_N[is_start_N], return_N[is_start_N]),
        "critic/calibration_error": calibration_error(calibration_table(scored.value_N[ended_N], outcome_N[ended_N])),
        "critic/value_mean": float(value_K.mean()),
        "critic/return_mean": float(return_K.mean()),
        "critic/return_std": float(return_K.std()) if return_K.numel() > 1 else math.nan,
    }
    for turn, share in explained_by_turn(value_K, return_K, turn_id_N[value_keep_N]).items():
        metrics[f"critic/explained_variance_turn_{turn}"] = share
    if config.lambda_alpha is not None:
        steps_N = torch.arange(turn_id_N.numel()) if config.estimator == "action" else turn_id_N
        lambda_B = adaptive_lambda(steps_N, rollout.episode_id_N, len(rollout.rows), config)
        metrics["ppo/lambda_turn"] = float(lambda_B.mean())
    return metrics


def _starts(rollout: Rollout) -> Tensor:
    return turn_starts(rollout.turn_id_N, rollout.episode_id_N)


def _count(groups: Tensor) -> float:
    return float(len(set(groups.tolist())))
