"""The learner's half of a replayed iteration: targets and losses, from the recorded logprobs and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.config import PpoConfig
from agentrl.learner import losses
from agentrl.learner.batch import Rollout
from agentrl.learner.credit import Scored, Targets, make_targets
from agentrl.learner.importance import importance_weights
from agentrl.learner.losses import Metrics, Share, kl_k1, kl_k3
from agentrl.learner.minibatch import Means
from agentrl.learner.record import StepRecord, UpdateRecord
from agentrl.replay.compare import Row

SAME_LOSS = 1e-5
"""Largest gap of a loss, which the learner adds up in float32: absolute below 1, relative above."""

_LOSSES = {
    "loss/policy": "policy_loss",
    "loss/value": "value_loss",
    "loss/kl": "kl_loss",
    "loss/entropy_bonus": "entropy_bonus",
}
"""Metrics by the fields of `StepRecord` that hold them."""


class Learned(NamedTuple):
    """The learner's half of a replay.

    Attributes:
        rows: Comparisons with the record.
        credit: What metrics.jsonl should hold of credit assignment, which is done in float64.
        losses: What it should hold of the losses.
    """

    rows: list[Row]
    credit: dict[str, float]
    losses: dict[str, float]


def learning_rows(ppo: PpoConfig, rollout: Rollout, record: UpdateRecord) -> Learned:
    """Computes targets and losses again.

    Args:
        ppo: The run's.
        rollout: Of the recorded episodes, with the rewards that are to be believed.
        record: What the update learned from, of these rows and tokens.
    """
    targets, metrics = _targets(ppo, rollout, record)
    place = place_in(rollout)
    rows = [
        Row("KL coefficient").also("the update", record.kl_coef, _kl_coef(ppo, record)),
        Row("advantages").also_tokens(record.advantage_N, targets.advantage_N, place),
        Row("value targets").also_tokens(record.return_N, targets.return_N, place),
        Row("importance weights").also_tokens(record.weight_N, targets.weight_N, place),
        Row("tokens in the policy's loss").also_tokens(record.keep_N, targets.keep_N, place),
        Row("tokens in the value loss").also_tokens(record.value_keep_N, targets.value_keep_N, place),
    ]
    loss_rows, means = _loss_rows(ppo, rollout, record)
    return Learned(rows + loss_rows, metrics, means)


def _targets(ppo: PpoConfig, rollout: Rollout, record: UpdateRecord) -> tuple[Targets, dict[str, float]]:
    scored = Scored(record.old_logprob_N, record.known_N, record.old_value_N, record.final_B)
    penalty_N: Tensor | float = 0.0
    kl: dict[str, float] = {}
    if record.reference_N is not None:
        k1_N = kl_k1(scored.logprob_N, record.reference_N)
        kl = {"ppo/kl_ref_k1": float(k1_N.mean()), "ppo/kl_coef": record.kl_coef}
        kl["ppo/kl_ref"] = float(kl_k3(scored.logprob_N, record.reference_N).mean())
        if ppo.kl.placement == "reward":
            penalty_N = record.kl_coef * k1_N
    targets, metrics = make_targets(rollout, scored, penalty_N, ppo)
    metrics |= kl
    if ppo.importance.is_on:
        weight_N, keep_N, found = importance_weights(
            rollout.logprob_N, scored.logprob_N, rollout.episode_id_N, ppo.importance
        )
        targets = replace(targets, weight_N=weight_N, keep_N=targets.keep_N & keep_N)
        metrics |= found
    return targets, metrics


def _kl_coef(ppo: PpoConfig, record: UpdateRecord) -> float:
    """What the coefficient must have been; where it adapts, what earlier iterations made of it is believed."""
    if record.reference_N is None:
        return 0.0
    return ppo.kl.coef if ppo.kl.target is None else record.kl_coef


def _loss_rows(ppo: PpoConfig, rollout: Rollout, record: UpdateRecord) -> tuple[list[Row], dict[str, float]]:
    rows = {name: Row(name.replace("_", " "), tolerance=SAME_LOSS) for name in _LOSSES.values()}
    means = Means()
    for i, step in enumerate(record.steps):
        found = _losses(ppo, rollout, record, step)
        means.add(found)
        for metric, name in _LOSSES.items():
            rows[name] = rows[name].also(f"minibatch {i}", getattr(step, name), float(found.get(metric, 0.0)))
    return list(rows.values()), means.result()


def _losses(ppo: PpoConfig, rollout: Rollout, record: UpdateRecord, step: StepRecord) -> dict[str, float]:
    """The metrics of one minibatch, in float64, over the whole of it at once."""
    share, value_share = (_share(ppo, rollout, step, keep_N) for keep_N in (None, record.value_keep_N))
    new_N, weight_N, keep_N = step.logprob_N, record.weight_N, record.keep_N
    old_N = torch.where(record.known_N, record.old_logprob_N, new_N)
    found: Metrics = {}
    loss, metrics = losses.policy_loss(
        new_N, old_N, record.advantage_N, share, ppo.loss, weight_N=weight_N, keep_N=keep_N
    )
    found |= {"loss/policy": loss} | {f"ppo/{name}": value for name, value in metrics.items()}
    loss, metrics = losses.entropy_loss(step.entropy_N, share, ppo.loss.entropy_coef, keep_N=keep_N)
    found |= {"loss/entropy_bonus": loss} | {f"ppo/{name}": value for name, value in metrics.items()}
    if record.reference_N is not None and ppo.kl.placement == "loss":
        loss = losses.kl_loss(new_N, old_N, record.reference_N, share, weight_N=weight_N, keep_N=keep_N)
        found["loss/kl"] = record.kl_coef * loss
    if not ppo.advantage.is_critic_free:
        clip = ppo.loss.value_clip
        loss, metrics = losses.value_loss(step.value_N, record.old_value_N, record.return_N, value_share, clip)
        found |= {"loss/value": loss} | {f"critic/{name}": value for name, value in metrics.items()}
    return {name: float(value) for name, value in found.items()}


def _share(ppo: PpoConfig, rollout: Rollout, step: StepRecord, keep_N: Tensor | None) -> Share:
    mask_N = torch.isin(rollout.episode_id_N, torch.tensor(step.rows))
    if keep_N is not None:
        mask_N &= keep_N
    return losses.make_share(rollout.episode_id_N, mask_N, ppo.loss.aggregation, ppo.loss.norm_length)


def place_in(rollout: Rollout) -> Callable[[int], str]:
    """Says where a place in the flat arrays is."""

    def place(at: int) -> str:
        row, turn = int(rollout.episode_id_N[at]), int(rollout.turn_id_N[at])
        same_N = (rollout.episode_id_N == row) & (rollout.turn_id_N == turn)
        return f"episode {rollout.rows[row].episode}, turn {turn}, token {int(same_N[:at].sum())}"

    return place
