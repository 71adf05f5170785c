"""Which episodes a report shows, and how their texts are made fit to be shown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl._store import EpisodeFolder
from agentrl.outcome import EndReason
from agentrl.run import RunDir
from agentrl.types import JSON

_MOST_TURNS = 16
"""Turns of one episode that are shown: the first and the last ones."""

_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def pick_episodes(run: RunDir, count: int = 12) -> list[dict[str, JSON]]:
    """A dozen episodes of the policy's evaluation, or else of the last rollouts, as different as can be had.

    They are taken in turns from the groups of (success, end reason, level), so that each kind is seen.
    """
    records: list[dict[str, JSON]] = []
    for folder in _best_first(run):
        records = EpisodeFolder(run.path / folder).records()
        if records:
            for record in records:
                record["folder"] = str(folder)
            break
    groups: dict[tuple[str, str, str], list[dict[str, JSON]]] = {}
    for record in records:
        kind = (str(record["success"]), str(record["end"]), str(record["task"]["data"].get("level", "")))
        groups.setdefault(kind, []).append(record)
    picked: list[dict[str, JSON]] = []
    while groups and len(picked) < count:
        picked += [group.pop(0) for _, group in sorted(groups.items())]
        groups = {kind: group for kind, group in groups.items() if group}
    return sorted(picked[:count], key=lambda record: record["id"])


def episode_view(record: dict[str, JSON], limit: int) -> dict[str, Any]:
    """What the template shows of an episode, every text cut to about `limit` characters and made visible."""
    end = EndReason(record["end"])
    outcome = "error" if end.is_error else {True: "success", False: "failure", None: "unknown"}[record["success"]]
    turns = list(enumerate(record["turns"]))
    if len(turns) > _MOST_TURNS:
        turns = [*turns[: _MOST_TURNS // 2], *turns[-_MOST_TURNS // 2 :]]
    steps = (record["ledger"] or {}).get("steps") or []
    return {
        "id": visible(record["id"], limit),
        "folder": record.get("folder", ""),
        "outcome": outcome,
        "end": str(end),
        "reward": None if end.is_error else record["reward"],
        "n_turns": len(record["turns"]),
        "n_tokens": record["n_sampled"],
        "level": record["task"]["data"].get("level"),
        "instruction": visible(record["task"]["instruction"], limit),
        "error": visible(record["error"], limit) if record["error"] else None,
        "opening": [{"role": m["role"], "text": visible(m["content"], limit)} for m in record["opening"]],
        "turns": [_turn_view(index, turn, steps, limit) for index, turn in turns],
        "left_out": len(record["turns"]) - len(turns),
    }


def visible(text: str, limit: int) -> str:
    """Text with its hidden characters (controls, escapes, reversed writing) spelt out, cut in the middle."""
    if len(text) > limit:
        half = limit // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    return _HIDDEN.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _best_first(run: RunDir) -> list[Path]:
    """Folders of episodes: evaluations of the policy that the run is about, sampled ones first, then the newest."""
    folders = [folder for folder in run.episode_folders() if folder.parts[0] in {"evals", "rollouts"}]
    compared = (run.result or {}).get("differences") or []
    subject = compared[0]["a"] if compared else None

    def rank(folder: Path) -> tuple[bool, bool, bool, float, str]:
        asked = EpisodeFolder(run.path / folder).request or {}
        sampled = asked.get("sampling", {}).get("temperature", 0.0) > 0
        newest = (run.path / folder / "episodes.jsonl").stat().st_mtime
        return folder.parts[0] == "evals", asked.get("policy") == subject, sampled, newest, str(folder)

    return sorted(folders, key=rank, reverse=True)


def _turn_view(index: int, turn: dict[str, JSON], steps: Sequence[JSON], limit: int) -> dict[str, Any]:
    return {
        "index": index,
        "text": visible(turn["text"], limit),
        "calls": [
            {"name": visible(call["name"], 80), "arguments": _as_text(call["arguments"], limit)}
            for call in turn["calls"]
        ],
        "results": [
            {
                "name": visible(result["name"], 80),
                "text": visible(result["content"], limit),
                "error": result["error_kind"],
                "truncated": result["truncated"],
            }
            for result in turn["results"]
        ],
        "malformed": visible(turn["malformed"], limit) if turn["malformed"] is not None else None,
        "reward": turn["reward"],
        "tokens": turn["n_sampled"],
        "ledger": [_entry_view(step["entry"], limit // 2) for step in steps if step["turn"] == index],
    }


def _entry_view(entry: dict[str, JSON], limit: int) -> dict[str, Any]:
    """One node of a reward's tree: its value, what it counts for, and why."""
    notes = [f"{name} {_as_text(entry[name], limit)}" for name in ("gate", "clip") if entry.get(name) is not None]
    if entry.get("open") is False:
        notes.append("does not count: its gate is closed")
    if entry.get("unscored"):
        notes.append(f"unscored: {visible(str(entry['unscored']), limit)}")
    return {
        "node": visible(str(entry["node"]), 80),
        "kind": entry.get("role") or entry.get("kind", ""),
        "value": entry.get("value"),
        "weight": entry.get("weight"),
        "contribution": entry.get("contribution"),
        "notes": notes,
        "evidence": _as_text(entry["evidence"], limit) if entry.get("evidence") is not None else None,
        "children": [_entry_view(child, limit) for child in entry.get("children", ())],
    }


def _as_text(value: JSON, limit: int) -> str:
    return visible(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), limit)
