"""Flags. A run's config comes from files, and any field of it from a flag: `--ppo.iterations 3`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import tyro
from pydantic import BaseModel, TypeAdapter
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from agentrl.config import RunConfig
from agentrl.configfile import fill, read_layers, sections, validated
from agentrl.types import JSON

T = TypeVar("T")

_PRECEDENCE = (
    "Files come first, from left to right, then flags. An absent section ([sft], [model.tiny], [model.lora]) appears"
    " with a flag that names one of its fields, and one that is there goes with a flag like `--sft none`."
)

_PLAIN = (tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)


@dataclass(frozen=True)
class RunOptions:
    """What `train` and `sft` take besides the config's own fields."""

    config: Annotated[tyro.conf.UseAppendAction[tuple[Path, ...]], tyro.conf.arg(aliases=["-c"], metavar="FILE")] = ()
    """A TOML file; may be given several times, later ones win."""
    resume: bool = False
    """Go on with a run of this name from its last checkpoint."""
    smoke: bool = False
    """Shrink everything, so that the run ends in under a minute: shows that it works, not that it learns."""
    dry_run: bool = False
    """Print the resolved config and do nothing."""
    json: bool = False
    """Print the result as JSON."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = None  # type: ignore[assignment]
    """The config."""


def parse(options: type[T], arguments: Sequence[str], command: str) -> T:
    """Parses the flags of a command; ends the process with code 2 on a mistake, and 0 after help."""
    return tyro.cli(options, args=list(arguments), prog=f"agentrl {command}", config=_PLAIN)


def parse_run(arguments: Sequence[str], command: str, description: str) -> tuple[RunOptions, RunConfig]:
    """Parses files and flags into a checked config.

    Raises:
        ConfigError: On a file that cannot be used, or a config that does not hold together.
    """
    files = _config_files(arguments)
    tables = read_layers(RunConfig, files)
    rest = list(arguments)
    for section in _optional_sections(RunConfig):
        rest = _choose_section(tables, section, rest)
    about = f"{description}\n\n{_PRECEDENCE}"
    default = RunOptions(run=_unchecked(RunConfig, fill(RunConfig, tables)))
    with _registry():
        options = tyro.cli(
            RunOptions, args=rest, default=default, prog=f"agentrl {command}", description=about, config=_PLAIN
        )
    where = " + ".join([*map(str, files), "flags"])
    return options, validated(RunConfig, options.run.model_dump(mode="json", warnings=False), where)


def _config_files(arguments: Sequence[str]) -> list[Path]:
    scout = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    scout.add_argument("-c", "--config", action="append", type=Path, default=[])
    try:
        found, _ = scout.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return []  # `--config` without a file: the real parser says so
    files: list[Path] = found.config
    return files


def _optional_sections(model: type[Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the sections that may be absent, outer ones first."""
    for name, section, default in sections(model):
        path = (*prefix, name)
        if default is None and not model.model_fields[name].is_required():
            yield path
        if issubclass(section, BaseModel):
            yield from _optional_sections(section, path)


def _choose_section(tables: dict[str, JSON], path: tuple[str, ...], arguments: list[str]) -> list[str]:
    """Adds an absent section that a flag names a field of; takes one out for `--section none`."""
    dotted = ".".join(path)
    names = [a[2:].split("=")[0].replace("-", "_") if a.startswith("--") else "" for a in arguments]
    outer = tables
    for key in path[:-1]:
        outer = outer.setdefault(key, {})
    if any(name.startswith(f"{dotted}.") for name in names) and not isinstance(outer.get(path[-1]), Mapping):
        outer[path[-1]] = {}
    for at, name in enumerate(names):
        joined = arguments[at].partition("=")[2] or (arguments[at + 1] if at + 1 < len(arguments) else "")
        if name == dotted and joined.lower() == "none":
            outer.pop(path[-1], None)
            return arguments[:at] + arguments[at + (1 if "=" in arguments[at] else 2) :]
    return arguments


def _unchecked(model: type[Any], tables: Mapping[str, JSON]) -> Any:
    """An instance that may lack what is required: flags may still give it."""
    inner = {name: section for name, section, _ in sections(model)}
    hints = get_type_hints(model)
    values: dict[str, Any] = {}
    for name, value in tables.items():
        if name in inner and isinstance(value, Mapping):
            values[name] = _unchecked(inner[name], value)
        elif issubclass(model, BaseModel):
            adapter: TypeAdapter[Any] = TypeAdapter(hints[name])
            values[name] = adapter.validate_json(json.dumps(value), strict=True)
        else:
            values[name] = value
    return model.model_construct(**values) if issubclass(model, BaseModel) else model(**values)


def _registry() -> ConstructorRegistry:
    """How tyro reads our models: built unchecked, as there is one check and one form of message; tables as JSON."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _table(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if get_origin(info.type) is not dict:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="JSON",
            instance_from_str=lambda words: json.loads(words[0]),
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [json.dumps(value)],
        )

    @registry.struct_rule
    def _model(info: StructTypeInfo) -> StructConstructorSpec | None:
        model = info.type
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return None
        hints = get_type_hints(model, include_extras=True)
        fields = tuple(
            StructFieldSpec(name, hints[name], _default(info.default, name, field), field.description)
            for name, field in model.model_fields.items()
        )
        return StructConstructorSpec(instantiate=model.model_construct, fields=fields)

    return registry


def _default(instance: Any, name: str, field: Any) -> Any:
    if isinstance(instance, BaseModel) and name in instance.__dict__:
        return getattr(instance, name)
    return tyro.MISSING_NONPROP if field.is_required() else field.get_default(call_default_factory=True)
