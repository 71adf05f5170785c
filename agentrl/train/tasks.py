"""Which tasks a run trains on, in which order, under which seeds. All of it follows from the run's seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from agentrl.errors import TaskError
from agentrl.seeds import derive_seed
from agentrl.types import EpisodeRequest, Task

_ENDLESS = 1 << 24
"""Splits at least this long are generators: they are walked through, not shuffled."""

_RUN_STRIDE = 1 << 20
"""Distance between the starting points of two runs' walks through an endless split."""


class TaskStream:
    """The order in which a split is trained on.

    An endless split is walked through from a place that the seed decides; a finite one is shuffled anew for each pass.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not len(tasks):
            raise TaskError("the split that training draws from has no tasks: expected at least one.")
        self._tasks = tasks
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, position: int) -> Task:
        n = len(self._tasks)
        if n >= _ENDLESS:
            return self._tasks[(self._seed * _RUN_STRIDE + position) % n]
        passes, index = divmod(position, n)
        if self._order[0] != passes:
            order = list(range(n))
            random.Random(derive_seed(self._seed, "order", passes)).shuffle(order)
            self._order = (passes, order)
        return self._tasks[self._order[1][index]]

    def take(self, start: int, count: int) -> list[Task]:
        """Tasks `start` to `start + count - 1` of the stream."""
        return [self[position] for position in range(start, start + count)]


def requests_for(tasks: Sequence[Task], attempts: int, prefix: str, seed: int) -> list[EpisodeRequest]:
    """Episodes for tasks: `attempts` of each, with ids that sort in this order.

    Args:
        tasks: In order.
        attempts: Episodes of each task.
        prefix: First part of every id, for example the iteration.
        seed: The run's; an episode's seed depends on it, the prefix, the place and the attempt.
    """
    return [
        EpisodeRequest(
            id=f"{prefix}/{place:05d}-{task.id.replace('/', '-')}/{attempt}",
            task=task,
            seed=derive_seed(seed, prefix, place, attempt),
        )
        for place, task in enumerate(tasks)
        for attempt in range(attempts)
    ]
