"""Progress of long work: bars on a terminal, plain lines elsewhere. Goes to stderr, so that stdout holds data alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

Field = float | int | str | None

_EVERY_S = 10.0
"""Plain lines of one stage are at least this far apart, seconds."""


def stderr_console() -> Console:
    """The console that progress and logs go to."""
    return Console(stderr=True, highlight=False)


class Stage:
    """One piece of work under way; made by `Progress.stage`.

    Attributes:
        done: How much is done.
    """

    def __init__(self, progress: Progress, name: str, total: int | None, task: TaskID | None) -> None:
        self._progress = progress
        self._name = name
        self._total = total
        self._task = task
        self.done = 0
        self._fields: dict[str, Field] = {}
        self._start = self._said = time.monotonic()

    def advance(self, n: int = 1, /, **fields: Field) -> None:
        """Counts work as done.

        Args:
            n: How much.
            **fields: Figures to show beside the bar; they stay until they are given anew.
        """
        self.done += n
        self._fields |= fields
        if self._task is not None:
            self._progress.bars.update(self._task, advance=n, figures=_figures(self._fields))
        elif time.monotonic() - self._said >= _EVERY_S:
            self.say()

    def say(self) -> None:
        """Prints how far it is, as a line."""
        self._said = time.monotonic()
        count = f"{self.done}/{self._total}" if self._total is not None else str(self.done)
        self._progress.say(f"{self._name} {count} {_figures(self._fields)} {self._said - self._start:.0f} s")


class Progress:
    """Shows stages, one inside another where they are. A context: the display ends with it."""

    def __init__(self, console: Console | None = None) -> None:
        """Makes a display.

        Args:
            console: Where to; stderr where not given. Bars are drawn where it is a terminal and NO_COLOR is not set.
        """
        self.console = console or stderr_console()
        self._depth = 0
        self._drawn = self.console.is_terminal and not self.console.no_color
        self.bars = Bars(
            TextColumn("{task.description:<12}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", style="dim"),
            console=self.console,
            disable=not self._drawn,
            transient=True,
        )

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """Shows a stage while it runs, and one line of it when it has ended, unless it was inside another.

        Args:
            name: What is done.
            total: How much there is to do, where it is known.
        """
        task = self.bars.add_task(name, total=total, figures="") if self._drawn else None
        stage = Stage(self, name, total, task)
        self._depth += 1
        try:
            yield stage
        finally:
            self._depth -= 1
            if task is not None:
                self.bars.remove_task(task)
            if self._depth == 0 and stage.done:
                stage.say()

    def say(self, text: str) -> None:
        """Prints a line above the bars."""
        self.console.print(" ".join(text.split()), markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bars.stop()


def _figures(fields: dict[str, Field]) -> str:
    return " ".join(f"{name}={_short(value)}" for name, value in fields.items())


def _short(value: Field) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
