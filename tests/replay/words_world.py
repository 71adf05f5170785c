"""A small environment whose rewards read all that a component can see, and never are the same for two episodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import agentrl
from agentrl.reward import Episode, normalised


@dataclass(frozen=True)
class Count:
    value: int
    target: int


@agentrl.component(name="words/reached")
def reached(episode: Episode) -> agentrl.Score:
    count = episode.evidence(Count)
    return agentrl.Score(float(count.value == count.target), {"value": count.value})


@agentrl.component(name="words/nearer", when="turn")
def nearer(episode: Episode) -> agentrl.Score:
    count = episode.evidence(Count)
    return agentrl.Score(1 / (1 + abs(count.value - count.target)))


@agentrl.component(name="words/letters", when="turn")
def letters(episode: Episode) -> agentrl.Score:
    """Any text counts, of the turn and of every message so far."""
    said = sum(map(ord, episode.turns[-1].text)) + sum(len(message.content) for message in episode.messages)
    return agentrl.Score((said + episode.turn + len(episode.turns[-1].results)) % 7 / 7)


class WordsEnv(agentrl.ToolEnv):
    name = "Words-v0"
    system_prompt = "You count."
    max_turns = 3
    reward = normalised((1.0, reached), (0.5, nearer), (0.5, letters))
    splits = ("train", "dev")

    def tasks(self, split):
        first = 0 if split == "train" else 50
        return [
            agentrl.Task(f"{split}/{i:06d}", self.name, f"Count to {1 + i % 5}.", {"target": 1 + i % 5}, split)
            for i in range(first, first + 24)
        ]

    def setup(self, task, rng: np.random.Generator) -> str:
        self.value = 0
        self.lucky = int(rng.integers(100))
        return f"{task.instruction} Lucky number: {self.lucky}."

    @agentrl.evidence(deadline_s=1)
    def count(self) -> Count:
        return Count(self.value, self.task.data["target"])

    @agentrl.tool
    def add(self, n: int = 1) -> str:
        """Adds to the count."""
        self.value += n
        return f"The count is {self.value}, and {self.lucky} is lucky."

    @agentrl.tool(ends=True)
    def submit(self) -> None:
        """Ends the counting."""

    def expert(self, task):
        target = task.data["target"]
        calls = [agentrl.ToolCall("add", {"n": target}), agentrl.ToolCall("submit", {})]
        return agentrl.ScriptedPolicy([self.format.render_calls("", [call], self.tools) for call in calls])
