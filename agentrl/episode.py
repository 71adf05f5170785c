"""One running episode: what happened so far, and the evidence. What reward components see of an environment."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agentrl.errors import EvidenceError, did_you_mean
from agentrl.reward.evidence import EvidenceMethod, TurnView
from agentrl.reward.recorded import remember
from agentrl.types import JSON, EndReason, Message, Task, ToolCall, ToolResult

OVERRUN_S = 5.0
"""How long the body of a tool or of evidence may overrun its deadline, seconds, before it counts as a fault."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step (or `finish`) came to: what the collector reads; infos are for users of Gymnasium.

    Attributes:
        calls: Tool calls in the message, in order.
        results: What they gave back; shorter than `calls` where one ended the episode.
        malformed: What was wrong with the message, where it could not be read.
        new_messages: Tool results or a nudge, to be shown to the policy; empty at the end.
        reward: The step reward; 0.0 where the episode ended in an error.
        ledger: The step's ledger entry; None where nothing was due.
        end: Why the episode ended; None while it goes on.
        success: Whether the objective was met; None before the end and where it cannot be told.
        unscored: Why there is no reward, where the end is VERIFIER_ERROR.
        error: What went wrong, with its traceback, where `end.is_error`.
        timings: Seconds: `parse`, `tools` (the agent's own tools), `reward`, and `reward/<leaf>`.
    """

    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    malformed: str | None = None
    new_messages: tuple[Message, ...] = ()
    reward: float = 0.0
    ledger: JSON = None
    end: EndReason | None = None
    success: bool | None = None
    unscored: str | None = None
    error: str | None = None
    timings: Mapping[str, float] = field(default_factory=dict)


class LiveEpisode:
    """The state of one episode; implements `agentrl.reward.Episode`. Components read it and change nothing.

    Attributes:
        task: The task.
        max_turns: Assistant messages that it may take.
        end: Why it ended; None while it runs.
        requested_end: The end that a tool asked for.
        ledger: The final ledger, once it is scored.
        turns: Every turn so far.
        messages: The conversation so far.
        malformed_in_a_row: Malformed messages since the last good one.
        world_version: Counted up by each call that may have changed the world.
        faults: Tracebacks of evidence that failed.
        evidence_record: What evidence gave, for replay (reward/recorded.py).
    """

    def __init__(self, env: object, task: Task, max_turns: int, methods: Mapping[type[Any], EvidenceMethod]) -> None:
        """Starts an episode with neither messages nor turns.

        Args:
            env: The environment whose evidence methods are called.
            task: The task.
            max_turns: Assistant messages that the episode may take.
            methods: The environment's evidence methods, by the kind that they return.
        """
        self.task = task
        self.max_turns = max_turns
        self.end: EndReason | None = None
        self.requested_end: EndReason | None = None
        self.ledger: JSON = None
        self.turns: list[TurnView] = []
        self.messages: list[Message] = []
        self.malformed_in_a_row = 0
        self.world_version = 0
        self.faults: list[str] = []
        self.evidence_record: dict[str, list[JSON]] = {}
        self._env = env
        self._methods = methods
        self._known: dict[type[Any], tuple[int, Any]] = {}

    @property
    def turn(self) -> int:
        """Index of the turn just taken; -1 before the first."""
        return len(self.turns) - 1

    @property
    def n_turns(self) -> int:
        """Turns taken so far."""
        return len(self.turns)

    def evidence(self, kind: type[T]) -> T:
        """The evidence of this kind, computed once for each version of the world.

        Args:
            kind: The dataclass that an `@evidence` method of the environment returns.

        Returns:
            What the method returned.

        Raises:
            EvidenceError: If it could not be had, now or before in this version of the world.
        """
        version, value = self._known.get(kind, (-1, None))
        if version != self.world_version:
            value = self._recorded(kind, self._computed(kind))
            self._known[kind] = (self.world_version, value)
        if isinstance(value, EvidenceError):
            raise EvidenceError(str(value))
        result: T = value
        return result

    def _recorded(self, kind: type[Any], value: Any) -> Any:
        try:
            remember(self.evidence_record, self.turn, kind, value)
        except EvidenceError as error:
            remember(self.evidence_record, self.turn, kind, error)
            return error
        return value

    def _computed(self, kind: type[Any]) -> Any:
        """The boundary to the environment's evidence: what it raises becomes an EvidenceError."""
        method = self._methods.get(kind)
        if method is None:
            hint = did_you_mean(kind.__name__, (known.__name__ for known in self._methods))
            return EvidenceError(f"{type(self._env).__name__} has no evidence of kind {kind.__name__!r}.{hint}")
        start = time.perf_counter()
        try:
            value = getattr(self._env, method.name)()
        except Exception as error:  # noqa: BLE001
            self.faults.append(traceback.format_exc())
            return EvidenceError(f"evidence {method.name}: {type(error).__name__}: {error}")
        took_s = time.perf_counter() - start
        if took_s > method.deadline_s + OVERRUN_S:
            return EvidenceError(
                f"evidence {method.name} took {took_s:.1f} s, its deadline is {method.deadline_s:g} s."
            )
        if not isinstance(value, kind):
            return EvidenceError(f"evidence {method.name} returned {type(value).__name__}, not {kind.__name__}.")
        return value


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as plain text."""
    return "\n\n".join(f"[{message.name or message.role}]\n{message.content}" for message in messages)
