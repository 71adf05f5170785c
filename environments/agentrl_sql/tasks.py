"""Tasks by index: each is a pure function of its split, domain, kind and number."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import overload

from agentrl import ConfigError, Task, TaskError, did_you_mean
from agentrl_sql.domains import DOMAINS, HELDOUT_DOMAINS, TRAIN_DOMAINS
from agentrl_sql.draws import Draws, number_of
from agentrl_sql.generate import make_database
from agentrl_sql.questions import KINDS, LEVEL_OF, Question, fits, make_question
from agentrl_sql.questions_check import Worlds, check
from agentrl_sql.schema import Database

ENV = "Sql-v0"

SPLITS: tuple[str, ...] = ("train", "dev", "heldout", "heldout_domains")
"""`train` has no end. `dev` chooses checkpoints; `heldout` has new databases and new questions of the same domains;
`heldout_domains` has domains that are never trained on. The last two are only ever reported."""

FINITE = 1000
"""Number of tasks in each split but `train`."""

ENDLESS = 2**31 - 1
"""The length that `train` claims."""

FROZEN: Mapping[str, str] = {
    "train": "b51a4ad35ee110183d4ec8b5ee2f1d0fe5fff71140d51e723fd623fbac1378f9",
    "dev": "e10e9a0dd7862cfe4dc301ae90b96da310a9b369023cb7f40104b6512053f37c",
    "heldout": "f4a4b5cf8b9e5e07bf522b78bd1eb0cf0147365d113c37aa84624739dee03345",
    "heldout_domains": "b4ee2e7d3c575618e4f271b87f21352ea53e79ac031663440713b6af42147527",
}
"""`split_digest` of the first 200 tasks of each split. A change of anything that tasks are made of shows here."""

_QUESTIONS_PER_WORLD = 4
"""Questions of each kind about one database, before the next is drawn."""

_WORLDS = 1_000_000
"""Different databases of a domain in a split."""

_SEEDS_PER_WORLD = 3
"""The base and two hidden siblings."""

_SHARES: Mapping[str, tuple[int, ...]] = {
    "train": (0, 1),
    "dev": (2,),
    "heldout": (3,),
    "heldout_domains": (0, 1, 2, 3),
}
"""Questions fall into four equal parts by a hash of their text; each split asks only those of its own parts, so that no
question of `dev` or `heldout` is ever asked in training, whatever the database."""

_TRIES = 300
"""Draws on one database, before another is taken."""

_MOVES = 20
"""Databases tried for one task."""


def make_task(split: str, domain: str, kind: str, number: int) -> Task:
    """Makes one task: a pure function of its arguments, in a few milliseconds.

    Args:
        split: One of SPLITS.
        domain: One of the split's domains.
        kind: One of the kinds in `KINDS`.
        number: From 0.

    Raises:
        TaskError: If there is no such split, domain, kind or number, or the domain has no room for the kind.
    """
    _expect("split", split, SPLITS)
    _expect(f"domain in split {split!r}", domain, domains_of(split))
    _expect("kind", kind, LEVEL_OF)
    if number < 0:
        raise TaskError(f"expected a task number from 0, found {number}.")
    draws = Draws("question", split, domain, kind, number)
    for move in range(_MOVES):
        world = (number // _QUESTIONS_PER_WORLD + 1009 * move) % _WORLDS
        seed = _SEEDS_PER_WORLD * (world + _WORLDS * SPLITS.index(split))
        databases = [make_database(domain, seed + i) for i in range(_SEEDS_PER_WORLD)]
        question = _first_good(split, kind, databases, draws)
        if question is not None:
            return _task(f"{split}/{domain}/{kind}/{number:06d}", split, databases, question)
    raise TaskError(f"domain {domain!r} has no good question of kind {kind!r} for {split!r}: leave one of them out.")


def task_of(task_id: str) -> Task:
    """The task of this id, such as `train/shop/count_where/000017`.

    Raises:
        TaskError: If no task has this id.
    """
    parts = task_id.split("/")
    if len(parts) != 4 or not (parts[3].isascii() and parts[3].isdigit()):
        raise TaskError(f"expected a task id such as 'train/shop/count_where/000017', found {task_id!r}.")
    split, domain, kind, number = parts
    return make_task(split, domain, kind, int(number))


def domains_of(split: str) -> tuple[str, ...]:
    """The domains that a split asks about."""
    return HELDOUT_DOMAINS if split == "heldout_domains" else TRAIN_DOMAINS


def split_digest(split: str, n: int) -> str:
    """SHA-256 over the digests of the first n tasks of a split, all levels, in hex."""
    digest = hashlib.sha256()
    tasks = SqlTasks(split)
    for i in range(n):
        digest.update(tasks[i].digest.encode())
    return digest.hexdigest()


class SqlTasks(Sequence[Task]):
    """The tasks of a split. Neighbours differ in kind and domain, so that any run of them is a fair mixture.

    Args:
        split: One of SPLITS.
        levels: Levels of questions, of 1, 2 and 3.
        domains: Domains to ask about; None takes all. Names of training domains do not restrict `heldout_domains`,
            which asks about all of its own unless some of those are named.
        kinds: Kinds of question, of those of the levels; None takes all.

    Raises:
        ConfigError: If a name is unknown, or nothing is left to ask.
    """

    def __init__(
        self,
        split: str,
        levels: Sequence[int] = (1, 2, 3),
        domains: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError(f"there is no split {split!r}.{did_you_mean(split, SPLITS)}")
        self.split = split
        chosen_kinds = _chosen_kinds(levels, kinds)
        chosen_domains = _chosen_domains(split, domains)
        self._cells = tuple(
            (domain, kind)
            for turn in range(len(chosen_domains))
            for at, kind in enumerate(chosen_kinds)
            if fits(kind, DOMAINS[domain := chosen_domains[(turn + at) % len(chosen_domains)]].schema)
        )
        if not self._cells:
            raise ConfigError(f"domains {list(chosen_domains)} allow no question of the kinds {list(chosen_kinds)}.")

    def __len__(self) -> int:
        return ENDLESS if self.split == "train" else FINITE

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = index + len(self) if index < 0 else index
        if not 0 <= at < len(self):
            raise IndexError(f"split {self.split!r} has {len(self)} tasks, found index {index}.")
        number, cell = divmod(at, len(self._cells))
        domain, kind = self._cells[cell]
        return make_task(self.split, domain, kind, number)


def _first_good(split: str, kind: str, databases: Sequence[Database], draws: Draws) -> Question | None:
    """The first question drawn that belongs to the split and passes the check; None after _TRIES draws."""
    with Worlds(databases) as worlds:
        for _ in range(_TRIES):
            question = make_question(databases[0], LEVEL_OF[kind], draws, kind)
            if number_of(question.text) % 4 in _SHARES[split] and check(question, worlds) is None:
                return question
    return None


def _task(task_id: str, split: str, databases: Sequence[Database], question: Question) -> Task:
    base, *hidden = databases
    data = {
        "domain": base.schema.domain,
        "db_seed": base.seed,
        "hidden_seeds": [database.seed for database in hidden],
        "level": question.level,
        "kind": question.kind,
        "gold_sql": question.gold_sql,
        "ordered": question.ordered,
        "tables": list(question.tables),
        "wrong_sql": list(question.wrong),
    }
    return Task(task_id, ENV, question.text, data, split)


def _expect(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise TaskError(f"there is no {what} called {name!r}.{did_you_mean(name, known)}")


def _chosen_kinds(levels: Sequence[int], kinds: Sequence[str] | None) -> tuple[str, ...]:
    for level in levels:
        if level not in KINDS:
            raise ConfigError(f"expected levels of 1, 2 and 3, found {level!r}.")
    offered = tuple(kind for level in sorted(set(levels)) for kind in KINDS[level])
    for kind in kinds or ():
        if kind not in offered:
            raise ConfigError(f"levels {sorted(set(levels))} have no kind {kind!r}.{did_you_mean(kind, offered)}")
    chosen = offered if kinds is None else tuple(kind for kind in offered if kind in kinds)
    if not chosen:
        raise ConfigError("expected at least one level and one kind of question, found none.")
    return chosen


def _chosen_domains(split: str, domains: Sequence[str] | None) -> tuple[str, ...]:
    own = domains_of(split)
    if domains is None:
        return own
    for domain in domains:
        if domain not in DOMAINS:
            raise ConfigError(f"there is no domain {domain!r}.{did_you_mean(domain, DOMAINS)}")
    chosen = tuple(domain for domain in own if domain in domains)
    if chosen or split == "heldout_domains":
        return chosen or own
    raise ConfigError(f"split {split!r} has none of the domains {list(domains)}: it has {', '.join(own)}.")
