"""`agentrl replay`: a stored iteration or episode once more, compared with what was recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.commands._flags import parse
from agentrl.commands._output import print_json, quiet_transformers, show
from agentrl.errors import UsageError
from agentrl.reward.explain import inert
from agentrl.types import JSON

if TYPE_CHECKING:
    from agentrl.replay.compare import Difference
    from agentrl.replay.episode import EpisodeReplay
    from agentrl.replay.iteration import IterationReplay

_MOST_SHOWN = 8
"""Differences of an episode that are listed after the first."""


@dataclass(frozen=True)
class ReplayOptions:
    """Compute a stored iteration again (rewards, advantages, losses), or execute a stored episode again, and compare.

    Exit code 1 where anything differs by more than rounding.
    """

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    """A run directory; for an episode also a folder of episodes (an evaluation's)."""
    iteration: int | None = None
    """An iteration: from its files alone, without the model's weights."""
    episode: str | None = None
    """An episode's id, or a part of it that no other has: its messages are said again in a fresh world."""
    weights: bool = False
    """With --iteration: logprobs and values too, with the weights of the checkpoint before it, where there is one."""
    json: bool = False
    """Print what was found as JSON."""


def main(arguments: list[str]) -> int:
    """Replays; see `agentrl replay --help`."""
    options = parse(ReplayOptions, arguments, "replay")
    if (options.iteration is None) == (options.episode is None):
        raise UsageError("agentrl replay needs one of --iteration N and --episode ID.")
    if options.episode is not None:
        from agentrl.replay.episode import replay_episode

        episode = replay_episode(options.run, options.episode)
        print_json(episode.as_dict()) if options.json else show(_episode(episode))
        return 0 if episode.ok else 1
    from agentrl.replay.iteration import replay_iteration

    if options.weights:
        quiet_transformers()
    iteration = replay_iteration(options.run, options.iteration or 0, weights=options.weights)
    print_json(iteration.as_dict()) if options.json else show(_iteration(iteration))
    return 0 if iteration.ok else 1


def _iteration(found: IterationReplay) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("quantity", "compared", "largest gap", "allowed", "", "where"):
        table.add_column(column, justify="right" if column in {"compared", "largest gap", "allowed"} else "left")
    for row in found.rows:
        where = ""
        if row.worst is not None and not row.ok:
            where = f"{row.worst.where}: {_short(row.worst.recorded)} recorded, {_short(row.worst.found)} found"
        elif row.worst is not None:
            where = row.worst.where
        numbers = (str(row.compared), f"{row.largest:.3g}", f"{row.tolerance:g}")
        ok = Text("same", "green") if row.ok else Text("differs", "bold red")
        table.add_row(row.what, *numbers, ok, Text(inert(where)))
    wrong = [row.what for row in found.rows if not row.ok]
    verdict = f"iteration {found.iteration}, {found.episodes} episodes: "
    verdict += f"it differs in {', '.join(wrong)}." if wrong else "everything that was recorded is found again."
    return Group(*_warnings(found.warnings), table, "", Text(verdict, "bold red" if wrong else "bold green"))


def _episode(found: EpisodeReplay) -> RenderableType:
    head = f"{found.turns} turns said again, {found.compared} values compared: "
    which = Text(inert(f"episode {found.id} of {found.folder}"))
    if found.ok:
        return Group(*_warnings(found.warnings), which, Text(f"{head}the same.", "bold green"))
    first, rest = found.differences[0], found.differences[1:]
    verdict = Text(f"{head}{len(found.differences)} differ.", "bold red")
    parts: list[RenderableType] = [*_warnings(found.warnings), which, verdict, "", *_difference(first)]
    if rest:
        parts += ["", Text("and then:"), *(Text(f"  {inert(d.where)}") for d in rest[:_MOST_SHOWN])]
    if len(rest) > _MOST_SHOWN:
        parts.append(Text(f"  and {len(rest) - _MOST_SHOWN} more (--json shows all)"))
    return Group(*parts)


def _difference(first: Difference) -> list[RenderableType]:
    return [
        Text(f"first at {inert(first.where)}", "bold"),
        Text("recorded:"),
        Text(inert(_text(first.recorded))),
        Text("found:"),
        Text(inert(_text(first.found))),
    ]


def _warnings(warnings: tuple[str, ...]) -> list[RenderableType]:
    return [Text(f"warning: {inert(warning)}", "bold yellow") for warning in warnings]


def _text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _short(value: JSON) -> str:
    return f"{value:.9g}" if isinstance(value, float) else inert(_text(value), 60)
