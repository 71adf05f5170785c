"""A person at the terminal as the policy: `agentrl play`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from agentrl.env import ToolEnv
from agentrl.episode import StepRecord
from agentrl.errors import PolicyError, did_you_mean
from agentrl.formats import Format, signature
from agentrl.formats.schemas import properties_of, raw_argument
from agentrl.reward.explain import inert, render_ledger
from agentrl.strict_json import BadJSONError, read_json
from agentrl.types import JSON, EndReason, Message, Reply, Sampling, Task, ToolCall, ToolSchema

_HELP = """Write a message as the model would, and end it with an empty line. Or:
  /call TOOL {"argument": value}   makes a tool call; a tool with one text argument takes the text as it is
  /tools                           shows the tools
  /quit                            gives up (so does the end of the input)
  /help                            shows this"""
_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "yellow"}


class LeftError(PolicyError):
    """The person has left."""


class HumanPolicy:
    """Shows a person the conversation, and takes what they type as the assistant's message."""

    def __init__(self, fmt: Format, console: Console | None = None, stream: TextIO | None = None) -> None:
        """Makes the policy.

        Args:
            fmt: How the environment's tool calls are written; `/call` writes them so.
            console: Where to show; the terminal where not given.
            stream: Where lines are read from; the terminal where not given.
        """
        self._format = fmt
        self._console = console or Console()
        self._stream = stream
        self._shown = 0

    def act(self, messages: Sequence[Message], tools: Sequence[ToolSchema], sampling: Sampling) -> Reply:  # noqa: ARG002
        """Shows what is new and reads the next message.

        Raises:
            LeftError: If the person quits or the input ends.
        """
        if self._shown > len(messages):
            self._shown = 0
        if self._shown == 0:
            show_tools(self._console, tools)
            self._print(_HELP, "dim")
        for message in messages[self._shown :]:
            if message.role != "assistant":
                self._print(f"[{message.name or message.role}]\n{message.content}\n", _STYLES[message.role])
        self._shown = len(messages)
        while True:
            text = self._typed(tools)
            if text is not None:
                return Reply(text)

    def _typed(self, tools: Sequence[ToolSchema]) -> str | None:
        first = self._line("> ")
        command, _, rest = first.strip().partition(" ")
        if command == "/call":
            return self._call(rest.strip(), tools)
        if command == "/quit":
            raise LeftError("the person gave up.")
        if command == "/tools":
            show_tools(self._console, tools)
            return None
        if command.startswith("/"):
            self._print(_HELP, "dim")
            return None
        if not command:
            return None
        lines = [first]
        while line := self._line(". "):
            lines.append(line)
        return "\n".join(lines)

    def _call(self, typed: str, tools: Sequence[ToolSchema]) -> str | None:
        name, _, text = typed.partition(" ")
        tool = next((tool for tool in tools if tool.name == name), None)
        if tool is None:
            self._print(f"There is no tool {name!r}.{did_you_mean(name, (tool.name for tool in tools))}", "red")
            return None
        try:
            arguments = _arguments(tool, text.strip())
            message = self._format.render_calls("", [ToolCall(name, arguments)], tools)
        except ValueError as problem:
            self._print(f"{problem}. Write: /call {signature(tool)}, with the arguments as a JSON object.", "red")
            return None
        self._print(message, "green")
        return message

    def _line(self, prompt: str) -> str:
        if self._stream is None:
            try:
                return self._console.input(prompt)
            except EOFError:
                raise LeftError("the input ended.") from None
        line = self._stream.readline()
        if not line:
            raise LeftError("the input ended.")
        return line.rstrip("\r\n")

    def _print(self, text: str, style: str) -> None:
        say(self._console, text, style)


def _arguments(tool: ToolSchema, text: str) -> Mapping[str, JSON]:
    raw = raw_argument(tool)
    if not text:
        return {}
    if raw is not None and not text.startswith("{"):
        return {raw: text}
    value, end = read_json(text)
    if not isinstance(value, dict) or end != len(text):
        raise BadJSONError("Expected one JSON object")
    return value


def say(console: Console, text: str, style: str) -> None:
    """Prints text as it is: neither the terminal nor rich obeys what is in it.

    Args:
        console: Where to.
        text: Anything.
        style: Its style.
    """
    console.print(Text(inert(text, limit=len(text)), style=style), soft_wrap=True)


def show_tools(console: Console, tools: Sequence[ToolSchema]) -> None:
    """Prints the tools: signature, description, arguments.

    Args:
        console: Where to.
        tools: The tools.
    """
    for tool in tools:
        say(console, f"{signature(tool)}  {tool.description}", "bold")
        for name, schema in properties_of(tool).items():
            if schema.get("description"):
                say(console, f"    {name}: {schema['description']}", "dim")


def play(
    env: ToolEnv,
    task: Task | str | None = None,
    console: Console | None = None,
    *,
    stream: TextIO | None = None,
    seed: int = 0,
    split: str | None = None,
) -> StepRecord:
    """Plays one episode with a person as the policy, and shows the reward's ledger at the end.

    Args:
        env: The environment.
        task: A task or the id of one; drawn by the seed where not given.
        console: Where to show; the terminal where not given.
        stream: Where lines are read from; the terminal where not given.
        seed: Of the episode.
        split: Where the task is looked for or drawn from.

    Returns:
        What the last step came to.
    """
    console = console or Console()
    options = {key: value for key, value in (("task", task), ("split", split)) if value is not None}
    env.reset(seed=seed, options=options)
    policy = HumanPolicy(env.format, console, stream)
    say(console, f"{env.name}: task {env.task.id}, seed {seed}, at most {env.max_turns} messages", "bold")
    try:
        while env.last_step.end is None:
            env.step(policy.act(env.messages, env.tools, Sampling()).text)
    except LeftError:
        env.finish(EndReason.GAVE_UP)
    finally:
        env.close()
    last = env.last_step
    for result in last.results:
        say(console, f"[{result.name}]\n{result.content}\n", _STYLES["tool"])
    say(console, f"The episode ended: {last.end}.", "bold")
    if last.error is not None:
        say(console, last.error, "red")
    if env.ledger is not None:
        console.print(render_ledger({"ledger": env.ledger}))
    return last
