"""Worlds of a few tokens whose best policy and values are known, and the pipeline that learns them.

A message is some digits, an observation too, and a digit is one token: what is left of a language model's task is the
assignment of credit. The pipeline is that of a run: ToolEnv, token bridge, HFPolicy, collector, learner, and a tiny
Llama that SFT has taught to read the prompt and to send messages of a length, nothing of what pays.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import agentrl
from agentrl.config import RunConfig, TinyModel
from agentrl.formats.base import PlainResults
from agentrl.learner.model import ActorCritic
from agentrl.learner.ppo import PPOLearner
from agentrl.learner.sft import SftTrainer
from agentrl.learner.tiny import make_tiny_model
from agentrl.rollout.codec import Codec
from agentrl.rollout.collector import Collector
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.load import load_model_and_tokenizer
from agentrl.train.tasks import requests_for
from agentrl.types import Message, Parsed, ToolCall, Trajectory

CHOICES = 4
"""Digits in use, so chance is 1/4."""
BATCH = 64
WORDS = "system user assistant tool You may send at most message messages"
"""What is written in all worlds besides digits."""


class Plain(PlainResults):
    """A format in which every message is a call of the only tool with the message as its argument."""

    name = "plain"

    def render_tools(self, tools):
        return ""

    def render_calls(self, content, calls, tools):
        return calls[0].arguments["text"]

    def parse(self, text, tools):
        return Parsed("", (ToolCall("play", {"text": text}),))

    def render_nudge(self, text):
        return Message("user", text)


class Tasks(Sequence):
    """Endless enough; a task is some digits."""

    def __init__(self, env: str, length: int) -> None:
        self.env, self.length = env, length

    def __len__(self) -> int:
        return 1 << 24

    def __getitem__(self, i: int) -> agentrl.Task:
        rng = random.Random(i)
        cue = "".join(str(rng.randrange(CHOICES)) for _ in range(self.length))
        return agentrl.Task(f"train/{i}", self.env, cue, {"cue": cue})


def said(episode: agentrl.Episode, turn: int = 0) -> str:
    return episode.turns[turn].text if len(episode.turns) > turn else ""


class World(agentrl.ToolEnv):
    """The prompt is some digits; whatever is played is answered with random ones.

    Attributes:
        cue: Digits of a task.
        repeats: How often the prompt says them.
        plays: Digits in a message, in the demonstrations.
        noise: Digits in an observation.
    """

    cue = 1
    repeats = 6
    plays = 3
    noise = 12

    def __init__(self, **kwargs):
        super().__init__(**({"format": Plain()} | kwargs))

    def tasks(self, split):
        return Tasks(self.name, self.cue)

    def setup(self, task, rng):
        self.rng = rng
        # Said several times, so that a model of one layer hears it among the template's tokens from the start.
        return task.instruction * self.repeats

    @agentrl.tool
    def play(self, text: str) -> str:
        """Plays.

        Args:
            text: Digits.
        """
        return "".join(map(str, self.rng.integers(CHOICES, size=self.noise)))

    def expert(self, task):
        rng = random.Random(task.id)

        def message() -> str:
            return f"{rng.randrange(CHOICES)}{task.data['cue']}{rng.randrange(CHOICES)}"[: self.plays]

        return agentrl.ScriptedPolicy([message() for _ in range(self.max_turns)])


@agentrl.component(name="world/key")
def key(episode):
    right = said(episode)[:1] == str((int(episode.task.data["cue"]) + 1) % CHOICES)
    return agentrl.Score(float(right and episode.end is agentrl.EndReason.MAX_TURNS))


class Key(World):
    """The first digit of the first message must be the key to the prompt's; it pays with the last message."""

    reward = key


class LongKey(Key):
    """Twice the turns, with shorter observations: it is about the turns."""

    max_turns = 8
    noise = 4


class Bandit(Key):
    max_turns = 1
    plays = 2


@agentrl.component(name="world/copy")
def copy(episode):
    cue = episode.task.data["cue"]
    return agentrl.Score(sum(a == b for a, b in zip(said(episode), cue, strict=False)) / len(cue))


class Copy(World):
    """The message must be the prompt; the reward, on its last token, is the share of digits that are right."""

    reward = copy
    max_turns = 1
    cue = plays = 4
    repeats = 1


