"""Trees in TOML: each kind, the round trip, other people's components and kinds, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from agentrl.errors import RegistryError, RewardError
from agentrl.plugins import list_plugins
from agentrl.reward import RewardTree, gate, leaf, weighted_sum
from agentrl.reward.ledger import check_ledger
from agentrl.reward.recompute import recompute
from agentrl.types import EndReason

HERE = Path(__file__).parent

WHOLE = """\
kind = "weighted_sum"
on_unscored = "renormalise"

[[children]]
weight = 1.0
kind = "gate"
at_least = 0.5
floor = -0.25
condition = { component = "components.py:full", role = "safeguard" }
child = { component = "components.py:half", name = "answer" }

[[children]]
weight = 0.5
kind = "lexicographic"

[[children.tiers]]
component = "components.py:full"
name = "first"

[[children.tiers]]
component = "components.py:half"
name = "second"

[[children]]
weight = -0.1
kind = "clip"
low = -0.25
high = 0.0

[children.child]
kind = "product"

[[children.child.children]]
component = "components.py:penalty"
role = "safeguard"

[[children.child.children]]
component = "components.py:Short"
options = { limit = 12 }

[[children]]
weight = 0.1
kind = "minimum"

[[children.children]]
component = "components.py:early"
role = "safeguard"
severity = "catastrophic"

[[children]]
kind = "shaping"
gamma_turn = 0.9
potential = { component = "components.py:early" }

