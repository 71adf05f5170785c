"""Results for the terminal: an evaluation's tables, and a run's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agentrl.evaluate import EvalSummary
from agentrl.types import JSON


def eval_tables(summary: EvalSummary) -> RenderableType:
    """An evaluation: success with its intervals, then levels, ends and components."""
    head = _table("success", "95 % by task", "95 % Wilson", "scored", "errors", "total", "tasks", "reward", "tokens")
    head.add_row(
        share(summary.success),
        interval(summary.clustered),
        interval(summary.wilson),
        str(summary.n_scored),
        str(summary.n_error),
        str(summary.n_total),
        str(summary.n_tasks),
        number(summary.reward),
        number(summary.tokens, 1),
    )
    parts: list[RenderableType] = [head]
    if len(summary.pass_at) > 1:
        table = _table(*(f"pass@{k}" for k in summary.pass_at))
        table.add_row(*(share(value) for value in summary.pass_at.values()))
        parts.append(table)
    if summary.by_level:
        table = _table("level", "success", "95 % by task", "scored", "errors")
        for row in summary.by_level:
            table.add_row(
                escape(row.level), share(row.success), interval(row.interval), str(row.n_scored), str(row.n_error)
            )
        parts.append(table)
    table = _table("end", "episodes", "share")
    for reason, count in sorted(summary.ends.items(), key=lambda item: -item[1]):
        table.add_row(escape(reason), str(count), share(count / summary.n_total))
    parts.append(table)
    if summary.components:
        table = _table("component", "mean")
        for name, value in summary.components.items():
            table.add_row(escape(name), number(value))
        parts.append(table)
    return Group(*(part for made in parts for part in (made, "")))


def result_tables(result: Mapping[str, JSON]) -> RenderableType:
    """A run's result (`result.json`): one row for each policy, split and temperature, and the paired differences."""
    table = _table("policy", "split", "temperature", "success", "95 % by task", "reward", "tokens", "scored", "errors")
    for row in result.get("evals") or ():
        summary = row["summary"]
        table.add_row(
            escape(str(row["policy"])),
            escape(str(row["split"])),
            temperature(row["temperature"]),
            share(summary["success"]),
            interval(summary["clustered"]),
            number(summary["reward"]),
            number(summary["tokens"], 1),
            str(summary["n_scored"]),
            str(summary["n_error"]),
        )
    parts: list[RenderableType] = [table, ""]
    parts += [Text(difference(row)) for row in result.get("differences") or ()]
    if result.get("wall_s") is not None:
        memory = f", {result['peak_memory_mib']:.0f} MiB at most" if result.get("peak_memory_mib") else ""
        parts.append(Text(f"{result['wall_s'] / 60:.1f} minutes{memory}"))
    if result.get("report") is not None:
        parts.append(Text(f"report: {result['report']}"))
    return Group(*parts)


def difference(row: Mapping[str, JSON]) -> str:
    """One paired difference as a sentence."""
    low, high = row["low"], row["high"]
    ends = "interval unknown" if low is None or high is None else f"95 % {100 * low:+.1f} to {100 * high:+.1f}"
    return (
        f"{row['a']} - {row['b']} on {row['split']}, {temperature(row['temperature'])}:"
        f" {100 * row['mean']:+.1f} points ({ends}; p = {row['p_value']:.3g}; paired over {row['n_clusters']} tasks)"
    )


def temperature(value: float) -> str:
    """Greedy decoding by its name."""
    return "greedy" if value == 0 else f"T = {value:g}"


def share(value: float | None) -> str:
    """A share in percent."""
    return "-" if value is None else f"{100 * value:.1f} %"


def interval(value: Sequence[float | None] | None) -> str:
    """An interval of shares in percent."""
    if value is None or value[0] is None or value[1] is None:
        return "-"
    return f"{100 * value[0]:.1f} to {100 * value[1]:.1f}"


def number(value: float | None, digits: int = 3) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column in {"split", "temperature"} else "right")
    return table