@agentrl.component(name="world/lucky_key")
def lucky_key(episode):
    lucky = episode.turns[0].results[0].content if episode.turns[0].results else "0"
    return agentrl.Score(key(episode).value * float(lucky == "1"))


class Coin(Key):
    """After the first message a coin falls; only if it shows 1 does the key pay, one message later."""

    reward = lucky_key
    max_turns = 2
    plays = 2

    @agentrl.tool
    def play(self, text: str) -> str:
        """Plays.

        Args:
            text: Digits.
        """
        return str(self.rng.integers(2))


def said_right(trajectory: Trajectory) -> float:
    """Whether the first digit was the key, whatever it paid."""
    return float(trajectory.turns[0].text[:1] == str((int(trajectory.task.data["cue"]) + 1) % CHOICES))


def config_of(path: Path, **changes) -> RunConfig:
    """A run on a prepared model; `model` takes changes."""
    model = {"path": str(path), "critic": "separate", "device": "cpu"} | changes.get("model", {})
    optim = {"policy": {"lr": 2e-3}, "critic": {"lr": 4e-3}, "target_kl": None}
    ppo = {"epochs": 2, "minibatches": 2, **optim}
    rollout = {"concurrency": BATCH, "threads": 1, "sampling": {"max_tokens": 6}}
    sft = {"steps": 120, "batch_episodes": 16, "optim": {"lr": 5e-3, "warmup_steps": 5}}
    return RunConfig.model_validate(
        {"name": "t", "seed": 1, "threads": 1, "model": model, "rollout": rollout, "ppo": ppo, "sft": sft}
    )


class Pipeline:
    """Model, environment and learner of a run, without its folder.

    Attributes:
        model: The actor-critic.
        learner: Of PPO; made by `begin`.
    """

    def __init__(self, make: Callable[[], agentrl.ToolEnv], config: RunConfig) -> None:
        self.config = config
        loaded, tokenizer = load_model_and_tokenizer(config.model.path, "cpu")
        self.tokenizer = tokenizer
        self.codec = Codec(tokenizer, eos_ids=loaded.generation_config.eos_token_id)
        self.model = ActorCritic(loaded, config.model, seed=config.seed)
        self.policy = HFPolicy(self.model.policy, self.codec, seed=config.seed)
        self.collector = Collector(make, self.policy, self.codec, config.rollout, config.seed)
        self.tasks, self.at = make().tasks("train"), 0
        self.learner: PPOLearner | None = None

    def begin(self) -> PPOLearner:
        self.model.begin_rl(reference=False)
        self.learner = PPOLearner(self.model, self.config)
        return self.learner

    def collect(self) -> list[Trajectory]:
        tasks = [self.tasks[self.at * BATCH + place] for place in range(BATCH)]
        self.at += 1
        return self.collector.collect(requests_for(tasks, 1, f"{self.at:06d}", self.config.seed))

    def update(self, batch: Sequence[Trajectory]) -> dict[str, float]:
        metrics = self.learner.update(batch)
        self.policy.weights_changed()
        return metrics

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.collector.close()


def prepare(make: Callable[[], agentrl.ToolEnv], folder: Path) -> Path:
    """Makes a model and teaches it a world's language: how long a message is. What its message begins with is random.

    Returns:
        Its folder.
    """
    tiny = TinyModel(vocab_size=320, hidden_size=32, layers=1, intermediate_size=64)
    make_tiny_model([], [WORDS] * 8, tiny, 1, folder / "made")
    config = config_of(folder / "made")
    with Pipeline(make, config) as pipeline:
        # As it is made its attention is all but even, and takes long to become anything else.
        with torch.no_grad():
            for weight in pipeline.model.policy.parameters():
                if weight.ndim == 2:
                    weight.mul_(10.0)
        tasks = [pipeline.tasks[10**6 + place] for place in range(256)]
        with Collector(make, lambda env, task: env.expert(task), pipeline.codec, config.rollout) as collector:
            demonstrations = collector.collect(requests_for(tasks, 1, "sft", 1))
        trainer = SftTrainer(pipeline.model, config)
        for _ in range(config.sft.steps):
            trainer.step(trainer.next_batch(demonstrations))
        pipeline.model.policy.save_pretrained(folder / "taught")
        pipeline.tokenizer.save_pretrained(folder / "taught")
    return folder / "taught"
