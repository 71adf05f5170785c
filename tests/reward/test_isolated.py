"""Components in a Worker: they see a JSON view, and whatever happens to them is a reason."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from agentrl.plugins import load_object
from agentrl.reward import RewardTree
from agentrl.reward.component import component
from agentrl.reward.evaluation import score
from agentrl.reward.recorded import remember
from agentrl.types import EndReason, Score, Unscored

HERE = Path(__file__).parent


def made(name):
    return load_object(f"{HERE / 'components.py'}:{name}", "component")


@pytest.fixture
def with_rows(at):
    def make(*texts):
        record = {}
        remember(record, 0, made("Rows"), made("Rows")(tuple(made("Cell")(text) for text in texts)))
        return at(0, EndReason.SUBMITTED, record)

    return make


def test_it_reads_the_evidence_that_it_names_and_the_turns(with_rows):
    assert score(made("isolated_rows"), with_rows("door", "window")) == Score(
        0.5, {"first": "door", "turns": 1, "task": "train/000001"}
    )


def test_it_stands_in_a_tree_like_any_other(with_rows):
    tree = RewardTree.load({"component": "components.py:isolated_rows"}, HERE)
    tree.begin(with_rows("door"))
    assert tree.step(with_rows("door"), ended=True).value == 0.5


def test_vacuity_and_doubt_cross_the_border(with_rows):
    vacuous = score(made("isolated_rows"), with_rows())
    assert vacuous.value == 0.0
    assert "there were no rows to check" in vacuous.evidence["vacuous"]
    assert score(made("isolated_unsure"), with_rows("a")) == Unscored("the referee is away")


def test_evidence_that_it_did_not_name_is_not_there(with_rows):
    assert "no Rows was recorded" in score(made("isolated_blind"), with_rows("a")).reason


def test_evidence_that_could_not_be_had_keeps_its_reason(at):
    assert "no Rows was recorded up to turn 0" in score(made("isolated_rows"), at(0)).reason


def test_one_that_hangs_is_killed_at_its_deadline(with_rows):
    start = time.monotonic()
    result = score(made("isolated_hang"), with_rows("a"))
    assert "WorkerTimeout" in result.reason
    assert time.monotonic() - start < 20


def test_one_that_raises_says_what(with_rows):
    assert "KeyError" in score(made("isolated_raise"), with_rows("a")).reason


def test_one_that_cannot_be_imported_is_unscored_with_the_reason(at):
    @component(name="t/local", isolated=True)
    def local(episode):
        return Score(1.0)

    assert "<locals>" in score(local, at(0)).reason
