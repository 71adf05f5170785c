"""What an environment is made and reset with: its settings, its reward's place, and the task."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel

from agentrl.configfile import field_names, validated
from agentrl.errors import ConfigError, TaskError, UsageError, did_you_mean
from agentrl.types import JSON, Task

_MOST_SCANNED = 100_000

M = TypeVar("M", bound=BaseModel)


def read_settings(model: type[M], settings: Mapping[str, JSON] | BaseModel | None, env: str) -> M:
    """Checks an environment's settings.

    Args:
        model: What the environment declares.
        settings: Values by name, or an instance of the model.
        env: The environment's name, for the message.

    Returns:
        An instance of the model.

    Raises:
        ConfigError: On an unknown name or a value that does not fit.
    """
    if isinstance(settings, model):
        return settings
    if isinstance(settings, BaseModel):
        raise ConfigError(f"settings of {env}: expected {model.__name__}, found {type(settings).__name__}.")
    given = dict(settings or {})
    for name in given:
        if name not in field_names(model):
            raise ConfigError(f"settings of {env}: there is no {name!r}.{did_you_mean(name, field_names(model))}")
    return validated(model, given, f"settings of {env}")


def folder_of(cls: type, attribute: str) -> Path | None:
    """The folder of the module of the class that sets an attribute; None where it has no file.

    Args:
        cls: A class that has the attribute, by itself or from a base.
        attribute: Its name.
    """
    owner = next(base for base in cls.__mro__ if attribute in vars(base))
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    return Path(file).resolve().parent if file else None


class TaskChooser:
    """Finds the tasks that resets ask for; keeps the sequences, which may be endless."""

    def __init__(self, env: Any) -> None:
        """Makes a chooser.

        Args:
            env: A ToolEnv.
        """
        self._env = env
        self._splits: dict[str, Sequence[Task]] = {}

    def choose(self, options: Mapping[str, Any] | None, seed: int) -> Task:
        """The task of a reset.

        Args:
            options: `task`: a Task or the id of one; `split`: where it is looked for, or drawn from (default: `train`,
                or the first split where there is no `train`).
            seed: Of the draw, where no task is named.

        Raises:
            UsageError: On an unknown option.
            TaskError: If there is no such split or task, or it is another environment's.
        """
        given = dict(options or {})
        for key in given.keys() - {"task", "split"}:
            raise UsageError(f"reset takes the options 'task' and 'split', found {key!r}.")
        wanted = given.get("task")
        if isinstance(wanted, Task):
            return self._ours(wanted)
        split = given.get("split")
        if isinstance(wanted, str):
            return self._ours(self._find(wanted, split))
        if wanted is not None:
            raise TaskError(f"expected options['task'] to be a Task or the id of one, found {type(wanted).__name__}.")
        splits: tuple[str, ...] = self._env.splits
        tasks = self._tasks(split or ("train" if "train" in splits else splits[0]))
        index = int(np.random.default_rng([0, seed]).integers(len(tasks)))
        return self._ours(tasks[index])

    def _tasks(self, split: str) -> Sequence[Task]:
        if split not in self._splits:
            splits: tuple[str, ...] = self._env.splits
            if split not in splits:
                raise TaskError(f"{self._env.name} has no split {split!r}.{did_you_mean(split, splits)}")
            tasks: Sequence[Task] = self._env.tasks(split)
            if not len(tasks):
                raise TaskError(f"the split {split!r} of {self._env.name} has no tasks.")
            self._splits[split] = tasks
        return self._splits[split]

    def _find(self, task_id: str, split: str | None) -> Task:
        for name in (split,) if split else self._env.splits:
            tasks = self._tasks(name)
            # Ids that end with the task's place in its split are found at once, however long the split is.
            tail = task_id.rpartition("/")[2]
            if tail.isascii() and tail.isdigit() and len(tail) < 20 and int(tail) < len(tasks):
                task = tasks[int(tail)]
                if task.id == task_id:
                    return task
            for i in range(len(tasks) if len(tasks) <= _MOST_SCANNED else 0):
                if tasks[i].id == task_id:
                    return tasks[i]
        raise TaskError(f"{self._env.name} has no task {task_id!r} in {split or ', '.join(self._env.splits)}.")

    def _ours(self, task: Task) -> Task:
        if task.env != self._env.name:
            raise TaskError(f"the task {task.id!r} belongs to the environment {task.env!r}, not to {self._env.name!r}.")
        return task
