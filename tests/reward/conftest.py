"""Components with known scores, and episodes made from a record: real parts that need no environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from agentrl.reward import Component, Node, RewardTree, StepScore, TurnView, component
from agentrl.reward.recorded import RecordedEpisode
from agentrl.types import EndReason, Score, Task, Unscored

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
