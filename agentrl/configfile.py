"""Config files: TOML (or a run's `config.json`) into a checked model; messages name the file, the key and the remedy.

Precedence, weakest first: defaults, files from left to right, flags. A table in a file changes the keys that it names
and leaves the others at the defaults of the section that it stands in.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from agentrl.errors import ConfigError, did_you_mean
from agentrl.types import JSON

M = TypeVar("M", bound=BaseModel)

_UNKNOWN = {"extra_forbidden", "unexpected_keyword_argument"}
_SECOND_LOOK = {"missing", "value_error"}
"""Errors that another file or a flag may still mend."""


def read_tables(path: Path) -> dict[str, JSON]:
    """Reads one TOML or JSON file.

    Raises:
        ConfigError: If it is missing, cannot be read, or is no table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*") if p.suffix in {".toml", ".json"}]
        raise ConfigError(f"config file {str(path)!r} does not exist.{did_you_mean(path.name, beside)}") from None
    except OSError as error:
        raise ConfigError(f"config file {str(path)!r} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found other bytes at offset {error.start}.") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path}: expected {kind}, but: {error}.") from error
    if not isinstance(tables, dict):
        raise ConfigError(f"{path}: expected a table of settings, found a {type(tables).__name__}.")
    return tables


def read_layers(model: type[BaseModel], files: Sequence[Path]) -> dict[str, JSON]:
    """Reads files and lays each over the one before, keys and types checked per file.

    What is still missing, and what goes wrong between keys, is left to `validated`: a flag may mend it.

    Raises:
        ConfigError: On a file that cannot be read, an unknown key, or a wrong type; all of a file's problems at once.
    """
    merged: dict[str, JSON] = {}
    for path in files:
        tables = read_tables(path)
        problems = [e for e in _errors(model, fill(model, tables)) if e["type"] not in _SECOND_LOOK]
        if problems:
            raise ConfigError(_describe(model, problems, str(path)))
        merged = merge(merged, tables)
    return merged


def load_config(model: type[M], files: Sequence[Path | str], overrides: Mapping[str, JSON] | None = None) -> M:
    """Loads a model from files and nested overrides, later ones winning.

    Raises:
        ConfigError: With the key, what was expected and what was found.
    """
    paths = [Path(file) for file in files]
    merged = merge(read_layers(model, paths), overrides or {})
    return validated(model, merged, ", ".join(map(str, paths)) or "config")


def validated(model: type[M], tables: Mapping[str, JSON], where: str) -> M:
    """Checks tables strictly (a string is no number) and builds the model.

    Raises:
        ConfigError: All problems at once, each with its key.
    """
    filled = fill(model, tables)
    try:
        return model.model_validate_json(_as_json(filled), strict=True)
    except ValidationError as error:
        raise ConfigError(_describe(model, error.errors(include_url=False), where)) from None


def merge(below: Mapping[str, JSON], above: Mapping[str, JSON]) -> dict[str, JSON]:
    """Lays one nest of tables over another; anything that is no table replaces what was there."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = merge(under, value) if isinstance(value, Mapping) and isinstance(under, Mapping) else value
    return merged


def fill(model: type[Any], tables: Mapping[str, JSON]) -> dict[str, JSON]:
    """Completes each table with the defaults of the field it stands in.

    Without this, `[sft.optim] lr = 1e-3` would take every other key from OptimConfig, not from SftConfig's optimiser.
    """
    filled = dict(tables)
    for name, section, default in sections(model):
        table = filled.get(name)
        if isinstance(table, Mapping):
            filled[name] = fill(section, merge(as_tables(default), table) if default is not None else table)
    return filled


def sections(model: type[Any]) -> Iterator[tuple[str, type[Any], Any]]:
    """Yields the fields that are tables of their own: name, class, default instance (None where there is none)."""
    for name, hint in get_type_hints(model).items():
        section = _section_class(hint)
        if section is not None and name in field_names(model):
            yield name, section, _default(model, name)


def field_names(model: type[Any]) -> list[str]:
    """The fields of a pydantic model or a dataclass, in order."""
    if issubclass(model, BaseModel):
        return list(model.model_fields)
    return [field.name for field in dataclasses.fields(model)]


def as_tables(instance: Any) -> dict[str, JSON]:
    """A model or dataclass as JSON-able tables, nulls kept."""
    tables: dict[str, JSON] = TypeAdapter(type(instance)).dump_python(instance, mode="json")
    return tables


def differences(old: Mapping[str, JSON], new: Mapping[str, JSON], prefix: str = "") -> list[str]:
    """Lists where two nests of tables differ, one line per key: `ppo.iterations: 3 -> 5`."""
    lines: list[str] = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {json.dumps(before)} -> {json.dumps(after)}")
    return lines


def _section_class(hint: Any) -> type[Any] | None:
    options = get_args(hint) if get_origin(hint) in {Union, UnionType} else (hint,)
    for option in options:
        if isinstance(option, type) and (issubclass(option, BaseModel) or dataclasses.is_dataclass(option)):
            return option
    return None


def _default(model: type[Any], name: str) -> Any:
    if issubclass(model, BaseModel):
        field = model.model_fields[name]
        return None if field.is_required() else field.get_default(call_default_factory=True)
    default = next(f.default for f in dataclasses.fields(model) if f.name == name)
    return None if default is dataclasses.MISSING else default


def _as_json(tables: Mapping[str, JSON]) -> str:
    # TOML has dates, which no setting is: as text they fail the check of the key they stand at.
    return json.dumps(tables, default=str)


def _errors(model: type[BaseModel], tables: Mapping[str, JSON]) -> list[ErrorDetails]:
    try:
        model.model_validate_json(_as_json(tables), strict=True)
    except ValidationError as error:
        return error.errors(include_url=False)
    return []


def _describe(model: type[Any], problems: Sequence[ErrorDetails], where: str) -> str:
    lines = [_describe_one(model, problem) for problem in problems]
    return f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n" + "\n".join(f"  {line}" for line in lines)


def _describe_one(model: type[Any], problem: ErrorDetails) -> str:
    keys = [str(key) for key in problem["loc"]]
    path = ".".join(keys)
    if problem["type"] in _UNKNOWN:
        return f"{path}: unknown key.{did_you_mean(keys[-1], _names_at(model, keys[:-1]))}"
    if problem["type"] == "missing":
        return f"{path}: is required and not given."
    if problem["type"] == "value_error":
        return f"{path}: {problem['msg']}".removeprefix(": ").replace("Value error, ", "", 1)
    expected = problem["msg"].replace("Input should be", "expected", 1)
    found = problem["input"]
    return f"{path}: {expected}, found {found!r} ({type(found).__name__})."


def _names_at(model: type[Any], keys: Sequence[str]) -> list[str]:
    for key in keys:
        inner = {name: section for name, section, _ in sections(model)}.get(key)
        if inner is None:
            return []
        model = inner
    return field_names(model)
