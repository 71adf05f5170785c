"""Environments by name: what installed packages register, and what a file path names."""

from __future__ import annotations

import functools
import re
from typing import Any

import gymnasium

from agentrl.env import ToolEnv
from agentrl.errors import RegistryError
from agentrl.plugins import PluginInfo, list_plugins, load_object, load_plugin

__all__ = ["GROUP", "PluginInfo", "env_class", "list_plugins", "make_env", "register_environments"]

GROUP = "agentrl.environments"
"""The entry-point group of environments."""

_NAMESPACE = "agentrl/"
_NAME = re.compile(r"[\w:.-]+-v\d+")


def env_class(env_id: str) -> type[ToolEnv]:
    """The class of an environment; its package is imported now.

    Args:
        env_id: A registered name (`Sql-v0`, with or without `agentrl/`), `path/to/file.py:Class` or `module:Class`.

    Returns:
        The class.

    Raises:
        RegistryError: If the name is unknown, its plugin does not load, or it is no ToolEnv.
        MissingError: If the plugin says itself what has to be installed first.
    """
    if ":" in env_id:
        found = load_object(env_id, f"environment {env_id!r}")
    else:
        found = load_plugin(GROUP, env_id.removeprefix(_NAMESPACE), "environment")
    if not (isinstance(found, type) and issubclass(found, ToolEnv)):
        raise RegistryError(f"environment {env_id!r}: expected a subclass of agentrl.ToolEnv, found {found!r}.")
    return found


def make_env(env_id: str, **kwargs: Any) -> ToolEnv:
    """Makes an environment by name.

    Args:
        env_id: As for `env_class`.
        kwargs: Of the constructor: `format`, `settings`, `reward`, `max_turns`, `render_mode`.

    Returns:
        The environment, without Gymnasium's wrappers.

    Raises:
        RegistryError: If there is no such environment.
        ConfigError: If an argument cannot be used.
    """
    return env_class(env_id)(**kwargs)


def register_environments() -> None:
    """Registers a Gymnasium id for each entry point: `Sql-v0` becomes `agentrl/Sql-v0`. Imports no plugin.

    A name that Gymnasium cannot take, or that is registered already, is left out: `env_class` says what is wrong with
    it when it is asked for.
    """
    for plugin in list_plugins(GROUP):
        gym_id = f"{_NAMESPACE}{plugin.name}"
        if _NAME.fullmatch(plugin.name) and gym_id not in gymnasium.registry:
            gymnasium.register(
                gym_id,
                entry_point=plugin.target,
                # With shared memory, Gymnasium's default, its processes cannot pass texts.
                vector_entry_point=functools.partial(_vector_env, gym_id),
            )


def _vector_env(gym_id: str, num_envs: int = 1, **kwargs: Any) -> gymnasium.vector.VectorEnv[Any, Any, Any]:
    make = functools.partial(_make_registered, gym_id, kwargs)
    return gymnasium.vector.AsyncVectorEnv([make] * num_envs, shared_memory=False)


def _make_registered(gym_id: str, kwargs: dict[str, Any]) -> gymnasium.Env[str, str]:
    # A process that was spawned, not forked, knows the id only after this import.
    register_environments()
    return gymnasium.make(gym_id, **kwargs)
