"""Trackers: where metrics go besides metrics.jsonl, behind one protocol of three methods.

metrics.jsonl is the record; a tracker is a view of it. A tracker that fails is dropped with a warning and never stops a
run; one whose package is missing is told of before the run starts. `tensorboard` writes files beside the run; `wandb`
and `trackio` send metrics where those packages are set up to send them, and only where the config names them.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from agentrl._files import finite
from agentrl.config import RunConfig
from agentrl.configfile import as_tables
from agentrl.errors import MissingError
from agentrl.run import RunDir
from agentrl.types import JSON

_LOG = logging.getLogger(__name__)

Metrics = Mapping[str, float | int | None]


class Tracker(Protocol):
    """Shows a run's metrics somewhere."""

    def start(self, config: RunConfig, run: RunDir, history: Sequence[Mapping[str, JSON]]) -> None:
        """Begins, or goes on with, a run whose metrics so far are `history`, lines of metrics.jsonl."""

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Shows one iteration."""

    def finish(self) -> None:
        """Ends; what was logged is shown."""


class TensorBoard:
    """Event files in `RUN/tensorboard`, written anew at a resume: what the resume went back behind must not stay."""

    def start(self, config: RunConfig, run: RunDir, history: Sequence[Mapping[str, JSON]]) -> None:  # noqa: ARG002
        """Writes what there is already."""
        from tensorboard.summary import Writer

        folder = run.path / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self._writer: Any = Writer(str(folder))
        for line in history:
            self.log(line["iteration"], {name: value for name, value in line.items() if name != "iteration"})

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Writes one event for each number."""
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def finish(self) -> None:
        """Closes the file."""
        self._writer.close()


class Hosted:
    """wandb or trackio, which share `init`, `log` and `finish`. What they print goes to stderr: stdout is for data."""

    def __init__(self, package: str) -> None:
        self._package = package

    def start(self, config: RunConfig, run: RunDir, history: Sequence[Mapping[str, JSON]]) -> None:  # noqa: ARG002
        """Opens the run under its name, in the project `agentrl`."""
        self._module = import_module(self._package)
        options: dict[str, Any] = {"resume": "allow"}
        if self._package == "wandb":
            options |= {"dir": str(run.path), "id": run.path.resolve().name}
        with redirect_stdout(sys.stderr):
            self._module.init(project="agentrl", name=config.name, config=as_tables(config), **options)

    def log(self, iteration: int, metrics: Metrics) -> None:
        """Logs the numbers of one iteration."""
        numbers = {name: value for name, value in finite(metrics).items() if value is not None}
        with redirect_stdout(sys.stderr):
            self._module.log(numbers, step=iteration)

    def finish(self) -> None:
        """Waits until everything is sent or saved."""
        with redirect_stdout(sys.stderr):
            self._module.finish()


class _Guarded:
    """The boundary to trackers: whatever one raises drops it with a warning, and the run goes on without it."""

    def __init__(self, name: str, tracker: Tracker) -> None:
        self._name = name
        self._tracker: Tracker | None = tracker

    def call(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # noqa: BLE001 (the boundary)
            self._tracker = None
            _LOG.warning(
                "the tracker %s failed and is left out from here on, metrics.jsonl has everything: %s: %s",
                self._name,
                type(error).__name__,
                error,
            )


@contextmanager
def tracked(config: RunConfig, run: RunDir) -> Iterator[None]:
    """Shows the run's metrics in the trackers that the config names, for as long as the context lasts.

    A tracker is started with its first line of metrics, when it is known what a resume keeps.

    Raises:
        MissingError: If a tracker's package is not installed; nothing has started then.
    """
    trackers = [_Guarded(name, make_tracker(name)) for name in config.trackers]
    started = False

    def listen(iteration: int, metrics: Metrics) -> None:
        nonlocal started
        if not started:
            started = True
            history = [line for line in run.read_metrics() if line["iteration"] < iteration]
            for tracker in trackers:
                tracker.call(lambda t: t.start(config, run, history))
        for tracker in trackers:
            tracker.call(lambda t: t.log(iteration, metrics))

    run.listeners.append(listen)
    try:
        yield
    finally:
        run.listeners.remove(listen)
        if started:
            for tracker in trackers:
                tracker.call(lambda t: t.finish())


def make_tracker(name: str) -> Tracker:
    """The tracker of this name.

    Raises:
        MissingError: If its package is not installed.
    """
    if find_spec(name) is None:
        raise MissingError(f"the config names the tracker {name!r}, which is not installed: pip install {name}")
    return TensorBoard() if name == "tensorboard" else Hosted(name)
