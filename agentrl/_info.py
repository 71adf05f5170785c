"""The infos of ToolEnv, for users of Gymnasium: nothing in them is timed, so that equal episodes have equal infos."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.episode import LiveEpisode, StepRecord
from agentrl.types import JSON, ToolResult, ToolSchema


def reset_info(episode: LiveEpisode, tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """The info of a reset.

    Args:
        episode: The episode that begins.
        tools: The environment's tools.

    Returns:
        `messages` (role and content), `tools` (in OpenAI's shape), `task` (its id).
    """
    return {
        "messages": [message.as_dict() for message in episode.messages],
        "tools": [tool.as_openai() for tool in tools],
        "task": episode.task.id,
    }


def step_info(
    episode: LiveEpisode, tools: Sequence[ToolSchema], record: StepRecord, final_ledger: JSON
) -> dict[str, Any]:
    """The info of a step.

    Args:
        episode: The episode.
        tools: The environment's tools.
        record: What the step came to.
        final_ledger: The episode's ledger, where it has ended.

    Returns:
        That of a reset, and `calls`, `results`, `malformed`, `ledger` (the step's; at the end the episode's), and where
        the episode ended `end`, `success` if it can be told, and `unscored` if there is no score.
    """
    ledger: Mapping[str, JSON] | None = record.ledger if final_ledger is None else final_ledger
    info = reset_info(episode, tools) | {
        "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in record.calls],
        "results": [_result(result) for result in record.results],
        "malformed": record.malformed,
        # Vector environments take plain dicts apart, key by key over environments whose ledgers differ in shape.
        "ledger": None if ledger is None else UserDict(ledger),
    }
    if record.end is not None:
        info["end"] = record.end.value
        if record.success is not None:
            info["success"] = record.success
        if record.unscored is not None:
            info["unscored"] = record.unscored
    return info


def _result(result: ToolResult) -> dict[str, JSON]:
    return {
        "name": result.name,
        "content": result.content,
        "error_kind": result.error_kind,
        "truncated": result.truncated,
    }
