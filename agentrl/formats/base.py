"""What a format is, and the strict JSON that formats read arguments with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Protocol

from agentrl.types import JSON, Malformed, Message, ParseResult, ToolCall, ToolResult, ToolSchema

MAX_CALLS = 64
"""Most calls in one message; a message with more is malformed."""

_MAX_DEPTH = 64
_MAX_DIGITS = 20
_MAX_INT = 2**63


class Format(Protocol):
    """A way of writing tool calls in assistant messages."""

    @property
    def name(self) -> str:
        """The name that a config chooses it by."""

    def render_tools(self, tools: Sequence[ToolSchema]) -> str:
        """What the system prompt says of the tools.

        Args:
            tools: The environment's tools.

        Returns:
            Text; empty where there are no tools.
        """

    def render_calls(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> str:
        """The assistant message that says `content` and makes `calls`; `parse` reads the same back.

        Args:
            content: Words in front of the calls; without white space around them, and nothing in them like a call.
            calls: Calls whose arguments fit their tools.
            tools: The environment's tools.

        Returns:
            The message's text.

        Raises:
            ValueError: If an argument is not JSON (NaN, infinity).
        """

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParseResult:
        """Reads an assistant message; all of it, or nothing: one bad call makes the message Malformed.

        Args:
            text: Anything at all.
            tools: The environment's tools.

        Returns:
            Parsed, Malformed with what to mend, or CutOff where it stops inside a call.
        """

    def render_results(self, results: Sequence[ToolResult]) -> tuple[Message, ...]:
        """The messages that show results to the model, one each, of role `tool`."""

    def render_nudge(self, text: str) -> Message:
        """The message that answers one that could not be read, of role `user`."""


class PlainResults:
    """How both formats show results and nudges: the template marks whose they are."""

    def render_results(self, results: Sequence[ToolResult]) -> tuple[Message, ...]:
        """One message of role `tool` for each result."""
        return tuple(Message("tool", result.content, name=result.name) for result in results)

    def render_nudge(self, text: str) -> Message:
        """A message of role `user`."""
        return Message("user", text)


class BadJSONError(ValueError):
    """Text that is not JSON, or JSON that is not taken here; the message tells the model what to mend."""


def _integer(digits: str) -> int:
    # The length is looked at first, because converting digits takes time quadratic in their number.
    if len(digits) > _MAX_DIGITS or not -_MAX_INT <= int(digits) < _MAX_INT:
        raise BadJSONError("an integer is beyond 64 bits")
    return int(digits)


def _number(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise BadJSONError("a number is too large")
    return value


def _constant(word: str) -> float:
    raise BadJSONError(f"{word} is not a JSON number")


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise BadJSONError("an object has the same key twice")
    return made


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_number, parse_constant=_constant, strict=False
)


def read_json(text: str, start: int = 0) -> tuple[JSON, int]:
    """Reads the JSON value that starts at a position: no NaN, no key twice, 64-bit integers, limited depth.

    Line breaks inside strings are taken, because models write them.

    Args:
        text: Text with a JSON value in it.
        start: Where the value starts.

    Returns:
        The value, and the position after it.

    Raises:
        BadJSONError: If there is no such value.
    """
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise BadJSONError(f"{error.msg[:1].lower()}{error.msg[1:]} at character {error.pos - start}") from None
    except RecursionError:
        raise BadJSONError("it is nested too deep") from None
    _check(value)
    return value, end


def _check(value: JSON) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        below: list[JSON] = []
        for item in level:
            if isinstance(item, str):
                if not is_unicode(item):
                    raise BadJSONError("a string holds half of a surrogate pair, which is no character")
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                below += item.keys()
                below += item.values()
        if not below:
            return
        level = below
    raise BadJSONError("it is nested too deep")


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can carry the text: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def not_unicode(text: str) -> Malformed:
    """The reading of a message that UTF-8 cannot carry."""
    return Malformed(
        text.encode("utf-8", "replace").decode(),
        "The message holds characters that are not valid Unicode: leave them out.",
    )


def too_many_calls(text: str) -> Malformed:
    """The reading of a message with more than MAX_CALLS calls."""
    return Malformed(text, f"The message makes more than {MAX_CALLS} tool calls: make fewer at a time.")


def kind_of(value: JSON) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "null"
    kinds = ((bool, "a boolean"), (int, "an integer"), (float, "a number"), (str, "a string"), (list, "an array"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an object")
