"""The order of tasks and the seeds of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import TaskError
from agentrl.train.tasks import TaskStream, requests_for
from agentrl.types import Task


class Endless(Sequence[Task]):
    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        assert isinstance(index, int)
        return Task(f"train/{index}", "E", "?")

    def __len__(self) -> int:
        return 2**31 - 1


def _finite(n: int) -> list[Task]:
    return [Task(f"train/{i}", "E", "?") for i in range(n)]


@given(n=st.integers(1, 12), seed=st.integers(0, 5), passes=st.integers(1, 4))
def test_each_pass_over_a_finite_split_holds_each_task_once(n: int, seed: int, passes: int) -> None:
    stream = TaskStream(_finite(n), seed)
    for k in range(passes):
        assert sorted(task.id for task in stream.take(k * n, n)) == sorted(task.id for task in _finite(n))


def test_passes_and_seeds_differ_in_order_and_repeat_exactly() -> None:
    stream = TaskStream(_finite(20), 0)
    assert stream.take(0, 20) != stream.take(20, 20)
    assert stream.take(0, 20) != TaskStream(_finite(20), 1).take(0, 20)
    assert stream.take(5, 30) == TaskStream(_finite(20), 0).take(5, 30)


def test_an_endless_split_is_walked_through_without_repeats() -> None:
    first, second = TaskStream(Endless(), 0), TaskStream(Endless(), 1)
    ids = [task.id for task in first.take(0, 50)]
    assert ids == [f"train/{i}" for i in range(50)]
    assert not set(ids) & {task.id for task in second.take(0, 50)}


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(TaskError, match="at least one"):
        TaskStream([], 0)


def test_requests_have_ids_that_sort_and_seeds_of_their_own() -> None:
    requests = requests_for(_finite(12), 3, "000004", seed=0)
    ids = [request.id for request in requests]
    assert ids == sorted(ids)
    assert len(set(ids)) == len({request.seed for request in requests}) == 36
    assert [r.seed for r in requests_for(_finite(12), 3, "000004", seed=1)] != [r.seed for r in requests]
    assert [r.seed for r in requests_for(_finite(12), 3, "000005", seed=0)] != [r.seed for r in requests]
