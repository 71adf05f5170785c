"""Every noun that crosses a module border, frozen.

Shape suffixes used throughout agentrl: `_B` episode or row, `_T` token of a trajectory, `_N` model (action) token,
`_V` vocabulary entry, `_K` turn.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from agentrl.errors import InvariantError
from agentrl.outcome import EndReason as EndReason  # a noun too: it is imported from here

JSON = Any
"""None, bool, int, float, str, or lists and string-keyed dicts of these."""

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length"]


def canonical_json(value: JSON) -> str:
    """The one JSON text of a value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Task:
    """One task of an environment.

    Attributes:
        id: Unique inside its environment, stable for ever: `train/000017`.
        env: The environment's name.
        instruction: What is asked, in words.
        data: JSON-able; whatever the environment needs to build the world and to verify.
        split: `train`, `dev`, `heldout`, or another name that the environment declares.
    """

    id: str
    env: str
    instruction: str
    data: Mapping[str, JSON] = field(default_factory=dict)
    split: str = "train"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, in hex: two tasks with one digest are the same task."""
        content = canonical_json([self.id, self.env, self.instruction, dict(self.data), self.split])
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it; the arguments are not yet validated."""

    name: str
    arguments: Mapping[str, JSON]


ToolErrorKind = Literal["unknown_tool", "bad_arguments", "tool_error", "deadline"]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave back, as the model reads it.

    Attributes:
        name: The tool that was called.
        content: The text that the model sees.
        error_kind: None where the tool ran and returned.
        duration_s: Wall time of the tool, seconds.
        truncated: Bytes left out of the middle of the output, 0 where it is whole.
    """

    name: str
    content: str
    error_kind: ToolErrorKind | None = None
    duration_s: float = 0.0
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `name` is the tool's, where the role is `tool`."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None

    def as_dict(self) -> dict[str, JSON]:
        """Role and content (and a tool's name): the shape that chat templates and endpoints read."""
        shown: dict[str, JSON] = {"role": self.role, "content": self.content}
        if self.name is not None:
            shown["name"] = self.name
        return shown


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool as the model is told of it.

    Attributes:
        name: The tool's name.
        description: The docstring's first paragraph.
        parameters: JSON schema of an object: `properties`, `required`.
    """

    name: str
    description: str
    parameters: Mapping[str, JSON]

    def as_openai(self) -> dict[str, JSON]:
        """The shape of OpenAI's function tools."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Parsed:
    """An assistant message that was understood: what was said, and the calls in order (possibly none)."""

    content: str
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Malformed:
    """An assistant message that tried to call and failed; `problem` tells the model what to mend."""

    content: str
    problem: str


@dataclass(frozen=True, slots=True)
class CutOff:
    """An assistant message that stops inside a call."""

    content: str
    problem: str


ParseResult = Parsed | Malformed | CutOff


@dataclass(frozen=True, slots=True)
class Score:
    """What a component found, and why: evidence is JSON-able and goes into the ledger."""

    value: float
    evidence: JSON = None


@dataclass(frozen=True, slots=True)
class Unscored:
    """A component that could not be computed. Never 0: the reason goes into the ledger."""

    reason: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy draws its next message.

    Attributes:
        temperature: 0 means greedy. Logprobs are always those of the distribution at this temperature (at 0: of 1).
        max_tokens: Cap of one message, tokens.
        top_p: 1.0 in training: a cut support cannot be corrected for.
        top_k: 0 means no cut; refused in training, as `min_p` is.
        min_p: 0.0 means no cut.
    """

    temperature: float = 1.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0 and self.max_tokens >= 1):
            raise ValueError(
                f"expected a temperature of 0 or more and at least 1 token, found temperature = {self.temperature} and"
                f" max_tokens = {self.max_tokens}."
            )

    @property
    def cuts_support(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """Tokens that a TokenPolicy sampled, the stop token included where `finish_reason` is `stop`.

    Attributes:
        token_ids: [N] ids as sampled.
        logprobs: [N] natural logarithms, of the distribution that was sampled from.
        finish_reason: `stop` (it ended its message) or `length` (the cap ended it).
        policy_version: Number of weight updates behind the policy that sampled.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    policy_version: int = 0

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise InvariantError(
                f"expected one logprob per sampled token, found {len(self.logprobs)} for {len(self.token_ids)} tokens:"
                " the engine must return the logprob of every token it sampled."
            )


@dataclass(frozen=True, slots=True)
class Reply:
    """An assistant message, with its tokens where the policy has them."""

    text: str
    finish_reason: FinishReason = "stop"
    tokens: Generation | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One assistant message and what the environment made of it.

    Attributes:
        prompt_ids: Token ids that were appended before the message: the opening for turn 0, what the template puts
            between turns and the observation after that. Empty where the policy has no tokens.
        sampled_ids: [N] ids that the policy sampled, the stop token included.
        logprobs: [N] the engine's logprobs of them.
        policy_version: Of the policy that sampled them.
        finish_reason: Why sampling stopped.
        text: The message as the environment read it.
        calls: Tool calls in it.
        results: What they gave back.
        malformed: What was wrong with the message, where it could not be read.
        reward: The step reward, on the last sampled token of this turn.
        ledger: The step's ledger entry (None where nothing was due).
        timings: Seconds per stage; not part of what must be equal between equal runs.
    """

    prompt_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    policy_version: int
    finish_reason: FinishReason
    text: str
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    malformed: str | None = None
    reward: float = 0.0
    ledger: JSON = None
    timings: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Packed:
    """A trajectory as flat arrays over its T tokens.

    Attributes:
        token_ids_T: int64.
        is_action_T: bool; True where the policy sampled the token.
        turn_id_T: int64; the turn that a token belongs to (an observation belongs to the turn that follows it).
        logprob_T: float64; the engine's, 0 where the token is not an action.
        reward_T: float64; a turn's reward on its last action token, 0 elsewhere.
    """

    token_ids_T: npt.NDArray[np.int64]
    is_action_T: npt.NDArray[np.bool_]
    turn_id_T: npt.NDArray[np.int64]
    logprob_T: npt.NDArray[np.float64]
    reward_T: npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a task, whole.

    Attributes:
        id: Unique in its run: `000012/train-000017/2` (iteration, task, attempt).
        task: The task.
        seed: The seed that the environment was reset with.
        opening: System and user message.
        turns: In order.
        end: Why it ended.
        ledger: The final ledger, JSON-able; None where the episode ended in an error.
        success: Whether the objective was met, as the environment says; None where unscored.
        trailing_ids: Observation and generation prompt after the last turn, packed at CUT alone.
        n_sampled: Tokens that the policy says it sampled for this episode.
        dropped: Sampled tokens that are not in `turns`, by reason.
        error: What went wrong, where `end.is_error`.
        attempt: 0 for the first try, counted up by retries after errors.
    """

    id: str
    task: Task
    seed: int
    opening: tuple[Message, ...]
    turns: tuple[Turn, ...]
    end: EndReason
    ledger: JSON = None
    success: bool | None = None
    trailing_ids: tuple[int, ...] = ()
    n_sampled: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    attempt: int = 0

    def __post_init__(self) -> None:
        kept = sum(len(turn.sampled_ids) for turn in self.turns)
        lost = sum(self.dropped.values())
        if kept + lost != self.n_sampled:
            raise InvariantError(
                f"token conservation broke in episode {self.id}: the policy sampled {self.n_sampled} tokens,"
                f" {kept} are in its turns and {lost} were dropped for a named reason ({dict(self.dropped)})."
            )
        for turn in self.turns:
            if len(turn.sampled_ids) != len(turn.logprobs):
                raise InvariantError(
                    f"episode {self.id}: {len(turn.sampled_ids)} sampled tokens with {len(turn.logprobs)} logprobs."
                )

    @property
    def reward(self) -> float:
        """Sum of the step rewards."""
        return float(sum(turn.reward for turn in self.turns))

    @property
    def n_tokens(self) -> int:
        """Length of the packed trajectory, tokens."""
        return sum(len(t.prompt_ids) + len(t.sampled_ids) for t in self.turns) + len(self.trailing_ids)

    def pack(self) -> Packed:
        """Lays the trajectory out flat; see Packed.

        Raises:
            InvariantError: If a turn has a reward but no sampled token to carry it.
        """
        ids: list[int] = []
        action: list[bool] = []
        turn_id: list[int] = []
        logprob: list[float] = []
        reward: list[float] = []
        for k, turn in enumerate(self.turns):
            n_prompt, n_sampled = len(turn.prompt_ids), len(turn.sampled_ids)
            if turn.reward != 0.0 and n_sampled == 0:
                raise InvariantError(
                    f"episode {self.id}, turn {k}: a reward of {turn.reward} has no sampled token to land on."
                )
            ids += [*turn.prompt_ids, *turn.sampled_ids]
            action += [False] * n_prompt + [True] * n_sampled
            turn_id += [k] * (n_prompt + n_sampled)
            logprob += [0.0] * n_prompt + list(turn.logprobs)
            reward += [0.0] * (n_prompt + n_sampled)
            if n_sampled:
                reward[-1] = turn.reward
        ids += self.trailing_ids
        action += [False] * len(self.trailing_ids)
        turn_id += [len(self.turns)] * len(self.trailing_ids)
        logprob += [0.0] * len(self.trailing_ids)
        reward += [0.0] * len(self.trailing_ids)
        return Packed(
            np.asarray(ids, dtype=np.int64),
            np.asarray(action, dtype=np.bool_),
            np.asarray(turn_id, dtype=np.int64),
            np.asarray(logprob, dtype=np.float64),
            np.asarray(reward, dtype=np.float64),
        )


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """One episode that a collector is asked to run.

    Attributes:
        id: The trajectory's id.
        task: The task.
        seed: Seed of the environment's reset; the policy's noise is keyed by it and the turn.
    """

    id: str
    task: Task
    seed: int
