"""Tools: `@tool` makes a method callable by the model; signature and docstring are its schema and its validation."""

from __future__ import annotations

import inspect
import json
import re
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticUserError

from agentrl.errors import ConfigError, ToolError, WorkerTimeout, did_you_mean
from agentrl.strict_json import kind_of
from agentrl.types import JSON, ToolErrorKind, ToolResult, ToolSchema

_OPTIONS = "__agentrl_tool__"
_MOST_PROBLEMS = 5
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_LEFT_OUT = "\n[{} bytes left out]\n"

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """What `@tool` was told.

    Attributes:
        mutates: Whether a call may change the world; evidence is computed anew after one that may.
        ends: Whether a call that ran ends the episode (as SUBMITTED).
        deadline_s: Seconds; kept where the work is done (a Worker, a sandbox). A body that overruns it by
            `OVERRUN_S` is the environment's fault.
        max_output_bytes: UTF-8 bytes of output that the model sees; the middle of a longer one is left out.
    """

    mutates: bool = True
    ends: bool = False
    deadline_s: float = 10.0
    max_output_bytes: int = 4096


@overload
def tool(function: F, /) -> F: ...


@overload
def tool(
    *, mutates: bool = True, ends: bool = False, deadline_s: float = 10.0, max_output_bytes: int = 4096
) -> Callable[[F], F]: ...


def tool(
    function: F | None = None,
    /,
    *,
    mutates: bool = True,
    ends: bool = False,
    deadline_s: float = 10.0,
    max_output_bytes: int = 4096,
) -> F | Callable[[F], F]:
    """Makes a method of a ToolEnv a tool. It stays an ordinary method for everybody but the model.

    Every parameter needs an annotation. The docstring's first paragraph describes the tool, its `Args:` section the
    parameters. A tool returns text (anything else is shown as JSON, None as `ok`), or raises ToolError with a text that
    tells the model what to mend.

    Args:
        function: The method, where the decorator is used bare.
        mutates: See ToolOptions, as for the others.
        ends: Whether a call that ran ends the episode.
        deadline_s: Seconds.
        max_output_bytes: Budget of the output.

    Returns:
        The method, marked.

    Raises:
        ConfigError: If the deadline or the budget is not positive.
    """
    if deadline_s <= 0 or max_output_bytes <= 0:
        raise ConfigError(
            "expected a tool's deadline_s and max_output_bytes to be above 0,"
            f" found {deadline_s} and {max_output_bytes}."
        )
    options = ToolOptions(mutates, ends, deadline_s, max_output_bytes)

    def mark(method: F) -> F:
        setattr(method, _OPTIONS, options)
        return method

    return mark if function is None else mark(function)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of an environment class: what the model is told, and how a call of it is checked and run."""

    schema: ToolSchema
    options: ToolOptions
    function: Callable[..., Any]
    model: type[BaseModel]

    @property
    def name(self) -> str:
        """The method's name."""
        return self.schema.name

    @property
    def mutates(self) -> bool:
        """Whether a call may change the world."""
        return self.options.mutates

    @property
    def ends(self) -> bool:
        """Whether a call that ran ends the episode."""
        return self.options.ends

    @property
    def deadline_s(self) -> float:
        """Seconds that one call may take."""
        return self.options.deadline_s

    @property
    def max_output_bytes(self) -> int:
        """UTF-8 bytes of output that the model sees."""
        return self.options.max_output_bytes

    def call(self, env: object, arguments: Mapping[str, JSON]) -> ToolResult:
        """Validates the arguments and runs the tool in the calling thread.

        Args:
            env: The environment that the method belongs to.
            arguments: As the model wrote them.

        Returns:
            The result as the model reads it; arguments that do not fit, a ToolError and work that was killed at its
            deadline are results too.

        Raises:
            Exception: Whatever else the tool's body raises: a fault of the environment, not of the model.
        """
        try:
            checked = self.model.model_validate_json(json.dumps(dict(arguments), allow_nan=False), strict=True)
        except (ValidationError, TypeError, ValueError, RecursionError) as error:
            return self._failed("bad_arguments", self._problems(error, arguments), 0.0)
        values = {str(field.alias): getattr(checked, key) for key, field in self.model.model_fields.items()}
        start = time.perf_counter()
        try:
            output = _as_text(self.function(env, **values))
        except ToolError as error:
            return self._failed("tool_error", str(error), time.perf_counter() - start)
        except WorkerTimeout:
            took = time.perf_counter() - start
            return self._failed(
                "deadline", f"{self.name} ran past its deadline and was stopped after {took:.0f} s.", took
            )
        duration_s = time.perf_counter() - start
        content, left_out = cut_middle(output, self.max_output_bytes)
        return ToolResult(self.name, content, None, duration_s, left_out)

    def _failed(self, kind: ToolErrorKind, problem: str, duration_s: float) -> ToolResult:
        content, left_out = cut_middle(f"Error: {problem}", self.max_output_bytes)
        return ToolResult(self.name, content, kind, duration_s, left_out)

    def _problems(self, error: Exception, arguments: Mapping[str, JSON]) -> str:
        if not isinstance(error, ValidationError):
            return f"{self.name}: the arguments are not valid JSON."
        known = [str(field.alias) for field in self.model.model_fields.values()]
        found: list[str] = []
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            if not detail["loc"]:
                return f"{self.name}: the arguments are not valid JSON."
            where = ".".join(str(part) for part in detail["loc"])
            if detail["type"] == "missing" and len(detail["loc"]) == 1:
                found.append(f"argument {where!r} is missing.")
            elif detail["type"] == "extra_forbidden" and len(detail["loc"]) == 1:
                hint = did_you_mean(where, known) if known else " It takes no arguments."
                found.append(f"there is no argument {where!r}.{hint}")
            else:
                message = detail["msg"][:1].lower() + detail["msg"][1:]
                kind = f", found {kind_of(arguments[where])}" if len(detail["loc"]) == 1 else ""
                found.append(f"argument {where!r}: {message}{kind}.")
        more = f" And {len(found) - _MOST_PROBLEMS} more." if len(found) > _MOST_PROBLEMS else ""
        return f"{self.name}: " + " ".join(found[:_MOST_PROBLEMS]) + more


