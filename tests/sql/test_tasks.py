from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import Task
from agentrl.errors import ConfigError, TaskError
from agentrl_sql.domains import DOMAINS, HELDOUT_DOMAINS, TRAIN_DOMAINS
from agentrl_sql.generate import make_database
from agentrl_sql.questions import KINDS, LEVEL_OF, fits
from agentrl_sql.tasks import ENDLESS, FINITE, FROZEN, SPLITS, SqlTasks, domains_of, make_task, split_digest, task_of


def sample(split: str, n: int, step: int = 1) -> list[Task]:
    return [SqlTasks(split)[i] for i in range(0, n * step, step)]


@contextmanager
def databases(task: Task) -> Iterator[list[sqlite3.Connection]]:
    """The base and the siblings of a task, the base first."""
    seeds = [task.data["db_seed"], *task.data["hidden_seeds"]]
    connections = [sqlite3.connect(":memory:") for _ in seeds]
    for connection, seed in zip(connections, seeds, strict=True):
        make_database(task.data["domain"], seed).build(connection)
    yield connections
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("split", SPLITS)
def test_the_first_200_tasks_of_a_split_are_frozen(split: str) -> None:
    assert split_digest(split, 200) == FROZEN[split]


def test_lengths() -> None:
    assert len(SqlTasks("train")) == ENDLESS == 2**31 - 1
    assert {len(SqlTasks(split, levels=(1,))) for split in SPLITS[1:]} == {FINITE}
    assert FINITE >= 1000


@pytest.mark.parametrize("split", SPLITS)
def test_a_task_carries_all_that_the_environment_needs(split: str) -> None:
    for task in sample(split, 80):
        data = json.loads(json.dumps(dict(task.data)))
        assert data == task.data
        assert set(data) == {
            "domain", "db_seed", "hidden_seeds", "level", "kind", "gold_sql", "ordered", "tables", "wrong_sql",
        }  # fmt: skip
        assert task.split == split
        assert data["domain"] in domains_of(split)
        assert len({data["db_seed"], *data["hidden_seeds"]}) == 3
        assert data["kind"] in KINDS[data["level"]]
        assert task.id.startswith(f"{split}/{data['domain']}/{data['kind']}/")


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_one_informative_and_not_to_be_had_by_a_wrong_query(split: str) -> None:
    """The promises, checked by code that shares nothing with the generator's own check."""
    for task in sample(split, 150, step=7 if split == "train" else 3):
        gold, ordered = task.data["gold_sql"], task.data["ordered"]

        def shape(rows: list[tuple[object, ...]], ordered: bool = ordered) -> object:
            return rows if ordered else Counter(rows)

        with databases(task) as connections:
            answers = [connection.execute(gold).fetchall() for connection in connections]
            assert answers[0], gold
            assert answers[0] != [(0,)]
            assert all(cell is not None for rows in answers for row in rows for cell in row)
            assert any(shape(rows) != shape(answers[0]) for rows in answers[1:])
            for wrong in task.data["wrong_sql"]:
                given_ = [connection.execute(wrong).fetchall() for connection in connections]
                assert any(shape(one) != shape(other) for one, other in zip(answers, given_, strict=True)), wrong
            for connection, rows in zip(connections, answers, strict=True):
                connection.execute("PRAGMA reverse_unordered_selects = 1")
                assert shape(connection.execute(gold).fetchall()) == shape(rows)


def test_a_limit_never_cuts_through_a_tie() -> None:
    for task in sample("train", 250, step=3):
        if found := re.search(r"^(SELECT .*?)( FROM .* ORDER BY (.*?)( DESC)?) LIMIT (\d+)$", task.data["gold_sql"]):
            _, source, key, _, n = found.groups()
            with databases(task) as connections:
                for connection in connections:
                    keys = connection.execute(f"SELECT {key}{source} LIMIT {int(n) + 1}").fetchall()
                    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("split", SPLITS)
def test_every_kind_of_question_can_be_asked_of_every_domain(split: str) -> None:
    for domain in domains_of(split):
        for kind in LEVEL_OF:
            if fits(kind, DOMAINS[domain].schema):
                task = make_task(split, domain, kind, 1)
                assert (task.data["domain"], task.data["kind"]) == (domain, kind)


def test_no_database_serves_two_splits() -> None:
    seen: dict[tuple[str, int], str] = {}
    for split in SPLITS:
        for task in sample(split, 150, step=6):
            for seed in (task.data["db_seed"], *task.data["hidden_seeds"]):
                assert seen.setdefault((task.data["domain"], seed), split) == split


def test_no_question_serves_two_splits() -> None:
    asked = {
        split: {(task.instruction, task.data["gold_sql"]) for task in sample(split, n)}
        for split, n in (("train", 500), ("dev", 300), ("heldout", 300), ("heldout_domains", 150))
    }
    for split, questions in asked.items():
        others = set().union(*(found for other, found in asked.items() if other != split))
        assert not questions & others


