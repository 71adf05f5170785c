"""The `fenced` format, compact for small models: a call is a markdown code block that has the tool's name."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl.formats.base import MAX_CALLS, PlainResults, not_unicode, too_many_calls
from agentrl.formats.schemas import properties_of, raw_argument, signature
from agentrl.strict_json import BadJSONError, is_unicode, kind_of, read_json
from agentrl.types import CutOff, Malformed, Parsed, ParseResult, ToolCall, ToolSchema

_FENCE = re.compile(r"^(`{3,})([^`\n]*)$", re.MULTILINE)


class FencedFormat(PlainResults):
    """Calls as code blocks whose info string is one word, the tool's name; a fence without a word is prose.

    The body is the argument itself where the tool has exactly one and it is a string, nothing where it has none, and a
    JSON object otherwise. A fence is three or more backticks at the start of a line; the closing one is as long.
    """

    name = "fenced"

    def render_tools(self, tools: Sequence[ToolSchema]) -> str:
        """One signature line a tool, and one example."""
        if not tools:
            return ""
        lines = "\n".join(f"- {signature(tool)}: {_told(tool)}" for tool in tools)
        example = next((tool for tool in tools if raw_argument(tool)), tools[0])
        body = f"{raw_argument(example) or '{...}'}\n" if properties_of(example) else ""
        return (
            f"Tools:\n{lines}\n"
            "To call a tool, write a code block with its name; inside, its one text argument as it is, or a JSON object"
            f" of its arguments, or nothing:\n```{example.name}\n{body}```"
        )

    def render_calls(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> str:
        """See Format."""
        by_name = {tool.name: tool for tool in tools}
        blocks = [_render(call, by_name.get(call.name)) for call in calls]
        return "\n".join([content, *blocks] if content else blocks)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParseResult:
        """See Format."""
        if not is_unicode(text):
            return not_unicode(text)
        by_name = {tool.name: tool for tool in tools}
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0  # everything before it has been dealt with
        opening: re.Match[str] | None = None
        for fence in _FENCE.finditer(text):
            rest = fence[2].strip()
            if opening is None:
                opening = fence if rest else None
                continue
            if rest or len(fence[1]) < len(opening[1]):
                continue
            if len(calls) == MAX_CALLS:
                return too_many_calls(text)
            said.append(text[at : opening.start()])
            body = text[opening.end() + 1 : max(fence.start() - 1, opening.end() + 1)]
            try:
                calls.append(_read(opening[2].strip(), body, by_name))
            except BadJSONError as problem:
                return Malformed(text, str(problem))
            at, opening = fence.end(), None
        if opening is not None:
            return CutOff(text, f"The message stops inside a code block: the closing {opening[1][:16]} is missing.")
        said.append(text[at:])
        return Parsed("\n".join(part for part in map(str.strip, said) if part), tuple(calls))


def _read(name: str, body: str, by_name: dict[str, ToolSchema]) -> ToolCall:
    tool = by_name.get(name)
    if tool is None:
        if len(name.split()) > 1:
            raise BadJSONError(f"After the backticks, expected only a tool's name, found {name[:64]!r}.")
        return ToolCall(name, {})
    raw = raw_argument(tool)
    if raw is not None:
        return ToolCall(name, {raw: body})
    stripped = body.strip()
    if not stripped:
        return ToolCall(name, {})
    names = ", ".join(properties_of(tool))
    expected = f"Expected the body of {name} to be {f'a JSON object with {names}' if names else 'empty'}"
    try:
        value, end = read_json(stripped)
    except BadJSONError as problem:
        raise BadJSONError(f"{expected}: {problem}.") from None
    if end != len(stripped) or not isinstance(value, dict):
        raise BadJSONError(
            f"{expected}, and nothing else; found {kind_of(value)}{' and more' if end != len(stripped) else ''}."
        )
    return ToolCall(name, value)


def _render(call: ToolCall, tool: ToolSchema | None) -> str:
    raw = raw_argument(tool) if tool else None
    argument = call.arguments.get(raw) if raw is not None and call.arguments.keys() == {raw} else None
    if isinstance(argument, str):
        body = argument
    elif not call.arguments:
        return f"```{call.name}\n```"
    else:
        body = json.dumps(dict(call.arguments), ensure_ascii=False, allow_nan=False)
    fence = "`" * max([3, *(len(run[1]) + 1 for run in _FENCE.finditer(body))])
    return f"{fence}{call.name}\n{body}\n{fence}"


def _told(tool: ToolSchema) -> str:
    described = ((name, schema.get("description")) for name, schema in properties_of(tool).items())
    return " ".join([tool.description, *(f"{name}: {text}" for name, text in described if text)])
