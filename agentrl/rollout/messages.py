"""Conversations for those that know no tool role."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.types import Message


def as_users(messages: Sequence[Message]) -> list[Message]:
    """Shows tool results as a user's messages.

    Neighbours become one message, because many templates and endpoints demand that user and assistant take turns.

    Args:
        messages: The conversation.

    Returns:
        The same with the roles system, user and assistant alone.
    """
    shown: list[Message] = []
    for message in messages:
        if message.role not in ("tool", "user"):
            shown.append(message)
        elif shown and shown[-1].role == "user":
            shown[-1] = Message("user", f"{shown[-1].content}\n{message.content}")
        else:
            shown.append(Message("user", message.content))
    return shown
