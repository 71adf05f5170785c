from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.errors import ConfigError, WorkerTimeout
from agentrl.tools import cut_middle, tool, tools_of, unknown_tool
from agentrl.types import ToolResult


@dataclass
class Point:
    x: int
    y: int


class Box:
    @tool(mutates=False, deadline_s=2.5, max_output_bytes=100)
    def find(self, text: str, limit: int = 10, order: Literal["up", "down"] = "up") -> str:
        """Finds text
        in the box.

        More that only people read.

        Args:
            text: What to
                look for.
            limit: At most so many.
        """
        return f"{text}|{limit}|{order}"

    @tool
    def put(self, json: str, schema: list[Point] | None = None, share: float = 0.5, *, copy: bool = False) -> dict:
        """Puts things, whose names a pydantic model could not have."""
        return {"json": json, "schema": schema and [asdict(point) for point in schema], "share": share, "copy": copy}

    @tool(ends=True)
    def stop(self) -> None:
        """Ends it."""

    @tool
    def fail(self, how: str) -> object:
        """Fails."""
        if how == "tool":
            raise agentrl.ToolError("mend this")
        if how == "deadline":
            raise WorkerTimeout("killed")
        if how == "value":
            return {math.nan}
        raise KeyError(how)


TOOLS = tools_of(Box)
BOX = Box()


def call(name, **arguments) -> ToolResult:
    return TOOLS[name].call(BOX, arguments)


def test_tools_come_in_the_order_of_definition_with_their_options():
    assert list(TOOLS) == ["find", "put", "stop", "fail"]
    find = TOOLS["find"]
    assert (find.mutates, find.ends, find.deadline_s, find.max_output_bytes) == (False, False, 2.5, 100)
    stop = TOOLS["stop"]
    assert (stop.mutates, stop.ends, stop.deadline_s, stop.max_output_bytes) == (True, True, 10.0, 4096)
    assert BOX.find("a", 1) == "a|1|up"


def test_schema_is_made_of_signature_and_docstring():
    assert TOOLS["find"].schema.as_openai() == {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds text in the box.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "What to look for."},
                    "limit": {"type": "integer", "default": 10, "description": "At most so many."},
                    "order": {"type": "string", "enum": ["up", "down"], "default": "up"},
                },
                "required": ["text"],
            },
        },
    }
    assert TOOLS["stop"].schema.parameters == {"type": "object", "properties": {}}
    assert TOOLS["put"].schema.parameters["$defs"]["Point"]["required"] == ["x", "y"]


def test_schema_equals_that_of_transformers():
    utils = pytest.importorskip("transformers.utils")

    class Simple:
        @tool
        def search(self, query: str, limit: int, share: float, deep: bool, names: list[str]):
            """Searches.

            Args:
                query: Words.
                limit: Most.
                share: Part.
                deep: Whether.
                names: Which.
            """

    def search(query: str, limit: int, share: float, deep: bool, names: list[str]):
        """Searches.

        Args:
            query: Words.
            limit: Most.
            share: Part.
            deep: Whether.
            names: Which.
        """

    assert tools_of(Simple)["search"].schema.as_openai() == utils.get_json_schema(search)


def test_call_returns_text_or_json():
    result = call("find", text="ä", limit=3)
    assert (result.name, result.content, result.error_kind, result.truncated) == ("find", "ä|3|up", None, 0)
    put = call("put", json="a", schema=[{"x": 1, "y": 2}], share=1, copy=True)
    assert put.content == '{"json": "a", "schema": [{"x": 1, "y": 2}], "share": 1.0, "copy": true}'
    assert call("stop").content == "ok"


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("find", {}, "argument 'text' is missing."),
        ("find", {"txt": "a"}, "there is no argument 'txt'. Did you mean 'text'?"),
        ("find", {"text": 3}, "argument 'text': input should be a valid string, found an integer."),
        ("find", {"text": None}, "argument 'text': input should be a valid string, found null."),
        ("find", {"text": "a", "limit": "3"}, "argument 'limit': input should be a valid integer, found a string."),
        ("find", {"text": "a", "limit": True}, "argument 'limit': input should be a valid integer, found a boolean."),
        ("find", {"text": "a", "limit": 3.0}, "argument 'limit': input should be a valid integer, found a number."),
        ("find", {"text": "a", "order": "left"}, "argument 'order': input should be 'up' or 'down', found a string."),
        ("put", {"json": "a", "schema": [{"x": 1}]}, "argument 'schema.0.y': field required."),
        ("put", {"json": "a", "schema": {}}, "argument 'schema': input should be a valid array, found an object."),
        ("stop", {"now": 1}, "there is no argument 'now'. It takes no arguments."),
        ("find", {"text": "\ud800"}, "not valid JSON"),
        ("find", {"text": {1, 2}}, "not valid JSON"),
        ("put", {"json": "a", "share": math.nan}, "not valid JSON"),
    ],
)
def test_arguments_that_do_not_fit_are_a_result_that_says_so(name, arguments, problem):
    result = TOOLS[name].call(BOX, arguments)
    assert result.error_kind == "bad_arguments"
    assert result.content.startswith(f"Error: {name}: ")
    assert problem in result.content


