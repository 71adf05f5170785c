"""Evaluation: run a policy on a frozen split, and say what it achieved with intervals.

Errors are counted and never scored as 0. Each figure comes with its interval; two policies are compared task by task.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl._files import finite, locked
from agentrl._store import EpisodeFolder
from agentrl.config import RolloutConfig
from agentrl.configfile import differences
from agentrl.errors import TaskError, UsageError, did_you_mean
from agentrl.seeds import derive_seed
from agentrl.stats import (
    Interval,
    PairedDifference,
    clustered_interval,
    paired_difference,
    pass_at_k,
    wilson_interval,
)
from agentrl.types import JSON, EpisodeRequest, Sampling, Task, Trajectory

if TYPE_CHECKING:
    from agentrl.env import ToolEnv


@dataclass(frozen=True, slots=True)
class LevelRow:
    """The episodes of one task level (`Task.data["level"]`)."""

    level: str
    n_scored: int
    n_error: int
    success: float | None
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """What a set of episodes shows.

    Attributes:
        n_total: Episodes.
        n_scored: Those whose success is known and counts (no errors, none that the trainer cut).
        n_error: Those that ended in an error that was not the agent's: left out, never 0.
        n_tasks: Tasks with at least one scored episode.
        success: Share of scored episodes that met the objective; None where none was scored.
        wilson: Its interval as if episodes were independent.
        clustered: Its interval clustered by task. Where all episodes went one way the clustered error is 0 and says
            nothing: Wilson's interval over tasks stands there.
        reward: Mean reward of scored episodes.
        pass_at: Chance that one of k attempts succeeds, mean over tasks with at least k; k = 1, 2, 4, ...
        by_level: One row for each level that tasks name.
        ends: Episodes by end reason, errors included.
        components: Mean of each reward component.
        tokens: Mean tokens sampled in an episode; None where the policy has no tokens.
        turns: Mean assistant messages in an episode.
    """

    n_total: int
    n_scored: int
    n_error: int
    n_tasks: int
    success: float | None
    wilson: Interval | None
    clustered: Interval | None
    reward: float | None
    pass_at: Mapping[int, float | None]
    by_level: tuple[LevelRow, ...]
    ends: Mapping[str, int]
    components: Mapping[str, float]
    tokens: float | None
    turns: float | None

    def as_dict(self) -> dict[str, JSON]:
        """JSON-able: what summary.json holds."""
        shown: dict[str, JSON] = finite(asdict(self))
        return shown


@dataclass(frozen=True)
class EvalOptions:
    """How an evaluation is run.

    Attributes:
        seed: Of the episodes; two policies under one seed meet the same tasks, worlds and noise.
        rollout: Concurrency, threads and retries.
        out: Folder that keeps episodes and summary; what is done there is not run again.
        policy_name: What the folder calls the policy.
        on_episode: Called as each episode ends, with those taken from `out` first.
    """

    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    out: Path | None = None
    policy_name: str = "policy"
    on_episode: Callable[[Trajectory], None] | None = None


class EvalResult(NamedTuple):
    """An evaluation's summary, and the episodes behind it, sorted by id."""

    summary: EvalSummary
    trajectories: tuple[Trajectory, ...]


def evaluate(
    env: str | Callable[[], ToolEnv],
    policy: Any,
    *,
    split: str | None = None,
    tasks: int = 100,
    samples: int = 1,
    sampling: Sampling | None = None,
    options: EvalOptions | None = None,
) -> EvalResult:
    """Runs a policy on the first tasks of a split.

    Args:
        env: An environment's name, its class, or a function that makes one.
        policy: A MessagePolicy, a function of (environment, task) that returns one, or a loaded local model
            (HFPolicy).
        split: One of the environment's splits; `default_split` where not given.
        tasks: Tasks, from the split's start; all of a split that has fewer.
        samples: Episodes of each task.
        sampling: How the policy draws; at temperature 1 where not given.
        options: Seed, concurrency, and where to keep the episodes.

    Returns:
        Summary and episodes.

    Raises:
        UsageError: If the split is unknown, or `options.out` holds another evaluation.
        TooManyErrors: If more episodes fail than `options.rollout.max_error_rate`; finished ones are kept in `out`.
    """
    from agentrl.registry import make_env

    options = options or EvalOptions()
    sampling = sampling or Sampling()
    make = functools.partial(make_env, env) if isinstance(env, str) else env
    probe = make()
    split = split or default_split(probe)
    requests = eval_requests(_tasks(probe, split, tasks), samples, split, options.seed)
    description = _description(probe, split, sampling, options)
    probe.close()
    if options.out is None:
        trajectories = _collect(make, policy, requests, sampling, options, n_asked=len(requests))
        return EvalResult(summarise(trajectories), tuple(trajectories))
    with locked(options.out), EpisodeFolder(options.out) as folder:
        _claim(folder, description)
        done = _done(folder, requests)
        for trajectory in done:
            _tell(options, trajectory)
        known = {trajectory.id for trajectory in done}
        missing = [request for request in requests if request.id not in known]
        new = _collect(make, policy, missing, sampling, options, n_asked=len(requests), folder=folder)
        trajectories = sorted([*done, *new], key=lambda trajectory: trajectory.id)
        summary = summarise(trajectories)
        folder.write_summary(summary.as_dict())
    return EvalResult(summary, tuple(trajectories))