[[children]]
component = "components.py:full"
name = "seen"
role = "diagnostic"
"""


def tree_from(text, base_dir=HERE):
    return RewardTree.load(tomllib.loads(text), base_dir)


def lone(reference):
    return tree_from(f'component = "{reference}"')


def test_every_kind_is_read_and_scored(run):
    tree = tree_from(WHOLE)
    (score,) = run(tree)
    # The gate gives 0.5, the tiers 1/2 + 0.5/2, the clip max(-0.5 * 1, -0.25), the least 0.25, shaping 0 - 0.25.
    expected = 1.0 * 0.5 + 0.5 * 0.75 + -0.1 * -0.25 + 0.1 * 0.25 - 0.25
    assert score.value == pytest.approx(expected)
    assert check_ledger(tree.final(EndReason.SUBMITTED), [score.value]) <= 1e-12


def test_the_whole_tree_comes_back_as_it_was_written():
    tree = tree_from(WHOLE)
    assert tree.as_dict() == tomllib.loads(WHOLE)
    assert tree.as_toml() == WHOLE
    again = tree_from(tree.as_toml())
    assert again.root == tree.root
    assert again.digest == tree.digest


def test_defaults_are_left_out_and_do_not_change_the_digest():
    short = tree_from('kind = "weighted_sum"\nchildren = [{ component = "components.py:full" }]')
    long = tree_from(
        'kind = "weighted_sum"\non_unscored = "propagate"\n'
        'children = [{ component = "components.py:full", weight = 1, role = "objective", severity = "recoverable" }]'
    )
    assert short.digest == long.digest
    assert short.as_toml() == 'kind = "weighted_sum"\n\n[[children]]\nweight = 1.0\ncomponent = "components.py:full"\n'


def test_a_file_is_found_from_the_folder_given_and_its_paths_from_its_own(tmp_path, run):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "reward.toml").write_text('component = "mine.py:done"\n')
    (tmp_path / "inner" / "mine.py").write_text(
        "from agentrl.reward import component\nfrom agentrl.types import Score\n"
        "@component(name='mine/done')\ndef done(episode):\n    return Score(1.0)\n"
    )
    tree = RewardTree.load("inner/reward.toml", tmp_path)
    assert run(tree)[0].value == 1.0
    assert RewardTree.load(tmp_path / "inner" / "reward.toml").digest == tree.digest


def test_a_tree_or_a_component_made_in_python_is_taken_as_it_is(fixed, run):
    assert run(RewardTree.load(fixed("a", 0.5)))[0].value == 0.5
    root = weighted_sum((2.0, fixed("a", 0.5)))
    assert RewardTree.load(root).root is root


def test_a_python_tree_names_components_by_their_entry_points_where_they_have_one(tmp_path, monkeypatch):
    offer(tmp_path, monkeypatch, "agentrl.rewards", "mine/done", "my_rewards:done")
    (tmp_path / "my_rewards.py").write_text(
        "from agentrl.reward import component\nfrom agentrl.types import Score\n"
        "@component(name='done')\ndef done(episode):\n    return Score(1.0)\n"
        "@component(name='other')\ndef other(episode):\n    return Score(1.0)\n"
    )
    import my_rewards

    tree = RewardTree(gate(my_rewards.other, my_rewards.done))
    assert tree.as_dict() == {
        "kind": "gate",
        "condition": {"component": "my_rewards:other"},
        "child": {"component": "mine/done"},
    }
    again = RewardTree.load(tree.as_dict())
    assert again.root == tree.root
    assert again.digest == tree.digest


def offer(folder, monkeypatch, group, name, target):
    info = folder / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(folder))
    list_plugins.cache_clear()


@pytest.fixture(autouse=True)
def _forget_plugins():
    yield
    list_plugins.cache_clear()


def test_somebody_elses_kind_comes_by_entry_point(tmp_path, monkeypatch, run):
    offer(tmp_path, monkeypatch, "agentrl.aggregators", "median", "my_nodes:Median")
    (tmp_path / "my_nodes.py").write_text((HERE / "components.py").read_text())
    table = {
        "kind": "median",
        "note": "robust",
        "children": [{"component": f"my_nodes:{name}"} for name in ("full", "half", "penalty")],
    }
    tree = RewardTree.load(table)
    assert tree.as_dict() == table
    (score,) = run(tree)
    assert score.value == 0.5
    assert score.ledger["note"] == "robust"
    assert check_ledger(tree.final(EndReason.SUBMITTED), [0.5]) == 0.0
    assert recompute(score.ledger) == 0.5


def test_somebody_elses_kind_comes_by_module_too(tmp_path, monkeypatch, run):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_kinds.py").write_text((HERE / "components.py").read_text())
    import my_kinds

    tree = RewardTree(my_kinds.Median(children=(leaf(my_kinds.full), leaf(my_kinds.half)), on_unscored="floor"))
    assert tree.as_dict()["kind"] == "my_kinds:Median"
    assert run(RewardTree.load(tree.as_dict()))[0].value == 1.0
    assert check_ledger(tree.final(EndReason.SUBMITTED), []) == 0.0


def test_options_make_a_component_of_a_class(run):
    short = 'component = "components.py:Short"\noptions = { limit = %d }'
    assert run(tree_from(short % 9))[0].value == 1.0
    assert run(tree_from(short % 8))[0].value == 0.0
    assert lone("components.py:Short").as_dict() == {"component": "components.py:Short"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kind = "wieghted_sum"\nchildren = []', "no kind of reward node 'wieghted_sum'. Did you mean 'weighted_sum'?"),
        ('kind = "weighted_sum"\nchildren = []', "reward: 'weighted_sum': weighted_sum has no children"),
        ('kind = "weighted_sum"', "reward: weighted_sum needs `children`"),
        ('kind = "gate"\nchild = {component="components.py:half"}', "reward: gate needs `condition`"),
        ('kind = "weighted_sum"\nchildren = 3', "reward.children: expected a list of tables, found 3"),
        ('kind = "weighted_sum"\nchildren = [3]', r"reward.children\[0\]: expected a table with either"),
        ('kind = "product"\nchildren = [{component="components.py:half", weight=2.0}]', "`weight` belongs to"),
        ('kind = "weighted_sum"\nchildren = [{component="components.py:half", weight="2"}]', r"\[0\].weight: .*number"),
        ('kind = "weighted_sum"\nchildren = [{component="components.py:half", weight=inf}]', "'t/half' must be finite"),
        ('kind = "weighted_sum"\nchildren = [{component="components.py:half", wieght=1.0}]', "unknown key 'wieght'"),
        ('component = "components.py:half"\nrole = "judge"', "role must be one of"),
        ('component = "components.py:half"\nkind = "gate"', "expected a table with either"),
        ("component = 3", "reward.component: expected the name of a component, found 3"),
        ('component = "components.py:half"\noptions = {limit = 3}', "takes no options; only one that is a class does"),
        ('component = "components.py:Short"\noptions = {limits = 3}', "unknown key 'limits'. Did you mean 'limit'"),
        ('component = "components.py:Short"\noptions = {limit = "x"}', "options do not fit component .*limit: "),
        ('component = "components.py:Short"\noptions = 3', "reward.options: expected a table, found 3"),
        ('component = "components.py:Plain"', "must be a dataclass to take options"),
        ('component = "components.py:Rows"', "expected a component"),
        ('kind = "shaping"\npotential = "components.py:early"', "reward.potential: expected a table with `component`"),
        ('kind = "components.py:Rows"', "expected a dataclass that extends"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_its_place(text, message):
    with pytest.raises(RewardError, match=message):
        tree_from(text)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("sql/corect", "there is no reward component 'sql/corect'. Did you mean 'sql/correct'"),
        ("components.py:hafl", "has no 'hafl'. Did you mean 'half'"),
        ("nowhere.py:half", "there is no file"),
        ("no_such_module:half", "does not load: there is no module"),
    ],
)
def test_a_component_that_is_not_there_is_named(reference, message):
    with pytest.raises(RegistryError, match=message):
        lone(reference)


def test_a_broken_file_is_named_with_its_cause(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RegistryError, match="does not load: ZeroDivisionError"):
        tree_from('component = "broken.py:x"', tmp_path)


def test_a_missing_or_broken_toml_file_is_named(tmp_path):
    (tmp_path / "reward.toml").write_text("kind = [")
    with pytest.raises(RewardError, match=r"reward\.toml is no TOML"):
        RewardTree.load("reward.toml", tmp_path)
    with pytest.raises(RewardError, match=r"cannot read .*No such file.*Did you mean 'reward\.toml'"):
        RewardTree.load("rewards.toml", tmp_path)


def test_a_refusal_names_the_file(tmp_path):
    (tmp_path / "reward.toml").write_text('kind = "clip"\n')
    with pytest.raises(RewardError, match=r"reward\.toml: reward: clip needs `child` and `low` and `high`"):
        RewardTree.load("reward.toml", tmp_path)
