"""The run directory: the one place that knows file names.

runs/NAME/
  config.json                 resolved; running it again is the same run
  manifest.json               versions, commit, machine, task digests, seeds; one entry more for each resume
  metrics.jsonl               one line per iteration, appended and flushed
  rollouts/000012/            episodes.jsonl, tokens.safetensors (tokens.partial while it is being written), and
                              learning.safetensors once an update has learned from them; reward_state.json where the
                              reward's root is a batch node: its state from before them
  model/made/                 the model made from nothing, where the config asks for one
  demonstrations/             episodes.jsonl, tokens.safetensors: what SFT learns from
  sft/000300/                 the model after so many SFT steps; sft/metrics.jsonl beside it
  checkpoints/000010/         Hugging Face layout + trainer/
  evals/000010/               episodes.jsonl, summary.json
  result.json                 at the end: before, after, differences, wall time, peak memory
  report.html                 one self-contained file
  attempts/1/                 what a resume went back behind; kept, never trained on
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import Self

from agentrl._facts import facts
from agentrl._files import Appender, finite, locked, read_json, read_lines, write_json, write_whole
from agentrl._store import EpisodeFolder
from agentrl.config import RunConfig
from agentrl.configfile import as_tables, differences, load_config
from agentrl.errors import UsageError, did_you_mean
from agentrl.types import JSON

__all__ = ["EpisodeFolder", "Listener", "RunDir", "find_episode"]

_MAY_DIFFER = {"runs_dir"}
"""Config keys that a resume may spell otherwise: they say where the run is, not what it is."""

Listener = Callable[[int, Mapping[str, float | int | None]], None]
"""What is called with an iteration and its metrics once they are in the file."""


class RunDir:
    """A run's folder. `create` opens it for writing, under a lock; `open` opens it for reading.

    Attributes:
        path: The folder.
        listeners: Called by `append_metrics`; trackers are.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ExitStack()
        self._metrics: Appender | None = None
        self.listeners: list[Listener] = []

    @classmethod
    def create(cls, config: RunConfig, *, resume: bool = False) -> Self:
        """Makes the run's folder, or goes on with the one that is there.

        A resume of a run that is not there starts it: a kill may have come before its first file.

        Raises:
            UsageError: If the run exists and `resume` is not given, if the config differs from the run's (the message
                lists the keys), if the folder holds something else, or if another process writes this run.
        """
        run = cls(config.runs_dir / config.name)
        run._lock.enter_context(locked(run.path))
        try:
            run._begin(config, resume=resume)
        except BaseException:
            run.close()
            raise
        return run

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Opens a run for reading; takes no lock and writes nothing.

        Raises:
            UsageError: If there is no run.
        """
        run = cls(Path(path))
        if not cls.is_run(run.path):
            folder = run.path.parent
            beside = [str(p.parent) for p in folder.glob("*/config.json")] if folder.is_dir() else []
            raise UsageError(
                f"{run.path} is no run directory: it has no config.json of a run.{did_you_mean(str(path), beside)}"
            )
        return run

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is a run's: a model's folder and a checkpoint have a config.json too."""
        config = read_json(path / "config.json")
        return config is not None and "runs_dir" in config

    @property
    def config_path(self) -> Path:
        """The resolved config."""
        return self.path / "config.json"

    @property
    def report_path(self) -> Path:
        """The HTML report."""
        return self.path / "report.html"

    @property
    def config(self) -> RunConfig:
        """The resolved config, loaded.

        Raises:
            ConfigError: If this version of agentrl does not understand it.
        """
        return load_config(RunConfig, [self.config_path])

    @property
    def manifest(self) -> dict[str, JSON]:
        """What the run ran on; empty where it is not there."""
        return read_json(self.path / "manifest.json") or {}

    @property
    def result(self) -> dict[str, JSON] | None:
        """What the run ended with; None before its end."""
        return read_json(self.path / "result.json")

    def update_manifest(self, entries: Mapping[str, JSON]) -> None:
        """Adds entries to the manifest, or replaces them."""
        write_json(self.path / "manifest.json", self.manifest | dict(entries))

    def write_result(self, result: Mapping[str, JSON]) -> None:
        """Writes result.json."""
        write_json(self.path / "result.json", dict(result))

    def append_metrics(self, iteration: int, metrics: Mapping[str, float | int | None]) -> None:
        """Appends an iteration's line; it is in the file when this returns. What is not finite is written as null.

        Raises:
            RunError: If there is no room.
        """
        if self._metrics is None:
            self._metrics = Appender.lines(self.path / "metrics.jsonl")
        self._metrics.append_record({"iteration": iteration} | finite(metrics))
        for listener in self.listeners:
            listener(iteration, metrics)

    def read_metrics(self) -> list[dict[str, JSON]]:
        """The lines of metrics.jsonl, each with its `iteration`."""
        return list(read_lines(self.path / "metrics.jsonl"))

    def truncate_metrics(self, iteration: int) -> None:
        """Removes the lines of iterations after the one that a resume goes on from."""
        self._close_metrics()
        kept = [json.dumps(line) + "\n" for line in self.read_metrics() if line["iteration"] <= iteration]
        write_whole(self.path / "metrics.jsonl", "".join(kept))

    def rollouts(self, iteration: int) -> EpisodeFolder:
        """The episodes of one iteration.

        As a context it is finished on a clean exit:
        `with run.rollouts(3) as folder: collector.collect(..., on_episode=folder.append)`.
        """
        return EpisodeFolder(self.path / "rollouts" / _numbered(iteration))

    def learning_path(self, iteration: int) -> Path:
        """What the update of an iteration learned from (`UpdateRecord`); not there after a warm-up."""
        return self.rollouts(iteration).path / "learning.safetensors"

    def move_later_rollouts(self, iteration: int) -> Path | None:
        """Moves rollouts and numbered evaluations after an iteration to `attempts/`.

        Returns:
            The folder that they are in now, or None where there were none.
        """
        later = [p for kind in ("rollouts", "evals") for p in self._numbered_in(kind) if int(p.name) > iteration]
        return self.set_aside(*later)

    def set_aside(self, *folders: Path) -> Path | None:
        """Moves folders of this run to `attempts/`, those that are there.

        Returns:
            The folder that they are in now, or None where there were none.
        """
        present = [folder for folder in folders if folder.exists()]
        if not present:
            return None
        attempt = self.path / "attempts" / str(1 + len(list((self.path / "attempts").glob("*"))))
        for folder in present:
            target = attempt / folder.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(target)
        return attempt

    @property
    def checkpoints(self) -> Path:
        """The folder of all checkpoints."""
        return self.path / "checkpoints"

    def checkpoint_dir(self, iteration: int) -> Path:
        """The checkpoint after an iteration."""
        return self.checkpoints / _numbered(iteration)

    @property
    def model_dir(self) -> Path:
        """The model that was made from nothing: an ordinary Hugging Face folder."""
        return self.path / "model" / "made"

    @property
    def sft_dir(self) -> Path:
        """The folder of SFT's checkpoints."""
        return self.path / "sft"

    def demonstrations(self) -> EpisodeFolder:
        """What SFT learns from."""
        return EpisodeFolder(self.path / "demonstrations")

    def append_sft_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends the line of an SFT step."""
        with Appender.lines(self.sft_dir / "metrics.jsonl") as file:
            file.append_record({"step": step} | finite(metrics))

    def read_sft_metrics(self) -> list[dict[str, JSON]]:
        """The lines of SFT's metrics; of a step that a resume did again, the last one."""
        lines = {line["step"]: line for line in read_lines(self.sft_dir / "metrics.jsonl")}
        return [lines[step] for step in sorted(lines)]

    def eval_dir(self, tag: int | str) -> Path:
        """The folder of one evaluation: an iteration's, or a named one (`before`, `after`)."""
        return self.path / "evals" / (_numbered(tag) if isinstance(tag, int) else tag)

    def set_aside_unfinished(self, tag: int | str) -> Path | None:
        """Moves an evaluation that was interrupted to `attempts/`.

        Done again from its start it meets the batches that it meets without interruption: others change last bits.

        Returns:
            The folder that it is in now, or None where there is none or it is whole.
        """
        folder = self.eval_dir(tag)
        return None if (folder / "summary.json").exists() else self.set_aside(folder)

    def episode_folders(self) -> list[Path]:
        """Every folder with episodes, relative to the run: evaluations, rollouts, demonstrations, attempts."""
        found = [p.parent.relative_to(self.path) for p in self.path.glob("**/episodes.jsonl")]
        return sorted(found, key=lambda p: (p.parts[0] == "attempts", str(p)))

    def close(self) -> None:
        """Closes the files and gives the lock back; more than once does no harm."""
        self._close_metrics()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _begin(self, config: RunConfig, *, resume: bool) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if not self.config_path.exists():
            strange = [p.name for p in self.path.iterdir() if p.name[0] != "." and p.name != "manifest.json"]
            if strange:
                raise UsageError(
                    f"{self.path} exists and is no run (it holds {', '.join(sorted(strange)[:5])} and no config.json):"
                    " choose another name with --name."
                )
            self.update_manifest({"created": now, "seed": config.seed, "threads": config.threads, **facts()})
            write_json(self.config_path, as_tables(config))
            return
        if not resume:
            raise UsageError(
                f"the run {self.path} exists: go on with it by --resume, or choose another name with --name."
            )
        old, new = as_tables(self.config), as_tables(config)
        changed = [line for line in differences(old, new) if line.split(":")[0] not in _MAY_DIFFER]
        if changed:
            listed = "\n".join(f"  {line}" for line in changed)
            raise UsageError(
                f"--resume needs the config that {self.path} was started with, but these keys differ (run -> now):\n"
                f"{listed}\nTake the run's own with --config {self.config_path}, or choose another name with --name."
            )
        self.update_manifest({"resumed": [*self.manifest.get("resumed", []), {"at": now, **facts()}]})

    def _numbered_in(self, kind: str) -> list[Path]:
        return sorted(p for p in (self.path / kind).glob("*") if p.is_dir() and p.name.isdecimal())

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _numbered(iteration: int) -> str:
    return f"{iteration:06d}"


