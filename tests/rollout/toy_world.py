"""A small environment with everything that a collector has to cope with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import agentrl
from agentrl.reward import Episode
from agentrl.types import EpisodeRequest, Task


@dataclass(frozen=True)
class Total:
    value: int


@agentrl.component(name="toy/total")
def total(episode: Episode) -> agentrl.Score:
    return agentrl.Score(min(episode.evidence(Total).value, 10) / 10)


@agentrl.component(name="toy/turn", when="turn", bounds=(-1.0, 0.0))
def turn_cost(episode: Episode) -> agentrl.Score:
    return agentrl.Score(-0.25)


class ToyTasks(Sequence[Task]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i):
        return Task(f"train/{i:03d}", "Toy", f"Count to {i}.", {"n": i})


class Log:
    """What the environments of one test did."""

    def __init__(self) -> None:
        self.made: list[ToyEnv] = []
        self.set_up: list[str] = []
        self.closed = 0
        self.torn_down = 0
        self.failures_left = 0
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.at_once = 0
        self.most_at_once = 0


class ToyEnv(agentrl.ToolEnv):
    name = "Toy"
    system_prompt = "Count."
    max_turns = 4
    reward = agentrl.weighted_sum((1.0, total), (1.0, turn_cost))

    def __init__(self, log: Log | None = None, **kwargs):
        super().__init__(**({"format": "fenced"} | kwargs))
        self.log = log or Log()
        self.log.made.append(self)
        self.sum = 0

    def tasks(self, split):
        return ToyTasks()

    def setup(self, task, rng):
        self.sum = 0
        self.log.set_up.append(task.id)
        if task.data.get("trouble") == "setup":
            raise OSError("no world today")
        return f"{task.instruction} Your number is {rng.integers(1000)}."

    def teardown(self):
        self.log.torn_down += 1

    def close(self):
        super().close()
        self.log.closed += 1

    @agentrl.evidence(deadline_s=5)
    def measure(self) -> Total:
        if self.task.data.get("trouble") == "evidence":
            raise OSError("the scales broke")
        return Total(self.sum)

    @agentrl.tool
    def add(self, n: int) -> str:
        """Adds.

        Args:
            n: How much.
        """
        with self.log.lock:
            self.log.at_once += 1
            self.log.most_at_once = max(self.log.most_at_once, self.log.at_once)
        time.sleep(0.001)
        with self.log.lock:
            self.log.at_once -= 1
        self.sum += n
        return f"sum {self.sum}"

    @agentrl.tool(deadline_s=0.05)
    def trouble(self, kind: str) -> str:
        """Makes trouble.

        Args:
            kind: Which.
        """
        if kind == "hang":
            self.log.release.wait(20)
        elif kind == "sleep":
            time.sleep(0.3)
        elif kind == "sometimes" and self.log.failures_left > 0:
            self.log.failures_left -= 1
            raise OSError("lost the connection")
        elif kind == "interrupt":
            raise KeyboardInterrupt
        return "fine"

    @agentrl.tool(ends=True)
    def submit(self) -> None:
        """Ends."""

    def expert(self, task):
        return agentrl.ScriptedPolicy([add(task.data["n"] % 10), SUBMIT])


SUBMIT = "```submit\n```"


def add(n: int) -> str:
    return f'```add\n{{"n": {n}}}\n```'


def trouble(kind: str) -> str:
    return f"```trouble\n{kind}\n```"


def requests_of(n: int, **data) -> list[EpisodeRequest]:
    return [
        EpisodeRequest(f"e{k:03d}", Task(f"train/{k:03d}", "Toy", f"Count to {k}.", {"n": k, **data}), seed=100 + k)
        for k in range(n)
    ]
