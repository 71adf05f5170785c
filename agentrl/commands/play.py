"""`agentrl play`: a person at the terminal is the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from agentrl.commands._flags import parse
from agentrl.commands._output import json_table


@dataclass(frozen=True)
class PlayOptions:
    """Be the policy of an environment: you see what a model would see, and get the reward it would get."""

    env: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ENV")]
    """A registered name (`agentrl list envs`) or `path/to/my_env.py:MyEnv`."""
    task: str | None = None
    """Id of a task; one is drawn where not given."""
    split: str | None = None
    """The split that the task is of; the environment's first where not given."""
    seed: int = 0
    """Draws the task, and seeds its world."""
    format: str = "fenced"
    """Tool-call format that you write in: `fenced` is the one for people."""
    settings: Annotated[str, tyro.conf.arg(metavar="JSON")] = "{}"
    """The environment's settings."""


def main(arguments: list[str]) -> int:
    """Plays; see `agentrl play --help`."""
    options = parse(PlayOptions, arguments, "play")
    settings = json_table(options.settings, "--settings")
    from agentrl.play import play
    from agentrl.registry import make_env

    env = make_env(options.env, format=options.format, settings=settings)
    try:
        play(env, options.task, Console(), seed=options.seed, split=options.split)
    finally:
        env.close()
    return 0
