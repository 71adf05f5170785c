"""The HTML report of a run: one file, no network, no server; what models wrote is inert in it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agentrl._files import write_whole
from agentrl.outcome import EndReason
from agentrl.report.charts import Chart, Series, interval_bar, line_chart, readable, stacked_chart
from agentrl.report.episodes import episode_view, pick_episodes
from agentrl.report.terminal import difference, interval, number, share, temperature
from agentrl.run import RunDir
from agentrl.types import JSON

_MOST_BYTES = 900_000
_TEXT_LIMITS = (3000, 1200, 500, 200)
"""Characters of one text that are shown; the first of these that keeps the file small enough."""


class Figure(NamedTuple):
    """A chart that every report has."""

    title: str
    metrics: tuple[str, ...]
    percent: bool


_FIGURES = (
    Figure("Success", ("rollout/success",), True),
    Figure("Reward, mean", ("reward/mean",), False),
    Figure("KL, nats", ("ppo/kl", "ppo/kl_ref"), False),
    Figure("Entropy, nats", ("ppo/entropy",), False),
    Figure("Clip fraction", ("ppo/clip_fraction",), False),
    Figure("Explained variance of the critic", ("critic/explained_variance",), False),
    Figure("Response length, tokens", ("rollout/response_tokens",), False),
)


def write_report(run: RunDir) -> Path:
    """Writes the run's report.html from what the run holds at the time; may be called as often as wanted.

    Returns:
        Where it is.

    Raises:
        RunError: If the run's files cannot be read, or there is no room.
    """
    records = pick_episodes(run)
    page = ""
    for limit in _TEXT_LIMITS:
        page = _render(run, [episode_view(record, limit) for record in records])
        if len(page.encode()) < _MOST_BYTES:
            break
    write_whole(run.report_path, page)
    return run.report_path


def _render(run: RunDir, episodes: Sequence[Mapping[str, Any]]) -> str:
    environment = Environment(
        loader=PackageLoader("agentrl.report", "template"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"readable": readable, "share": share, "interval": interval, "number": number}
    script = _own("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    metrics = run.read_metrics()
    result = run.result or {}
    return environment.get_template("report.html").render(
        title=run.path.resolve().name,
        style=Markup(_own("report.css")),  # noqa: S704 (files of ours)
        script=Markup(script),  # noqa: S704
        script_digest=digest,
        facts=_facts(run, metrics, result),
        rows=[_row(row) for row in result.get("evals") or ()],
        levels=_levels(result),
        differences=[_difference(row) for row in result.get("differences") or ()],
        figures=_figures(metrics),
        components=_components(metrics),
        others=_others(metrics),
        episodes=episodes,
        config=json.dumps(json.loads(run.config_path.read_text(encoding="utf-8")), indent=2),
    )


def _own(name: str) -> str:
    return (Path(__file__).parent / "template" / name).read_text(encoding="utf-8")


def _facts(run: RunDir, metrics: Sequence[JSON], result: Mapping[str, JSON]) -> list[tuple[str, str]]:
    config, manifest = run.config, run.manifest
    commit = manifest.get("commit")
    updates = metrics[-1].get("ppo/updates", len(metrics)) if metrics else 0
    packages = manifest.get("packages") or {}
    model = config.model.path or (f"tiny Llama, {config.model.tiny.layers} layers" if config.model.tiny else "-")
    facts = [
        ("environment", config.env.id),
        ("model", model),
        ("seed", str(config.seed)),
        ("policy updates", f"{updates:.0f} of {config.ppo.iterations}"),
        ("started", str(manifest.get("created", "-"))[:16].replace("T", " ")),
        ("agentrl", str(manifest.get("agentrl", "-"))),
        ("torch", str(packages.get("torch") or "-")),
        ("commit", f"{commit['id'][:10]}{', changed' if commit['changed'] else ''}" if commit else "-"),
    ]
    if result.get("wall_s") is not None:
        facts.append(("wall time", f"{result['wall_s'] / 60:.1f} min"))
    if result.get("peak_memory_mib") is not None:
        facts.append(("peak memory", f"{result['peak_memory_mib'] / 1024:.2f} GiB"))
    return facts


def _row(row: Mapping[str, JSON]) -> dict[str, Any]:
    summary = row["summary"]
    bounds, success = summary["clustered"], summary["success"]
    bar = None if bounds is None or success is None else interval_bar(bounds[0], success, bounds[1])
    return {
        "policy": row["policy"],
        "split": row["split"],
        "temperature": temperature(row["temperature"]),
        "bar": bar,
        "summary": summary,
    }


def _levels(result: Mapping[str, JSON]) -> list[dict[str, Any]]:
    """One row for each evaluation and level, where tasks have more than one level."""
    rows = []
    for row in result.get("evals") or ():
        if len(row["summary"]["by_level"]) > 1:
            named = {"policy": row["policy"], "split": row["split"], "temperature": temperature(row["temperature"])}
            rows += [named | level for level in row["summary"]["by_level"]]
    return rows


def _difference(row: Mapping[str, JSON]) -> dict[str, Any]:
    known = row["low"] is not None and row["high"] is not None
    return {
        "text": difference(row),
        "bar": interval_bar(row["low"], row["mean"], row["high"], around_zero=True) if known else None,
    }


def _figures(metrics: Sequence[Mapping[str, JSON]]) -> list[Chart]:
    charts = []
    for figure in _FIGURES:
        lines = [line for name in figure.metrics for line in _series(metrics, name)]
        if lines:
            charts.append(line_chart(figure.title, _iterations(metrics), lines, percent=figure.percent))
    ends = [f"rollout/end/{reason}" for reason in EndReason]
    shares = [Series(line.name.rpartition("/")[2], line.values) for name in ends for line in _series(metrics, name)]
    if shares:
        charts.append(stacked_chart("Ends by reason, share of episodes", _iterations(metrics), shares))
    return charts


def _components(metrics: Sequence[Mapping[str, JSON]]) -> list[Chart]:
    names = [
        name for name in _names(metrics) if name.startswith("reward/") and name not in {"reward/mean", "reward/std"}
    ]
    return [_single(metrics, name, name.removeprefix("reward/")) for name in names]


def _others(metrics: Sequence[Mapping[str, JSON]]) -> list[Chart]:
    shown = {name for figure in _FIGURES for name in figure.metrics}
    names = [n for n in _names(metrics) if n not in shown and not n.startswith("rollout/end/")]
    return [_single(metrics, n, n) for n in names if not n.startswith("reward/") or n == "reward/std"]


def _single(metrics: Sequence[Mapping[str, JSON]], name: str, title: str) -> Chart:
    return line_chart(title, _iterations(metrics), _series(metrics, name))


def _series(metrics: Sequence[Mapping[str, JSON]], name: str) -> list[Series]:
    """The metric's line, or nothing where no iteration has a number for it."""
    values = [line.get(name) for line in metrics]
    numbers = [value if isinstance(value, int | float) else None for value in values]
    return [Series(name, numbers)] if any(value is not None for value in numbers) else []


def _names(metrics: Sequence[Mapping[str, JSON]]) -> list[str]:
    names = {name for line in metrics for name in line if name != "iteration"}
    return sorted(name for name in names if _series(metrics, name))


def _iterations(metrics: Sequence[Mapping[str, JSON]]) -> list[int]:
    return [line["iteration"] for line in metrics]
