"""Reward trees written down: as the table that loading.py reads, and as TOML text."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

from agentrl.reward.aggregators import Shaping
from agentrl.reward.component import Component, FunctionComponent
from agentrl.reward.evidence import to_json
from agentrl.reward.loading import COMPONENTS_GROUP, kind_of, named
from agentrl.reward.nodes import Aggregator, Leaf, Node, Weighted, is_diagnostic
from agentrl.types import JSON


def node_as_dict(node: Node) -> dict[str, JSON]:
    """A node as its table; defaults are left out, so two trees that are equal have one table."""
    if isinstance(node, Leaf):
        return _component(node.component, node.reference) | _changed(node, ("name", "role", "severity"))
    if isinstance(node, Shaping):
        potential = {"potential": _component(node.potential, node.reference)}
        return {"kind": node.kind} | _changed(node, ("name", "gamma_turn", "scale")) | potential
    if not isinstance(node, Aggregator):
        raise TypeError(f"{type(node).__name__} is neither a leaf nor an aggregator.")
    fields = [each.name for each in dataclasses.fields(node)]
    slots = {edge.slot for edge in node.edges}
    shown: dict[str, JSON] = {"kind": kind_of(type(node))} | _changed(
        node, [name for name in fields if name not in slots]
    )
    for name in fields:
        if name in slots:
            value = getattr(node, name)
            shown[name] = [_child(item) for item in value] if isinstance(value, tuple) else _child(value)
    return shown


def to_toml(table: Mapping[str, JSON], path: str = "") -> str:
    """A tree's table as TOML: lists of nodes as tables of their own, lone nodes without such lists inline."""
    lines: list[str] = []
    blocks: list[str] = []
    for key, value in table.items():
        if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            blocks += [f"\n[[{path}{key}]]\n{to_toml(item, f'{path}{key}.')}" for item in value]
        elif isinstance(value, Mapping) and not _is_flat(value):
            blocks.append(f"\n[{path}{key}]\n{to_toml(value, f'{path}{key}.')}")
        else:
            lines.append(f"{key} = {_inline(value)}\n")
    return "".join(lines + blocks)


def _child(item: Node | Weighted) -> dict[str, JSON]:
    if isinstance(item, Weighted):
        weightless = is_diagnostic(item.node) or isinstance(item.node, Shaping)
        return ({} if weightless else {"weight": item.weight}) | node_as_dict(item.node)
    return node_as_dict(item)


def _changed(node: Node, names: Any) -> dict[str, JSON]:
    defaults = {each.name: each.default for each in dataclasses.fields(node)}
    values = {name: getattr(node, name) for name in names}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items() if v != defaults[name]}


def _component(component: Component, reference: str) -> dict[str, JSON]:
    shown: dict[str, JSON] = {"component": reference or _reference(component)}
    if not isinstance(component, FunctionComponent) and dataclasses.is_dataclass(component):
        values = to_json(component)
        init = [each for each in dataclasses.fields(component) if each.init]
        options = {each.name: values[each.name] for each in init if getattr(component, each.name) != each.default}
        if options:
            shown["options"] = options
    return shown


def _reference(component: Component) -> str:
    made_of: Any = component.function if isinstance(component, FunctionComponent) else type(component)
    return named(COMPONENTS_GROUP, made_of)


def _is_flat(value: Mapping[str, JSON]) -> bool:
    return not any(isinstance(inner, list) and inner and isinstance(inner[0], Mapping) for inner in _all_values(value))


def _all_values(value: Mapping[str, JSON]) -> list[JSON]:
    found: list[JSON] = []
    for inner in value.values():
        found.append(inner)
        if isinstance(inner, Mapping):
            found += _all_values(inner)
    return found


def _inline(value: JSON) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(inner)}" for key, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(inner) for inner in value) + "]"
    # JSON's text of a scalar is TOML's too, but for one character that TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _inline(key)
