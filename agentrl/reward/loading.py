"""Reward trees as text. A table with `component` is a leaf, one with `kind` an aggregator; children are tables in it.

    kind = "weighted_sum"

    [[children]]
    weight = 1.0
    kind = "gate"
    condition = { component = "sql/executes", role = "safeguard" }
    child = { component = "sql/correct" }

    [[children]]
    weight = 0.1
    component = "conduct/turns"
    role = "safeguard"

A component is named by its entry point (group `agentrl.rewards`), as `module:name`, or as `path/file.py:name` seen from
the file's folder. One that is a class takes its fields from a table `options`. What is left out has its default.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from agentrl.errors import RewardError, did_you_mean
from agentrl.plugins import list_plugins, load_object, load_plugin
from agentrl.reward.aggregators import AGGREGATORS, Shaping
from agentrl.reward.batch_nodes import BATCH_NODES
from agentrl.reward.component import Component, check_component
from agentrl.reward.evidence import adapter
from agentrl.reward.nodes import Aggregator, Leaf, Node, Weighted, is_diagnostic
from agentrl.types import JSON

COMPONENTS_GROUP = "agentrl.rewards"
AGGREGATORS_GROUP = "agentrl.aggregators"
_BUILT_IN = AGGREGATORS | BATCH_NODES


def read_toml(path: Path) -> dict[str, JSON]:
    """The content of a TOML file.

    Raises:
        RewardError: If it is missing or no TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = did_you_mean(path.name, (each.name for each in path.parent.glob("*.toml")))
        raise RewardError(f"cannot read the reward tree {path}: {error.strerror}.{near}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RewardError(f"the reward tree {path} is no TOML: {error}") from error


def node_from_dict(table: JSON, base_dir: Path, where: str = "reward") -> Node:
    """A node from its table.

    Args:
        table: What TOML gives.
        base_dir: Where relative file paths of components start.
        where: Place of the table, for messages.

    Raises:
        RewardError: If a key, a value or a kind cannot be used.
        RegistryError: If a component or a kind is not known or does not load.
    """
    if not isinstance(table, Mapping) or ("kind" in table) == ("component" in table):
        raise RewardError(
            f"{where}: expected a table with either `component` (a leaf) or `kind` (an aggregator),"
            f" found {table!r:.200}."
        )
    if "component" in table:
        _refuse_unknown(table, {"component", "options", "name", "role", "severity"}, where)
        made = load_component(table["component"], table.get("options"), base_dir, where)
        values = {
            key: _scalar(str, table[key], f"{where}.{key}") for key in ("name", "role", "severity") if key in table
        }
        return _construct(Leaf, {"component": made, "reference": table["component"], **values}, where)
    kind = _scalar(str, table["kind"], f"{where}.kind")
    if kind == Shaping.kind:
        return _shaping(table, base_dir, where)
    cls = aggregator_class(kind, base_dir)
    fields = _fields(cls)
    _refuse_unknown(table, {"kind", *fields}, where)
    values = {
        key: _value(fields[key], value, base_dir, f"{where}.{key}") for key, value in table.items() if key != "kind"
    }
    missing = [each.name for each in dataclasses.fields(cls) if _required(each) and each.name not in values]
    if missing:
        raise RewardError(f"{where}: {kind} needs {' and '.join(f'`{name}`' for name in missing)}.")
    return _construct(cls, values, where)


def load_component(reference: JSON, options: JSON, base_dir: Path, where: str) -> Component:
    """A component by its reference, made with `options` where it is a class."""
    if not isinstance(reference, str) or not reference:
        raise RewardError(f"{where}.component: expected the name of a component, found {reference!r}.")
    found = _resolve(COMPONENTS_GROUP, reference, base_dir, "reward component")
    if not isinstance(found, type):
        if options is not None:
            raise RewardError(f"{where}: component {reference!r} takes no options; only one that is a class does.")
        return check_component(found)
    given = {} if options is None else options
    if not isinstance(given, Mapping):
        raise RewardError(f"{where}.options: expected a table, found {given!r:.200}.")
    if not dataclasses.is_dataclass(found):
        raise RewardError(
            f"{where}: the component {reference!r} is a class, which must be a dataclass to take options."
        )
    _refuse_unknown(given, {each.name for each in dataclasses.fields(found) if each.init}, f"{where}.options")
    try:
        return check_component(adapter(found).validate_python(given))
    except ValidationError as error:
        raise RewardError(f"{where}.options do not fit component {reference!r}: {_problems(error)}") from error


def aggregator_class(kind: str, base_dir: Path | None = None) -> type[Aggregator]:
    """The class of a kind: a built-in one, an entry point of `agentrl.aggregators`, or `module:Class`.

    Raises:
        RewardError: If there is no such kind, or what is found is no Aggregator.
    """
    if kind in _BUILT_IN:
        return _BUILT_IN[kind]
    offered = [plugin.name for plugin in list_plugins(AGGREGATORS_GROUP)]
    if ":" not in kind and kind not in offered:
        known = [*_BUILT_IN, Shaping.kind, *offered]
        raise RewardError(f"there is no kind of reward node {kind!r}.{did_you_mean(kind, known)}")
    found = _resolve(AGGREGATORS_GROUP, kind, base_dir or Path(), "reward aggregator")
    if not (isinstance(found, type) and issubclass(found, Aggregator) and dataclasses.is_dataclass(found)):
        raise RewardError(
            f"the kind {kind!r} is {found!r}: expected a dataclass that extends agentrl.reward.Aggregator."
        )
    return found


def kind_of(cls: type[Aggregator]) -> str:
    """The kind that `aggregator_class` finds the class by."""
    return cls.kind if _BUILT_IN.get(cls.kind) is cls else named(AGGREGATORS_GROUP, cls)


def named(group: str, what: Any) -> str:
    """How text names a class or function: by its entry point where it has one, else as `module:name`."""
    target = f"{what.__module__}:{what.__qualname__}"
    return next((plugin.name for plugin in list_plugins(group) if plugin.target == target), target)


def _resolve(group: str, reference: str, base_dir: Path, what: str) -> Any:
    where, colon, name = reference.rpartition(":")
    if not colon:
        return load_plugin(group, reference, what)
    if where.endswith(".py"):
        where = str(base_dir / Path(where).expanduser())
    return load_object(f"{where}:{name}", f"{what} {reference!r}")


def _shaping(table: Mapping[str, JSON], base_dir: Path, where: str) -> Shaping:
    _refuse_unknown(table, {"kind", "potential", "name", "gamma_turn", "scale"}, where)
    potential = table.get("potential")
    if not isinstance(potential, Mapping) or "component" not in potential:
        raise RewardError(f"{where}.potential: expected a table with `component`, found {potential!r:.200}.")
    _refuse_unknown(potential, {"component", "options"}, f"{where}.potential")
    made = load_component(potential["component"], potential.get("options"), base_dir, f"{where}.potential")
    types = {"name": str, "gamma_turn": float, "scale": float}
    values = {key: _scalar(types[key], table[key], f"{where}.{key}") for key in types if key in table}
    return cast(
        "Shaping", _construct(Shaping, {"potential": made, "reference": potential["component"], **values}, where)
    )


@functools.lru_cache(maxsize=64)
def _fields(cls: type[Aggregator]) -> dict[str, Any]:
    """The fields of a kind with their types."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls)}


def _value(hint: Any, value: JSON, base_dir: Path, where: str) -> Any:
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if inner in (Node, Weighted):
        if not isinstance(value, list):
            raise RewardError(f"{where}: expected a list of tables, found {value!r:.200}.")
        make = _weighted if inner is Weighted else node_from_dict
        return tuple(make(item, base_dir, f"{where}[{i}]") for i, item in enumerate(value))
    if hint is Node:
        return node_from_dict(value, base_dir, where)
    return _scalar(hint, tuple(value) if isinstance(value, list) else value, where)


def _weighted(table: JSON, base_dir: Path, where: str) -> Weighted:
    rest = {key: value for key, value in table.items() if key != "weight"} if isinstance(table, Mapping) else table
    node = node_from_dict(rest, base_dir, where)
    if isinstance(table, Mapping) and "weight" in table:
        return Weighted(_scalar(float, table["weight"], f"{where}.weight"), node)
    return Weighted(0.0 if is_diagnostic(node) else 1.0, node)


def _scalar(hint: Any, value: JSON, where: str) -> Any:
    try:
        return adapter(hint).validate_python(value, strict=True)
    except ValidationError as error:
        raise RewardError(f"{where}: {_problems(error)}; found {value!r:.200}.") from error


def _problems(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" if each["loc"] else each["msg"]
        for each in error.errors()
    )


def _construct(cls: type[Node], values: Mapping[str, Any], where: str) -> Node:
    try:
        return cls(**values)
    except RewardError as error:
        raise RewardError(f"{where}: {error}") from error


def _required(each: dataclasses.Field[Any]) -> bool:
    return each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING


def _refuse_unknown(table: Mapping[str, JSON], known: set[str], where: str) -> None:
    for key in table:
        if key == "weight" and "weight" not in known:
            raise RewardError(f"{where}: `weight` belongs to the children of a weighted_sum.")
        if key not in known:
            raise RewardError(f"{where}: unknown key {key!r}.{did_you_mean(key, known)}")
