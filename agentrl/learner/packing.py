"""Which episodes share a line: first-fit-decreasing bin packing, and lines of like length grouped by a token budget."""

from __future__ import annotations

from collections.abc import Sequence

LINE_TOKENS = 1024
"""Lines of several episodes are no longer than this. Attention over a line costs the square of its length, whichever
parts of it are masked, so longer lines would lose more than their better fill gains."""


def fill_lines(lengths: Sequence[int], line_tokens: int = LINE_TOKENS) -> list[list[int]]:
    """Packs episodes into lines, first fit, longest first.

    First-fit-decreasing needs at most 11/9 of the fewest possible lines, and 2/3 more (Dosa, 2007).

    Args:
        lengths: Tokens of each episode.
        line_tokens: Most tokens of a line; it is no longer than the longest episode either, and one that is longer than
            this goes alone.

    Returns:
        Indices into `lengths`, each once, line by line.
    """
    capacity = min(line_tokens, max(lengths, default=0))
    lines: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        for line, room in enumerate(rooms):
            if lengths[index] <= room:
                lines[line].append(index)
                rooms[line] -= lengths[index]
                break
        else:
            lines.append([index])
            rooms.append(capacity - lengths[index])
    return lines


def group_lines(widths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups lines into micro-batches, longest first, so that lines of like length share one and little is padding.

    Args:
        widths: Tokens of each line.
        budget: Most tokens of a group, padding included; a longer line goes alone.

    Returns:
        Indices into `widths`, each once, group by group.
    """
    groups: list[list[int]] = []
    width = 0
    for line in sorted(range(len(widths)), key=lambda line: -widths[line]):
        if groups and (len(groups[-1]) + 1) * width <= budget:
            groups[-1].append(line)
        else:
            groups.append([line])
            width = widths[line]
    return groups
