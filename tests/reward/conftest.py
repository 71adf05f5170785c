"""Components with known scores, and episodes made from a record: real parts that need no environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentrl.reward import Component, Node, RewardTree, StepScore, TurnView, component
from agentrl.reward.ledger import check_trajectory
from agentrl.reward.recorded import RecordedEpisode
from agentrl.types import EndReason, Score, Task, Trajectory, Turn, Unscored

Value = float | Unscored | Mapping[int, float | Unscored]


@pytest.fixture(scope="session")
def fixed() -> Callable[..., Component]:
    """`fixed(name, value, when="end", bounds=(0, 1))`: a component with a score that is known, by turn if need be."""

    def make(name: str, value: Value, when: Any = "end", bounds: tuple[float, float] = (0.0, 1.0)) -> Component:
        @component(name=name, when=when, bounds=bounds)
        def score(episode: Any) -> Score | Unscored:
            found = value[episode.turn] if isinstance(value, Mapping) else value
            return found if isinstance(found, Unscored) else Score(found)

        return score

    return make


@pytest.fixture(scope="session")
def at() -> Callable[..., RecordedEpisode]:
    """`at(turn, end=None, record=None)`: an episode in which turns 0 to `turn` were taken."""

    def make(turn: int, end: EndReason | None = None, record: Any = None) -> RecordedEpisode:
        turns = tuple(TurnView(f"message {k}") for k in range(turn + 1))
        return RecordedEpisode(Task("train/000001", "Test-v0", "do it"), end, turn, 8, turns, (), record or {})

    return make


@pytest.fixture(scope="session")
def run(at: Callable[..., RecordedEpisode]) -> Callable[..., list[StepScore]]:
    """`run(tree, n_turns, end)`: the scores of an episode that ends with its last turn."""

    def go(
        tree: RewardTree | Node | Component, n_turns: int = 1, end: EndReason = EndReason.SUBMITTED
    ) -> list[StepScore]:
        tree = tree if isinstance(tree, RewardTree) else RewardTree(tree)
        tree.begin(at(-1))
        scores = [tree.step(at(k), ended=False) for k in range(n_turns - 1)]
        last = at(n_turns - 1, end)
        return [*scores, tree.step(last, ended=True, bootstraps=end.bootstraps)]

    return go


@pytest.fixture(scope="session")
def told() -> Callable[..., Component]:
    """`told("solved", when="end", bounds=(0, 1))`: a component that reads its score from the task; a list by turn."""

    def make(name: str, when: Any = "end", bounds: tuple[float, float] = (0.0, 1.0)) -> Component:
        @component(name=name, when=when, bounds=bounds)
        def score(episode: Any) -> Score | Unscored:
            found = episode.task.data[name]
            found = found[episode.turn] if isinstance(found, list) else found
            return Unscored("lost") if found is None else Score(found)

        return score

    return make


@pytest.fixture(scope="session")
def attempt() -> Callable[..., Trajectory]:
    """`attempt(root, id, n_turns=1, end=SUBMITTED, task="train/1", solved=1.0)`: an episode, scored by a tree."""

    def make(
        root: Node | RewardTree,
        id: str,  # noqa: A002
        n_turns: int = 1,
        end: EndReason = EndReason.SUBMITTED,
        task: str = "train/1",
        **values: Any,
    ) -> Trajectory:
        tree = root if isinstance(root, RewardTree) else RewardTree(root)
        asked = Task(task, "Test-v0", "do it", values)

        def seen(turn: int, end: EndReason | None = None) -> RecordedEpisode:
            return RecordedEpisode(asked, end, turn, 8, tuple(TurnView("x") for _ in range(turn + 1)), (), {})

        tree.begin(seen(-1))
        scores = [tree.step(seen(k), ended=False) for k in range(n_turns - 1)]
        scores.append(tree.step(seen(n_turns - 1, end), ended=True, bootstraps=end.bootstraps))
        turns = tuple(Turn((1,), (2, 3), (-0.1, -0.2), 0, "stop", "x", reward=score.value or 0.0) for score in scores)
        ledger = None if end.is_error else tree.final(end)
        made = Trajectory(id, asked, 0, (), turns[:n_turns], end, ledger, scores[-1].success, n_sampled=2 * n_turns)
        assert check_trajectory(made) <= 1e-12
        return made

    return make
