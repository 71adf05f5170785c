"""Components for how an agent behaves, in any environment: can its calls be read, is it brief."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from agentrl import Episode, Score, component, require_some


@component(name="conduct/malformed")
def malformed(episode: Episode) -> Score:
    """The share of messages that could be read as what they were meant to be."""
    turns = require_some(episode.turns, "messages")
    bad = sum(turn.malformed is not None for turn in turns)
    return Score(1.0 - bad / len(turns), {"messages": len(turns), "malformed": bad})


@component(name="conduct/turns")
def turns(episode: Episode) -> Score:
    """1 for an episode of one message, falling evenly to 0 for one that uses all it may."""
    require_some(episode.turns, "messages")
    spare, most = episode.max_turns - episode.n_turns, episode.max_turns - 1
    return Score(spare / most if most else 1.0, {"turns": episode.n_turns, "max_turns": episode.max_turns})


@dataclass(frozen=True)
class Length:
    """1 while messages are short on average, falling evenly to 0.

    Attributes:
        free_chars: Average characters of a message up to which nothing is lost.
        worst_chars: Average characters from which nothing is left.
    """

    name: ClassVar[str] = "conduct/length"
    when: ClassVar[Literal["end"]] = "end"
    bounds: ClassVar[tuple[float, float]] = (0.0, 1.0)

    free_chars: int = 400
    worst_chars: int = 4000

    def __call__(self, episode: Episode, /) -> Score:
        """Scores the episode as it stands."""
        written = require_some([len(turn.text) for turn in episode.turns], "messages")
        average = sum(written) / len(written)
        span = max(1, self.worst_chars - self.free_chars)
        return Score(min(1.0, max(0.0, (self.worst_chars - average) / span)), {"average_chars": round(average, 1)})


length = Length
"""The name that reward trees use."""