def test_held_out_domains_are_asked_about_in_their_split_alone() -> None:
    assert {task.data["domain"] for task in sample("heldout_domains", 100)} == set(HELDOUT_DOMAINS)
    assert {task.data["domain"] for task in sample("train", 100)} == set(TRAIN_DOMAINS)


@pytest.mark.parametrize("split", SPLITS)
def test_any_run_of_tasks_is_a_fair_mixture(split: str) -> None:
    tasks = SqlTasks(split, levels=(1,))[:96]
    kinds, domains = (Counter(task.data[what] for task in tasks) for what in ("kind", "domain"))
    assert set(kinds.values()) == {96 // len(KINDS[1])}
    assert set(domains.values()) == {96 // len(domains_of(split))}


def test_a_task_does_not_depend_on_what_was_asked_for_before() -> None:
    task = SqlTasks("train")[12_345]
    make_database.cache_clear()
    assert task_of(task.id) == task
    assert task_of(task.id).digest == task.digest


def test_an_id_means_the_same_task_under_all_settings() -> None:
    narrow = SqlTasks("train", levels=(1,), domains=("shop", "farm"), kinds=("count", "like"))
    for i in range(12):
        task = narrow[i]
        assert task.data["domain"] in {"shop", "farm"}
        assert task.data["kind"] in {"count", "like"}
        assert task_of(task.id).digest == task.digest
    ids = [narrow[i].id for i in range(40)]
    assert len(set(ids)) == 40


@settings(max_examples=60, deadline=None)
@given(st.integers(0, ENDLESS - 1))
def test_train_has_a_task_at_every_index(index: int) -> None:
    task = SqlTasks("train")[index]
    assert task.data["gold_sql"].startswith("SELECT ")
    assert max(task.data["db_seed"], *task.data["hidden_seeds"]) < 3_000_000


def test_sequence_manners() -> None:
    tasks = SqlTasks("dev", levels=(2,))
    assert tasks[-1].digest == tasks[FINITE - 1].digest
    assert [task.id for task in tasks[3:9:2]] == [tasks[i].id for i in (3, 5, 7)]
    for index in (FINITE, -FINITE - 1):
        with pytest.raises(IndexError, match="1000 tasks"):
            tasks[index]


def test_restrictions() -> None:
    assert {task.data["level"] for task in SqlTasks("dev", levels=(1, 3))[:60]} == {1, 3}
    assert {task.data["kind"] for task in SqlTasks("dev", kinds=("top_n",))[:5]} == {"top_n"}
    assert {task.data["domain"] for task in SqlTasks("heldout_domains", domains=("shop",))[:40]} == set(HELDOUT_DOMAINS)
    assert {task.data["domain"] for task in SqlTasks("heldout_domains", domains=("zoo",))[:40]} == {"zoo"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "held_out"}, "no split 'held_out'. Did you mean 'heldout'"),
        ({"levels": (0,)}, "levels of 1, 2 and 3, found 0"),
        ({"levels": ()}, "at least one level"),
        ({"levels": (1,), "kinds": ("without",)}, "levels \\[1\\] have no kind 'without'"),
        ({"kinds": ("counts",)}, "no kind 'counts'. Did you mean 'count'"),
        ({"kinds": ()}, "at least one level and one kind"),
        ({"domains": ("shp",)}, "no domain 'shp'. Did you mean 'shop'"),
        ({"domains": ("zoo",)}, "split 'train' has none of the domains \\['zoo'\\]"),
        ({"domains": ("farm",), "kinds": ("two_joins",)}, "allow no question"),
    ],
)
def test_what_cannot_be_had_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SqlTasks(**{"split": "train", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task_id", "message"),
    [
        ("train/000017", "expected a task id such as"),
        ("train/shop/count/x", "expected a task id such as"),
        ("train/shop/count/-1", "expected a task id such as"),
        ("tran/shop/count/000001", "no split called 'tran'. Did you mean 'train'"),
        ("train/zoo/count/000001", "no domain in split 'train' called 'zoo'"),
        ("dev/shop/cuont/000001", "no kind called 'cuont'. Did you mean 'count'"),
    ],
)
def test_an_unknown_id_is_refused(task_id: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        task_of(task_id)


def test_tasks_do_not_depend_on_the_hash_seed() -> None:
    code = "from agentrl_sql.tasks import split_digest; print(split_digest('dev', 40))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == split_digest("dev", 40)


def test_a_constant_or_a_copied_number_never_passes() -> None:
    for task in sample("heldout", 120, step=2):
        with databases(task) as connections, closing(sqlite3.connect(":memory:")) as empty:
            seen, *hidden = [connection.execute(task.data["gold_sql"]).fetchall() for connection in connections]
            values = ", ".join(f"({', '.join('?' * len(row))})" for row in seen)
            copied = empty.execute(f"VALUES {values}", [cell for row in seen for cell in row]).fetchall()
            assert Counter(copied) == Counter(seen)
            assert any(Counter(copied) != Counter(rows) or (task.data["ordered"] and copied != rows) for rows in hidden)
