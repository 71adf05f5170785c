"""PPO with a critic over whole trajectories: score, assign credit, take a few clipped steps, check what must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.learner import invariants, losses
from agentrl.learner.batch import MicroBatch, Rollout, make_microbatches, read_rollout
from agentrl.learner.credit import Scored, Targets, kl_penalty, make_targets, mean_return, score
from agentrl.learner.losses import Metrics, Share
from agentrl.learner.model import ActorCritic, PolicyScores, ValueScores
from agentrl.learner.optim import Optimizer, linear_warmup
from agentrl.types import Trajectory

PROBED_EPISODES = 8
"""Episodes scored in a batch of their own where the update needs no old logprobs but the invariants do."""
EARLY_STOP = 1.5
"""An update stops once its KL is above this many times the target."""


class PPOLearner:
    """Trains an actor-critic on collected trajectories.

    Everything random is drawn from its own generator, and everything with a state is in `state_dict`: on a CPU a
    learner restored with its model goes on bit for bit.
    """

    def __init__(self, model: ActorCritic, config: RunConfig) -> None:
        """Prepares the optimisers.

        Args:
            model: The actor-critic, after `begin_rl`.
            config: `ppo`, `rollout.sampling.temperature` and `seed` are read.

        Raises:
            ConfigError: If a KL penalty is asked for and the model has no reference.
        """
        if config.ppo.loss.kl_coef > 0 and not model.has_reference:
            raise ConfigError(
                "ppo.loss.kl_coef is above 0 but the model has no reference: call model.begin_rl(reference=True) first."
            )
        self._model = model
        self._ppo = config.ppo
        self._temperature = config.rollout.sampling.temperature
        self._policy, self._critic = (
            Optimizer(name, parameters, optim, linear_warmup(optim.warmup_steps))
            for name, parameters, optim in (
                ("policy", model.policy_parameters(), self._ppo.policy),
                ("critic", model.critic_parameters(), self._ppo.critic),
            )
        )
        self._order = torch.Generator().manual_seed(config.seed)
        self._bias_is_set = False

    def warmup(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Fits the critic alone to one collection, `warmup_epochs` times over.

        Returns:
            Metrics. `critic/explained_variance` is that of these episodes before the fit, so of a critic that has not
            seen them; `critic/warm` is 1 where it clears `warmup_explained_variance` and warm-up may end.
        """
        rollout = self._read(trajectories)
        metrics = _counts(rollout)
        if not rollout.rows:
            return metrics
        self._start_value_bias(rollout)
        scored = Scored.blank(rollout)
        score(self._model, self._micros(rollout), self._temperature, scored, what="critic")
        targets, diagnosis = make_targets(rollout, scored, 0.0, self._ppo.advantage)
        means, skipped = _Means(), self._critic.skipped
        for _ in range(self._ppo.warmup_epochs):
            for rows in self._minibatches(rollout):
                total: Metrics = {}
                share = self._share(rollout, rows)
                for micro in self._micros(rollout, rows):
                    values, wanted = self._model.values(micro), self._take(targets, micro)
                    self._value_loss(values, self._part(share, micro), wanted, total).backward()  # type: ignore[no-untyped-call]
                means.add(total | self._step("critic", self._critic))
        warm = diagnosis["critic/explained_variance"] >= self._ppo.warmup_explained_variance
        skips = {"critic/skipped_steps": float(self._critic.skipped - skipped)}
        return metrics | diagnosis | means.result() | skips | {"critic/warm": float(warm)}

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One PPO update of policy and critic on one collection.

        Trajectories that ended in an error are left out and counted; where none is left nothing is changed and only
        counts are returned.

        Returns:
            Metrics: means over the optimiser steps, `..._max` their maximum. NaN where a figure is not defined.

        Raises:
            InvariantError: If a runtime invariant breaks (see `invariants` and `batch`); no step was taken on this
                batch then, unless a gradient was not finite several times in a row.
        """
        rollout = self._read(trajectories)
        metrics = _counts(rollout) | {"ppo/steps": 0.0}
        if not rollout.rows:
            return metrics
        self._start_value_bias(rollout)
        scored = self._score(rollout)
        penalty_N: Tensor | float = 0.0
        if self._ppo.loss.kl_coef > 0:
            k1_N, penalised = kl_penalty(self._model, self._micros(rollout), self._temperature, scored)
            penalty_N, metrics = self._ppo.loss.kl_coef * k1_N, metrics | penalised
        targets, diagnosis = make_targets(rollout, scored, penalty_N, self._ppo.advantage)
        metrics |= {"ppo/lr": self._policy.lr, "critic/lr": self._critic.lr}
        return metrics | diagnosis | self._train(rollout, targets)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on besides the model's weights."""
        return {
            "policy": self._policy.state_dict(),
            "critic": self._critic.state_dict(),
            "order": self._order.get_state(),
            "bias_is_set": self._bias_is_set,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self._policy.load_state_dict(state["policy"])
        self._critic.load_state_dict(state["critic"])
        self._order.set_state(state["order"])
        self._bias_is_set = state["bias_is_set"]

    def _read(self, trajectories: Sequence[Trajectory]) -> Rollout:
        return read_rollout(trajectories, context=self._model.context, vocab_size=self._model.vocab_size)

    def _micros(self, rollout: Rollout, rows: Sequence[int] | None = None) -> list[MicroBatch]:
        rows = range(len(rollout.rows)) if rows is None else rows
        return make_microbatches(rollout, rows, self._ppo.microbatch_tokens, self._model.device)

    def _minibatches(self, rollout: Rollout) -> list[list[int]]:
        order = torch.randperm(len(rollout.rows), generator=self._order)
        parts = order.tensor_split(min(self._ppo.minibatches, len(rollout.rows)))
        return [part.tolist() for part in parts]

    def _share(self, rollout: Rollout, rows: Sequence[int]) -> Share:
        mask_N = torch.isin(rollout.episode_id_N, torch.tensor(rows))
        loss = self._ppo.loss
        return losses.make_share(rollout.episode_id_N, mask_N, loss.aggregation, loss.norm_length)

    def _part(self, share: Share, micro: MicroBatch) -> Share:
        return share.take(micro.index_N).to(self._model.device)

    def _take(self, targets: Targets, micro: MicroBatch) -> Targets:
        dtype = torch.promote_types(self._model.dtype, torch.float32)
        return targets.take(micro.index_N, self._model.device, dtype)

    def _start_value_bias(self, rollout: Rollout) -> None:
        if not self._bias_is_set:
            self._model.set_value_bias(mean_return(rollout, self._ppo.advantage))
            self._bias_is_set = True

    def _score(self, rollout: Rollout) -> Scored:
        scored = Scored.blank(rollout)
        if self._model.shares_trunk:
            score(self._model, self._micros(rollout), self._temperature, scored, what="both")
            return scored
        score(self._model, self._micros(rollout), self._temperature, scored, what="critic")
        rows: Sequence[int] = range(len(rollout.rows))
        # With a single step the old logprobs are the update's own: a probe in a batch of its own serves the invariants.
        if self._ppo.epochs * self._ppo.minibatches == 1 and self._ppo.loss.kl_coef == 0:
            rows = rows[:: math.ceil(len(rows) / PROBED_EPISODES)]
        score(self._model, self._micros(rollout, rows), self._temperature, scored, what="policy")
        return scored

    def _train(self, rollout: Rollout, targets: Targets) -> dict[str, float]:
        means, checks = _Means(), dict[str, float]()
        before = (self._policy.steps, self._policy.skipped, self._critic.skipped)
        stopped = False
        for rows in (rows for _ in range(self._ppo.epochs) for rows in self._minibatches(rollout)):
            total, new_logprob_N = self._minibatch(rollout, targets, rows)
            checks = checks or self._first_checks(rollout, targets, new_logprob_N)
            means.add(total)
            stopped = self._ppo.target_kl is not None and float(total["ppo/kl"]) > EARLY_STOP * self._ppo.target_kl
            if stopped:
                self._policy.clear()
                self._critic.clear()
                break
            means.add(self._step("ppo", self._policy) | self._step("critic", self._critic))
        counts = {
            "ppo/steps": float(self._policy.steps - before[0]),
            "ppo/skipped_steps": float(self._policy.skipped - before[1]),
            "critic/skipped_steps": float(self._critic.skipped - before[2]),
            "ppo/early_stop": float(stopped),
        }
        return checks | means.result() | counts

    def _minibatch(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> tuple[Metrics, Tensor]:
        """Accumulates the gradients of one minibatch; also gives the logprobs that it met, NaN where it met none."""
        total: Metrics = {}
        new_logprob_N = torch.full_like(targets.old_logprob_N, math.nan)
        share = self._share(rollout, rows)
        for micro in self._micros(rollout, rows):
            scores = self._backward(micro, self._part(share, micro), self._take(targets, micro), total)
            new_logprob_N[micro.index_N] = scores.logprob_N.detach().double().cpu()
        return total, new_logprob_N

    def _first_checks(self, rollout: Rollout, targets: Targets, new_logprob_N: Tensor) -> dict[str, float]:
        both_N = targets.known_N & ~new_logprob_N.isnan()
        dtype = self._model.dtype
        metrics = invariants.check_first_minibatch(targets.old_logprob_N[both_N], new_logprob_N[both_N], dtype)
        learner_N = torch.where(targets.known_N, targets.old_logprob_N, new_logprob_N)
        return metrics | invariants.check_engine_gap(rollout, learner_N, dtype)

    def _backward(self, micro: MicroBatch, share: Share, targets: Targets, total: Metrics) -> PolicyScores:
        entropy_grad = self._ppo.loss.entropy_coef > 0
        if self._model.shares_trunk:
            scores, values = self._model.score(micro, self._temperature, entropy_grad=entropy_grad)
            loss = self._policy_loss(scores, share, targets, total) + self._value_loss(values, share, targets, total)
            loss.backward()  # type: ignore[no-untyped-call]
            return scores
        # One after the other, so that the graphs of policy and critic are never held together.
        scores = self._model.policy_logprobs(micro, self._temperature, entropy_grad=entropy_grad)
        self._policy_loss(scores, share, targets, total).backward()  # type: ignore[no-untyped-call]
        values = self._model.values(micro)
        self._value_loss(values, share, targets, total).backward()  # type: ignore[no-untyped-call]
        return scores

    def _policy_loss(self, scores: PolicyScores, share: Share, targets: Targets, total: Metrics) -> Tensor:
        config = self._ppo.loss
        old_N = torch.where(targets.known_N, targets.old_logprob_N, scores.logprob_N.detach())
        loss, metrics = losses.policy_loss(scores.logprob_N, old_N, targets.advantage_N, share, config)
        bonus, entropy = losses.entropy_loss(scores.entropy_N, share, config.entropy_coef)
        found = {f"ppo/{name}": value for name, value in (metrics | entropy).items()}
        losses.merge_metrics(total, found | {"loss/policy": loss.detach()})
        return loss + bonus

    def _value_loss(self, values: ValueScores, share: Share, targets: Targets, total: Metrics) -> Tensor:
        clip = self._ppo.loss.value_clip
        loss, metrics = losses.value_loss(values.value_N, targets.old_value_N, targets.return_N, share, clip)
        found = {f"critic/{name}": value for name, value in metrics.items()}
        losses.merge_metrics(total, found | {"loss/value": loss.detach()})
        return loss

    def _step(self, group: str, optimizer: Optimizer) -> dict[str, Tensor | float]:
        norm, stepped = optimizer.step()
        return {f"{group}/grad_norm": norm, f"{group}/grad_norm_max": norm} if stepped else {}


class _Means:
    """Means of metrics over optimiser steps; `..._max` are maxima."""

    def __init__(self) -> None:
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(float(value))

    def result(self) -> dict[str, float]:
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._values.items()
        }


def _counts(rollout: Rollout) -> dict[str, float]:
    return {
        "ppo/episodes": float(len(rollout.rows)),
        "ppo/episodes_error": float(rollout.n_error),
        "ppo/episodes_empty": float(rollout.n_empty),
        "ppo/tokens": float(rollout.n_actions),
    }
