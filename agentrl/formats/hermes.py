"""The `hermes` format of Qwen, Hermes and many others: JSON inside tool_call tags."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from agentrl.formats.base import MAX_CALLS, PlainResults, not_unicode, too_many_calls
from agentrl.strict_json import BadJSONError, is_unicode, kind_of, read_json
from agentrl.types import JSON, CutOff, Malformed, Parsed, ParseResult, ToolCall, ToolSchema

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_SPACE = re.compile(r"\s*")
_EXPECTED = f'Expected: {_OPEN}\n{{"name": "<tool>", "arguments": {{...}}}}\n{_CLOSE}'


class HermesFormat(PlainResults):
    """Calls as `<tool_call>` tags around a JSON object with `name` and `arguments`."""

    name = "hermes"

    def render_tools(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as JSON schemas, one a line, in `<tools>` tags."""
        if not tools:
            return ""
        schemas = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
        return (
            f"# Tools\n\nThese tools can be called:\n<tools>\n{schemas}\n</tools>\n\n"
            "To call one, write its name and arguments as a JSON object inside tool_call tags:\n"
            f'{_OPEN}\n{{"name": <tool name>, "arguments": <object of arguments>}}\n{_CLOSE}'
        )

    def render_calls(self, content: str, calls: Sequence[ToolCall], tools: Sequence[ToolSchema]) -> str:  # noqa: ARG002
        """See Format."""
        blocks = [f"{_OPEN}\n{_dumps({'name': c.name, 'arguments': dict(c.arguments)})}\n{_CLOSE}" for c in calls]
        return "\n".join([content, *blocks] if content else blocks)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParseResult:  # noqa: ARG002
        """See Format."""
        if not is_unicode(text):
            return not_unicode(text)
        said: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        while (start := text.find(_OPEN, at)) >= 0:
            said.append(text[at:start])
            if len(calls) == MAX_CALLS:
                return too_many_calls(text)
            begin = _after_space(text, start + len(_OPEN))
            try:
                value, end = read_json(text, begin)
                end = _after_space(text, end)
                if not text.startswith(_CLOSE, end):
                    raise BadJSONError(f"{_CLOSE} is missing after the JSON object")
                calls.append(_call(value))
            except BadJSONError as problem:
                return _failed(text, begin, str(problem))
            at = end + len(_CLOSE)
        said.append(text[at:])
        if any(_CLOSE in part for part in said):
            return Malformed(text, f"There is a {_CLOSE} without {_OPEN} before it. {_EXPECTED}")
        return Parsed("\n".join(part for part in map(str.strip, said) if part), tuple(calls))


def _failed(text: str, begin: int, problem: str) -> ParseResult:
    if text.find(_CLOSE, begin) < 0:
        return CutOff(text, f"The message stops inside a tool call: {_CLOSE} is missing.")
    return Malformed(text, f"The tool call could not be read: {problem}. {_EXPECTED}")


def _call(value: JSON) -> ToolCall:
    if not isinstance(value, dict):
        raise BadJSONError(f"expected an object with name and arguments, found {kind_of(value)}")
    if not isinstance(value.get("name"), str):
        raise BadJSONError(
            "`name` is missing" if "name" not in value else f"`name` is {kind_of(value['name'])}, not a string"
        )
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise BadJSONError(f"`arguments` is {kind_of(arguments)}, not an object")
    if extra := sorted(value.keys() - {"name", "arguments"}):
        raise BadJSONError(f"there is a key {extra[0][:64]!r} beside `name` and `arguments`")
    return ToolCall(value["name"], arguments)


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def _dumps(value: JSON) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
