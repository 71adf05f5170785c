"""The losses of one minibatch: forwards its micro-batches, adds up their gradients, keeps what they met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.config import PpoConfig
from agentrl.learner import losses
from agentrl.learner.batch import MicroBatch, Rollout, make_microbatches
from agentrl.learner.credit import Targets
from agentrl.learner.losses import Metrics, Share
from agentrl.learner.model import ActorCritic, PolicyScores, ValueScores
from agentrl.learner.record import StepRecord


@dataclass(frozen=True, slots=True)
class Batch:
    """One collection, ready to be learned from; on the CPU.

    Attributes:
        rollout: Rows and their model tokens.
        targets: What the losses compare with.
        reference_N: The reference's logprobs; None where no KL is asked for.
        kl_coef: Weight of the KL in the loss; 0 where it is in the reward or absent.
    """

    rollout: Rollout
    targets: Targets
    reference_N: Tensor | None = None
    kl_coef: float = 0.0


@dataclass(frozen=True, slots=True)
class Met:
    """What one minibatch met; its gradients are in the weights.

    Attributes:
        rows: Its rows.
        metrics: Over the whole minibatch.
        logprob_N: float64, on the CPU, NaN outside its rows.
        value_N: As `logprob_N`; all NaN without a critic.
        entropy_N: As `logprob_N`.
        idle: Whether nothing in it can teach the policy: no token is kept, or no term of the loss has a gradient.
    """

    rows: tuple[int, ...]
    metrics: Metrics
    logprob_N: Tensor
    value_N: Tensor
    entropy_N: Tensor
    idle: bool

    def record(self, *, stepped: bool) -> StepRecord:
        """What is written down of it."""
        loss = {
            name: float(self.metrics.get(f"loss/{name}", 0.0)) for name in ("policy", "value", "kl", "entropy_bonus")
        }
        return StepRecord(
            self.rows,
            self.logprob_N,
            self.value_N,
            self.entropy_N,
            stepped,
            policy_loss=loss["policy"],
            value_loss=loss["value"],
            kl_loss=loss["kl"],
            entropy_bonus=loss["entropy_bonus"],
        )


class Objective:
    """The losses of policy and critic, as the config says, on a model."""

    def __init__(self, model: ActorCritic, ppo: PpoConfig, temperature: float) -> None:
        """Keeps what it is given.

        Args:
            model: The actor-critic.
            ppo: Losses, micro-batches.
            temperature: Of sampling; scores are of the tempered policy.
        """
        self._model = model
        self._ppo = ppo
        self._temperature = temperature

    def micros(self, rollout: Rollout, rows: Sequence[int] | None = None) -> list[MicroBatch]:
        """Micro-batches of some rows, or of all."""
        rows = range(len(rollout.rows)) if rows is None else rows
        ppo = self._ppo
        return make_microbatches(rollout, rows, ppo.microbatch_tokens, self._model.device, packing=ppo.packing)

    def accumulate(self, batch: Batch, rows: Sequence[int]) -> Met:
        """Adds the gradients of one minibatch to the weights of policy and critic."""
        targets = batch.targets
        policy, value = (self._share(batch.rollout, rows, keep_N) for keep_N in (None, targets.value_keep_N))
        blank_N = torch.full_like(targets.old_logprob_N, math.nan)
        idle = self._is_idle(batch, policy.mask_N & targets.keep_N)
        met = Met(tuple(rows), {}, blank_N, blank_N.clone(), blank_N.clone(), idle)
        for micro in self.micros(batch.rollout, rows):
            scores, values = self._backward(batch, micro, policy, value, met.metrics)
            met.logprob_N[micro.index_N] = scores.logprob_N.detach().double().cpu()
            met.entropy_N[micro.index_N] = scores.entropy_N.detach().double().cpu()
            if values is not None:
                met.value_N[micro.index_N] = values.value_N.detach().double().cpu()
        return met

    def fit_values(self, rollout: Rollout, targets: Targets, rows: Sequence[int]) -> Metrics:
        """Adds the gradients of one minibatch to the critic's weights alone."""
        total: Metrics = {}
        share = self._share(rollout, rows, targets.value_keep_N)
        for micro in self.micros(rollout, rows):
            values = self._model.values(micro)
            self._value_loss(values, self._part(share, micro), self._take(targets, micro), total).backward()  # type: ignore[no-untyped-call]
        return total

    def _share(self, rollout: Rollout, rows: Sequence[int], keep_N: Tensor | None) -> Share:
        mask_N = torch.isin(rollout.episode_id_N, torch.tensor(rows))
        if keep_N is not None:
            mask_N &= keep_N
        loss = self._ppo.loss
        return losses.make_share(rollout.episode_id_N, mask_N, loss.aggregation, loss.norm_length)

    def _is_idle(self, batch: Batch, kept_N: Tensor) -> bool:
        if self._model.config.critic_gradient:
            return False
        if self._ppo.loss.entropy_coef > 0 or batch.kl_coef > 0:
            return not bool(kept_N.any())
        advantage_N = torch.where(kept_N, batch.targets.advantage_N * batch.targets.weight_N, 0.0)
        return not bool((advantage_N != 0).any())

    def _part(self, share: Share, micro: MicroBatch) -> Share:
        return share.take(micro.index_N).to(self._model.device)

    def _take(self, targets: Targets, micro: MicroBatch) -> Targets:
        return targets.take(micro.index_N, self._model.device, self._loss_dtype)

    @property
    def _loss_dtype(self) -> torch.dtype:
        return torch.promote_types(self._model.dtype, torch.float32)

    def _backward(
        self, batch: Batch, micro: MicroBatch, policy: Share, value: Share, total: Metrics
    ) -> tuple[PolicyScores, ValueScores | None]:
        model, entropy_grad = self._model, self._ppo.loss.entropy_coef > 0
        targets = self._take(batch.targets, micro)
        policy, value = self._part(policy, micro), self._part(value, micro)
        reference_N = None
        if batch.kl_coef > 0 and batch.reference_N is not None:
            reference_N = batch.reference_N[micro.index_N].to(model.device, self._loss_dtype)
        if model.shares_trunk:
            scores, values = model.score(micro, self._temperature, entropy_grad=entropy_grad)
            coef = self._ppo.loss.value_coef if model.config.critic_gradient else 1.0
            loss = coef * self._value_loss(values, value, targets, total)
            loss = loss + self._policy_loss(scores, policy, targets, (reference_N, batch.kl_coef), total)
            loss.backward()  # type: ignore[no-untyped-call]
            return scores, values
        # One after the other, so that the graphs of policy and critic are never held together.
        scores = model.policy_logprobs(micro, self._temperature, entropy_grad=entropy_grad)
        self._policy_loss(scores, policy, targets, (reference_N, batch.kl_coef), total).backward()  # type: ignore[no-untyped-call]
        if not model.has_critic:
            return scores, None
        values = model.values(micro)
        self._value_loss(values, value, targets, total).backward()  # type: ignore[no-untyped-call]
        return scores, values

    def _policy_loss(
        self, scores: PolicyScores, share: Share, targets: Targets, kl: tuple[Tensor | None, float], total: Metrics
    ) -> Tensor:
        config, keep_N, weight_N = self._ppo.loss, targets.keep_N, targets.weight_N
        new_N = scores.logprob_N
        old_N = torch.where(targets.known_N, targets.old_logprob_N, new_N.detach())
        loss, metrics = losses.policy_loss(
            new_N, old_N, targets.advantage_N, share, config, weight_N=weight_N, keep_N=keep_N
        )
        bonus, entropy = losses.entropy_loss(scores.entropy_N, share, config.entropy_coef, keep_N=keep_N)
        parts = {"loss/policy": loss}
        if config.entropy_coef > 0:
            parts["loss/entropy_bonus"] = bonus
        reference_N, coef = kl
        if reference_N is not None:
            term = losses.kl_loss(new_N, old_N, reference_N, share, weight_N=weight_N, keep_N=keep_N)
            parts["loss/kl"] = coef * term
        found = {f"ppo/{name}": value for name, value in (metrics | entropy).items()}
        losses.merge_metrics(total, found | {name: part.detach() for name, part in parts.items()})
        return torch.stack(list(parts.values())).sum()

    def _value_loss(self, values: ValueScores, share: Share, targets: Targets, total: Metrics) -> Tensor:
        clip = self._ppo.loss.value_clip
        loss, metrics = losses.value_loss(values.value_N, targets.old_value_N, targets.return_N, share, clip)
        found = {f"critic/{name}": value for name, value in metrics.items()}
        losses.merge_metrics(total, found | {"loss/value": loss.detach()})
        return loss


class Means:
    """Means of metrics over optimiser steps; `..._max` are maxima."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._values: dict[str, list[float]] = {}

    def add(self, metrics: Metrics | dict[str, float]) -> None:
        """Takes in the metrics of one step; a name that a step lacks is averaged over the others."""
        for name, value in metrics.items():
            self._values.setdefault(name, []).append(float(value))

    def result(self) -> dict[str, float]:
        """The means and maxima."""
        return {
            name: max(values) if name.endswith("_max") else sum(values) / len(values)
            for name, values in self._values.items()
        }
