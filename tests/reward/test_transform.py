"""What a batch node leaves behind: trees as text, ledgers that add up, other people's nodes, what a person reads."""

from __future__ import annotations

import copy
import io
import json
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.errors import InvariantError, RewardError
from agentrl.plugins import list_plugins
from agentrl.reward import RewardTree, constrained, group_relative, leaf, normalised, weighted_sum
from agentrl.reward.explain import render_ledger
from agentrl.reward.ledger import check_ledger, check_trajectory
from agentrl.reward.transform import is_trained
from agentrl.types import EndReason

HERE = Path(__file__).parent

NORMALISED = """\
kind = "normalised"
name = "scaled"
on_unscored = "renormalise"
min_std = 0.25

[[children]]
weight = 2.0
component = "components.py:half"

[[children]]
weight = -0.5
component = "components.py:early"
role = "safeguard"

[[children]]
component = "components.py:full"
role = "diagnostic"
"""

CONSTRAINED = """\
kind = "constrained"
on_unscored = "floor"
budget = 0.05
eta = 0.2
start = 1.0
at_least = 0.5

[objective]
kind = "weighted_sum"

[[objective.children]]
weight = 1.0
component = "components.py:half"

[[safeguards]]
component = "components.py:early"
role = "safeguard"

[[safeguards]]
component = "components.py:full"
role = "safeguard"
severity = "catastrophic"
"""

GROUPED = """\
kind = "group_relative"
min_std = 0.01

[[children]]
weight = 1.0
component = "components.py:half"

[[children]]
weight = 0.5
kind = "clip"
low = 0.0
high = 0.5
child = { component = "components.py:full" }
"""


def tree_from(text):
    return RewardTree.load(tomllib.loads(text), HERE)


@pytest.mark.parametrize("text", [NORMALISED, CONSTRAINED, GROUPED])
def test_batch_nodes_come_back_as_they_were_written(text):
    tree = tree_from(text)
    assert tree.as_toml() == text
    assert tree.as_dict() == tomllib.loads(text)
    again = tree_from(tree.as_toml())
    assert again.root == tree.root
    assert again.start_state() == tree.start_state()


