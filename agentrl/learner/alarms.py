"""Alarms: the few signs that have preceded most failed runs, watched after each update, each with its remedy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.types import Trajectory

EARLY = 5
"""Updates whose mean is what entropy and reward spread are compared with."""
STREAK = 3
"""What differs much from one batch to the next rings once it was so in so many updates in a row."""
NOISY = ("entropy_high", "entropy_low", "reward_spread", "explained_variance")
"""What that holds for."""

REMEDIES = {
    "entropy_high": "entropy is above 2 times its early mean: the policy dissolves into noise. Lower ppo.policy.lr or"
    " ppo.loss.entropy_coef, or add ppo.kl.coef.",
    "entropy_low": "entropy is below 0.3 times its early mean: little is explored any more. Raise ppo.loss.clip_high or"
    " ppo.loss.entropy_coef, or lower ppo.policy.lr.",
    "truncation": "more than 10 % of the episodes end in a budget: raise rollout.sampling.max_tokens,"
    " rollout.max_context or env.max_turns, or shorten the observations.",
    "reward_spread": "the rewards of attempts at one task hardly differ any more and the mean has not risen: the policy"
    " repeats itself (echo trap). Set ppo.min_group_std, raise ppo.loss.entropy_coef, or go back to a checkpoint.",
    "explained_variance": "the critic has been worse than a constant for some updates: raise ppo.critic.lr or"
    " ppo.warmup_collections, or use an estimator without a critic.",
    "clip_fraction": "more than half of the tokens are clipped: the steps are too long. Lower ppo.policy.lr, ppo.epochs"
    " or ppo.minibatches.",
}
"""Names of the alarms, and what to do about each, in one line."""


class Alarms:
    """Watches the figures of the updates. Rings are metrics and words only: nothing is ever stopped here.

    Sources: entropy growth and collapse, arXiv:2503.14476; spread of rewards, arXiv:2504.20073 (RAGEN).
    """

    def __init__(self) -> None:
        self._early: list[dict[str, float]] = []
        self._streaks = dict.fromkeys(NOISY, 0)
        self._ringing: set[str] = set()
        self._new: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """What to say after the last update: the remedies of the alarms that began to ring with it."""
        return tuple(f"alarm/{name}: {REMEDIES[name]}" for name in self._new)

    def quiet(self) -> None:
        """Forgets what was to be said: nothing was found since."""
        self._new = ()

    def observe(self, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Looks at one update.

        Args:
            metrics: Of the update: `ppo/entropy`, `ppo/clip_fraction`, `critic/explained_variance` are read.
            trajectories: What was collected for it.

        Returns:
            `alarm/<name>` for each alarm, 1 where it rings.
        """
        now = _figures(metrics, trajectories)
        ringing = self._ringing_at(now)
        self._new = tuple(name for name in REMEDIES if name in ringing - self._ringing)
        self._ringing = ringing
        if len(self._early) < EARLY:
            self._early.append(now)
        return {f"alarm/{name}": float(name in ringing) for name in REMEDIES}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next look depends on."""
        early = [dict(now) for now in self._early]
        return {"early": early, "streaks": dict(self._streaks), "ringing": sorted(self._ringing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self._early = [dict(now) for now in state["early"]]
        self._streaks = dict(state["streaks"])
        self._ringing = set(state["ringing"])
        self._new = ()

    def _ringing_at(self, now: Mapping[str, float]) -> set[str]:
        # A comparison with NaN is False: a figure that is not defined never rings.
        rings = {
            "truncation": now["truncation"] > 0.1,
            "explained_variance": now["explained_variance"] < 0,
            "clip_fraction": now["clip_fraction"] > 0.5,
        }
        if len(self._early) == EARLY:
            entropy, spread, reward = (self._before(name) for name in ("entropy", "spread", "reward"))
            rings |= {
                "entropy_high": now["entropy"] > 2.0 * entropy,
                "entropy_low": now["entropy"] < 0.3 * entropy,
                # Where the tasks are solved the spread falls too, and that is no alarm.
                "reward_spread": now["spread"] <= 0.3 * spread and now["reward"] <= reward,
            }
        for name in NOISY:
            self._streaks[name] = self._streaks[name] + 1 if rings.get(name) else 0
            rings[name] = self._streaks[name] >= STREAK
        return {name for name, is_on in rings.items() if is_on}

    def _before(self, name: str) -> float:
        known = [now[name] for now in self._early if not math.isnan(now[name])]
        return sum(known) / len(known) if known else math.nan


def _figures(metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    counted = [t for t in trajectories if t.end.in_baseline]
    groups: dict[str, list[float]] = {}
    for trajectory in counted:
        groups.setdefault(trajectory.task.id, []).append(_earned(trajectory))
    several = [rewards for rewards in groups.values() if len(rewards) > 1]
    return {
        "entropy": metrics.get("ppo/entropy", math.nan),
        "clip_fraction": metrics.get("ppo/clip_fraction", math.nan),
        "explained_variance": metrics.get("critic/explained_variance", math.nan),
        "truncation": float(np.mean([t.end.is_truncated for t in counted])) if counted else math.nan,
        "spread": float(np.mean([np.std(rewards) for rewards in several])) if several else math.nan,
        "reward": float(np.mean([_earned(t) for t in counted])) if counted else math.nan,
    }


def _earned(trajectory: Trajectory) -> float:
    """The reward before a batch node: what is trained on may be centred, and says nothing of success then."""
    raw = trajectory.ledger.get("raw") if isinstance(trajectory.ledger, dict) else None
    return sum(float(x) for x in raw if isinstance(x, int | float)) if isinstance(raw, list) else trajectory.reward
