"""Data goes to stdout: as JSON for programs, as tables for people."""

from __future__ import annotations

import json
import sys

from rich.console import Console, RenderableType

from agentrl._files import finite
from agentrl.errors import UsageError
from agentrl.types import JSON


def print_json(value: JSON) -> None:
    """Prints one JSON document."""
    sys.stdout.write(json.dumps(finite(value), indent=2, default=str) + "\n")
    sys.stdout.flush()


def show(renderable: RenderableType) -> None:
    """Prints for people; without colours where stdout is no terminal or NO_COLOR is set."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(renderable)


def quiet_transformers() -> None:
    """Turns the progress bars of transformers off: ours are the only ones, and logs hold whole lines."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def json_table(text: str, flag: str) -> dict[str, JSON]:
    """Reads a flag's JSON object.

    Raises:
        UsageError: If it is something else.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{flag}: expected a JSON object like '{{\"levels\": [1]}}', but: {error}.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{flag}: expected a JSON object, found {text!r}.")
    return value