def test_many_problems_are_not_all_listed():
    result = call("put", **{f"unknown_{i}": i for i in range(500)})
    assert result.content.endswith("And 496 more.")


def test_a_tool_error_is_shown_and_anything_else_is_raised():
    assert call("fail", how="tool") == ToolResult("fail", "Error: mend this", "tool_error", pytest.approx(0, abs=0.1))
    deadline = call("fail", how="deadline")
    assert deadline.error_kind == "deadline"
    assert "ran past its deadline" in deadline.content
    with pytest.raises(KeyError):
        call("fail", how="else")
    with pytest.raises(TypeError, match="JSON serializable"):
        call("fail", how="value")


def test_unknown_tool_names_the_nearest():
    result = unknown_tool("fnd", TOOLS)
    assert (result.error_kind, result.content) == (
        "unknown_tool",
        "Error: there is no tool 'fnd'. Did you mean 'find'?",
    )
    assert len(unknown_tool("x" * 10**6, TOOLS).content) <= 1024
    assert unknown_tool("<|end|>\n" + "x" * 10**6, TOOLS).name == "__end___" + "x" * 56


def test_long_output_is_cut_in_the_middle():
    result = call("find", text="a" * 500 + "z" * 500)
    assert result.content == "a" * 39 + "\n[929 bytes left out]\n" + "z" * 32 + "|10|up"
    assert result.truncated == 929


json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(["text", "limit", "order", "json", "schema", "share", "copy", "self", "argument_0"])


@given(
    name=st.sampled_from(["find", "put", "stop"]), arguments=st.dictionaries(names | st.text(), json_value, max_size=4)
)
@settings(max_examples=500)
def test_no_arguments_make_a_call_raise(name, arguments):
    result = TOOLS[name].call(BOX, arguments)
    assert result.error_kind in (None, "bad_arguments")
    assert len(result.content.encode()) <= TOOLS[name].max_output_bytes


@given(text=st.text(), budget=st.integers(1, 80))
@settings(max_examples=300)
def test_cut_is_valid_utf8_within_the_budget_and_counts_right(text, budget):
    data = text.encode("utf-8", "replace")
    shown, left_out = cut_middle(text, budget)
    if len(data) <= budget:
        assert (shown, left_out) == (data.decode(), 0)
        return
    note = f"\n[{left_out} bytes left out]\n"
    head, _, tail = shown.partition(note)
    assert len(shown.encode()) <= max(budget, len(note) + 1)
    assert data.startswith(head.encode())
    assert data.endswith(tail.encode())
    assert len(head.encode()) + len(tail.encode()) + left_out == len(data)


def test_a_subclass_adds_replaces_and_removes_tools():
    class Better(Box):
        put = None

        @tool
        def find(self, text: str) -> str:
            """Finds better."""
            return text

        @tool
        def more(self) -> None:
            """More."""

    tools = tools_of(Better)
    assert list(tools) == ["find", "stop", "fail", "more"]
    assert tools["find"].schema.description == "Finds better."


def bad(**namespace):
    return type("Bad", (Box,), namespace)


def undocumented(self):
    pass


def wrongly_documented(self, query: str):
    """Does.

    Args:
        qury: It.
    """


def unannotated(self, query):
    """Does."""


def unnamed(self, *args: int):
    """Does."""


def unreadable(self, query: Nowhere):  # noqa: F821
    """Does."""


def unjsonable(self, query: ToolResultWithNoSchema):
    """Does."""


class ToolResultWithNoSchema:
    pass


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        (undocumented, "has no docstring"),
        (wrongly_documented, r"documents an argument 'qury' that it does not have\. Did you mean 'query'"),
        (unannotated, "has an argument 'query' without annotation"),
        (unnamed, "has an argument 'args' that cannot be given by name"),
        (unreadable, "has an annotation that cannot be read"),
        (unjsonable, "has an argument of a type that JSON cannot carry"),
    ],
)
def test_a_tool_that_cannot_be_one_is_refused(method, problem):
    with pytest.raises(ConfigError, match=problem):
        tools_of(bad(doing=tool(method)))


def test_an_override_that_is_no_tool_is_refused():
    with pytest.raises(ConfigError, match="overrides a tool without being one"):
        tools_of(bad(find=lambda self: ""))


def test_a_tool_that_hides_a_method_is_refused():
    class Toy(agentrl.ToolEnv):
        @tool
        def reset(self) -> str:
            """Starts again."""

    with pytest.raises(ConfigError, match=r"hides ToolEnv\.reset: give the tool another name"):
        tools_of(Toy)


@pytest.mark.parametrize("options", [{"deadline_s": 0}, {"max_output_bytes": -1}])
def test_a_deadline_or_budget_that_is_not_positive_is_refused(options):
    with pytest.raises(ConfigError, match="to be above 0"):
        tool(**options)
