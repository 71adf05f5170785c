"""The run directory: the one place that knows file names.

runs/NAME/
  config.json                 resolved; running it again is the same run
  manifest.json               versions, commit, machine, task digests, seeds; one entry more for each resume
  metrics.jsonl               one line per iteration, appended and flushed
  rollouts/000012/            episodes.jsonl, tokens.safetensors (tokens.partial while it is being written)
  checkpoints/000010/         Hugging Face layout + trainer/
  evals/000010/               episodes.jsonl, summary.json
  result.json                 at the end: before, after, differences, wall time, peak memory
  report.html                 one self-contained file
  attempts/1/                 what a resume went back behind; kept, never trained on
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from agentrl._facts import facts
from agentrl._files import Appender, finite, read_lines, write_json, write_whole
from agentrl._store import EpisodeFolder
from agentrl.config import RunConfig
from agentrl.configfile import as_tables, differences, load_config
from agentrl.errors import RunError, UsageError, did_you_mean
from agentrl.types import JSON

__all__ = ["EpisodeFolder", "RunDir"]

_MAY_DIFFER = {"runs_dir"}
"""Config keys that a resume may spell otherwise: they say where the run is, not what it is."""


class RunDir:
    """A run's folder. `create` opens it for writing, under a lock; `open` opens it for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._metrics: Appender | None = None

    @classmethod
    def create(cls, config: RunConfig, *, resume: bool = False) -> Self:
        """Makes the run's folder, or goes on with the one that is there.

        A resume of a run that is not there starts it: a kill may have come before its first file.

        Raises:
            UsageError: If the run exists and `resume` is not given, if the config differs from the run's (the message
                lists the keys), if the folder holds something else, or if another process writes this run.
        """
        run = cls(config.runs_dir / config.name)
        run.path.mkdir(parents=True, exist_ok=True)
        run._lock_or_refuse()
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
        if not run.config_path.exists():
            folder = run.path.parent
            beside = [str(p.parent) for p in folder.glob("*/config.json")] if folder.is_dir() else []
            raise UsageError(f"{run.path} is no run directory: it has no config.json.{did_you_mean(str(path), beside)}")
        return run

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
        return self._read_json("manifest.json") or {}

    @property
    def result(self) -> dict[str, JSON] | None:
        """What the run ended with; None before its end."""
        return self._read_json("result.json")

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

    def move_later_rollouts(self, iteration: int) -> Path | None:
        """Moves rollouts and numbered evaluations after an iteration to `attempts/`.

        Returns:
            The folder that they are in now, or None where there were none.
        """
        later = [p for kind in ("rollouts", "evals") for p in self._numbered_in(kind) if int(p.name) > iteration]
        if not later:
            return None
        attempt = self.path / "attempts" / str(1 + len(list((self.path / "attempts").glob("*"))))
        for folder in later:
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

    def eval_dir(self, tag: int | str) -> Path:
        """The folder of one evaluation: an iteration's, or a named one (`before`, `after`)."""
        return self.path / "evals" / (_numbered(tag) if isinstance(tag, int) else tag)

    def episode_folders(self) -> list[Path]:
        """Every folder with episodes, relative to the run: evaluations, rollouts, attempts."""
        found = [p.parent.relative_to(self.path) for p in self.path.glob("**/episodes.jsonl")]
        return sorted(found, key=lambda p: (p.parts[0] == "attempts", str(p)))

    def close(self) -> None:
        """Closes the files and gives the lock back; more than once does no harm."""
        self._close_metrics()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _lock_or_refuse(self) -> None:
        lock = FileLock(self.path / ".lock", thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"another process is writing {self.path}: wait for it, stop it, or choose another name with --name."
            ) from None
        self._lock = lock

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

    def _read_json(self, name: str) -> dict[str, JSON] | None:
        path = self.path / name
        try:
            content: dict[str, JSON] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(f"{path}: expected a JSON document, but: {error}. Remove it or restore it.") from error
        return content

    def _numbered_in(self, kind: str) -> list[Path]:
        return sorted(p for p in (self.path / kind).glob("*") if p.is_dir() and p.name.isdecimal())

    def _close_metrics(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _numbered(iteration: int) -> str:
    return f"{iteration:06d}"
