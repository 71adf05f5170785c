"""Components: the leaves of a reward tree. A component reads evidence and gives a Score, or says why it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from agentrl.errors import AgentRLError, RewardError
from agentrl.reward.evidence import Episode
from agentrl.types import Score, Unscored

When = Literal["end", "turn"]
Bounds = tuple[float, float]
S = TypeVar("S", bound=Sized)


@runtime_checkable
class Component(Protocol):
    """What a leaf calls: a decorated function, or an object, best a frozen dataclass whose fields are its options."""

    @property
    def name(self) -> str:
        """The name in ledgers and metrics: `sql/correct`."""

    @property
    def when(self) -> When:
        """`turn`: due at each turn; `end`: due once, when the episode has ended."""

    @property
    def bounds(self) -> Bounds:
        """Least and greatest value; a value outside is Unscored."""

    def __call__(self, episode: Episode, /) -> Score | Unscored:
        """Scores the episode as it stands. Pure: it reads, and changes nothing."""


@dataclass(frozen=True)
class FunctionComponent:
    """A component made of a function by `@component`.

    Attributes:
        function: The function.
        name: The name in ledgers and metrics.
        when: `turn` or `end`.
        bounds: Least and greatest value.
        isolated: Whether it runs in a Worker, where it can be killed.
        reads: Kinds of evidence that an isolated component reads: they are computed first and sent to it.
        deadline_s: Seconds that an isolated component may take.
    """

    function: Callable[[Episode], Score | Unscored]
    name: str
    when: When
    bounds: Bounds
    isolated: bool = False
    reads: tuple[type[Any], ...] = ()
    deadline_s: float = 10.0

    def __call__(self, episode: Episode, /) -> Score | Unscored:
        """Calls the function, in this process."""
        return self.function(episode)


def component(
    *,
    name: str,
    when: When = "end",
    bounds: Bounds = (0.0, 1.0),
    isolated: bool = False,
    reads: tuple[type[Any], ...] = (),
    deadline_s: float = 10.0,
) -> Callable[[Callable[[Episode], Score | Unscored]], FunctionComponent]:
    """Makes a component of a function.

    Args:
        name: The name in ledgers and metrics, `family/what`.
        when: `turn`: due at each turn; `end`: due once, when the episode has ended.
        bounds: Least and greatest value it may give; finite.
        isolated: Run it in a Worker: for code that may hang or take the process down. It must be importable there.
        reads: Kinds of evidence that an isolated component reads; one that runs in the process just asks for it.
        deadline_s: Seconds that an isolated component may take.

    Returns:
        A decorator.

    Raises:
        RewardError: If the name, `when` or the bounds cannot be used.
    """

    def decorate(function: Callable[[Episode], Score | Unscored]) -> FunctionComponent:
        made = FunctionComponent(
            function, name, when, (float(bounds[0]), float(bounds[1])), isolated, reads, deadline_s
        )
        check_component(made)
        return made

    return decorate


def check_component(value: object) -> Component:
    """The value as a component, if it can be one.

    Raises:
        RewardError: If an attribute is missing or cannot be used.
    """
    if isinstance(value, type) or not isinstance(value, Component):
        raise RewardError(
            f"expected a component (a function decorated with @component, or an object with name, when, bounds and"
            f" __call__), found {value!r}."
        )
    if not isinstance(value.name, str) or not value.name:
        raise RewardError(f"a component's name must be a text that is not empty, found {value.name!r}.")
    if value.when not in ("turn", "end"):
        raise RewardError(f"component {value.name!r}: `when` must be 'turn' or 'end', found {value.when!r}.")
    low, high = value.bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise RewardError(
            f"component {value.name!r}: bounds must be two finite numbers, the first below the second,"
            f" found ({low}, {high})."
        )
    return value


class VacuousError(AgentRLError):
    """Raised by `require_some`: there was nothing to check, so the check fails (the component's lower bound)."""


def require_some(items: S, what: str) -> S:
    """Refuses to check nothing: a check over an empty set fails instead of passing.

    Args:
        items: What is about to be checked.
        what: What they are, in the plural: `rows`.

    Returns:
        The items.

    Raises:
        VacuousError: If there are none. Let it pass: the tree scores the component at its lower bound and says why.
    """
    if len(items) == 0:
        raise VacuousError(f"there were no {what} to check, and a check over nothing fails.")
    return items