def default_split(env: ToolEnv) -> str:
    """The split that is measured where none is named: `heldout`, else the environment's first."""
    return "heldout" if "heldout" in env.splits else env.splits[0]


def eval_requests(tasks: Sequence[Task], samples: int, split: str, seed: int) -> list[EpisodeRequest]:
    """The episodes of an evaluation. An episode's id and seed do not depend on how many there are."""
    return [
        EpisodeRequest(
            f"{split}/{place:05d}-{task.id.replace('/', '-')}/{sample}", task, derive_seed(seed, task.id, sample)
        )
        for place, task in enumerate(tasks)
        for sample in range(samples)
    ]


def summarise(trajectories: Iterable[Trajectory]) -> EvalSummary:
    """Counts and intervals of episodes; see EvalSummary."""
    episodes = list(trajectories)
    scored = [t for t in episodes if is_scored(t)]
    outcomes = [bool(t.success) for t in scored]
    clusters = [t.task.id for t in scored]
    return EvalSummary(
        n_total=len(episodes),
        n_scored=len(scored),
        n_error=sum(t.end.is_error for t in episodes),
        n_tasks=len(set(clusters)),
        success=_mean(outcomes),
        wilson=wilson_interval(sum(outcomes), len(outcomes)) if outcomes else None,
        clustered=_success_interval(outcomes, clusters),
        reward=_mean([t.reward for t in scored]),
        pass_at=_pass_at(scored),
        by_level=_level_rows(episodes),
        ends=dict(sorted(Counter(str(t.end) for t in episodes).items())),
        components=component_means(scored),
        tokens=_mean([t.n_sampled for t in scored]) if any(t.n_sampled for t in scored) else None,
        turns=_mean([len(t.turns) for t in scored]),
    )


def compare(a: Iterable[Trajectory], b: Iterable[Trajectory], seed: int = 0) -> PairedDifference:
    """The difference in success of two policies, a - b, over the tasks that both have scored episodes of.

    Raises:
        UsageError: If they have no task in common.
    """
    by_task_a, by_task_b = success_by_task(a), success_by_task(b)
    common = sorted(by_task_a.keys() & by_task_b.keys())
    if not common:
        raise UsageError("the two evaluations have no scored task in common: evaluate both on the same split.")
    return paired_difference([by_task_a[t] for t in common], [by_task_b[t] for t in common], common, seed)


def environment_identity(env: ToolEnv, splits: Iterable[str], n_tasks: int) -> dict[str, JSON]:
    """What makes two runs' environments the same: name, format, reward, source, and the digests of measured tasks.

    Args:
        env: The environment.
        splits: Whose tasks are looked at.
        n_tasks: How many of each, from its start.
    """
    digests = {}
    for split in splits:
        content = "".join(task.digest for task in _tasks(env, split, n_tasks))
        digests[split] = hashlib.sha256(content.encode()).hexdigest()
    return {
        "env": env.name,
        "format": env.format.name,
        "reward": env.reward_tree.digest,
        "source": source_digest(type(env)),
        "task_digests": digests,
    }


