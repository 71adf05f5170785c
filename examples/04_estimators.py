"""Five ways to assign credit under one budget: the same supervised start, tasks, rollout tokens and evaluations.

PPO with boundary GAE, with GAE over tokens (`action`) and over turns (`turn`), GRPO and RLOO. For each seed one model
is made and fine-tuned; every estimator starts from it, on the same stream of tasks, and ends with the first iteration
that brings its rollouts to the budget, counted in sampled and observed tokens (those that only warm a critic up are
counted too). Learning rates, losses and batch sizes are the same for all.

`python examples/04_estimators.py` takes most of an hour on two cores and goes on where it was stopped; `--smoke` only
shows that it runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

import agentrl
from agentrl.configfile import load_config
from agentrl.evaluate import compare
from agentrl.run import EpisodeFolder, RunDir
from agentrl.train import sft, train

Estimator = Literal["boundary", "action", "turn", "grpo", "rloo"]
CRITIC_FREE = ("grpo", "rloo")
LABELS = {
    "boundary": "PPO, boundary GAE",
    "action": "PPO, GAE over tokens",
    "turn": "PPO, GAE over turns",
    "grpo": "GRPO",
    "rloo": "RLOO",
}
DECODINGS = {"T=1": ("sampled", 1.0), "greedy": ("greedy", 0.0)}
QUICKSTART = Path(__file__).with_name("01_quickstart.toml")


@dataclass(frozen=True)
class Options:
    """What is compared.

    Attributes:
        seeds: One supervised start, and one run of each estimator from it, for each.
        budget_tokens: Sampled and observed tokens of all rollouts of one run.
        estimators: Which ones; the first is what the others are compared with.
        runs_dir: Where the runs are kept; a finished one is not repeated.
        out: The table as JSON.
        smoke: Only show that it runs, in a temporary folder.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    budget_tokens: int = 400_000
    estimators: tuple[Estimator, ...] = ("boundary", "action", "turn", "grpo", "rloo")
    runs_dir: Path = Path("runs/estimators")
    out: Path | None = None
    smoke: bool = False


def tables(options: Options, seed: int) -> dict[str, Any]:
    """What the runs of a seed have in common: the quickstart's environment, a smaller model, fewer episodes."""
    quickstart = load_config(agentrl.RunConfig, [QUICKSTART])
    small = {"vocab_size": 400, "hidden_size": 32, "layers": 1, "intermediate_size": 64, "corpus_tasks": 20}
    full = {"vocab_size": 1024, "hidden_size": 128, "layers": 2, "intermediate_size": 384}
    return {
        "runs_dir": options.runs_dir,
        "seed": seed,
        "threads": 1,
        "env": quickstart.env.model_dump(),
        "model": {"critic": "head", "tiny": {"context": 512, **(small if options.smoke else full)}},
        "rollout": {
            "tasks": 2 if options.smoke else 16,
            "episodes_per_task": 4,
            "concurrency": 64,
            "sampling": {"max_tokens": 16 if options.smoke else 64},
        },
        "ppo": {"minibatches": 2, "policy": {"lr": 3e-4}, "critic": {"lr": 1e-3}},
        "eval": {"splits": ("heldout",), "tasks": 4 if options.smoke else 200},
    }


def start_config(options: Options, seed: int) -> agentrl.RunConfig:
    """The supervised start of a seed."""
    sft = {"demonstrator": "sloppy_expert", "batch_episodes": 16, "optim": {"lr": 5e-3, "warmup_steps": 40}}
    size = {"episodes": 16, "steps": 3} if options.smoke else {"episodes": 3000, "steps": 450}
    return agentrl.RunConfig.model_validate(
        {**tables(options, seed), "name": f"start-seed-{seed}", "sft": {**sft, **size}}
    )


def run_config(options: Options, estimator: Estimator, seed: int) -> agentrl.RunConfig:
    """One estimator from that start. Its `model.path` is the run that made the start: its last checkpoint is loaded."""
    common = tables(options, seed)
    start = options.runs_dir / start_config(options, seed).name
    critic = "none" if estimator in CRITIC_FREE else "head"
    ppo = {
        **common["ppo"],
        "advantage": {"estimator": estimator},
        "iterations": 10_000,
        "rollout_tokens": options.budget_tokens,
    }
    return agentrl.RunConfig.model_validate(
        {**common, "name": f"{estimator}-seed-{seed}", "model": {"path": str(start), "critic": critic}, "ppo": ppo}
    )


def finished(config: agentrl.RunConfig) -> dict[str, Any]:
    """Runs what a config asks for, in a process of its own so that its peak memory is its own; resumes it if begun."""
    run = train if config.sft is None else sft
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        result: dict[str, Any] = pool.submit(run, config, resume=True).result()
    return result


def episodes(config: agentrl.RunConfig, policy: str, decoding: str) -> list[agentrl.Trajectory]:
    """The evaluated episodes of a finished run."""
    folder = RunDir.open(config.runs_dir / config.name).eval_dir(f"{policy}-heldout-{DECODINGS[decoding][0]}")
    return EpisodeFolder(folder).trajectories()


