"""ToolEnv: a Gymnasium environment whose actions are assistant messages and whose tools are methods."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from pydantic import BaseModel, ConfigDict

from agentrl._choose import TaskChooser, folder_of, read_settings
from agentrl._info import reset_info, step_info
from agentrl._step import Stepper, encodable, error_record
from agentrl.episode import LiveEpisode, StepRecord, transcript
from agentrl.errors import ConfigError, UsageError
from agentrl.formats import Format, get_format
from agentrl.policy import MessagePolicy
from agentrl.reward.evidence import evidence_of
from agentrl.reward.tree import RewardTree, Source
from agentrl.spaces import TextSpace
from agentrl.tools import Tool, tools_of
from agentrl.types import JSON, EndReason, Message, Task, ToolSchema

StepReturn = tuple[str, float, bool, bool, dict[str, Any]]


class NoSettings(BaseModel):
    """The settings of an environment that has none."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ToolEnv(gymnasium.Env[str, str]):
    """An environment for agents that use tools: subclass it, give it tasks, a world, tools and a reward.

    An action is an assistant message, an observation the text that answers it. One thread uses an environment at a
    time. The life of an episode: `reset` calls `setup`, each `step` parses a message, runs its tool calls and scores
    the turn, the end scores the episode and calls `teardown`.

    Attributes:
        name: Of the environment, as its tasks carry it; the class's name where not given.
        system_prompt: What the system message starts with; tools and the budget of messages follow.
        settings_model: A pydantic model of the environment's settings.
        max_turns: Assistant messages in one episode.
        plain_text: What a message without a call is: `malformed`, or the `answer` that ends the episode.
        reward: The reward tree: a TOML file beside the module, or a tree or component made in Python.
        splits: Names that `tasks` takes.
        format: How tool calls are written.
        settings: The settings in force.
        reward_tree: The reward in force.
        tool_objects: The tools by name.
        tools: Their schemas.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 (as in gymnasium.Env)
    name: ClassVar[str] = ""
    system_prompt: str = ""
    settings_model: ClassVar[type[BaseModel]] = NoSettings
    max_turns: int = 8
    plain_text: ClassVar[Literal["malformed", "answer"]] = "malformed"
    reward: ClassVar[Source | None] = None
    splits: ClassVar[tuple[str, ...]] = ("train",)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name:
            cls.name = cls.__name__

    def __init__(
        self,
        *,
        format: str | Format = "hermes",  # noqa: A002 (the word for it)
        settings: Mapping[str, JSON] | BaseModel | None = None,
        reward: Source | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        """Makes an environment; nothing is built before `reset`.

        Args:
            format: Tool-call format, by name or itself.
            settings: Settings by name; the environment's defaults where not given.
            reward: A reward in the place of the environment's own.
            max_turns: Assistant messages in one episode.
            render_mode: None, or `ansi`: `render` returns the conversation.

        Raises:
            ConfigError: If a setting, the number of turns, or a tool cannot be used.
            RewardError: If the reward cannot be used.
            RegistryError: If the format is unknown.
        """
        if max_turns is not None:
            self.max_turns = max_turns
        if self.max_turns < 1:
            raise ConfigError(f"{self.name}: expected max_turns to be at least 1, found {self.max_turns}.")
        if render_mode not in (None, *self.metadata["render_modes"]):
            raise ConfigError(f"{self.name}: expected render_mode to be None or 'ansi', found {render_mode!r}.")
        self.render_mode = render_mode
        self.observation_space = TextSpace()
        self.action_space = TextSpace()
        self.format = get_format(format) if isinstance(format, str) else format
        self.settings = read_settings(self.settings_model, settings, self.name)
        self.reward_tree = self.__load_reward(reward)
        self.tool_objects: Mapping[str, Tool] = tools_of(type(self))
        self.tools: tuple[ToolSchema, ...] = tuple(tool.schema for tool in self.tool_objects.values())
        # Two underscores: a subclass may use any name of its own.
        self.__evidence = evidence_of(type(self))
        self.__tasks = TaskChooser(self)
        self.__stepper = Stepper(self, self.format, self.tool_objects, self.reward_tree, self.plain_text == "answer")
        self.__lock = threading.Lock()
        self.__episode: LiveEpisode | None = None
        self.__built = False
        self.__last = StepRecord()
        self.__ledger: JSON = None

    # What a subclass gives.

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, the same every time; may be endless (a seeded generator behind `__getitem__`).

        Args:
            split: One of `splits`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define tasks(split).")

    def setup(self, task: Task, rng: np.random.Generator) -> str:
        """Builds the world of a task.

        Args:
            task: The task.
            rng: The only randomness there is: seeded by the episode's seed.

        Returns:
            The opening message; the task's instruction where a subclass has no world to build.
        """
        del rng
        return task.instruction

    def teardown(self) -> None:
        """Takes the world down. Called once after each `setup`, also one that failed half-way, and after errors."""

    def expert(self, task: Task) -> MessagePolicy:
        """A policy that solves the task by tools, where the environment has one.

        Args:
            task: The task.

        Raises:
            UsageError: If the environment has none.
        """
        raise UsageError(f"{self.name} has no expert for {task.id!r}: define expert(task), or demonstrate otherwise.")

    def honest(self, task: Task) -> dict[str, MessagePolicy]:
        """Other right ways to solve the task, by name; each must earn the maximum.

        Args:
            task: The task.
        """
        del task
        return {}

    def cheats(self, task: Task) -> dict[str, MessagePolicy]:
        """Wrong ways that look right, by name; each must stay at the floor.

        Args:
            task: The task.
        """
        del task
        return {}

    def end_with(self, reason: EndReason) -> None:
        """For tools: the episode ends with this reason once the tool has returned.

        Args:
            reason: GAVE_UP, FORBIDDEN, AGENT_FAULT or another; an error end where the world broke.
        """
        self.__begun("end_with").requested_end = reason

    # What happened so far.

    @property
    def task(self) -> Task:
        """The task of the episode that runs, or ran last."""
        return self.__begun("task").task

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation so far: system, user, assistant, tool."""
        return tuple(self.__episode.messages) if self.__episode else ()

    @property
    def end(self) -> EndReason | None:
        """Why the episode ended; None while it runs."""
        return self.__episode.end if self.__episode else None

    @property
    def last_step(self) -> StepRecord:
        """What the last `step` or `finish` came to."""
        return self.__last

    @property
    def ledger(self) -> JSON:
        """The final ledger of the episode; None while it runs and where it ended in an error."""
        return self.__ledger

    @property
    def success(self) -> bool | None:
        """Whether the objective was met; None while the episode runs and where it cannot be told."""
        return self.__last.success

    @property
    def timings(self) -> Mapping[str, float]:
        """Seconds per stage of the last step."""
        return self.__last.timings

    @property
    def calls(self) -> int:
        """Tool calls made in the episode."""
        return sum(len(turn.results) for turn in self.__episode.turns) if self.__episode else 0

    @property
    def malformed_count(self) -> int:
        """Malformed messages in the episode."""
        return sum(turn.malformed is not None for turn in self.__episode.turns) if self.__episode else 0

    @property
    def turns_used(self) -> int:
        """Assistant messages in the episode."""
        return self.__episode.n_turns if self.__episode else 0

    # The five calls of Gymnasium, and finish.

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Starts an episode; one that still runs is torn down first.

        Args:
            seed: Of the world, and of the draw of the task where none is named. Two resets with the same task and seed
                are equal byte for byte. Without it, one follows from the seeds before.
            options: `task`, a Task or the id of one, and `split`.

        Returns:
            The opening message, and the info: `messages`, `tools`, `task`.

        Raises:
            TaskError: If there is no such task.
            UsageError: If another call on this environment runs.
        """
        with self.__alone("reset"):
            self.__tear_down()
            super().reset(seed=seed)
            episode_seed = int(self.np_random.integers(2**63)) if seed is None else int(seed)
            task = self.__tasks.choose(options, episode_seed)
            episode = LiveEpisode(self, task, self.max_turns, self.__evidence)
            self.__episode, self.__last, self.__ledger = episode, StepRecord(), None
            with self.__torn_down_on_error():
                self.__built = True
                opening = self.setup(task, np.random.default_rng([1, episode_seed]))
                if not isinstance(opening, str):
                    raise ConfigError(
                        f"{self.name}.setup must return the opening message, found {type(opening).__name__}."
                    )
                opening = encodable(opening)
                episode.messages += [Message("system", self.__system_message()), Message("user", opening)]
                self.reward_tree.begin(episode)
            return opening, reset_info(episode, self.tools)

    def step(self, message: str) -> StepReturn:
        """Takes an assistant message: parses it, runs its tool calls in order, and scores the turn.

        Args:
            message: The message; anything at all.

        Returns:
            The text of the results, the reward, whether the task is over, whether a budget or an error ended it, and
            the info: as that of `reset`, with `calls`, `results`, `malformed`, `ledger`, and at the end `end`,
            `success` and, where there is no score, `unscored`. An end by an error has reward 0.0 and is truncated.

        Raises:
            UsageError: If no episode runs, or another call on this environment does.
        """
        with self.__alone("step"):
            episode = self.__running("step")
            if not isinstance(message, str):
                raise UsageError(f"step takes the assistant message, a str; found {type(message).__name__}.")
            with self.__torn_down_on_error():
                return self.__returned(episode, self.__stepper.step(episode, message))

    def finish(self, reason: EndReason, message: str | None = None) -> StepReturn:
        """Ends the episode for a reason that only the rollout knows; scores it (unless it is an error), tears down.

        Args:
            reason: MAX_TOKENS, CONTEXT_FULL, TIME_LIMIT, CUT, POLICY_ERROR, GAVE_UP, or another.
            message: An assistant message that was cut before it could be acted on: counted as a turn, not parsed.

        Returns:
            As `step` does.

        Raises:
            UsageError: If no episode runs, or another call on this environment does.
        """
        with self.__alone("finish"):
            episode = self.__running("finish")
            with self.__torn_down_on_error():
                return self.__returned(episode, self.__stepper.finish(episode, EndReason(reason), message))

    def render(self) -> str | None:
        """The conversation so far, where the render mode is `ansi`."""
        return transcript(self.messages) if self.render_mode == "ansi" else None

    def close(self) -> None:
        """Tears down an episode that still runs. A subclass that holds more across episodes frees it here too.

        Raises:
            UsageError: If another call on this environment runs.
        """
        with self.__alone("close"):
            self.__tear_down()

    # How it works.

    def __load_reward(self, given: Source | None) -> RewardTree:
        if given is not None:
            return RewardTree.load(given)
        if self.reward is None:
            raise ConfigError(f"{self.name} has no reward: set `reward` in the class, or give one.")
        return RewardTree.load(self.reward, folder_of(type(self), "reward"))

    @contextmanager
    def __alone(self, what: str) -> Iterator[None]:
        if not self.__lock.acquire(blocking=False):
            raise UsageError(
                f"{what} was called while another call on the same {self.name} runs:"
                " give each thread an environment of its own."
            )
        try:
            yield
        finally:
            self.__lock.release()

    @contextmanager
    def __torn_down_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if self.__episode is not None:
                self.__episode.end = EndReason.ENV_ERROR
            self.__tear_down()
            raise

    def __tear_down(self) -> None:
        if self.__built:
            self.__built = False
            self.teardown()

    def __begun(self, what: str) -> LiveEpisode:
        if self.__episode is None:
            raise UsageError(f"{self.name}.{what}: there is no episode yet, call reset first.")
        return self.__episode

    def __running(self, what: str) -> LiveEpisode:
        episode = self.__begun(what)
        if not self.__built:
            raise UsageError(f"{self.name}.{what}: the episode is over ({episode.end or 'closed'}), call reset first.")
        return episode

    def __system_message(self) -> str:
        budget = f"You may send at most {self.max_turns} message{'s' if self.max_turns > 1 else ''}."
        parts = (self.system_prompt.strip(), self.format.render_tools(self.tools), budget)
        return encodable("\n\n".join(part for part in parts if part))

    def __returned(self, episode: LiveEpisode, record: StepRecord) -> StepReturn:
        """The boundary to a subclass's teardown: what it raises makes the end an ENV_ERROR."""
        end = record.end
        if end is not None:
            try:
                self.__tear_down()
            except Exception:  # noqa: BLE001
                end = EndReason.ENV_ERROR
                record = error_record(record, end, traceback.format_exc())
            episode.end = end
            self.__ledger = None if end.is_error else episode.ledger
        self.__last = record
        shown = record.new_messages or record.results
        return (
            "\n\n".join(part.content for part in shown),
            record.reward,
            end is not None and end.is_terminated,
            end is not None and not end.is_terminated,
            step_info(episode, self.tools, record, self.__ledger),
        )
