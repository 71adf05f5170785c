"""An iteration once more: rewards from recorded evidence, credit from recorded values, losses from recorded logprobs.

Nothing here needs weights. The components, the estimators and the losses are the very functions that training calls;
what they get is what the run directory holds.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.errors import RunError, UsageError
from agentrl.learner.batch import Rollout, read_rollout
from agentrl.learner.record import UpdateRecord
from agentrl.replay.compare import Row
from agentrl.replay.learning import SAME_LOSS, learning_rows, place_in
from agentrl.replay.rewards import Rescored, rescore
from agentrl.replay.world import World, opened, run_world
from agentrl.reward.transform import is_trained
from agentrl.run import RunDir
from agentrl.train.metrics import rollout_metrics
from agentrl.types import JSON, Trajectory

_ANY_TOKEN = 1 << 62


@dataclass(frozen=True, slots=True)
class IterationReplay:
    """What came of computing an iteration once more.

    Attributes:
        iteration: Which.
        episodes: How many it collected.
        rows: One for each kind of quantity.
        warnings: What is known to be other than it was, or could not be compared.
    """

    iteration: int
    episodes: int
    rows: tuple[Row, ...]
    warnings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return all(row.ok for row in self.rows)

    def as_dict(self) -> dict[str, JSON]:
        """JSON-able."""
        return {
            "iteration": self.iteration,
            "episodes": self.episodes,
            "ok": self.ok,
            "rows": [row.as_dict() for row in self.rows],
            "warnings": list(self.warnings),
        }


def replay_iteration(run: RunDir | Path | str, iteration: int, *, weights: bool = False) -> IterationReplay:
    """Computes rewards, advantages, value targets and losses of a stored iteration, and compares them.

    Args:
        run: The run, or its folder.
        iteration: Which; counted from 1, warm-ups included.
        weights: Whether logprobs and values are computed again too, with the weights of the checkpoint before it.

    Raises:
        UsageError: If there is no such run or iteration, or no checkpoint before it where `weights` is asked for; the
            message lists those that exist.
        RunError: If a file of the iteration is missing or damaged.
        RegistryError: If the environment or a reward component is not installed here.
    """
    run = opened(run)
    recorded = _episodes(run, iteration)
    line = next((line for line in run.read_metrics() if line["iteration"] == iteration), None)
    record, note = _record(run, iteration, line)
    world = run_world(run)
    paid = _paid(world, recorded, _reward_state(run, iteration, line))
    rows = [*_reward_rows(recorded, paid)]
    metrics, losses = rollout_metrics(paid.earned) | paid.metrics, dict[str, float]()
    if record is not None:
        learned_from = [trajectory for trajectory in paid.trained if is_trained(trajectory)]
        rollout = read_rollout(learned_from, context=sys.maxsize, vocab_size=_ANY_TOKEN)
        rows.append(_layout_row(record, rollout))
        if rows[-1].ok:
            learned = learning_rows(run.config.ppo, rollout, record)
            rows += learned.rows
            metrics, losses = metrics | learned.credit, learned.losses
            if weights:
                from agentrl.replay.weights import weights_rows

                rows += weights_rows(run, iteration, rollout, record, place_in(rollout))
    rows.append(_metrics_row(Row("metrics.jsonl, rewards and credit"), line, metrics))
    rows.append(_metrics_row(Row("metrics.jsonl, losses", tolerance=SAME_LOSS), line, losses))
    warnings = (*world.warnings, *([note] if note else []))
    return IterationReplay(iteration, len(recorded), tuple(row for row in rows if row.compared), warnings)


@dataclass(frozen=True, slots=True)
class _Paid:
    """A collection as its evidence pays it.

    Attributes:
        earned: Episodes with the rewards that their turns earned.
        trained: The same after the reward's batch node, where it has one.
        metrics: The batch node's.
        unscored: Ids of episodes that cannot be scored now; they stand as they were recorded.
    """

    earned: tuple[Trajectory, ...]
    trained: tuple[Trajectory, ...]
    metrics: dict[str, float]
    unscored: frozenset[str]


def _episodes(run: RunDir, iteration: int) -> list[Trajectory]:
    folder = run.rollouts(iteration)
    if not (folder.path / "episodes.jsonl").is_file():
        there = [int(p.parent.name) for p in (run.path / "rollouts").glob("*/episodes.jsonl")]
        listed = "none yet" if not there else f"{min(there)} to {max(there)}" if len(there) > 1 else str(there[0])
        raise UsageError(f"{run.path} has no iteration {iteration}: expected one that it holds, which are {listed}.")
    try:
        return folder.trajectories()
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RunError(
            f"the episodes in {folder.path} cannot be read ({type(error).__name__}: {error}): a file is damaged."
        ) from error


def _record(run: RunDir, iteration: int, line: dict[str, JSON] | None) -> tuple[UpdateRecord | None, str | None]:
    """What the update learned from, or why there is nothing."""
    path = run.learning_path(iteration)
    if path.exists():
        return UpdateRecord.load(path), None
    if line is None:
        return None, f"iteration {iteration} was not finished: there is no update to compare, only its rewards."
    if "ppo/steps" not in line:
        return None, f"iteration {iteration} warmed the critic up: there is no update of the policy to compare."
    if not line.get("ppo/episodes"):
        return None, f"iteration {iteration} had no episode to learn from: there is no update to compare."
    raise RunError(
        f"{path} is missing, which holds what the update learned from: the file was removed, or the run was made by an"
        " agentrl that did not keep it."
    )


def _reward_state(run: RunDir, iteration: int, line: dict[str, JSON] | None) -> JSON:
    """The batch node's state from before the iteration; None where there is none."""
    path = run.rollouts(iteration)
    state = path.reward_state
    if state is None and line is not None and "reward/episodes_excluded" in line:
        raise RunError(
            f"{path.path / 'reward_state.json'} is missing, from which the trained rewards follow: it was removed."
        )
    return state


