from __future__ import annotations

import math
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError, RegistryError
from agentrl.formats import MAX_CALLS, format_of_template, get_format
from agentrl.types import CutOff, Malformed, Message, Parsed, ToolCall, ToolResult, ToolSchema


def schema(name, **kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return ToolSchema(name, f"Does {name}.", {"type": "object", "properties": properties, "required": list(kinds)})


RAW = schema("run_sql", query="string")
NONE = schema("list_tables")
MANY = schema("plot", title="string", points="array")
NUMBER = schema("wait", seconds="number")
TOOLS = (RAW, NONE, MANY, NUMBER)
FORMATS = [get_format("hermes"), get_format("fenced")]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
calls = st.lists(
    st.one_of(
        st.builds(lambda query: ToolCall("run_sql", {"query": query}), text | st.text("`\n ab\r", max_size=30)),
        st.just(ToolCall("list_tables", {})),
        st.builds(
            lambda title, points: ToolCall("plot", {"title": title, "points": points}), text, st.lists(json_value)
        ),
        st.builds(lambda seconds: ToolCall("wait", {"seconds": seconds}), json_value),
        st.builds(lambda arguments: ToolCall("plot", arguments), st.dictionaries(text, json_value, max_size=3)),
    ),
    max_size=5,
)
PIECES = [
    "<tool_call>",
    "</tool_call>",
    "```",
    "````",
    "```run_sql\n",
    "```plot\n",
    "\n```",
    "\n",
    '{"name": "run_sql", ',
    '"arguments":',
    '{"query": "',
    "\\ud800",
    "\ud800",
    "NaN",
    "1e999",
    "9" * 5000,
    "[" * 50,
    "]",
    "}",
    '"',
    " ",
    "SELECT 1",
    "\x00",
    "\r\n",
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@given(content=text, calls=calls)
@settings(max_examples=300, deadline=None)
def test_parse_reads_back_what_render_writes(fmt, content, calls):
    said = fmt.parse(content, TOOLS)
    if not isinstance(said, Parsed) or said.calls:
        content = "I look first."
    content = content.strip()
    assert fmt.parse(fmt.render_calls(content, calls, TOOLS), TOOLS) == Parsed(content, tuple(calls))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@given(message=st.lists(st.sampled_from(PIECES) | st.text(max_size=20), max_size=30).map("".join))
@settings(max_examples=1500, deadline=None)
def test_no_message_makes_parse_raise(fmt, message):
    parsed = fmt.parse(message, TOOLS)
    assert isinstance(parsed, Parsed | Malformed | CutOff)
    if isinstance(parsed, Parsed):
        assert len(parsed.calls) <= MAX_CALLS
    else:
        parsed.problem.encode()
        parsed.content.encode()


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_a_hundred_thousand_random_messages(fmt):
    rng = random.Random(0)
    kinds = Counter()
    for _ in range(100_000):
        parts = (
            rng.choice(PIECES) if rng.random() < 0.8 else chr(rng.randrange(0x110000)) for _ in range(rng.randrange(30))
        )
        kinds[type(fmt.parse("".join(parts), TOOLS))] += 1
    assert set(kinds) == {Parsed, Malformed, CutOff}
    assert min(kinds.values()) > 1000


HOSTILE = [
    "<tool_call>" * 100_000,
    "</tool_call>" * 100_000,
    "<tool_call>{" * 100_000,
    "<tool_call>" + "[" * 200_000 + "</tool_call>",
    '<tool_call>{"name": "list_tables"}</tool_call>' * 20_000,
    "<tool_call>" + " " * 1_000_000,
    '<tool_call>{"name": ' + "9" * 500_000 + "}</tool_call>",
    '<tool_call>{"name": "' + "\\" * 500_000,
    "```" * 100_000,
    "```\n" * 100_000,
    "```run_sql\n" * 100_000,
    "```run_sql\n```\n" * 50_000,
    "`" * 1_000_000 + "a",
    "````run_sql\n" + "```\n" * 100_000,
    "```plot\n" + '{"title": ' * 100_000 + "\n```",
    "```wait\n" + "[" * 200_000 + "\n```",
    "\n" * 1_000_000,
]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("message", HOSTILE, ids=lambda m: repr(m[:20]))
def test_hostile_messages_take_linear_time(fmt, message):
    start = time.perf_counter()
    fmt.parse(message, TOOLS)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ('{"seconds": NaN}', "NaN is not a JSON number"),
        ('{"seconds": -Infinity}', "-Infinity is not a JSON number"),
        ('{"seconds": 1e999}', "too large"),
        ('{"seconds": ' + "9" * 10_000 + "}", "beyond 64 bits"),
        ('{"seconds": 9223372036854775808}', "beyond 64 bits"),
        ('{"seconds": 1, "seconds": 2}', "same key twice"),
        ('{"seconds": ' + "[" * 70 + "]" * 70 + "}", "nested too deep"),
        ('{"seconds": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deep"),
        ('{"seconds": "\\ud800"}', "surrogate"),
        ('{"\\udfff": 1}', "surrogate"),
        ("{seconds: 1}", "enclosed in double quotes at character"),
        ("[1]", "array"),
        ("3", "integer"),
        ('{"seconds": 1} {}', ""),
    ],
)
def test_json_that_no_tool_can_take_is_malformed(fmt, arguments, problem):
    message = {
        "hermes": f'<tool_call>\n{{"name": "wait", "arguments": {arguments}}}\n</tool_call>',
        "fenced": f"```wait\n{arguments}\n```",
    }[fmt.name]
    parsed = fmt.parse(message, TOOLS)
    assert isinstance(parsed, Malformed)
    assert problem in parsed.problem


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_half_a_surrogate_pair_in_the_message_is_malformed(fmt):
    parsed = fmt.parse("SELECT \ud800", TOOLS)
    assert isinstance(parsed, Malformed)
    assert "Unicode" in parsed.problem


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_more_calls_than_allowed_are_malformed(fmt):
    most = [ToolCall("list_tables", {})] * MAX_CALLS
    assert isinstance(fmt.parse(fmt.render_calls("", most, TOOLS), TOOLS), Parsed)
    parsed = fmt.parse(fmt.render_calls("", [*most, most[0]], TOOLS), TOOLS)
    assert isinstance(parsed, Malformed)
    assert str(MAX_CALLS) in parsed.problem


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_arguments_that_are_no_json_are_not_rendered(fmt):
    with pytest.raises(ValueError, match="not JSON compliant"):
        fmt.render_calls("", [ToolCall("wait", {"seconds": math.nan})], TOOLS)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_results_are_tool_messages_and_nudges_are_the_users(fmt):
    results = (ToolResult("run_sql", "1"), ToolResult("wait", "Error: no", "tool_error"))
    assert fmt.render_results(results) == (
        Message("tool", "1", name="run_sql"),
        Message("tool", "Error: no", name="wait"),
    )
    assert fmt.render_nudge("Call a tool.") == Message("user", "Call a tool.")


def test_hermes_reads_calls_between_words():
    message = (
        "First\n<tool_call>\n"
        '{"name": "run_sql", "arguments": {"query": "SELECT \'</tool_call>\'"}}'
        '\n</tool_call>\nthen <tool_call>{"name": "list_tables"}</tool_call> done'
    )
    parsed = FORMATS[0].parse(message, TOOLS)
    assert parsed == Parsed(
        "First\nthen\ndone", (ToolCall("run_sql", {"query": "SELECT '</tool_call>'"}), ToolCall("list_tables", {}))
    )


def test_hermes_takes_line_breaks_in_strings():
    parsed = FORMATS[0].parse('<tool_call>{"name": "run_sql", "arguments": {"query": "a\nb"}}</tool_call>', TOOLS)
    assert parsed == Parsed("", (ToolCall("run_sql", {"query": "a\nb"}),))


@pytest.mark.parametrize(
    ("message", "kind", "problem"),
    [
        ('<tool_call>{"name": "wait"', CutOff, "</tool_call> is missing"),
        ('<tool_call>{"name": "wait", "arguments": {}}', CutOff, "</tool_call> is missing"),
        ("<tool_call></tool_call>", Malformed, "expecting value at character 0"),
        ('<tool_call>{"arguments": {}}</tool_call>', Malformed, "`name` is missing"),
        ('<tool_call>{"name": 3}</tool_call>', Malformed, "`name` is an integer, not a string"),
        (
            '<tool_call>{"name": "wait", "arguments": "3"}</tool_call>',
            Malformed,
            "`arguments` is a string, not an object",
        ),
        ('<tool_call>{"name": "wait", "arguments": null}</tool_call>', Malformed, "`arguments` is null"),
        ('<tool_call>{"name": "wait", "args": {}}</tool_call>', Malformed, "a key 'args'"),
        ('<tool_call>{"name": "wait"} 3</tool_call>', Malformed, "</tool_call> is missing after the JSON object"),
        ("3 </tool_call>", Malformed, "without <tool_call> before it"),
    ],
)
def test_hermes_says_what_to_mend(message, kind, problem):
    parsed = FORMATS[0].parse(message, TOOLS)
    assert isinstance(parsed, kind)
    assert problem in parsed.problem


def test_one_bad_call_makes_the_whole_message_malformed():
    good, bad = '<tool_call>{"name": "list_tables"}</tool_call>', "<tool_call>{}</tool_call>"
    assert isinstance(FORMATS[0].parse(good + bad, TOOLS), Malformed)
    assert isinstance(FORMATS[1].parse("```list_tables\n```\n```wait\n3\n```", TOOLS), Malformed)


def test_fenced_reads_raw_empty_and_json_bodies():
    message = 'Look:\n```list_tables\n```\n```run_sql\nSELECT 1\n  FROM t\n```\n```wait\n{"seconds": 0.5}\n```'
    assert FORMATS[1].parse(message, TOOLS) == Parsed(
        "Look:",
        (
            ToolCall("list_tables", {}),
            ToolCall("run_sql", {"query": "SELECT 1\n  FROM t"}),
            ToolCall("wait", {"seconds": 0.5}),
        ),
    )


def test_fenced_takes_windows_line_ends_at_fences():
    assert FORMATS[1].parse("```list_tables\r\n```\r\n", TOOLS) == Parsed("", (ToolCall("list_tables", {}),))


def test_fenced_keeps_blocks_without_a_name_and_code_in_a_line_as_prose():
    message = "See:\n```\nSELECT 1\n```\nand ```run_sql SELECT 1```"
    assert FORMATS[1].parse(message, TOOLS) == Parsed(message)
    assert FORMATS[1].parse("```\n```list_tables\n```", TOOLS) == Parsed("```", (ToolCall("list_tables", {}),))


def test_fenced_body_may_hold_shorter_fences():
    call = ToolCall("run_sql", {"query": "```\nSELECT 1\n```"})
    rendered = FORMATS[1].render_calls("", [call], TOOLS)
    assert rendered.startswith("````run_sql\n")
    assert FORMATS[1].parse(rendered, TOOLS) == Parsed("", (call,))


@pytest.mark.parametrize(
    ("message", "kind", "problem"),
    [
        ("```run_sql\nSELECT 1", CutOff, "closing ``` is missing"),
        ("````run_sql\nSELECT 1\n```", CutOff, "closing ```` is missing"),
        (
            "```list_tables\nnow\n```",
            Malformed,
            "Expected the body of list_tables to be empty: expecting value at character 0.",
        ),
        (
            "```wait\nsoon\n```",
            Malformed,
            "Expected the body of wait to be a JSON object with seconds: expecting value",
        ),
        ("```run_sql now\nSELECT 1\n```", Malformed, "expected only a tool's name, found 'run_sql now'"),
    ],
)
def test_fenced_says_what_to_mend(message, kind, problem):
    parsed = FORMATS[1].parse(message, TOOLS)
    assert isinstance(parsed, kind)
    assert problem in parsed.problem


def test_fenced_block_without_a_body_is_a_call_without_arguments():
    assert FORMATS[1].parse("```wait\n```", TOOLS) == Parsed("", (ToolCall("wait", {}),))
    assert FORMATS[1].parse("```run_sql\n```", TOOLS) == Parsed("", (ToolCall("run_sql", {"query": ""}),))


def test_fenced_block_with_an_unknown_name_is_a_call_of_it():
    assert FORMATS[1].parse("```run_sq\nSELECT 1\n```", TOOLS) == Parsed("", (ToolCall("run_sq", {}),))


def test_rendered_tools_name_every_tool_and_show_a_call_that_parses():
    for fmt in FORMATS:
        shown = fmt.render_tools(TOOLS)
        assert all(tool.name in shown and tool.description in shown for tool in TOOLS)
        assert fmt.render_tools(()) == ""
    example = FORMATS[1].render_tools(TOOLS).partition("```")
    assert FORMATS[1].parse(example[1] + example[2], TOOLS) == Parsed("", (ToolCall("run_sql", {"query": "query"}),))
    assert "- plot(title: str, points: list): Does plot." in FORMATS[1].render_tools(TOOLS)


def test_format_by_name_and_by_template():
    assert get_format("hermes").name == format_of_template("{{ '<tool_call>' }}") == "hermes"
    with pytest.raises(RegistryError, match=r"'hermse'\. Did you mean 'hermes'"):
        get_format("hermse")
    for template in (None, "{{ messages }}", "<tool_call><function=name>"):
        with pytest.raises(ConfigError, match=r"set env\.format"):
            format_of_template(template)
