"""What a format is, and what the formats share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.types import Malformed, Message, ParseResult, ToolCall, ToolResult, ToolSchema

MAX_CALLS = 64
"""Most calls in one message; a message with more is malformed."""


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


def not_unicode(text: str) -> Malformed:
    """The reading of a message that UTF-8 cannot carry."""
    return Malformed(
        text.encode("utf-8", "replace").decode(),
        "The message holds characters that are not valid Unicode: leave them out.",
    )


def too_many_calls(text: str) -> Malformed:
    """The reading of a message with more than MAX_CALLS calls."""
    return Malformed(text, f"The message makes more than {MAX_CALLS} tool calls: make fewer at a time.")