@dataclass
class Row:
    """One estimator over all seeds; shares of 1, means over seeds, differences paired by task with 95 % intervals.

    Attributes:
        success: By decoding, one number for each seed.
        over_start: By decoding, minus the supervised start: mean, low, high.
        over_first: By decoding, minus the first estimator; empty for itself.
        tokens: Rollout tokens, for each seed.
        seconds: Collecting and learning, for each seed.
        mebibytes: Peak memory, for each seed.
    """

    success: dict[str, list[float]]
    over_start: dict[str, tuple[float, float, float]]
    over_first: dict[str, tuple[float, float, float]]
    tokens: list[int]
    seconds: list[float]
    mebibytes: list[float]


def difference(ours: Sequence[agentrl.Trajectory], theirs: Sequence[agentrl.Trajectory]) -> tuple[float, float, float]:
    """Ours minus theirs, seeds together and tasks as clusters: mean, low, high."""
    found = compare(ours, theirs)
    return found.mean, found.low, found.high


def compare_all(options: Options, results: Mapping[tuple[Estimator, int], dict[str, Any]]) -> dict[Estimator, Row]:
    """Puts the finished runs side by side."""

    def pooled(estimator: Estimator, policy: str, decoding: str) -> list[agentrl.Trajectory]:
        configs = [run_config(options, estimator, seed) for seed in options.seeds]
        return [episode for config in configs for episode in episodes(config, policy, decoding)]

    first, rows = options.estimators[0], dict[Estimator, Row]()
    for estimator in options.estimators:
        ours = {decoding: pooled(estimator, "ppo", decoding) for decoding in DECODINGS}
        found = [results[estimator, seed] for seed in options.seeds]
        rows[estimator] = Row(
            success={
                decoding: [success(result, temperature) for result in found]
                for decoding, (_, temperature) in DECODINGS.items()
            },
            over_start={d: difference(ours[d], pooled(estimator, "start", d)) for d in DECODINGS},
            over_first={d: difference(ours[d], pooled(first, "ppo", d)) for d in DECODINGS if estimator != first},
            tokens=[result["rollout_tokens"] for result in found],
            seconds=[result["ppo_s"] for result in found],
            mebibytes=[result["peak_memory_mib"] for result in found],
        )
    return rows


def success(result: Mapping[str, Any], temperature: float, policy: str = "ppo") -> float:
    """Held-out success of one policy of a run."""
    (row,) = (r for r in result["evals"] if (r["policy"], r["temperature"]) == (policy, temperature))
    return float(row["summary"]["success"])


def show(options: Options, rows: Mapping[Estimator, Row], starts: Mapping[str, list[float]], console: Console) -> None:
    """Prints the table."""
    table = Table(
        title=f"Held-out success, {options.budget_tokens:,} rollout tokens, seeds {', '.join(map(str, options.seeds))}"
    )
    table.add_column("")
    for decoding in DECODINGS:
        for name in (decoding, "minus start", f"minus {options.estimators[0]}"):
            table.add_column(name, justify="right")
    for name in ("tokens", "time", "memory"):
        table.add_column(name, justify="right")
    table.add_row("SFT start", *(cell for d in DECODINGS for cell in (shares(starts[d]), "", "")), "", "", "")
    for estimator, row in rows.items():
        cells = [
            cell
            for d in DECODINGS
            for cell in (shares(row.success[d]), points(row.over_start[d]), points(row.over_first.get(d)))
        ]
        minutes, memory = statistics.mean(row.seconds) / 60, statistics.mean(row.mebibytes)
        used = f"{statistics.mean(row.tokens) / 1000:.0f} k", f"{minutes:.1f} min", f"{memory:.0f} MiB"
        table.add_row(LABELS[estimator], *cells, *used)
    console.print(table)
    console.print("Differences in points, paired by task, [95 % interval]; tokens, time and memory of one run.")


def shares(values: Sequence[float]) -> str:
    """A mean over seeds, and the seeds'."""
    each = f" ({', '.join(f'{100 * value:.0f}' for value in values)})" if len(values) > 1 else ""
    return f"{100 * statistics.mean(values):.1f} %{each}"


def points(found: tuple[float, float, float] | None) -> str:
    """A difference with its interval."""
    if found is None:
        return ""
    mean, low, high = (100 * value for value in found)
    return f"{mean:+.1f} \\[{low:+.1f}, {high:+.1f}]"


def main(options: Options) -> None:
    """Trains what is not trained yet, and compares."""
    if options.smoke:
        folder = Path(tempfile.mkdtemp())
        options = Options((0,), 3_000, options.estimators, folder, options.out, smoke=True)
    starts: dict[str, list[float]] = {decoding: [] for decoding in DECODINGS}
    results: dict[tuple[Estimator, int], dict[str, Any]] = {}
    for seed in options.seeds:
        start = finished(start_config(options, seed))
        for decoding, (_, temperature) in DECODINGS.items():
            starts[decoding].append(success(start, temperature, "sft"))
        for estimator in options.estimators:
            results[estimator, seed] = finished(run_config(options, estimator, seed))
    rows = compare_all(options, results)
    show(options, rows, starts, Console(width=200))
    out = options.out or options.runs_dir / "estimators.json"
    found = {estimator: asdict(row) for estimator, row in rows.items()}
    out.write_text(
        json.dumps({"seeds": options.seeds, "start": starts, "estimators": found}, indent=1) + "\n", encoding="utf-8"
    )
    Console().print(f"written to {out}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
