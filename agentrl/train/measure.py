"""What a run measures: its policies on the frozen splits, and their differences task by task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from agentrl.config import RunConfig
from agentrl.evaluate import EvalOptions, EvalSummary, compare, evaluate
from agentrl.progress import Progress
from agentrl.run import RunDir
from agentrl.train.parts import Parts
from agentrl.types import JSON, Trajectory


@dataclass(frozen=True)
class Measured:
    """One policy on one split at one temperature."""

    policy: str
    split: str
    temperature: float
    summary: EvalSummary
    trajectories: tuple[Trajectory, ...]


def measure(
    config: RunConfig, run: RunDir, parts: Parts, name: str, progress: Progress, *, again: bool = False
) -> list[Measured]:
    """Evaluates the policy as the config says. What was measured before a resume is not measured again.

    An evaluation that was interrupted is begun again in deterministic mode, else it goes on.

    Args:
        config: `eval`, `rollout` and `seed` are read.
        run: Keeps the episodes in `evals/NAME-SPLIT-sampled` and `-greedy`.
        parts: Environment and policy.
        name: What the policy is called.
        progress: Shows how far it is.
        again: Whether an earlier measurement under this name is of another policy and goes to `attempts/`.

    Returns:
        One entry for each split and way of decoding.
    """
    done = []
    for split in config.eval.splits:
        for temperature in (1.0, 0.0) if config.eval.greedy else (1.0,):
            folder = run.eval_dir(f"{name.replace(' ', '-')}-{split}-{'sampled' if temperature else 'greedy'}")
            if again:
                run.set_aside(folder)
            elif config.rollout.deterministic:
                run.set_aside_unfinished(folder.name)
            samples = config.eval.samples if temperature else 1
            with progress.stage(f"evaluate {folder.name}", config.eval.tasks * samples) as stage:
                options = EvalOptions(
                    seed=config.seed,
                    rollout=config.rollout,
                    out=folder,
                    policy_name=name,
                    on_episode=lambda _, stage=stage: stage.advance(),  # type: ignore[misc]
                )
                parts.policy.forget()
                summary, trajectories = evaluate(
                    parts.make,
                    parts.policy,
                    split=split,
                    tasks=config.eval.tasks,
                    samples=samples,
                    sampling=replace(config.rollout.sampling, temperature=temperature),
                    options=options,
                )
            done.append(Measured(name, split, temperature, summary, trajectories))
    return done


def measure_dev(config: RunConfig, run: RunDir, parts: Parts, iteration: int) -> dict[str, float]:
    """Success on the development split in the middle of training; metrics `dev/success` and `dev/reward`."""
    if config.rollout.deterministic:
        run.set_aside_unfinished(iteration)
    options = EvalOptions(
        seed=config.seed, rollout=config.rollout, out=run.eval_dir(iteration), policy_name=f"iteration {iteration}"
    )
    parts.policy.forget()
    summary, _ = evaluate(
        parts.make,
        parts.policy,
        split=config.eval.dev_split,
        tasks=config.eval.dev_tasks,
        sampling=config.rollout.sampling,
        options=options,
    )
    found = {"dev/success": summary.success, "dev/reward": summary.reward}
    return {metric: value for metric, value in found.items() if value is not None}


def as_rows(measured: Sequence[Measured]) -> list[dict[str, JSON]]:
    """The `evals` of result.json."""
    return [
        {"policy": m.policy, "split": m.split, "temperature": m.temperature, "summary": m.summary.as_dict()}
        for m in measured
    ]


def differences(measured: Sequence[Measured], policy: str, seed: int) -> list[dict[str, JSON]]:
    """The `differences` of result.json: a policy minus each other one, on the same tasks."""
    rows: list[dict[str, JSON]] = []
    for ours in (m for m in measured if m.policy == policy):
        for other in measured:
            if other.policy != policy and (other.split, other.temperature) == (ours.split, ours.temperature):
                found = compare(ours.trajectories, other.trajectories, seed)
                where = {"split": ours.split, "temperature": ours.temperature}
                rows.append({"a": ours.policy, "b": other.policy, **where, **asdict(found)})
    return rows
