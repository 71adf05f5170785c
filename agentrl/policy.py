"""What a policy is: one protocol for messages, one for tokens, and the policy that follows a script. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from agentrl.errors import PolicyError
from agentrl.types import Generation, Message, Reply, Sampling, ToolSchema


class MessagePolicy(Protocol):
    """Answers a conversation with a message: experts, endpoints, people."""

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSchema], sampling: Sampling) -> Reply:
        """The next assistant message.

        Args:
            messages: The conversation so far, which ends with a message that is not the assistant's.
            tools: The environment's tools.
            sampling: How to draw; a policy that does not draw ignores it.

        Returns:
            The message, with its tokens where the policy has them.

        Raises:
            PolicyError: If the policy cannot answer.
        """


class TokenPolicy(Protocol):
    """Continues token ids with token ids, and says how likely each was: what training needs."""

    @property
    def policy_version(self) -> int:
        """Number of weight updates behind the policy."""

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Samples a continuation.

        Args:
            token_ids: [T] the whole trajectory so far.
            sampling: How to draw.

        Returns:
            The sampled ids with their logprobs.

        Raises:
            PolicyError: If the engine cannot answer.
        """

    async def update(self, source: object) -> None:
        """Takes over new weights.

        Args:
            source: Where the weights are; what it may be is the policy's to say.
        """


class ScriptedPolicy:
    """Says what a script says: a list of messages, or a function of the conversation.

    It keeps no state: the position in a list is the number of assistant messages in the conversation, so that one
    policy serves many episodes at once.
    """

    def __init__(self, script: Sequence[str] | Callable[[Sequence[Message]], str]) -> None:
        """Makes the policy.

        Args:
            script: The messages in order, or a function that gets the conversation and returns the next one. To repeat
                a message for ever, use a function.
        """
        self._script = script if callable(script) else tuple(script)

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSchema], sampling: Sampling) -> Reply:  # noqa: ARG002
        """The script's next message.

        Raises:
            PolicyError: If the list has no more: an episode that outlives its script is a mistake in the script.
        """
        if callable(self._script):
            return Reply(self._script(messages))
        said = sum(message.role == "assistant" for message in messages)
        if said >= len(self._script):
            raise PolicyError(f"the script has {len(self._script)} messages and the episode goes on after them.")
        return Reply(self._script[said])
