"""What can be known to be wrong before anything is started is said before anything is started."""

from __future__ import annotations

from agentrl.config import RunConfig
from agentrl.env import ToolEnv
from agentrl.errors import ConfigError, TaskError, UsageError, did_you_mean
from agentrl.registry import make_env
from agentrl.trackers import make_tracker
from agentrl.train.parts import check_groups


def preflight(config: RunConfig) -> None:
    """Checks the names in a config against the environment and the machine. Nothing is written.

    Raises:
        RegistryError: If there is no such environment.
        ConfigError: If the environment refuses its settings or reward, has no such demonstrator, or its reward compares
            attempts that the config does not give it.
        UsageError: If the environment has no such split.
        TaskError: If a split is empty.
        MissingError: If a tracker's package is not installed.
    """
    settings = config.env.settings
    env = make_env(config.env.id, settings=settings, reward=config.env.reward, max_turns=config.env.max_turns)
    try:
        check_groups(config, env.reward_tree)
        dev = (config.eval.dev_split,) if config.eval.every else ()
        for split in ("train", *config.eval.splits, *dev):
            if split not in env.splits:
                raise UsageError(f"{env.name} has no split {split!r}.{did_you_mean(split, env.splits)}")
            if not len(env.tasks(split)):
                raise TaskError(f"the split {split!r} of {env.name} has no tasks: expected at least one.")
        if config.sft is not None:
            check_demonstrator(env, config.sft.demonstrator)
    finally:
        env.close()
    for name in config.trackers:
        make_tracker(name)


def check_demonstrator(env: ToolEnv, name: str) -> None:
    """Demonstrators are the environment's methods whose names end in `expert`.

    Raises:
        ConfigError: If it has none of this name.
    """
    available = {attribute for attribute in dir(env) if attribute.endswith("expert")}
    if name not in available:
        raise ConfigError(f"{env.name} has no demonstrator {name!r}.{did_you_mean(name, available)}")
