"""One attempt at an episode: what is asked of the environment, and the trajectory that comes of it."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Literal

from agentrl.env import ToolEnv
from agentrl.episode import StepRecord
from agentrl.errors import UsageError
from agentrl.rollout.codec import Codec
from agentrl.types import JSON, EndReason, EpisodeRequest, Generation, Message, Reply, Trajectory, Turn

FAILED_ATTEMPT = "failed_attempt"
"""Why tokens were dropped: an earlier attempt ended in an error."""

DID_NOT_FIT = "context_full"
"""Why tokens were dropped: the message was longer than the context had room for, so nobody acted on it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the episodes of a collection share.

    Attributes:
        codec: Makes tokens of messages; None where nobody needs tokens.
        max_context: Longest trajectory, tokens; None for no limit.
    """

    codec: Codec | None
    max_context: int | None


class EpisodeRun:
    """An attempt at a request. One thread uses it at a time; `start`, `take` and `finish` call the environment.

    A call that is given up while it hangs must not write into the record when it comes back: `calling` raises then.

    Attributes:
        request: What is asked for.
        attempt: 0 for the first try.
        end: Why it ended; None while it runs.
        tool_s: Time of the agent's own tools so far, seconds.
        env: The environment that it runs in.
        env_state: Whether the environment can run another episode: `broken` after a fault, `hung` where a call of it
            has not returned.
    """

    def __init__(
        self,
        request: EpisodeRequest,
        env: ToolEnv,
        limits: Limits,
        calling: Callable[[EpisodeRun], AbstractContextManager[None]],
        *,
        attempt: int = 0,
        lost_tokens: int = 0,
    ) -> None:
        """Prepares an attempt.

        Args:
            request: What is asked for.
            env: An environment that no episode runs in.
            limits: Codec and context.
            calling: Entered around each call of the environment.
            attempt: Counted up by retries.
            lost_tokens: Sampled in earlier attempts.
        """
        self.request = request
        self.attempt = attempt
        self.end: EndReason | None = None
        self.tool_s = 0.0
        self.env = env
        self.env_state: Literal["good", "broken", "hung"] = "good"
        self._codec = limits.codec
        self._max_context = limits.max_context
        self._calling = calling
        self._opening: tuple[Message, ...] = ()
        self._turns: list[Turn] = []
        self._ids: list[int] = []
        self._prompt: list[int] = []
        self._dropped = Counter({FAILED_ATTEMPT: lost_tokens} if lost_tokens else {})
        self._ledger: JSON = None
        self._success: bool | None = None
        self._error: str | None = None

    @property
    def n_turns(self) -> int:
        """Turns taken so far."""
        return len(self._turns)

    @property
    def token_ids(self) -> list[int]:
        """[T] the whole trajectory so far, up to and with the generation prompt."""
        return self._ids + self._prompt

    @property
    def room(self) -> int | None:
        """Tokens that the next message may have; None where nothing limits it."""
        if self._codec is None or self._max_context is None:
            return None
        return self._max_context - len(self._ids) - len(self._prompt)

    def start(self) -> None:
        """Resets the environment for this episode."""
        self._guarded(self._start)

    def take(self, reply: Reply, policy_s: float) -> None:
        """Gives an assistant message to the environment.

        Args:
            reply: The message; one that its cap cut short ends the episode.
            policy_s: How long the policy took, seconds.
        """
        self._guarded(lambda: self._take(reply, policy_s))

    def finish(self, reason: EndReason, error: str | None = None) -> None:
        """Ends the episode from outside.

        Args:
            reason: Why.
            error: What went wrong, where the reason is an error.
        """
        self._guarded(lambda: self._finish(reason))
        if error is not None:
            self._error = error

    def give_up(self, env_state: Literal["broken", "hung"], error: str) -> None:
        """Ends the episode as ENV_ERROR without another call of its environment."""
        self.env_state = env_state
        self.end = EndReason.ENV_ERROR
        self._error = error

    def opening_too_long(self) -> str | None:
        """What is wrong where no message fits behind the opening: a mistake in the config, not the agent's."""
        if self._turns or self.room is None or self.room >= 1:
            return None
        return (
            f"the opening of task {self.request.task.id} takes {len(self._prompt)} tokens, and a trajectory may have"
            f" {self._max_context}: raise rollout.max_context, or shorten the environment's prompt."
        )

    def n_sampled(self) -> int:
        """Tokens sampled so far, those of earlier attempts included."""
        return sum(len(turn.sampled_ids) for turn in self._turns) + sum(self._dropped.values())

    def trajectory(self) -> Trajectory:
        """The record of a finished attempt."""
        if self.end is None:
            raise UsageError(f"the episode {self.request.id} has not ended.")
        return Trajectory(
            id=self.request.id,
            task=self.request.task,
            seed=self.request.seed,
            opening=self._opening,
            turns=tuple(self._turns),
            end=self.end,
            ledger=self._ledger,
            success=self._success,
            trailing_ids=tuple(self._prompt) if self.end is EndReason.CUT else (),
            n_sampled=self.n_sampled(),
            dropped={reason: n for reason, n in self._dropped.items() if n},
            error=self._error if self.end.is_error else None,
            attempt=self.attempt,
        )

    def _guarded(self, work: Callable[[], None]) -> None:
        """The boundary to environments: what they raise ends this episode as ENV_ERROR, and no other."""
        try:
            work()
        except Exception:  # noqa: BLE001
            self.give_up("broken", traceback.format_exc())

    def _start(self) -> None:
        with self._calling(self):
            self.env.reset(seed=self.request.seed, options={"task": self.request.task})
        self._opening = self.env.messages
        if self._codec is not None:
            self._prompt = self._codec.opening(self._opening)

    def _take(self, reply: Reply, policy_s: float) -> None:
        tokens = self._tokens(reply)
        ids = () if tokens is None else tokens.token_ids
        if self.room is not None and len(ids) > self.room:
            self._dropped[DID_NOT_FIT] += len(ids)
            self._finish(EndReason.CONTEXT_FULL)
            return
        cut = EndReason.CONTEXT_FULL if self.room == len(ids) else EndReason.MAX_TOKENS
        with self._calling(self):
            began = time.perf_counter()
            if reply.finish_reason == "length":
                self.env.finish(cut, reply.text)
            else:
                self.env.step(reply.text)
        record = self.env.last_step
        timings = {"policy": policy_s, "env": time.perf_counter() - began, **record.timings}
        self._turns.append(
            Turn(
                prompt_ids=tuple(self._prompt),
                sampled_ids=ids,
                logprobs=() if tokens is None else tokens.logprobs,
                policy_version=0 if tokens is None else tokens.policy_version,
                finish_reason=reply.finish_reason,
                text=reply.text,
                calls=record.calls,
                results=record.results,
                malformed=record.malformed,
                reward=record.reward,
                ledger=record.ledger,
                timings=timings,
            )
        )
        self._ids += [*self._prompt, *ids]
        self._prompt = []
        self.tool_s += sum(result.duration_s for result in record.results)
        if record.end is not None:
            self._ended(record)
        elif self._codec is not None:
            self._prompt = self._codec.between(record.new_messages)

    def _finish(self, reason: EndReason) -> None:
        with self._calling(self):
            self.env.finish(reason)
        record = self.env.last_step
        if self._turns:
            # What the end earns without a message of its own is earned by the last message.
            last = self._turns[-1]
            ledger = record.ledger if last.ledger is None else last.ledger
            self._turns[-1] = replace(last, reward=last.reward + record.reward, ledger=ledger)
        self._ended(record)

    def _ended(self, record: StepRecord) -> None:
        self.end = record.end
        self._ledger = self.env.ledger
        self._success = record.success
        self._error = record.error

    def _tokens(self, reply: Reply) -> Generation | None:
        if reply.tokens is not None or self._codec is None:
            return reply.tokens
        encode = self._codec.encode_content if reply.finish_reason == "length" else self._codec.encode_reply
        ids = tuple(encode(reply.text))
        return Generation(ids, (0.0,) * len(ids), reply.finish_reason)
