"""PPO over whole trajectories: score, assign credit, take a few clipped steps, check what must hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agentrl.config import OptimConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.learner import invariants
from agentrl.learner.alarms import Alarms
from agentrl.learner.batch import Rollout, read_rollout
from agentrl.learner.credit import Scored, make_targets, mean_return, score
from agentrl.learner.importance import importance_weights
from agentrl.learner.kl import KlController, kl_stat, score_reference
from agentrl.learner.losses import kl_k1
from agentrl.learner.minibatch import Batch, Means, Met, Objective
from agentrl.learner.model import ActorCritic
from agentrl.learner.optim import Optimizer, linear_warmup
from agentrl.learner.record import StepRecord, UpdateRecord
from agentrl.types import Trajectory

PROBED_EPISODES = 8
"""Episodes scored in a batch of their own where the update needs no old logprobs but the invariants do."""
EARLY_STOP = 1.5
"""An update stops once its KL is above this many times the target."""


class PPOLearner:
    """Trains an actor-critic, or a policy alone, on collected trajectories.

    Everything random is drawn from its own generator, and everything with a state is in `state_dict`: on a CPU a
    learner restored with its model goes on bit for bit.

    Attributes:
        record: What the last update learned from; None before the first one, after a warm-up, and after a collection
            that left nothing to learn from.
        alarms: What has been noticed; `alarms.lines` is what to tell a person after an update.
    """

    def __init__(self, model: ActorCritic, config: RunConfig) -> None:
        """Prepares the optimisers.

        Args:
            model: The actor-critic, after `begin_rl`.
            config: `ppo`, `rollout.sampling.temperature` and `seed` are read.

        Raises:
            ConfigError: If a KL is asked for and the model has no reference.
        """
        if config.ppo.kl.needs_reference and not model.has_reference:
            raise ConfigError(
                "ppo.kl.coef is above 0 but the model has no reference: call model.begin_rl(reference=True) first."
            )
        self._model = model
        self._ppo = config.ppo
        self._temperature = config.rollout.sampling.temperature
        self._objective = Objective(model, config.ppo, self._temperature)
        self._policy = _optimizer("policy", model.policy_parameters(), config.ppo.policy)
        self._critic: Optimizer | None = None
        if model.has_critic:
            self._critic = _optimizer("critic", model.critic_parameters(), config.ppo.critic)
        self._order = torch.Generator().manual_seed(config.seed)
        self._bias_is_set = False
        self._kl = KlController(config.ppo.kl)
        self.alarms = Alarms()
        self.record: UpdateRecord | None = None

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic to warm up."""
        return self._critic is not None

    def warmup(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Fits the critic alone to one collection, `warmup_epochs` times over.

        Without a critic nothing is done, and the answer is that it is warm: collections spent here would be lost.

        Returns:
            Metrics. `critic/explained_variance` is that of these episodes before the fit, so of a critic that has not
            seen them; `critic/warm` is 1 where it clears `warmup_explained_variance` and warm-up may end.
        """
        self.record = None
        rollout = self._read(trajectories)
        metrics = _counts(rollout)
        if self._critic is None:
            return metrics | {"critic/warm": 1.0}
        if not rollout.rows:
            return metrics
        self._start_value_bias(rollout)
        scored = Scored.blank(rollout)
        score(self._model, self._objective.micros(rollout), self._temperature, scored, what="critic")
        targets, diagnosis = make_targets(rollout, scored, 0.0, self._ppo)
        self._clear()
        means, skipped = Means(), self._critic.skipped
        for _ in range(self._ppo.warmup_epochs):
            for rows in self._minibatches(rollout):
                means.add(self._objective.fit_values(rollout, targets, rows))
                means.add(_step("critic", self._critic)[0])
        warm = diagnosis["critic/explained_variance"] >= self._ppo.warmup_explained_variance
        skips = {"critic/skipped_steps": float(self._critic.skipped - skipped)}
        return metrics | diagnosis | means.result() | skips | {"critic/warm": float(warm)}

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One PPO update of policy and critic on one collection.

        Trajectories that ended in an error are left out and counted; where none is left nothing is changed and only
        counts are returned. A minibatch in which nothing can teach the policy (no token is kept, or every advantage is
        0 and no other term is on) moves the critic alone and is counted in `ppo/idle_steps`: the optimiser's momentum
        is no evidence.

        Returns:
            Metrics: means over the optimiser steps, `..._max` their maximum. NaN where a figure is not defined.

        Raises:
            InvariantError: If a runtime invariant breaks (see `invariants` and `batch`); no step was taken on this
                batch then, unless a gradient was not finite several times in a row.
        """
        self.record = None
        self.alarms.quiet()
        rollout = self._read(trajectories)
        metrics = _counts(rollout) | {"ppo/steps": 0.0}
        if not rollout.rows:
            return metrics
        self._start_value_bias(rollout)
        scored = self._score(rollout)
        batch, found = self._assign(rollout, scored)
        metrics |= found | {"ppo/lr": self._policy.lr}
        if self._critic is not None:
            metrics["critic/lr"] = self._critic.lr
        trained, steps = self._train(batch)
        metrics |= trained
        self.record = self._written(batch, scored, steps)
        if batch.reference_N is not None:
            k1_N = kl_k1(scored.logprob_N, batch.reference_N)
            self._kl.observe(kl_stat(k1_N, rollout.episode_id_N, self._ppo.kl.stat), len(rollout.rows))
        return metrics | self.alarms.observe(metrics, trajectories)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next update depends on besides the model's weights."""
        return {
            "policy": self._policy.state_dict(),
            "critic": None if self._critic is None else self._critic.state_dict(),
            "order": self._order.get_state(),
            "bias_is_set": self._bias_is_set,
            "kl": self._kl.state_dict(),
            "alarms": self.alarms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self._policy.load_state_dict(state["policy"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])
        self._order.set_state(state["order"])
        self._bias_is_set = state["bias_is_set"]
        self._kl.load_state_dict(state["kl"])
        self.alarms.load_state_dict(state["alarms"])

    def _read(self, trajectories: Sequence[Trajectory]) -> Rollout:
        return read_rollout(trajectories, context=self._model.context, vocab_size=self._model.vocab_size)

    def _minibatches(self, rollout: Rollout) -> list[list[int]]:
        order = torch.randperm(len(rollout.rows), generator=self._order)
        parts = order.tensor_split(min(self._ppo.minibatches, len(rollout.rows)))
        return [part.tolist() for part in parts]

    def _start_value_bias(self, rollout: Rollout) -> None:
        if self._critic is not None and not self._bias_is_set:
            self._model.set_value_bias(mean_return(rollout, self._ppo.advantage))
            self._bias_is_set = True

    def _score(self, rollout: Rollout) -> Scored:
        """Old logprobs and values; the logprobs from a batch of their own always, or the first check would be empty."""
        scored, micros = Scored.blank(rollout), self._objective.micros
        if self._critic is not None and self._model.shares_trunk:
            score(self._model, micros(rollout), self._temperature, scored, what="both")
            return scored
        if self._critic is not None:
            score(self._model, micros(rollout), self._temperature, scored, what="critic")
        rows: Sequence[int] = range(len(rollout.rows))
        # With a single step the old logprobs are the update's own, and a few rows serve the invariants.
        if self._ppo.epochs * self._ppo.minibatches == 1 and not self._reads_old_logprobs:
            rows = rows[:: math.ceil(len(rows) / PROBED_EPISODES)]
        score(self._model, micros(rollout, rows), self._temperature, scored, what="policy")
        return scored

    @property
    def _reads_old_logprobs(self) -> bool:
        return self._ppo.kl.needs_reference or self._ppo.importance.is_on

    def _assign(self, rollout: Rollout, scored: Scored) -> tuple[Batch, dict[str, float]]:
        """Credit for each token, its weight, and the KL where it belongs."""
        kl, metrics = self._ppo.kl, dict[str, float]()
        reference_N: Tensor | None = None
        penalty_N: Tensor | float = 0.0
        if kl.needs_reference:
            micros = self._objective.micros(rollout)
            reference_N, metrics = score_reference(self._model, micros, self._temperature, scored.logprob_N)
            metrics["ppo/kl_coef"] = self._kl.coef
        if reference_N is not None and kl.placement == "reward":
            penalty_N = self._kl.coef * kl_k1(scored.logprob_N, reference_N)
        targets, diagnosis = make_targets(rollout, scored, penalty_N, self._ppo)
        metrics |= diagnosis
        if self._ppo.importance.is_on:
            weight_N, keep_N, found = importance_weights(
                rollout.logprob_N, scored.logprob_N, rollout.episode_id_N, self._ppo.importance
            )
            targets = replace(targets, weight_N=weight_N, keep_N=targets.keep_N & keep_N)
            metrics |= found
        metrics["ppo/kept_fraction"] = float(targets.keep_N.double().mean())
        in_loss = self._kl.coef if reference_N is not None and kl.placement == "loss" else 0.0
        return Batch(rollout, targets, reference_N, in_loss), metrics

    def _train(self, batch: Batch) -> tuple[dict[str, float], tuple[StepRecord, ...]]:
        means, checks, steps = Means(), dict[str, float](), list[StepRecord]()
        before, idle, stopped = self._tallies(), 0, False
        # An error after a backward pass leaves gradients behind.
        self._clear()
        for rows in (rows for _ in range(self._ppo.epochs) for rows in self._minibatches(batch.rollout)):
            met = self._objective.accumulate(batch, rows)
            checks = checks or self._first_checks(batch, met.logprob_N)
            means.add(met.metrics)
            # Before the first step the KL is rounding: in bfloat16 more than a small target.
            moved, target = self._policy.steps > before["ppo/steps"], self._ppo.target_kl
            stopped = moved and target is not None and float(met.metrics["ppo/kl"]) > EARLY_STOP * target
            if stopped:
                self._clear()
                steps.append(met.record(stepped=False))
                break
            idle += met.idle
            figures, stepped = self._step(met)
            means.add(figures)
            steps.append(met.record(stepped=stepped))
        counts = {name: count - before[name] for name, count in self._tallies().items()}
        counts |= {"ppo/early_stop": float(stopped), "ppo/idle_steps": float(idle)}
        return checks | means.result() | counts, tuple(steps)

    def _step(self, met: Met) -> tuple[dict[str, float], bool]:
        if met.idle:
            self._policy.clear()
            figures, stepped = {"ppo/grad_norm": 0.0, "ppo/grad_norm_max": 0.0}, False
        else:
            figures, stepped = _step("ppo", self._policy)
        if self._critic is not None:
            figures |= _step("critic", self._critic)[0]
        return figures, stepped

    def _clear(self) -> None:
        self._policy.clear()
        if self._critic is not None:
            self._critic.clear()

    def _tallies(self) -> dict[str, float]:
        tallies = {"ppo/steps": float(self._policy.steps), "ppo/skipped_steps": float(self._policy.skipped)}
        if self._critic is not None:
            tallies["critic/skipped_steps"] = float(self._critic.skipped)
        return tallies

    def _first_checks(self, batch: Batch, new_logprob_N: Tensor) -> dict[str, float]:
        targets, dtype = batch.targets, self._model.dtype
        both_N = targets.known_N & ~new_logprob_N.isnan()
        metrics = invariants.check_first_minibatch(targets.old_logprob_N[both_N], new_logprob_N[both_N], dtype)
        learner_N = torch.where(targets.known_N, targets.old_logprob_N, new_logprob_N)
        corrected = self._ppo.importance.weight != "none"
        return metrics | invariants.check_engine_gap(batch.rollout, learner_N, dtype, corrected=corrected)

    def _written(self, batch: Batch, scored: Scored, steps: tuple[StepRecord, ...]) -> UpdateRecord:
        targets = batch.targets
        return UpdateRecord(
            episodes=tuple(row.episode for row in batch.rollout.rows),
            kl_coef=self._kl.coef if batch.reference_N is not None else 0.0,
            old_logprob_N=targets.old_logprob_N,
            known_N=targets.known_N,
            reference_N=batch.reference_N,
            old_value_N=targets.old_value_N,
            final_B=scored.final_B,
            advantage_N=targets.advantage_N,
            return_N=targets.return_N,
            weight_N=targets.weight_N,
            keep_N=targets.keep_N,
            value_keep_N=targets.value_keep_N,
            steps=steps,
        )


def _optimizer(name: str, parameters: list[torch.nn.Parameter], config: OptimConfig) -> Optimizer:
    return Optimizer(name, parameters, config, linear_warmup(config.warmup_steps))


def _step(group: str, optimizer: Optimizer) -> tuple[dict[str, float], bool]:
    norm, stepped = optimizer.step()
    return ({f"{group}/grad_norm": norm, f"{group}/grad_norm_max": norm} if stepped else {}), stepped


def _counts(rollout: Rollout) -> dict[str, float]:
    return {
        "ppo/episodes": float(len(rollout.rows)),
        "ppo/episodes_error": float(rollout.n_error),
        "ppo/episodes_empty": float(rollout.n_empty),
        "ppo/tokens": float(rollout.n_actions),
    }