def _paid(world: World, recorded: Sequence[Trajectory], state: JSON) -> _Paid:
    env = world.make()
    try:
        found = {t.id: rescore(env, t) for t in recorded if not t.end.is_error}
        unscored = frozenset(key for key, value in found.items() if any(map(math.isnan, value.rewards)))
        earned = tuple(_with_rewards(t, found[t.id]) if t.id in found and t.id not in unscored else t for t in recorded)
        if state is None:
            return _Paid(earned, earned, {}, unscored)
        batch = env.reward_tree.transform(earned, state)
        return _Paid(earned, batch.trajectories, batch.metrics, unscored)
    finally:
        env.close()


def _with_rewards(trajectory: Trajectory, found: Rescored) -> Trajectory:
    turns = (replace(turn, reward=paid) for turn, paid in zip(trajectory.turns, found.rewards, strict=True))
    return replace(trajectory, turns=tuple(turns), ledger=found.ledger, success=found.ledger["success"])


def _reward_rows(recorded: Sequence[Trajectory], paid: _Paid) -> tuple[Row, Row]:
    rewards, ledgers = Row("rewards of turns"), Row("ledgers")
    for before, now in zip(recorded, paid.trained, strict=True):
        if before.end.is_error:
            continue
        where = f"episode {before.id}"
        for k, turn in enumerate(before.turns):
            found = None if before.id in paid.unscored else now.turns[k].reward
            rewards = rewards.also(f"{where}, turn {k}", turn.reward, found)
        ledger = {key: value for key, value in (before.ledger or {}).items() if key != "evidence"}
        ledgers = ledgers.also_record(where, ledger, {k: v for k, v in (now.ledger or {}).items() if k != "evidence"})
        ledgers = ledgers.also_record(f"{where}, success", before.success, now.success)
    return rewards, ledgers


def _layout_row(record: UpdateRecord, rollout: Rollout) -> Row:
    """Whether the record is of these episodes and as many tokens."""
    episodes = [row.episode for row in rollout.rows]
    row = Row("episodes and tokens").also_record("episode", list(record.episodes), episodes)
    return row.also("model tokens", record.old_logprob_N.numel(), rollout.n_actions)


def _metrics_row(row: Row, line: dict[str, JSON] | None, found: dict[str, float]) -> Row:
    for name, value in found.items():
        if line is not None and name in line:
            row = row.also(name, line[name], value)
    return row
