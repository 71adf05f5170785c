"""Tool schemas as a line of text, and what formats ask of them."""

from __future__ import annotations

import json

from agentrl.types import JSON, ToolSchema

_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "array": "list", "object": "dict"}


def properties_of(tool: ToolSchema) -> dict[str, JSON]:
    """The schemas of a tool's arguments, by name."""
    properties: dict[str, JSON] = tool.parameters.get("properties", {})
    return properties


def raw_argument(tool: ToolSchema) -> str | None:
    """The name of a tool's only argument, where it is a string."""
    properties = properties_of(tool)
    if len(properties) != 1:
        return None
    name, schema = next(iter(properties.items()))
    return name if schema.get("type") == "string" else None


def signature(tool: ToolSchema) -> str:
    """The tool as Python would write it: `run_sql(query: str)`."""
    required = tool.parameters.get("required", [])
    parts = []
    for name, schema in properties_of(tool).items():
        kind = "|".join(map(json.dumps, schema["enum"])) if "enum" in schema else _TYPES.get(schema.get("type"), "any")
        default = "" if name in required else f" = {json.dumps(schema.get('default'), ensure_ascii=False)}"
        parts.append(f"{name}: {kind}{default}")
    return f"{tool.name}({', '.join(parts)})"
