"""`agentrl explain`: where an episode's reward came from, node by node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentrl.commands._flags import parse
from agentrl.commands._output import print_json, show
from agentrl.run import find_episode


@dataclass(frozen=True)
class ExplainOptions:
    """Show the ledger of one episode of a run: each component's score, evidence and weight, each gate and why."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run directory, or a folder of episodes (an evaluation's)."""
    episode: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="EPISODE")]
    """The episode's id, or a part of it that no other has: see the report, or episodes.jsonl."""
    json: bool = False
    """Print the whole episode as JSON."""


def main(arguments: list[str]) -> int:
    """Explains; see `agentrl explain --help`."""
    options = parse(ExplainOptions, arguments, "explain")
    folder, record = find_episode(options.run, options.episode, "agentrl explain {folder} {episode}")
    if options.json:
        print_json(record)
        return 0
    from agentrl.reward.explain import render_ledger

    show(render_ledger(next(t for t in folder.trajectories() if t.id == record["id"])))
    return 0
