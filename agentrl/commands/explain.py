"""`agentrl explain`: where an episode's reward came from, node by node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
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
    paths = sorted(path.parent for path in run.glob("**/episodes.jsonl"))
    # What a resume went back behind is looked at only where a folder of it is named.
    kept = [path for path in paths if "attempts" not in path.relative_to(run).parts]
    if not kept:
        raise UsageError(f"{run} holds no episodes: expected a run directory, or a folder with episodes.jsonl.")
    found = [(folder, record) for folder in map(EpisodeFolder, kept) for record in folder.records()]
    fitting = [pair for pair in found if pair[1]["id"] == wanted] or [p for p in found if wanted in p[1]["id"]]
    if not fitting:
        hint = f": one is {found[0][1]['id']!r}, for example" if found else ""
        raise UsageError(f"{run} has no episode {wanted!r} among its {len(found)}{hint}.")
    if len(fitting) > 1:
        listed = "\n".join(f"  agentrl explain {quote(str(f.path))} {quote(r['id'])}" for f, r in fitting[:8])
        raise UsageError(f"{len(fitting)} episodes fit {wanted!r}. Name one of them and its folder:\n{listed}")
    return fitting[0]
