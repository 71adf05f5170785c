"""A run from its config to its result: model, SFT, measurement, PPO, measurement, comparison, report."""

from __future__ import annotations

import resource
import time

from rich.console import Console

from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.evaluate import environment_identity
from agentrl.progress import Progress, stderr_console
from agentrl.report import write_report
from agentrl.run import RunDir
from agentrl.trackers import tracked
from agentrl.train.loop import Loop
from agentrl.train.measure import Measured, as_rows, differences, measure
from agentrl.train.parts import Parts, build_parts, set_threads
from agentrl.train.preflight import preflight
from agentrl.train.sft import continue_sft, fine_tune, starting_model
from agentrl.types import JSON

__all__ = ["sft", "train"]


def train(config: RunConfig, *, resume: bool = False, console: Console | None = None) -> dict[str, JSON]:
    """Runs everything that the config asks for.

    Args:
        config: The run.
        resume: Go on with a run of this name from its last checkpoint; it ends as if it had never stopped, on CPU bit
            for bit.
        console: Where progress goes; stderr where not given.

    Returns:
        What result.json holds: `evals`, `differences`, `wall_s`, `stages_s`, `peak_memory_mib`, `report`.

    Raises:
        UsageError: If the run exists and `resume` is not given, or the config differs from the run's.
        MissingError: If weights or packages are missing.
        InvariantError: If something that must hold during training does not.
    """
    preflight(config)
    with (
        RunDir.create(config, resume=resume) as run,
        Progress(console or stderr_console()) as progress,
        tracked(config, run),
    ):
        if _is_trained(run):
            return _complete(run, progress)
        clock = _Clock()
        parts = _start(config, run, progress)
        clock.lap("sft")
        start_name = "sft" if config.sft is not None else "start"
        measured = measure(config, run, parts, start_name, progress)
        clock.lap("eval")
        position = Loop(config, run, parts, progress).go()
        clock.lap("ppo")
        measured += measure(config, run, parts, "ppo", progress)
        clock.lap("eval")
        if config.baseline.sft_continued:
            measured += _sft_continued(config, run, progress)
            clock.lap("baseline")
        result = _result(run, measured, clock, config)
        result["iterations"] = position.iteration
        result["rollout_tokens"] = position.tokens
        run.write_result(result)
        result["report"] = str(write_report(run))
        return result


def sft(config: RunConfig, *, resume: bool = False, console: Console | None = None) -> dict[str, JSON]:
    """Fine-tunes on the environment's demonstrations, and measures the outcome.

    Args:
        config: The run; its `sft` section is needed.
        resume: As for `train`.
        console: As for `train`.

    Returns:
        As `train` does.

    Raises:
        ConfigError: If there is no `sft` section.
    """
    if config.sft is None:
        raise ConfigError("agentrl sft needs an [sft] section in the config: add one; its fields have defaults.")
    preflight(config)
    with RunDir.create(config, resume=resume) as run, Progress(console or stderr_console()) as progress:
        if _is_trained(run):
            return _complete(run, progress)
        clock = _Clock()
        parts = _start(config, run, progress)
        clock.lap("sft")
        measured = measure(config, run, parts, "sft", progress)
        clock.lap("eval")
        result = _result(run, measured, clock, config)
        run.write_result(result)
        result["report"] = str(write_report(run))
        return result


def _is_trained(run: RunDir) -> bool:
    return run.result is not None and "iterations" in run.result


def _complete(run: RunDir, progress: Progress) -> dict[str, JSON]:
    progress.say(f"{run.path} is complete: nothing is left to do.")
    report = run.report_path if run.report_path.exists() else write_report(run)
    return {**(run.result or {}), "report": str(report)}


class _Clock:
    """Wall time of the stages, seconds. After a resume it holds what this process spent."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.stages: dict[str, float] = {}

    def lap(self, stage: str) -> None:
        now = time.monotonic()
        self.stages[stage] = self.stages.get(stage, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start


def _start(config: RunConfig, run: RunDir, progress: Progress) -> Parts:
    """Model, environment and policy at the end of SFT, or as they were loaded where there is none."""
    run.update_manifest({"torch_threads": set_threads(config)})
    parts = build_parts(config, starting_model(config, run, progress))
    run.update_manifest({"environment": _identity(config, parts)})
    fine_tune(config, run, parts, progress)
    return parts


def _identity(config: RunConfig, parts: Parts) -> dict[str, JSON]:
    env = parts.make()
    identity = environment_identity(env, config.eval.splits, config.eval.tasks)
    env.close()
    return identity


def _sft_continued(config: RunConfig, run: RunDir, progress: Progress) -> list[Measured]:
    if config.sft is None:
        return []
    seconds = sum(float(line.get("time/iteration") or 0.0) for line in run.read_metrics())
    parts = build_parts(config, starting_model(config, run, progress))
    steps = continue_sft(config, config.sft, run, parts, seconds, progress)
    progress.say(f"SFT continued for {seconds:.0f} s, the time that PPO took: {steps} more steps")
    return measure(config, run, parts, "sft continued", progress, again=True)


def _result(run: RunDir, measured: list[Measured], clock: _Clock, config: RunConfig) -> dict[str, JSON]:
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "name": config.name,
        "seed": config.seed,
        "evals": as_rows(measured),
        "differences": differences(measured, "ppo", config.seed),
        "ppo_s": sum(float(line.get("time/iteration") or 0.0) for line in run.read_metrics()),
        "stages_s": clock.stages,
        "wall_s": clock.total,
        "peak_memory_mib": peak_kib / 1024,
    }
