"""Evidence: what an environment knows, as dataclasses that components read, and the episode they see it through."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

from pydantic import TypeAdapter, ValidationError

from agentrl.errors import EvidenceError, RewardError
from agentrl.types import JSON, EndReason, Message, Task, ToolCall, ToolResult, canonical_json

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__agentrl_evidence__"


@dataclass(frozen=True, slots=True)
class TurnView:
    """One turn as a component sees it.

    Attributes:
        text: The assistant message.
        calls: Tool calls in it, in order.
        results: What they gave back.
        malformed: What was wrong with the message, None where it could be read.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    malformed: str | None = None


class Episode(Protocol):
    """What a component sees: what happened, and the evidence. Never the environment itself."""

    @property
    def task(self) -> Task:
        """The task."""

    @property
    def end(self) -> EndReason | None:
        """Why the episode ended; None while it runs."""

    @property
    def turn(self) -> int:
        """Index of the turn just taken; -1 after setup, before the first."""

    @property
    def n_turns(self) -> int:
        """Turns taken so far."""

    @property
    def max_turns(self) -> int:
        """Turns that the episode may take."""

    @property
    def turns(self) -> Sequence[TurnView]:
        """Every turn so far, in order."""

    @property
    def messages(self) -> Sequence[Message]:
        """Every message so far: system, user, assistant, tool."""

    def evidence(self, kind: type[T]) -> T:
        """The evidence of this kind, computed now or remembered for this version of the world.

        Args:
            kind: The dataclass that one of the environment's `@evidence` methods returns.

        Raises:
            EvidenceError: If it could not be had, or the environment has none of this kind.
        """


@dataclass(frozen=True, slots=True)
class EvidenceMethod:
    """An `@evidence` method of an environment class.

    Attributes:
        name: The method's name.
        kind: The dataclass that it returns.
        deadline_s: Seconds that it may take; the work is killed where it is done (a Worker, a sandbox).
    """

    name: str
    kind: type[Any]
    deadline_s: float


@overload
def evidence(method: F, /) -> F: ...
@overload
def evidence(*, deadline_s: float = ...) -> Callable[[F], F]: ...


def evidence(method: F | None = None, /, *, deadline_s: float = 10.0) -> F | Callable[[F], F]:
    """Marks a method of an environment as evidence; its return annotation, a dataclass, says of which kind.

    Args:
        method: The method, where the decorator is written without parentheses.
        deadline_s: Seconds that it may take.

    Returns:
        The same method: calling it computes afresh, `Episode.evidence` remembers.
    """

    def mark(function: F) -> F:
        setattr(function, _MARK, float(deadline_s))
        return function

    return mark if method is None else mark(method)


def evidence_of(cls: type[Any]) -> dict[type[Any], EvidenceMethod]:
    """The evidence that a class of environments offers, by kind.

    Raises:
        RewardError: If a method's return annotation is not a dataclass, or two methods return kinds of one name.
    """
    found: dict[type[Any], EvidenceMethod] = {}
    by_name: dict[str, str] = {}
    for name in dir(cls):
        method = getattr(cls, name, None)
        deadline_s = getattr(method, _MARK, None)
        if deadline_s is None:
            continue
        where = f"{cls.__name__}.{name}"
        kind = typing.get_type_hints(method).get("return")
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise RewardError(
                f"evidence {where}: expected a dataclass as return annotation, found {kind!r}:"
                " define one beside the components that read it."
            )
        if (other := by_name.setdefault(kind_name(kind), name)) != name:
            raise RewardError(
                f"evidence {where} returns {kind_name(kind)}, and so does {other}:"
                " a component could not tell which it reads; give one of them a dataclass with a name of its own."
            )
        found[kind] = EvidenceMethod(name, kind, deadline_s)
    return found


def kind_name(kind: type[Any]) -> str:
    """The name of a kind of evidence in records; unique inside an environment."""
    return kind.__name__


@functools.lru_cache(maxsize=256)
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Pydantic's adapter of a type, made once."""
    return TypeAdapter(kind)


def to_json(value: Any) -> JSON:
    """An evidence dataclass as JSON.

    Raises:
        EvidenceError: If it holds what JSON cannot (NaN, an object without fields).
    """
    kind: Any = type(value)
    try:
        shown = adapter(kind).dump_python(value, mode="json")
        canonical_json(shown)
    except (ValueError, TypeError) as error:
        raise EvidenceError(f"evidence {type(value).__name__} cannot be written as JSON: {error}") from error
    return shown


def from_json(kind: type[T], value: JSON) -> T:
    """An evidence dataclass from its JSON; the inverse of `to_json`.

    Raises:
        EvidenceError: If the JSON does not fit the dataclass.
    """
    wanted: Any = kind
    try:
        return typing.cast("T", adapter(wanted).validate_python(value))
    except ValidationError as error:
        raise EvidenceError(f"recorded evidence does not fit {kind_name(kind)}: {error}") from error
