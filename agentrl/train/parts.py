"""The live objects of a run: environment factory, model with critic, token bridge, and the policy that samples."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agentrl.config import RunConfig
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError
from agentrl.formats import format_of_template
from agentrl.learner.model import ActorCritic
from agentrl.policy import MessagePolicy
from agentrl.registry import make_env
from agentrl.reward import RewardTree
from agentrl.rollout.codec import Codec
from agentrl.rollout.collector import Collector
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.load import load_model_and_tokenizer
from agentrl.types import EpisodeRequest, Task, Trajectory

TINY_FORMAT = "fenced"
"""The tool-call format of models made from nothing, where the config says `auto`: the one that takes fewest tokens."""


@dataclass(frozen=True)
class Parts:
    """What the stages of a run work with.

    Attributes:
        make: Makes an environment as the config says, in the model's tool-call format.
        tokenizer: Of the model.
        codec: The token bridge.
        model: Policy, critic and reference.
        policy: Samples from `model.policy`; the two share their weights.
    """

    make: Callable[[], ToolEnv]
    tokenizer: Any
    codec: Codec
    model: ActorCritic
    policy: HFPolicy


def set_threads(config: RunConfig) -> int:
    """Gives torch the configured number of threads, one per core where it is 0.

    Returns:
        The number, for the manifest.
    """
    threads = config.threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    return threads


def environment_factory(config: RunConfig, chat_template: str | None) -> Callable[[], ToolEnv]:
    """A function that makes the configured environment.

    Args:
        config: `env` is read.
        chat_template: What `format = "auto"` is told from; None for a model made from nothing.

    Raises:
        RegistryError: If there is no such environment.
        ConfigError: If a setting cannot be used, or the format cannot be told.
    """
    name = config.env.format
    if name == "auto":
        name = TINY_FORMAT if config.model.tiny is not None else format_of_template(chat_template)
    return functools.partial(
        make_env,
        config.env.id,
        format=name,
        settings=config.env.settings,
        reward=config.env.reward,
        max_turns=config.env.max_turns,
    )


def build_parts(config: RunConfig, source: str | Path) -> Parts:
    """Loads the model and everything around it.

    Args:
        config: The run's.
        source: A Hugging Face folder, hub id or packaged name.

    Raises:
        MissingError: If weights or packages are missing.
        TemplateError: If the chat template cannot be trained on.
        ConfigError: If an environment setting cannot be used.
    """
    loaded, tokenizer = load_model_and_tokenizer(str(source), config.model.device, config.model.dtype)
    codec = Codec(tokenizer, eos_ids=loaded.generation_config.eos_token_id)
    make = environment_factory(config, tokenizer.chat_template)
    env = make()
    check_shaping(config, env.reward_tree)
    env.close()
    model = ActorCritic(
        loaded, config.model, logit_chunk=config.ppo.logit_chunk, seed=config.seed, packing=config.ppo.packing
    )
    policy = HFPolicy(model.policy, codec, kv_cache_mib=config.rollout.kv_cache_mib, seed=config.seed)
    return Parts(make, tokenizer, codec, model, policy)


def check_shaping(config: RunConfig, tree: RewardTree) -> None:
    """Potential-based shaping leaves the best policy alone only under the learner's own discount.

    Raises:
        ConfigError: If a shaping addend discounts otherwise than the learner (Ng, Harada and Russell, 1999).
    """
    advantage = config.ppo.advantage
    for shaping in tree.shapings:
        if (shaping.gamma_turn, 1.0) != (advantage.gamma_turn, advantage.gamma_token):
            raise ConfigError(
                f"the reward's shaping has gamma_turn = {shaping.gamma_turn}, and ppo.advantage has gamma_turn ="
                f" {advantage.gamma_turn} and gamma_token = {advantage.gamma_token}: expected the same gamma_turn and a"
                " gamma_token of 1. Otherwise shaping changes which policy is best."
            )


def check_groups(config: RunConfig, tree: RewardTree) -> None:
    """A reward that compares the attempts at a task needs two of each, and no critic beside it.

    Raises:
        ConfigError: If the tree has such a root and the config does not go with it.
    """
    node = tree.batch_node
    if node is None or not node.compares_groups:
        return
    if config.model.critic != "none":
        raise ConfigError(
            f"the reward's root {node.label!r} ({node.kind}) takes the mean of the attempts at a task off, which no"
            f" critic can foresee: expected model.critic = 'none' (with ppo.advantage.estimator 'grpo', 'rloo' or"
            f" 'reinforce_pp'), found {config.model.critic!r}. With a critic take the root 'normalised'."
        )
    if config.rollout.episodes_per_task < 2:
        raise ConfigError(
            f"the reward's root {node.label!r} ({node.kind}) compares the attempts at a task: expected"
            f" rollout.episodes_per_task of at least 2, found {config.rollout.episodes_per_task}."
        )


def collect_demonstrations(
    config: RunConfig,
    make: Callable[[], ToolEnv],
    codec: Codec | None,
    requests: Sequence[EpisodeRequest],
    on_episode: Callable[[Trajectory], None] | None = None,
) -> list[Trajectory]:
    """Episodes of the configured demonstrator.

    Args:
        config: `sft.demonstrator` is read; the environment's expert without an `sft` section.
        make: Makes an environment.
        codec: Fills in the tokens; without it the episodes hold text alone.
        requests: What to demonstrate.
        on_episode: Called as each episode ends.

    Raises:
        ConfigError: If the environment has no such demonstrator.
    """
    name = config.sft.demonstrator if config.sft is not None else "expert"

    def demonstrator(env: ToolEnv, task: Task) -> MessagePolicy:
        found: MessagePolicy = getattr(env, name)(task)
        return found

    collector = Collector(make, demonstrator, codec, config.rollout, config.seed)
    try:
        return collector.collect(requests, on_episode=on_episode)
    finally:
        collector.close()
