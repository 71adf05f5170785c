"""Where replays happen: the environment of a run or an evaluation, made again, and whether it is still the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl._store import EpisodeFolder
from agentrl.config import EnvConfig
from agentrl.configfile import differences
from agentrl.env import ToolEnv
from agentrl.errors import UsageError
from agentrl.evaluate import environment_identity, source_digest
from agentrl.registry import env_class, make_env
from agentrl.run import RunDir
from agentrl.types import JSON


@dataclass(frozen=True)
class World:
    """An environment, and what is known to be other than when the episodes were recorded.

    Attributes:
        make: Makes it.
        warnings: In words: what a replay finds may then be the environment's change and not the record's.
    """

    make: Callable[[], ToolEnv]
    warnings: tuple[str, ...] = ()


def run_world(run: RunDir) -> World:
    """The environment that a run trained in.

    Raises:
        ConfigError: If the run's config or its reward cannot be read here.
        RegistryError: If the environment is not installed.
        UsageError: If the run never said which tool-call format it used.
    """
    config = run.config
    recorded: Mapping[str, JSON] = run.manifest.get("environment") or {}
    name = recorded.get("format", config.env.format)
    if name == "auto":
        raise UsageError(
            f"{run.path} does not say which tool-call format it used (its manifest.json has no `environment`), and its"
            " config says 'auto': it ended before its first episode, or manifest.json is damaged."
        )
    make = _factory(config.env, name)
    env = make()
    found = environment_identity(env, recorded.get("task_digests", ()), config.eval.tasks)
    env.close()
    return World(make, _changes(recorded, found))


def evaluation_world(folder: EpisodeFolder, run: RunDir | None) -> World | None:
    """The environment of an evaluation, from what it was asked for; None where the folder holds no evaluation.

    Args:
        folder: An evaluation's.
        run: The run that it belongs to, where it does.

    Raises:
        RegistryError: If the environment is not installed.
    """
    request = folder.request
    if request is None:
        return None
    base = EnvConfig(id=request["env"]) if run is None else run.config.env
    if run is not None and env_class(base.id).name != request["env"]:
        base = EnvConfig(id=request["env"])
    changes = {"settings": request["settings"], "max_turns": request["max_turns"]}
    make = _factory(base.model_copy(update=changes), request["format"])
    env = make()
    found = {"env": env.name, "reward": env.reward_tree.digest, "source": source_digest(type(env))}
    env.close()
    return World(make, _changes(request, found))


def opened(run: RunDir | Path | str) -> RunDir:
    """The run, opened for reading.

    Raises:
        UsageError: If there is none.
    """
    return run if isinstance(run, RunDir) else RunDir.open(run)


def _factory(env: EnvConfig, format_name: str) -> Callable[[], ToolEnv]:
    return functools.partial(
        make_env, env.id, format=format_name, settings=env.settings, reward=env.reward, max_turns=env.max_turns
    )


def _changes(recorded: Mapping[str, JSON], found: Mapping[str, JSON]) -> tuple[str, ...]:
    """What an environment says of itself now and did not say then; what was not written down is not compared."""
    known = {key: value for key, value in found.items() if key in recorded}
    changed = differences({key: recorded[key] for key in known}, known)
    return tuple(f"the environment is another than when this was recorded: {line}" for line in changed)
