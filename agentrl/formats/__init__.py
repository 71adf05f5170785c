"""Tool-call formats: how tools are described to a model, and how its messages are read.

A format is total: no message makes it raise, and reading takes time linear in the message's length.
"""

from __future__ import annotations

from agentrl.errors import ConfigError, RegistryError, did_you_mean
from agentrl.formats.base import MAX_CALLS, Format
from agentrl.formats.fenced import FencedFormat
from agentrl.formats.hermes import HermesFormat
from agentrl.formats.schemas import signature

__all__ = ["MAX_CALLS", "FencedFormat", "Format", "HermesFormat", "format_of_template", "get_format", "signature"]

FORMATS: dict[str, Format] = {"hermes": HermesFormat(), "fenced": FencedFormat()}


def get_format(name: str) -> Format:
    """The format of this name.

    Args:
        name: `hermes` or `fenced`.

    Returns:
        The format; it has no state, so one serves all.

    Raises:
        RegistryError: If there is none.
    """
    if name not in FORMATS:
        raise RegistryError(f"there is no tool-call format {name!r}.{did_you_mean(name, FORMATS)}")
    return FORMATS[name]


def format_of_template(chat_template: str | None) -> str:
    """Tells the format that a model was trained on from its chat template.

    Args:
        chat_template: The template's source, as the tokenizer carries it.

    Returns:
        `hermes`, where the template writes tool calls so.

    Raises:
        ConfigError: If the template does not say.
    """
    if chat_template is not None and "<tool_call>" in chat_template and "<function=" not in chat_template:
        return "hermes"
    raise ConfigError(
        "the tool-call format cannot be told from the tokenizer's chat template (it says nothing of <tool_call>):"
        f" set env.format to one of {', '.join(sorted(FORMATS))}."
    )
