"""`agentrl explain`: where an episode's reward came from, node by node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentrl._store import EpisodeFolder
from agentrl.commands._flags import parse
from agentrl.commands._output import print_json, show
from agentrl.errors import UsageError
from agentrl.types import JSON


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
    folder, record = find_episode(options.run, options.episode)
    if options.json:
        print_json(record)
        return 0
    from agentrl.reward.explain import render_ledger

    show(render_ledger(next(t for t in folder.trajectories() if t.id == record["id"])))
    return 0


def find_episode(run: Path, wanted: str) -> tuple[EpisodeFolder, dict[str, JSON]]:
    """The record of an episode and the folder that it is in, by its id or a part of it that is its alone.

    Raises:
        UsageError: If there are no episodes, or none or several fit.
    """
    folders = sorted({path.parent for path in run.glob("**/episodes.jsonl")}, key=lambda p: ("attempts" in p.parts, p))
    if not folders:
        raise UsageError(f"{run} holds no episodes: expected a run directory, or a folder with episodes.jsonl.")
    found: dict[str, tuple[EpisodeFolder, dict[str, JSON]]] = {}
    for folder in map(EpisodeFolder, folders):
        for record in folder.records():
            found.setdefault(record["id"], (folder, record))
    if wanted in found:
        return found[wanted]
    fitting = [episode for episode in found if wanted in episode]
    if not fitting:
        raise UsageError(f"{run} has no episode {wanted!r} among its {len(found)}: one is {min(found)!r}, for example.")
    if len(fitting) > 1:
        raise UsageError(f"{len(fitting)} episodes have {wanted!r} in their id: {', '.join(fitting[:8])} ...")
    return found[fitting[0]]