def find_episode(run: Path, wanted: str, command: str) -> tuple[EpisodeFolder, dict[str, JSON]]:
    """The record of an episode and the folder that it is in, by its id or a part of it that is its alone.

    Args:
        run: A run's folder, or a folder of episodes.
        wanted: The id, or a part of it.
        command: What to type for one of several, with `{folder}` and `{episode}` in it.

    Raises:
        UsageError: If there are no episodes, or none or several fit.
    """
    paths = sorted(path.parent for path in run.glob("**/episodes.jsonl"))
    # What a resume went back behind is looked at only where a folder of it is named.
    kept = [path for path in paths if "attempts" not in path.relative_to(run).parts]
    if not kept:
        raise UsageError(f"{run} holds no episodes: expected a run directory, or a folder with episodes.jsonl.")
    found = [(folder, record) for folder in map(EpisodeFolder, kept) for record in folder.records()]
    fitting = [pair for pair in found if pair[1]["id"] == wanted] or [p for p in found if wanted in p[1]["id"]]
    if not fitting:
        hint = f": one is {found[0][1]['id']!r}, for example" if found else ""
        raise UsageError(f"{run} has no episode {wanted!r} among its {len(found)}{hint}.")
    if len(fitting) > 1:
        lines = (command.format(folder=quote(str(f.path)), episode=quote(r["id"])) for f, r in fitting[:8])
        listed = "\n".join(f"  {line}" for line in lines)
        raise UsageError(f"{len(fitting)} episodes fit {wanted!r}. Name one of them and its folder:\n{listed}")
    return fitting[0]
