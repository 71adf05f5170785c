"""The boundary around components: what they may give, and what becomes of everything else."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from agentrl.errors import EvidenceError, RewardError
from agentrl.reward import component, require_some
from agentrl.reward.component import check_component
from agentrl.reward.evaluation import score
from agentrl.types import Score, Unscored


def scored(at, give, bounds=(0.0, 1.0)):
    @component(name="t/x", bounds=bounds)
    def x(episode):
        return give(episode)

    return score(x, at(0))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, "not finite"),
        (math.inf, "not finite"),
        (1.0000001, r"outside its bounds \[0.0, 1.0\]"),
        (-1e-12, "outside its bounds"),
        ("1.0", "expected a Score with a number"),
        (None, "expected a Score with a number"),
    ],
)
def test_a_value_that_cannot_be_is_unscored_and_never_clipped(at, value, reason):
    result = scored(at, lambda episode: Score(value))
    assert isinstance(result, Unscored)
    assert re.search(reason, result.reason)


@pytest.mark.parametrize("value", [1, True, np.float32(1.0), np.int64(1), 1.0])
def test_any_real_number_is_a_value(at, value):
    result = scored(at, lambda episode: Score(value))
    assert result == Score(1.0)
    assert type(result.value) is float


@pytest.mark.parametrize("given", [0.5, None, "good", (Score(1.0),)])
def test_anything_but_a_score_is_unscored(at, given):
    assert "expected a Score" in scored(at, lambda episode: given).reason


def test_what_a_component_raises_is_unscored_with_type_and_text(at):
    def broken(episode):
        return {}["rows"]

    assert scored(at, broken) == Unscored("it raised KeyError: 'rows'")


def test_evidence_that_cannot_be_had_is_unscored_with_its_reason(at):
    def blind(episode):
        raise EvidenceError("the database is locked")

    assert scored(at, blind) == Unscored("the database is locked")


def test_a_component_may_say_itself_that_it_cannot_tell(at):
    assert scored(at, lambda episode: Unscored("no referee")) == Unscored("no referee")


@pytest.mark.parametrize("evidence", [object(), {1, 2}, math.nan, {"x": [math.inf]}])
def test_evidence_that_is_not_json_is_unscored(at, evidence):
    assert "cannot be written as JSON" in scored(at, lambda episode: Score(1.0, evidence)).reason


def test_evidence_is_copied(at):
    cited = {"rows": [1, 2]}
    result = scored(at, lambda episode: Score(1.0, cited))
    cited["rows"].append(3)
    assert result.evidence == {"rows": [1, 2]}


def test_a_check_over_nothing_fails_at_the_lower_bound(at):
    def vacuous(episode):
        return Score(float(all(require_some([], "open ports"))))

    result = scored(at, vacuous, bounds=(-1.0, 1.0))
    assert result.value == -1.0
    assert "there were no open ports to check" in result.evidence["vacuous"]


def test_a_check_over_something_goes_on(at):
    assert require_some([3], "rows") == [3]


@dataclass(frozen=True)
class Limit:
    limit: int
    name: ClassVar[str] = "t/limit"
    when: ClassVar[str] = "end"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    def __call__(self, episode):
        return Score(float(episode.n_turns <= self.limit))


def test_an_object_is_a_component(at):
    assert score(Limit(1), at(0)) == Score(1.0)
    assert score(Limit(0), at(0)) == Score(0.0)


def test_a_decorated_function_can_be_called(fixed, at):
    assert fixed("t/x", 0.5)(at(0)) == Score(0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "a text that is not empty"),
        ({"name": "x", "when": "never"}, "`when` must be 'turn' or 'end'"),
        ({"name": "x", "bounds": (1.0, 0.0)}, "the first below the second"),
        ({"name": "x", "bounds": (0.0, math.inf)}, "two finite numbers"),
    ],
)
def test_a_component_that_cannot_be_used_is_refused_when_it_is_made(arguments, message):
    with pytest.raises(RewardError, match=message):
        component(**arguments)(lambda episode: Score(1.0))


@pytest.mark.parametrize("value", [len, "sql/correct", Limit, 3])
def test_what_is_no_component_is_refused(value):
    with pytest.raises(RewardError, match="expected a component"):
        check_component(value)
