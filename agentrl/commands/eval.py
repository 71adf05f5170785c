"""`agentrl eval`: what a policy achieves on an environment, with intervals."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from agentrl.commands._flags import parse
from agentrl.commands._output import json_table, print_json, show
from agentrl.errors import UsageError
from agentrl.progress import Progress
from agentrl.types import JSON, Sampling, Trajectory


@dataclass(frozen=True)
class EvalCommand:
    """Measure a policy: success with intervals, by level, by end, by component. Errors are counted, never scored as 0.

    MODEL is a run directory, a Hugging Face folder or hub id, `smollm2`, `expert` (the environment's own), or, with -b,
    a model of an OpenAI-compatible endpoint. With -o, or for a run, episodes are kept, and none is run twice.
    """

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """A registered name (`agentrl list envs`) or `path/to/my_env.py:MyEnv`."""
    model: Annotated[str, tyro.conf.arg(aliases=["-m"])]
    """What to measure; see above."""
    base_url: Annotated[str | None, tyro.conf.arg(aliases=["-b"], metavar="URL")] = None
    """Of an OpenAI-compatible endpoint: http://localhost:8000/v1."""
    tasks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 100
    """Tasks, from the start of the split."""
    samples: Annotated[int, tyro.conf.arg(aliases=["-r"])] = 1
    """Episodes of each task."""
    temperature: Annotated[float, tyro.conf.arg(aliases=["-T"])] = 1.0
    """0 is greedy."""
    max_tokens: int | None = None
    """Cap of one message, tokens; the run's own, or 256."""
    top_p: float = 1.0
    """Cuts the distribution; training never does."""
    split: Annotated[str | None, tyro.conf.arg(aliases=["-s"])] = None
    """One of the environment's splits; `heldout` where it has one, else its first."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"], metavar="DIR")] = None
    """Where to keep episodes and summary; a run's own evals/ where MODEL is a run."""
    concurrency: Annotated[int | None, tyro.conf.arg(aliases=["-c"])] = None
    """Episodes at once."""
    seed: int = 0
    """Of the episodes: two policies under one seed meet the same worlds."""
    settings: Annotated[str | None, tyro.conf.arg(metavar="JSON")] = None
    """The environment's settings, like '{"levels": [1]}'; the run's own where MODEL is a run."""
    format: str | None = None
    """Tool-call format; told from the chat template where not given."""
    reward: str | None = None
    """A reward tree (TOML file) in the place of the environment's own."""
    max_turns: int | None = None
    """Assistant messages in one episode."""
    checkpoint: int | None = None
    """Iteration of the run's checkpoint; the newest where not given."""
    native_tools: bool = False
    """The endpoint gets tool schemas and calls tools in its own way."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the endpoint's key."""
    fail_under: float | None = None
    """Exit with code 1 if success is below this share."""
    dry_run: bool = False
    """Print what would be run and do nothing."""
    json: bool = False
    """Print the summary as JSON."""


def main(arguments: list[str]) -> int:
    """Evaluates; see `agentrl eval --help`."""
    command = parse(EvalCommand, arguments, "eval")
    _check(command)
    if command.dry_run:
        print_json(asdict(command))
        return 0
    from agentrl.commands._policies import find_subject, with_concurrency
    from agentrl.evaluate import evaluate
    from agentrl.report.terminal import eval_tables

    subject = find_subject(_wanted(command))
    split = _split(command, subject.make)
    sampling = Sampling(command.temperature, command.max_tokens or subject.rollout.sampling.max_tokens, command.top_p)
    rollout = with_concurrency(subject.rollout, command.concurrency)
    tag = f"{subject.name}-{split}-T{command.temperature:g}"
    out = command.output
    if out is None and subject.home is not None:
        out = subject.home.eval_dir(re.sub(r"[^A-Za-z0-9._-]+", "-", tag))
    with Progress() as progress, progress.stage("evaluate", command.tasks * command.samples) as stage:
        counts = {"ok": 0, "errors": 0}

        def count(trajectory: Trajectory) -> None:
            counts["ok"] += bool(trajectory.success)
            counts["errors"] += trajectory.end.is_error
            stage.advance(1, **counts)

        summary, _ = evaluate(
            subject.make,
            subject.policy(),
            split=split,
            tasks=command.tasks,
            samples=command.samples,
            sampling=sampling,
            options=_options(command, rollout, out, subject.name, count),
        )
    if command.json:
        print_json(summary.as_dict() | {"env": command.env, "model": command.model, "split": split})
    else:
        show(eval_tables(summary))
    if command.fail_under is not None and (summary.success is None or summary.success < command.fail_under):
        progress.say(f"success is below --fail-under {command.fail_under:g}.")
        return 1
    return 0


def _check(command: EvalCommand) -> None:
    """Refuses numbers that mean nothing before anything is loaded."""
    bounds = {
        "--tasks": (command.tasks, 1, None),
        "--samples": (command.samples, 1, None),
        "--seed": (command.seed, 0, None),
        "--temperature": (command.temperature, 0, None),
        "--max-tokens": (command.max_tokens, 1, None),
        "--concurrency": (command.concurrency, 1, None),
        "--fail-under": (command.fail_under, 0, 1),
    }
    for flag, (value, low, high) in bounds.items():
        if value is not None and not (low <= value <= (math.inf if high is None else high)):
            raise UsageError(
                f"{flag}: expected at least {low}{f' and at most {high}' if high else ''}, found {value:g}."
            )
    if not 0 < command.top_p <= 1:
        raise UsageError(f"--top-p: expected more than 0 and at most 1, found {command.top_p:g}.")


def _wanted(command: EvalCommand) -> Any:
    from agentrl.commands._policies import Wanted

    changes: dict[str, JSON] = {}
    if command.settings is not None:
        changes["settings"] = json_table(command.settings, "--settings")
    for name in ("format", "reward", "max_turns"):
        value = getattr(command, name)
        if value is not None:
            changes[name] = value
    return Wanted(
        env=command.env,
        model=command.model,
        base_url=command.base_url,
        changes=changes,
        native_tools=command.native_tools,
        api_key_env=command.api_key_env,
        checkpoint=command.checkpoint,
    )


def _split(command: EvalCommand, make: Any) -> str:
    if command.split is not None:
        return command.split
    from agentrl.evaluate import default_split

    env = make()
    split = default_split(env)
    env.close()
    return split


def _options(command: EvalCommand, rollout: Any, out: Path | None, name: str, count: Any) -> Any:
    from agentrl.evaluate import EvalOptions

    return EvalOptions(seed=command.seed, rollout=rollout, out=out, policy_name=name, on_episode=count)
