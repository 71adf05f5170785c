"""A small environment that the tests share: count to a number, with tools for every way in which a tool can end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pydantic import BaseModel

import agentrl
from agentrl.errors import WorkerTimeout
from agentrl.reward import Episode


def fence(name: str, body: str = "") -> str:
    """A call in the fenced format."""
    return f"```{name}\n{body}\n```" if body else f"```{name}\n```"


@dataclass(frozen=True)
class Count:
    value: int
    target: int
    computed: int


@agentrl.component(name="toy/reached")
def reached(episode: Episode) -> agentrl.Score:
    count = episode.evidence(Count)
    return agentrl.Score(float(count.value == count.target), {"value": count.value})


class ToySettings(BaseModel):
    largest: int = 5
    broken: str = ""


class ToyTasks(Sequence[agentrl.Task]):
    def __len__(self) -> int:
        return 2**31 - 1

    def __getitem__(self, i):
        return agentrl.Task(f"train/{i:06d}", "Toy-v0", f"Count to {1 + i % 5}.", {"target": 1 + i % 5})


class ToyEnv(agentrl.ToolEnv):
    name = "Toy-v0"
    system_prompt = "You count."
    settings_model = ToySettings
    reward = agentrl.leaf(reached)
    splits = ("train", "dev")

    def tasks(self, split):
        return ToyTasks()

    def setup(self, task, rng: np.random.Generator) -> str:
        self.value = 0
        self.computed = 0
        self.torn_down = 0
        if self.settings.broken == "setup":
            raise RuntimeError("setup broke")
        return f"{task.instruction} Lucky number: {rng.integers(10**9)}."

    def teardown(self) -> None:
        self.torn_down += 1
        if self.settings.broken == "teardown":
            raise RuntimeError("teardown broke")

    @agentrl.evidence(deadline_s=1)
    def count(self) -> Count:
        self.computed += 1
        if self.settings.broken == "evidence":
            raise RuntimeError("evidence broke")
        return Count(self.value, self.task.data["target"], self.computed)

    @agentrl.tool
    def add(self, n: int = 1) -> str:
        """Adds to the count.

        Args:
            n: How much.
        """
        if n > self.settings.largest:
            raise agentrl.ToolError(f"at most {self.settings.largest} at a time.")
        self.value += n
        return f"The count is {self.value}."

    @agentrl.tool(mutates=False, max_output_bytes=64)
    def echo(self, text: str) -> str:
        """Says it again."""
        return text

    @agentrl.tool(deadline_s=0.01)
    def trouble(self, kind: str) -> None:
        """Makes trouble."""
        if kind == "sleep":
            time.sleep(0.1)
        elif kind == "timeout":
            raise WorkerTimeout("killed")
        elif kind == "interrupt":
            raise KeyboardInterrupt
        elif kind == "reenter":
            self.step("again")
        elif kind == "give_up":
            self.end_with(agentrl.EndReason.GAVE_UP)
        elif kind == "sandbox":
            self.end_with(agentrl.EndReason.SANDBOX_ERROR)
        elif kind == "bug":
            raise ValueError("secret-of-the-environment")

    @agentrl.tool(ends=True)
    def submit(self) -> None:
        """Ends the counting."""

    def expert(self, task):
        target = task.data["target"]
        calls = [agentrl.ToolCall("add", {"n": target}), agentrl.ToolCall("submit", {})]
        return agentrl.ScriptedPolicy([self.format.render_calls("", [call], self.tools) for call in calls])
