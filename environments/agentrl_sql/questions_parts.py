"""What questions of all levels are made of: conditions, aggregates, and the words for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl_sql.draws import Draws
from agentrl_sql.schema import NUMERIC, Cell, Column, Database, Role, Table, literal


class Unfit(Exception):
    """The tables or values at hand have nothing for this kind of question: another draw is made."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A question before it is checked.

    Attributes:
        text: In words.
        gold: The SQL that answers it.
        wrong: What somebody in a hurry would write instead.
        tables: Names of the tables that the gold reads.
        keys: Where the gold orders: SQL of its order keys, up to one row past a limit; they must all be different.
        same: Other fair readings of the text; they must give what the gold gives.
    """

    text: str
    gold: str
    wrong: tuple[str, ...]
    tables: tuple[str, ...]
    keys: str = ""
    same: tuple[str, ...] = ()


Builder = Callable[["Scene"], Draft]


@dataclass(frozen=True, slots=True)
class Clause:
    """A condition on one row.

    Attributes:
        text: What follows `whose`: `price is greater than 20`.
        sql: `price > 20`.
        wrong: The wrong comparison or the wrong value, in SQL.
        column: The column it is about.
    """

    text: str
    sql: str
    wrong: tuple[str, ...]
    column: str


COMPARABLE: tuple[Role, ...] = ("word", *NUMERIC, "day")
"""Roles of the columns that conditions are about."""

AGGREGATES: dict[str, tuple[Role, ...]] = {
    "AVG": ("amount", "measure"),
    "SUM": ("amount",),
    "MIN": NUMERIC,
    "MAX": NUMERIC,
}
"""Each aggregate, and the roles of the columns for which it means something."""

AGGREGATE_WORDS = {
    "AVG": ("average {}", "mean {}"),
    "SUM": ("total {}", "sum of {}"),
    "MIN": ("lowest {}", "minimum {}"),
    "MAX": ("highest {}", "maximum {}"),
}

OTHER_AGGREGATES = {"AVG": ("SUM", "MAX"), "SUM": ("AVG", "COUNT"), "MIN": ("MAX", "AVG"), "MAX": ("MIN", "AVG")}
"""What each aggregate is mistaken for, the likeliest first."""

_COMPARISON_WORDS = {
    ">": ("greater than", "more than", "above"),
    "<": ("less than", "below"),
    ">=": ("at least",),
    "<=": ("at most",),
}
_YEAR_WORDS = {">": ("after",), "<": ("before",), ">=": ("at least",), "<=": ("at most",)}
_DAY_WORDS = {">": ("after",), "<": ("before",), ">=": ("on or after",), "<=": ("on or before",)}
_FLIPPED = {">": "<", "<": ">", ">=": "<=", "<=": ">="}
_NEIGHBOUR = {">": ">=", "<": "<=", ">=": ">", "<=": "<"}


def select(what: str, source: str, where: str = "", tail: str = "") -> str:
    """A SELECT in the one style of all golds: upper-case keywords, single spaces, no semicolon."""
    parts = ("SELECT", what, "FROM", source, where and f"WHERE {where}", tail)
    return " ".join(part for part in parts if part)


def round_ones(values: list[Cell]) -> list[Cell]:
    """The roundest of some numbers, at least two of them: what a person would ask about; anything else as it is."""
    for step in (100, 50, 10, 5, 1):
        found: list[Cell] = [value for value in values if isinstance(value, int | float) and value % step == 0]
        if len(found) >= 2:
            return found
    return values


def listing(names: Sequence[str]) -> str:
    """Names as a list in words: `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def one(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def which(clause: Clause | None) -> str:
    """What a condition adds to a noun, a space in front; nothing where there is none."""
    return f" whose {clause.text}" if clause else ""


@dataclass(frozen=True, slots=True)
class Link:
    """A foreign key as a question sees it."""

    child: Table
    key: str
    parent: Table
    nullable: bool

    @property
    def on(self) -> str:
        """`purchase.customer_id = customer.id`."""
        return f"{self.child.name}.{self.key} = {self.parent.name}.{self.parent.primary_key}"

    @property
    def child_first(self) -> str:
        """The join, the child on the left."""
        return f"{self.child.name} JOIN {self.parent.name} ON {self.on}"

    @property
    def parent_first(self) -> str:
        """The join, the parent on the left."""
        return f"{self.parent.name} JOIN {self.child.name} ON {self.on}"

    @property
    def outer(self) -> str:
        """The join that keeps parents without children."""
        return f"{self.parent.name} LEFT JOIN {self.child.name} ON {self.on}"

    @property
    def tables(self) -> tuple[str, str]:
        """Names of both tables."""
        return (self.child.name, self.parent.name)


class Scene:
    """A database and a stream of draws: what a builder of questions works with.

    Args:
        database: What is asked about; literals come from its rows.
        draws: The stream.
    """

    def __init__(self, database: Database, draws: Draws) -> None:
        self.database = database
        self.schema = database.schema
        self.draws = draws

    def say(self, *templates: str, **words: object) -> str:
        """One of the templates, filled in."""
        return self.draws.pick(templates).format(**words)

    def table(self) -> Table:
        """Any table."""
        return self.draws.pick(self.schema.tables)

    def link(self, *, labelled: bool = False) -> Link:
        """Any foreign key; with `labelled` one whose parent has a label.

        Raises:
            Unfit: If there is none.
        """
        links = self.links(labelled=labelled)
        if not links:
            raise Unfit
        return self.draws.pick(links)

    def links(self, *, labelled: bool = False) -> list[Link]:
        """All foreign keys, or those whose parent has a label."""
        return [
            Link(child, key.column, parent, child.column(key.column).nullable)
            for child, key, parent in self.schema.links
            if not labelled or parent.label.role == "label"
        ]

    def column(self, table: Table, *roles: Role, nullable: bool | None = None, without: Sequence[str] = ()) -> Column:
        """Any column of these roles.

        Args:
            table: Where to look.
            roles: The roles allowed.
            nullable: Whether it must (True) or must not (False) allow NULL; None allows both.
            without: Names of columns that will not do.

        Raises:
            Unfit: If there is none.
        """
        fitting = [
            column
            for column in table.with_role(*roles)
            if column.name not in without and nullable in {None, column.nullable}
        ]
        if not fitting:
            raise Unfit
        return self.draws.pick(fitting)

    def column_or_none(
        self, table: Table, *roles: Role, nullable: bool | None = None, without: Sequence[str] = ()
    ) -> Column | None:
        """As `column`, but None where there is none."""
        try:
            return self.column(table, *roles, nullable=nullable, without=without)
        except Unfit:
            return None

    def distinct(self, table: Table, column: Column, least: int) -> list[Cell]:
        """The different values of a column, sorted.

        Raises:
            Unfit: If there are fewer than `least`.
        """
        values = sorted(set(self.database.values(table.name, column.name)))  # type: ignore[type-var]
        if len(values) < least:
            raise Unfit
        return values

    def counts(self, table: Table, column: str) -> list[int]:
        """How often the values of a column occur: the different numbers from 2 on, sorted.

        Raises:
            Unfit: If none occurs twice.
        """
        counts = sorted({n for n in Counter(self.database.values(table.name, column)).values() if n > 1})
        if not counts:
            raise Unfit
        return counts

    def clause(self, table: Table, prefix: str = "", *, roles: tuple[Role, ...] = ("word", *NUMERIC)) -> Clause:
        """A condition on a column of these roles, with a value that occurs.

        Args:
            table: What it is about.
            prefix: What stands before the column in SQL: `customer.` or nothing.
            roles: The roles allowed.
        """
        return self.clause_on(table, self.column(table, *roles), prefix)

    def clause_on(self, table: Table, column: Column, prefix: str = "") -> Clause:
        """A condition on this column: equality for words, a comparison for numbers and days."""
        if column.role == "word":
            return self._word_clause(table, column, prefix)
        value = self.draws.pick(round_ones(self.distinct(table, column, 4)[1:-1]))
        at = self.draws.pick((">", ">", "<", "<", ">=", "<="))
        is_year = column.role == "ordinal" and isinstance(value, int) and value >= 1000
        forms = _DAY_WORDS if column.role == "day" else _YEAR_WORDS if is_year else _COMPARISON_WORDS
        words = self.draws.pick(forms[at])
        name = prefix + column.name
        wrong = (f"{name} {_FLIPPED[at]} {literal(value)}", f"{name} {_NEIGHBOUR[at]} {literal(value)}")
        return Clause(
            f"{column.words} {column.verb} {words} {literal(value)}",
            f"{name} {at} {literal(value)}",
            wrong,
            column.name,
        )

    def _word_clause(self, table: Table, column: Column, prefix: str) -> Clause:
        right, other = self.draws.sample(self.distinct(table, column, 2), 2)
        name = prefix + column.name
        same, different = f"{name} = {literal(right)}", f"{name} <> {literal(right)}"
        # Whether NULL counts as "not 'x'" is open to debate, so that is asked of columns without NULL only.
        if not column.nullable and self.draws.chance(0.2):
            return Clause(f"{column.words} is not {literal(right)}", different, (same,), column.name)
        wrong = (f"{name} = {literal(other)}", different)
        return Clause(f"{column.words} is {literal(right)}", same, wrong, column.name)

    def maybe_clause(self, table: Table, prefix: str = "", without: Sequence[str] = ()) -> Clause | None:
        """A condition on any other column; now and then none."""
        if self.draws.chance(0.3):
            return None
        return self.clause_on(table, self.column(table, *COMPARABLE, without=without), prefix)

    def where(self, clause: Clause) -> str:
        """The condition as it follows a noun."""
        return f"{self.draws.pick(('whose', 'where the'))} {clause.text}"

    def aggregate(self, table: Table, *functions: str, without: Sequence[str] = ()) -> tuple[str, Column]:
        """One of the aggregate functions, and a column of the table for which it means something."""
        function = self.draws.pick(functions)
        return function, self.column(table, *AGGREGATES[function], without=without)

    def aggregate_words(self, function: str, column: Column) -> str:
        """`average price`."""
        return self.draws.pick(AGGREGATE_WORDS[function]).format(column.words)
