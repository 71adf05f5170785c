"""What the collector adds to the environment's own time: 256 scripted episodes at once, tokens included.

Prints milliseconds per turn; the goal is at most 2.

    python benchmarks/collector_overhead.py
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from agentrl import Score, ScriptedPolicy, Task, ToolCall, ToolEnv, component, leaf, tool
from agentrl.config import RolloutConfig, TinyModel
from agentrl.formats import get_format
from agentrl.reward import Episode
from agentrl.rollout.codec import Codec
from agentrl.rollout.collector import Collector
from agentrl.types import EpisodeRequest

EPISODES, TURNS = 256, 8


@component(name="bench/done")
def done(episode: Episode) -> Score:
    """Always met."""
    del episode
    return Score(1.0)


class CountEnv(ToolEnv):
    """As little as an environment can do."""

    name = "Count"
    system_prompt = "Count."
    max_turns = TURNS
    reward = leaf(done)

    def tasks(self, split: str) -> Sequence[Task]:
        """None: the requests bring theirs."""
        del split
        return ()

    @tool
    def add(self, n: int) -> str:
        """Adds.

        Args:
            n: How much.
        """
        return f"added {n}"


def main() -> None:
    """Times the environment alone, then the collector."""
    from agentrl.learner.tiny import train_tokenizer

    codec = Codec(train_tokenizer(["added 1", "Count."], TinyModel()))
    message = get_format("hermes").render_calls("", [ToolCall("add", {"n": 1})], ())
    requests = [EpisodeRequest(f"{k:04d}", Task(f"train/{k}", "Count", "Count."), k) for k in range(EPISODES)]

    began = time.perf_counter()
    for request in requests:
        env = CountEnv()
        env.reset(seed=request.seed, options={"task": request.task})
        while env.end is None:
            env.step(message)
    alone_s = time.perf_counter() - began

    config = RolloutConfig(concurrency=EPISODES)
    with Collector(CountEnv, ScriptedPolicy(lambda messages: message), codec, config) as collector:  # noqa: ARG005
        began = time.perf_counter()
        found = collector.collect(requests)
        took_s = time.perf_counter() - began
    turns = sum(len(trajectory.turns) for trajectory in found)
    print(f"{1000 * (took_s - alone_s) / turns:.3f} ms per turn beside the environment's {1000 * alone_s / turns:.3f}")


if __name__ == "__main__":
    main()