def unknown_tool(name: str, known: Mapping[str, Tool]) -> ToolResult:
    """The result of a call whose name no tool has.

    Args:
        name: As the model wrote it.
        known: The tools by name.

    Returns:
        A result that names the nearest tool. Its own name is the one written, as far as a name can hold it.
    """
    content, left_out = cut_middle(f"Error: there is no tool {name!r}.{did_you_mean(name, known)}", 1024)
    return ToolResult(_NO_NAME.sub("_", name[:64]), content, "unknown_tool", 0.0, left_out)


def cut_middle(text: str, max_bytes: int) -> tuple[str, int]:
    """Cuts the middle out of a text that is over its byte budget, between characters, and says so in its place.

    Args:
        text: Any text; characters that UTF-8 has no bytes for become `?`.
        max_bytes: Budget of the result, UTF-8 bytes. (The note of what is missing may exceed a budget of its size.)

    Returns:
        The text, and the number of bytes left out.
    """
    data = text.encode("utf-8", "replace")
    if len(data) <= max_bytes:
        return data.decode("utf-8"), 0
    keep = max(max_bytes - len(_LEFT_OUT.format(len(data))), 0)
    head = data[: keep - keep // 2].decode("utf-8", "ignore")
    tail = data[len(data) - keep // 2 :].decode("utf-8", "ignore")
    left_out = len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}{_LEFT_OUT.format(left_out)}{tail}", left_out


def tools_of(cls: type) -> dict[str, Tool]:
    """The tools of a class, those it inherits first, in the order of their definition.

    Args:
        cls: An environment class.

    Returns:
        Tools by name.

    Raises:
        ConfigError: If a tool has no docstring, an argument without annotation, a name that hides one of the
            environment's own methods, or is overridden without being a tool.
    """
    return dict(_tools_of(cls))


@lru_cache(maxsize=256)
def _tools_of(cls: type) -> dict[str, Tool]:
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update(dict.fromkeys(name for name, value in vars(base).items() if hasattr(value, _OPTIONS)))
    tools: dict[str, Tool] = {}
    for name in names:
        method = getattr(cls, name)
        if method is None:
            continue
        if not hasattr(method, _OPTIONS):
            _refuse(
                method, name, "overrides a tool without being one: add @agentrl.tool, or set it to None to remove it"
            )
        _refuse_hidden(cls, name)
        tools[name] = _build(name, method)
    return tools


def _refuse_hidden(cls: type, name: str) -> None:
    for base in cls.__mro__:
        if name in vars(base) and not hasattr(vars(base)[name], _OPTIONS) and vars(base)[name] is not None:
            _refuse(getattr(cls, name), name, f"hides {base.__name__}.{name}: give the tool another name")


def _build(name: str, function: Callable[..., Any]) -> Tool:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        _refuse(function, name, f"has an annotation that cannot be read ({error}): define its type in the module")
    doc = inspect.cleandoc(function.__doc__ or "")
    description = " ".join(doc.partition("\n\n")[0].split())
    if not description:
        _refuse(function, name, "has no docstring: its first paragraph tells the model what the tool does")
    parsed = docstring_parser.parse(doc, docstring_parser.DocstringStyle.GOOGLE).params
    told = {param.arg_name: " ".join((param.description or "").split()) for param in parsed}
    for extra in told.keys() - {parameter.name for parameter in parameters}:
        hint = did_you_mean(extra, (parameter.name for parameter in parameters))
        _refuse(function, name, f"documents an argument {extra!r} that it does not have.{hint}")
    fields: dict[str, Any] = {}
    for i, parameter in enumerate(parameters):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            _refuse(function, name, f"has an argument {parameter.name!r} that cannot be given by name")
        if parameter.name not in hints:
            _refuse(function, name, f"has an argument {parameter.name!r} without annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        # Numbered fields with aliases: an argument may be called `json` or `schema`, which a model's field may not.
        spec = Field(default, alias=parameter.name, description=told.get(parameter.name) or None)
        fields[f"argument_{i}"] = (hints[parameter.name], spec)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields)
        parameters_schema = _plain_schema(model.model_json_schema())
    except PydanticUserError as error:
        _refuse(function, name, f"has an argument of a type that JSON cannot carry ({str(error).splitlines()[0]})")
    return Tool(ToolSchema(name, description, parameters_schema), getattr(function, _OPTIONS), function, model)


def _refuse(function: object, name: str, problem: str) -> NoReturn:
    raise ConfigError(f"the tool {getattr(function, '__qualname__', name)!r} {problem}.")


def _plain_schema(schema: dict[str, JSON]) -> dict[str, JSON]:
    """A pydantic schema without the titles and the closing of objects, which say nothing to a model."""

    def plain(value: JSON) -> JSON:
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept: dict[str, JSON] = {}
        for key, item in value.items():
            if key in ("title", "additionalProperties") and not isinstance(item, dict):
                continue
            named = key in ("properties", "$defs") and isinstance(item, dict)
            kept[key] = {name: plain(part) for name, part in item.items()} if named else plain(item)
        return kept

    result: dict[str, JSON] = plain(schema)
    result.setdefault("properties", {})
    return result


def _as_text(output: object) -> str:
    if isinstance(output, str):
        return output
    return "ok" if output is None else json.dumps(output, ensure_ascii=False, allow_nan=False)