def success_by_task(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Each task's share of successes among its scored episodes."""
    outcomes: dict[str, list[bool]] = {}
    for trajectory in trajectories:
        if is_scored(trajectory):
            outcomes.setdefault(trajectory.task.id, []).append(bool(trajectory.success))
    return {task: sum(found) / len(found) for task, found in outcomes.items()}


def is_scored(trajectory: Trajectory) -> bool:
    """Whether an episode counts in reported means: no error, not cut by the trainer, its success known."""
    return trajectory.end.in_metrics and trajectory.success is not None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _success_interval(outcomes: Sequence[bool], clusters: Sequence[str]) -> Interval | None:
    if not outcomes:
        return None
    if len(set(outcomes)) == 1:
        n_tasks = len(set(clusters))
        return wilson_interval(n_tasks * outcomes[0], n_tasks)
    low, high = clustered_interval([float(outcome) for outcome in outcomes], clusters)
    return Interval(max(0.0, low), min(1.0, high))


def _pass_at(scored: Sequence[Trajectory]) -> dict[int, float | None]:
    attempts = Counter(t.task.id for t in scored)
    successes = Counter(t.task.id for t in scored if t.success)
    most = max(attempts.values(), default=0)
    ks = [2**i for i in range(most.bit_length())]
    table: dict[int, float | None] = {}
    for k in ks:
        chances = [pass_at_k(n, successes[task], k) for task, n in attempts.items()]
        table[k] = _mean([chance for chance in chances if chance is not None])
    return table


def _level_rows(episodes: Sequence[Trajectory]) -> tuple[LevelRow, ...]:
    levels: dict[str, list[Trajectory]] = {}
    for trajectory in episodes:
        if "level" in trajectory.task.data:
            levels.setdefault(str(trajectory.task.data["level"]), []).append(trajectory)
    rows = []
    for level in sorted(levels):
        scored = [t for t in levels[level] if is_scored(t)]
        outcomes = [bool(t.success) for t in scored]
        interval = _success_interval(outcomes, [t.task.id for t in scored])
        n_error = sum(t.end.is_error for t in levels[level])
        rows.append(LevelRow(level, len(scored), n_error, _mean(outcomes), interval))
    return tuple(rows)


def component_means(scored: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each reward component over episodes that count; those where it was unscored are left out of its mean."""
    values: dict[str, list[float]] = {}
    for trajectory in scored:
        for name, value in ((trajectory.ledger or {}).get("components") or {}).items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def _tasks(env: ToolEnv, split: str, count: int) -> list[Task]:
    if split not in env.splits:
        raise UsageError(f"{env.name} has no split {split!r}.{did_you_mean(split, env.splits)}")
    available = env.tasks(split)
    if not len(available):
        raise TaskError(f"the split {split!r} of {env.name} has no tasks: expected at least one.")
    return [available[index] for index in range(min(count, len(available)))]


def _description(env: ToolEnv, split: str, sampling: Sampling, options: EvalOptions) -> dict[str, JSON]:
    return {
        "env": env.name,
        "settings": env.settings.model_dump(mode="json"),
        "format": env.format.name,
        "source": source_digest(type(env)),
        "reward": env.reward_tree.digest,
        "max_turns": env.max_turns,
        "split": split,
        "sampling": asdict(sampling),
        "seed": options.seed,
        "policy": options.policy_name,
    }


def source_digest(env_class: type) -> str:
    """SHA-256 of the file that defines the environment; empty where there is none."""
    module = sys.modules.get(env_class.__module__)
    path = Path(getattr(module, "__file__", None) or "")
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _claim(folder: EpisodeFolder, description: dict[str, JSON]) -> None:
    """Writes what a new folder evaluates, or checks that an old one evaluates the same."""
    before = folder.request
    if before is None:
        folder.write_request(description)
        return
    changed = differences(before, json.loads(json.dumps(description)))
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise UsageError(
            f"{folder.path} holds another evaluation; these differ (there -> now):\n{listed}\n"
            "Choose another folder with -o, or ask for the same."
        )


def _done(folder: EpisodeFolder | None, requests: Sequence[EpisodeRequest]) -> list[Trajectory]:
    """Episodes that need not be run again: neither in error nor cut, and of the very task that is asked for."""
    if folder is None:
        return []
    asked = {request.id: request.task.digest for request in requests}
    return [t for t in folder.trajectories() if t.end.in_metrics and asked.get(t.id) == t.task.digest]


def _collect(
    make: Callable[[], ToolEnv],
    policy: Any,
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    options: EvalOptions,
    *,
    n_asked: int,
    folder: EpisodeFolder | None = None,
) -> list[Trajectory]:
    from agentrl.rollout.collector import Collector

    def keep(trajectory: Trajectory) -> None:
        if folder is not None:
            folder.append(trajectory)
        _tell(options, trajectory)

    if not requests:
        return []
    # What was kept from before counts in the share of errors too: one error among many stays one among many.
    rate = min(1.0, options.rollout.max_error_rate * n_asked / len(requests))
    rollout = options.rollout.model_copy(update={"max_error_rate": rate})
    collector = Collector(make, policy, getattr(policy, "codec", None), rollout, options.seed)
    try:
        return collector.collect(requests, sampling, on_episode=keep)
    finally:
        collector.close()


def _tell(options: EvalOptions, trajectory: Trajectory) -> None:
    if options.on_episode is not None:
        options.on_episode(trajectory)
