"""Evidence: which methods an environment has, its JSON, and its record."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import EvidenceError, RewardError
from agentrl.reward import evidence
from agentrl.reward.evidence import EvidenceMethod, evidence_of, from_json, to_json
from agentrl.reward.recorded import RecordedEpisode, remember
from agentrl.types import EndReason


@dataclass(frozen=True)
class Cell:
    text: str
    value: bool | int | float | str | None = None


@dataclass(frozen=True)
class Rows:
    cells: tuple[Cell, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    end: EndReason | None = None


@dataclass(frozen=True)
class Ports:
    open: tuple[int, ...] = ()


class World:
    @evidence
    def rows(self) -> Rows:
        return Rows((Cell("a", 1),))

    @evidence(deadline_s=2)
    def ports(self) -> Ports:
        return Ports((80,))

    def other(self) -> int:
        return 1


class Sealed(World):
    @evidence(deadline_s=1)
    def ports(self) -> Ports:
        return Ports()


def test_methods_are_found_by_the_kind_that_they_return():
    assert evidence_of(World) == {Rows: EvidenceMethod("rows", Rows, 10.0), Ports: EvidenceMethod("ports", Ports, 2.0)}
    assert evidence_of(Sealed)[Ports].deadline_s == 1.0
    assert World().rows() == Rows((Cell("a", 1),))


def test_a_kind_that_is_no_dataclass_is_refused():
    class Loose:
        @evidence
        def rows(self) -> dict:
            return {}

    with pytest.raises(
        RewardError, match=r"Loose\.rows: expected a dataclass as return annotation, found <class 'dict'>"
    ):
        evidence_of(Loose)


def test_two_methods_of_one_kind_are_refused():
    class Twice(World):
        @evidence
        def more_rows(self) -> Rows:
            return Rows()

    with pytest.raises(RewardError, match="could not tell which it reads"):
        evidence_of(Twice)


numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
cells = st.builds(Cell, text=st.text(), value=st.none() | st.booleans() | numbers | st.text())


@given(st.builds(Rows, cells=st.lists(cells).map(tuple), end=st.none() | st.sampled_from(EndReason)))
def test_evidence_survives_being_written(rows):
    again = from_json(Rows, json.loads(json.dumps(to_json(rows))))
    assert again == rows
    assert [type(cell.value) for cell in again.cells] == [type(cell.value) for cell in rows.cells]


def test_evidence_that_json_cannot_hold_is_refused():
    with pytest.raises(EvidenceError, match="evidence Cell cannot be written as JSON"):
        to_json(Cell("a", math.nan))


def test_json_that_does_not_fit_is_refused():
    with pytest.raises(EvidenceError, match="recorded evidence does not fit Rows"):
        from_json(Rows, {"cells": [{"value": 1}]})


def test_a_record_gives_what_was_known_at_each_turn(at):
    record = {}
    remember(record, -1, Rows, Rows())
    remember(record, 1, Rows, Rows((Cell("a"),)))
    remember(record, 2, Rows, EvidenceError("the world is gone"))
    assert at(-1, record=record).evidence(Rows) == Rows()
    assert at(0, record=record).evidence(Rows) == Rows()
    assert at(1, record=record).evidence(Rows) == Rows((Cell("a"),))
    with pytest.raises(EvidenceError, match="the world is gone"):
        at(2, record=record).evidence(Rows)
    with pytest.raises(EvidenceError, match="no Ports was recorded up to turn 2"):
        at(2, record=record).evidence(Ports)


def test_a_view_of_an_episode_survives_being_written(at):
    record = {}
    remember(record, 0, Rows, Rows((Cell("a", 2),)))
    episode = at(1, EndReason.SUBMITTED, record)
    view = RecordedEpisode.of(episode, (Rows, Ports))
    again = RecordedEpisode.from_json(json.loads(json.dumps(view.as_json())))
    assert (again.task, again.turns, again.end, again.n_turns) == (episode.task, episode.turns, episode.end, 2)
    assert again.evidence(Rows) == Rows((Cell("a", 2),))
    with pytest.raises(EvidenceError, match="no Ports was recorded"):
        again.evidence(Ports)