def test_one_number_that_differs_is_another_tree():
    assert tree_from(GROUPED).digest != tree_from(GROUPED.replace("0.01", "0.02")).digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "constrained"\nobjective = { component = "components.py:half" }', "needs `safeguards` and `budget`"),
        ('kind = "normalized"\nchildren = []', "no kind of reward node 'normalized'. Did you mean 'normalised'?"),
        ('kind = "normalised"\nmin_sdt = 1.0\nchildren = []', "unknown key 'min_sdt'. Did you mean 'min_std'?"),
        (
            'kind = "weighted_sum"\n[[children]]\nkind = "normalised"\nchildren = [{component = "components.py:half"}]',
            r"'normalised' \(normalised\) stands under 'weighted_sum' \(weighted_sum\): expected it as the root",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(text, message):
    with pytest.raises(RewardError, match=message):
        tree_from(text)


def test_somebody_elses_batch_node_comes_by_entry_point(tmp_path, monkeypatch, attempt):
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.aggregators]\nranked = my_batch:Ranked\n")
    (tmp_path / "my_batch.py").write_text((HERE / "components.py").read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    list_plugins.cache_clear()
    try:
        table = {"kind": "ranked", "keep": 0.5, "child": {"component": "my_batch:Short"}}
        tree = RewardTree.load(table)
        assert tree.as_dict() == {"kind": "ranked", "child": {"component": "my_batch:Short"}}
        batch = tree.transform([attempt(tree, name, n_turns=2) for name in "abcd"], tree.start_state())
        assert [[turn.reward for turn in t.turns] for t in batch.trajectories] == [[0, 1], [0, 1], [0, 0], [0, 0]]
        assert batch.state["node"] == {"collections": 1}
        assert batch.metrics["reward/won"] == 2.0
        assert [check_trajectory(t) for t in batch.trajectories] == [0.0] * 4
        with pytest.raises(RewardError, match="stands under"):
            RewardTree.load({"kind": "product", "children": [table]})
        batch.trajectories[0].ledger["batch"]["won"] = False
        with pytest.raises(InvariantError, match="trained reward of turn 1"):
            check_trajectory(batch.trajectories[0])
    finally:
        list_plugins.cache_clear()


@pytest.fixture
def grown(attempt, told):
    """Of each kind a tree and its transformed collection of two episodes of two turns."""
    children = ((1.0, told("solved")), (0.5, told("calm", "turn")), leaf(told("seen"), role="diagnostic"))
    trees = {
        "normalised": RewardTree(normalised(*children)),
        "constrained": RewardTree(
            constrained(weighted_sum(*children), told("safe", "turn"), told("short"), budget=0.1, start=0.5)
        ),
        "group_relative": RewardTree(group_relative(*children)),
    }
    first = {"solved": 1.0, "calm": [0.25, 0.75], "seen": 0.5, "safe": [1.0, 0.5], "short": 0.0}
    other = {"solved": 0.5, "calm": [1.0, 0.5], "seen": 0.5, "safe": [0.0, 0.5], "short": 1.0}
    made = {}
    for kind, tree in trees.items():
        episodes = [attempt(tree, "a", n_turns=2, **first), attempt(tree, "b", n_turns=2, **other)]
        made[kind] = (tree, episodes, tree.transform(episodes, tree.start_state()))
    return made


KINDS = ["normalised", "constrained", "group_relative"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_ledger_holds_what_was_earned_and_what_is_trained_and_both_add_up(grown, kind):
    _, episodes, batch = grown[kind]
    for earned, trained in zip(episodes, batch.trajectories, strict=True):
        assert trained.ledger["raw"] == [turn.reward for turn in earned.turns]
        assert trained.ledger["trained"] == [turn.reward for turn in trained.turns]
        assert trained.ledger["raw"] != trained.ledger["trained"]
        assert trained.ledger["total"] == pytest.approx(earned.reward)
        assert trained.ledger["steps"] == earned.ledger["steps"]
        assert trained.ledger["batch"]["kind"] == kind
        assert check_trajectory(trained) <= 1e-12
        assert is_trained(trained)
        assert check_ledger(json.loads(json.dumps(trained.ledger)), trained.ledger["trained"]) <= 1e-12
        assert "batch" not in earned.ledger


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_a_collection_does_not_matter_and_once_more_gives_the_same(grown, kind):
    tree, episodes, batch = grown[kind]
    assert tree.transform(episodes[::-1], tree.start_state()) == batch
    # Replay has the transformed episodes alone.
    assert tree.transform(batch.trajectories, json.loads(json.dumps(tree.start_state()))) == batch


def places(value, path=()):
    """Every number that trained rewards depend on, the facts of the batch among them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # Bounds of a fact, what a diagnostic would weigh and success change no sum.
            unused = {"weight"} if value.get("role") == "diagnostic" else set()
            if key not in {"bounds", "turn", "success", "violations", "at_least", *unused}:
                yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*path, i))
    elif isinstance(value, float):
        yield path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [lambda x: x + 3e-6, lambda x: x - 0.625, lambda x: float("nan")])
def test_every_number_that_is_changed_is_found(grown, kind, change):
    ledger = grown[kind][2].trajectories[0].ledger
    found = list(places(ledger))
    assert len(found) >= 20
    missed = []
    for path in found:
        other = copy.deepcopy(ledger)
        place = other
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = change(place[path[-1]])
        try:
            check_ledger(other, ledger["trained"])
            missed.append(path)
        except InvariantError:
            pass
    assert missed == []


def test_what_constrained_reads_is_its_objective(attempt, told):
    tree = RewardTree(constrained(told("solved"), told("safe"), budget=0.0))
    episode = attempt(tree, "a", solved=0.5, safe=1.0)
    episode.ledger["steps"][0]["entry"]["children"][0]["value"] = 0.75
    with pytest.raises(InvariantError, match="turn 0: it states 0.5, what it is made of gives 0.75"):
        check_ledger(episode.ledger, [0.5])


def test_a_violation_that_is_stated_elsewhere_is_found(grown):
    trained = grown["constrained"][2].trajectories[0]
    trained.ledger["batch"]["violations"]["safe"] = 0
    with pytest.raises(InvariantError, match="safeguards broke at turns .*'safe': 0.*its steps say .*'safe': 1"):
        check_trajectory(trained)


def test_a_turn_that_carries_another_reward_is_found(grown):
    trained = grown["normalised"][2].trajectories[0]
    with pytest.raises(InvariantError, match=r"reward of turn 1: it states .*gap 1e-08"):
        check_ledger(trained.ledger, [trained.ledger["trained"][0], trained.ledger["trained"][1] + 1e-8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"raw": [0.5]}, "has 1 raw rewards, expected one for 2 turns"),
        ({"trained": []}, "has 0 trained rewards, expected one for 2 turns"),
        ({"trained": None}, "left out of training, and not why"),
        ({"batch": {"kind": "weighted_sum"}}, "'weighted_sum' changed its rewards, and that is no batch node"),
        ({"batch": {"kind": "normalised"}}, "does not say what 'normalised' needs: KeyError"),
        ({"batch": {"kind": "normalised", "deviation": 0.0}}, "does not say what 'normalised' needs: ZeroDivision"),
    ],
)
def test_a_ledger_that_cannot_be_is_refused(grown, change, message):
    trained = grown["normalised"][2].trajectories[0]
    with pytest.raises(InvariantError, match=message):
        check_ledger(trained.ledger | change, [turn.reward for turn in trained.turns])


def shown(trajectory) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(render_ledger(trajectory))
    return console.file.getvalue()


def test_explain_shows_both(grown, attempt):
    text = shown(grown["constrained"][2].trajectories[0])
    # Turn 1 earned 1 + 0.5 * 0.75 and breaks both safeguards at 0.5 each.
    assert (
        "turn 1   reward +0.375   (on token 5, the last that was sampled in it)   trained on; it earned +1.375" in text
    )
    assert "sum of the step rewards  +1.5" in text
    assert "sum of the trained rewards  +0.5  constrained" in text
    assert 'multipliers {"safe": 0.5, "short": 0.5}  violations {"safe": 1, "short": 1}' in text
    assert "recoverable safeguard  a constraint" in text
    tree = grown["group_relative"][0]
    alone = tree.transform([attempt(tree, "a", solved=1.0, calm=[1.0], seen=1.0)], tree.start_state())
    text = shown(alone.trajectories[0])
    assert "earned; not trained on" in text
    assert "sum of the trained rewards  none: it has 1 attempts to compare, expected at least 2  group_relative" in text


def test_an_episode_without_turns_trains_nothing(at, told):
    from agentrl.types import Task, Trajectory

    tree = RewardTree(normalised(told("do")))
    task = Task("train/1", "Test-v0", "do it", {"do": 0.5})
    tree.begin(at(-1))
    episode = at(-1, EndReason.CONTEXT_FULL)
    object.__setattr__(episode, "task", task)
    tree.step(episode, ended=True)
    whole = Trajectory("a", task, 0, (), (), EndReason.CONTEXT_FULL, tree.final(EndReason.CONTEXT_FULL))
    batch = tree.transform([whole], tree.start_state())
    assert batch.trajectories[0].ledger["trained"] == []
    assert batch.state["node"]["count"] == 0
    assert check_trajectory(batch.trajectories[0]) == 0.0
