"""`agentrl list`: what can be named, and where it comes from."""

from __future__ import annotations

import inspect
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import tyro
from rich.table import Table

from agentrl.commands._flags import parse
from agentrl.commands._output import print_json, show
from agentrl.errors import AgentRLError
from agentrl.plugins import PluginInfo, list_plugins, load_plugin
from agentrl.types import JSON

Kind = Literal["all", "envs", "rewards", "formats"]

_GROUPS = {"envs": ("agentrl.environments", "environment"), "rewards": ("agentrl.rewards", "reward component")}


@dataclass(frozen=True)
class ListOptions:
    """Show environments, reward components and tool-call formats. Plugins are imported, and broken ones say why."""

    kind: tyro.conf.Positional[Kind] = "all"
    """What to show."""
    json: bool = False
    """Print JSON, with the settings that each environment takes."""


@dataclass(frozen=True)
class Entry:
    """Something that can be named.

    Attributes:
        kind: `envs`, `rewards` or `formats`.
        name: What to write.
        source: Package and version.
        target: Where in it.
        about: First line of its documentation.
        broken: Why it does not load; None where it does.
        details: What it takes: an environment's settings and splits, a component's bounds.
    """

    kind: str
    name: str
    source: str
    target: str
    about: str = ""
    broken: str | None = None
    details: dict[str, JSON] = field(default_factory=dict)


def main(arguments: list[str]) -> int:
    """Lists; see `agentrl list --help`."""
    options = parse(ListOptions, arguments, "list")
    kinds = ["envs", "rewards", "formats"] if options.kind == "all" else [options.kind]
    entries = [entry for kind in kinds for entry in (_formats() if kind == "formats" else _plugins(kind))]
    if options.json:
        print_json([asdict(entry) for entry in entries])
        return 0
    table = Table("kind", "name", "about", "from", box=None, header_style="bold", pad_edge=False)
    for entry in entries:
        about = f"[red]broken:[/red] {_plain(entry.broken)}" if entry.broken else _plain(entry.about)
        table.add_row(entry.kind, entry.name, about, _plain(f"{entry.source} ({entry.target})"))
    show(table)
    return 0


def _plugins(kind: str) -> list[Entry]:
    group, what = _GROUPS[kind]
    return [_entry(kind, group, what, plugin) for plugin in list_plugins(group)]


def _entry(kind: str, group: str, what: str, plugin: PluginInfo) -> Entry:
    source = f"{plugin.package} {plugin.version}"
    try:
        found = load_plugin(group, plugin.name, what)
    except AgentRLError as error:
        return Entry(kind, plugin.name, source, plugin.target, broken=str(error))
    documented = getattr(found, "function", found)
    about = (inspect.getdoc(documented) or "").partition("\n")[0]
    return Entry(kind, plugin.name, source, plugin.target, about, None, _details(found))


def _details(found: Any) -> dict[str, JSON]:
    """What is worth knowing of an environment or a component."""
    if hasattr(found, "settings_model"):
        schema = found.settings_model.model_json_schema()
        return {"splits": list(found.splits), "max_turns": found.max_turns, "settings": schema.get("properties", {})}
    shown = {name: getattr(found, name, None) for name in ("when", "bounds")}
    return {name: value for name, value in shown.items() if value is not None}


def _formats() -> list[Entry]:
    from agentrl.formats import FORMATS

    entries = []
    for name, made in FORMATS.items():
        about = (inspect.getdoc(type(made)) or "").partition("\n")[0]
        entries.append(Entry("formats", name, "agentrl", f"{type(made).__module__}:{type(made).__name__}", about))
    return entries


def _plain(text: str | None) -> str:
    from rich.markup import escape

    return escape(text or "")
