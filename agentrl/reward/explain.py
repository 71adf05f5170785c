"""Why an episode got its reward, for the terminal: each turn, the token it lands on, and the tree behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from agentrl.types import JSON, Trajectory, Turn

_SHOWN_CHARS = 1200
"""Characters of one message or piece of evidence that are shown."""

# Colours and cursor moves carry no text and go as a whole; of everything else the text stays and the control goes.
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def inert(text: str, limit: int = _SHOWN_CHARS) -> str:
    """Text that a terminal shows and does not obey: no escapes, no control characters, no reversed writing; cut.

    Args:
        text: Anything, such as what a model wrote.
        limit: Characters that are kept.
    """
    shown = _CONTROLS.sub("", _ESCAPES.sub("", text))
    return shown if len(shown) <= limit else f"{shown[:limit]} ... ({len(shown) - limit} more)"


def render_ledger(trajectory: Trajectory | Mapping[str, JSON]) -> RenderableType:
    """The rewards of an episode, explained.

    Args:
        trajectory: A trajectory; or where there is none, as in `agentrl play`, `{"ledger": the episode's ledger}`.

    Returns:
        A rich renderable. Nothing in it is read as markup.
    """
    if isinstance(trajectory, Mapping):
        steps = trajectory["ledger"]["steps"]
        trees = [Group(Text(f"\nturn {step['turn']}", style="bold"), render_entry(step["entry"])) for step in steps]
        return Group(*trees, _sums(trajectory["ledger"]))
    parts: list[RenderableType] = [_heading(trajectory)]
    if trajectory.ledger is None:
        parts.append(_unaccounted(trajectory))
    end_of_turn = 0
    for k, turn in enumerate(trajectory.turns):
        end_of_turn += len(turn.prompt_ids) + len(turn.sampled_ids)
        parts.append(_turn(k, turn, end_of_turn - 1, trajectory.ledger))
    if trajectory.ledger is not None:
        parts += _before_any_turn(trajectory.ledger)
        parts.append(_sums(trajectory.ledger))
    return Group(*parts)


def _heading(trajectory: Trajectory) -> RenderableType:
    verdict = {True: "success", False: "no success", None: "success cannot be told"}[trajectory.success]
    text = Text()
    text.append(f"{inert(trajectory.task.instruction)}\n", style="italic")
    text.append(f"ended as {trajectory.end} after {len(trajectory.turns)} turns; {verdict}; ")
    text.append(f"reward {_signed(trajectory.reward)}", style="bold")
    return Panel(text, title=Text(f"{inert(trajectory.id)}  (task {inert(trajectory.task.id)})"), title_align="left")


def _unaccounted(trajectory: Trajectory) -> RenderableType:
    text = Text("This episode has no ledger: ", style="yellow")
    if trajectory.end.is_error:
        text.append("it ended in an error that is not the agent's, so it has no reward, and none of 0 either; ")
        text.append("it is left out of training and of every mean.")
    else:
        text.append("it was never scored.")
    if trajectory.error:
        text.append(f"\n{inert(trajectory.error)}", style="red")
    return text


def _turn(k: int, turn: Turn, last_token: int, ledger: JSON) -> RenderableType:
    title = Text(f"\nturn {k}", style="bold")
    title.append(f"   reward {_signed(turn.reward)}", style=_colour(turn.reward))
    where = f"on token {last_token}, the last that was sampled in it" if turn.sampled_ids else "no token was sampled"
    title.append(f"   ({where})", style="dim")
    if ledger is not None and "batch" in ledger:
        how = f"trained on; it earned {_signed(ledger['raw'][k])}" if ledger["trained"] else "earned; not trained on"
        title.append(f"   {how}", style="dim")
    parts: list[RenderableType] = [title, Padding(_said(turn), (0, 0, 0, 2))]
    steps = [step for step in (ledger or {}).get("steps", ()) if step["turn"] == k]
    parts += [Padding(render_entry(step["entry"]), (0, 0, 0, 2)) for step in steps]
    if ledger is not None and not steps:
        parts.append(Padding(Text("nothing was due here", style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


def _said(turn: Turn) -> Text:
    text = Text(inert(turn.text.strip()))
    if turn.malformed:
        text.append(f"\ncould not be read: {inert(turn.malformed)}", style="red")
    for result in turn.results:
        text.append(f"\n{inert(result.name)} -> ", style="cyan")
        text.append(inert(result.content), style="red" if result.error_kind else "")
    return text


def render_entry(entry: JSON) -> Tree:
    """One ledger entry, with everything below it, as a tree."""
    tree = Tree(_line(entry))
    _grow(tree, entry)
    return tree


def _grow(tree: Tree, entry: JSON) -> None:
    for child in entry.get("children", ()):
        _grow(tree.add(_line(child)), child)


def _line(entry: JSON) -> Text:
    line = Text(inert(str(entry["node"])), style="bold")
    if entry["kind"] not in ("component", entry["node"]):
        line.append(f" ({inert(str(entry['kind']))})", style="not bold dim")
    if entry["value"] is None:
        line.append(f"  not scored: {inert(str(entry.get('unscored')))}", style="not bold red")
    else:
        line.append(f"  {entry['value']:.4g}", style=_colour(entry["value"]))
    for note in _notes(entry):
        line.append(f"  {note}", style="not bold dim")
    if "evidence" in entry:
        line.append(f"\n{inert(json.dumps(entry['evidence'], ensure_ascii=False))}", style="not bold dim italic")
    return line


def _notes(entry: JSON) -> Iterator[str]:
    if "bounds" in entry:
        yield f"of [{entry['bounds'][0]:g}, {entry['bounds'][1]:g}]"
    role = " ".join(entry[key] for key in ("severity", "role") if key in entry)
    if role:
        yield role
    if entry.get("slot") == "condition":
        yield "the gate's condition"
    if entry.get("slot") == "safeguards":
        yield "a constraint"
    if "contribution" in entry:
        times = f"x {entry['weight']:g} " if "weight" in entry else ""
        yield f"{times}adds {_signed(entry['contribution'])}"
    elif entry.get("role") == "diagnostic":
        yield "adds nothing"
    if entry.get("open") is False:
        yield "not counted"
    if "gate" in entry:
        gate = entry["gate"]
        yield f"{'open' if gate['open'] else 'closed'}: {inert(gate['why'])}"
    if "clip" in entry:
        yield f"held inside [{entry['clip']['low']:g}, {entry['clip']['high']:g}]"
    if "on_unscored" in entry and any(child["value"] is None for child in entry["children"]):
        yield f"unscored children: {entry['on_unscored']}"
    if "potential" in entry:
        phi = entry["potential"]
        before = f"{phi['before']:g}" if phi["new_turn"] else f"{phi['gamma_turn']:g} x {phi['before']:g}"
        yield f"= {phi['scale']:g} x ({phi['gamma_turn']:g} x {phi['after']:g} - {before}), the change of the potential"


def _before_any_turn(ledger: JSON) -> list[RenderableType]:
    early = [step for step in ledger["steps"] if step["turn"] < 0]
    if not early:
        return []
    note = Text("\nscored before any turn, so no token carries it", style="yellow")
    return [note, *(render_entry(step["entry"]) for step in early)]


def _sums(ledger: JSON) -> RenderableType:
    text = Text("\nsum of the step rewards  ", style="bold")
    text.append("not scored" if ledger["total"] is None else _signed(ledger["total"]))
    if "batch" in ledger:
        text.append(_trained(ledger))
    for name, value in ledger["components"].items():
        text.append(f"\n  {inert(name)}  ", style="not bold")
        text.append("not scored" if value is None else f"{value:.4g}", style="not bold")
    return text


def _trained(ledger: JSON) -> Text:
    """What a batch node made of the episode, and what it follows from."""
    batch = dict(ledger["batch"])
    text = Text("\nsum of the trained rewards  ", style="bold")
    text.append("none: " if ledger["trained"] is None else _signed(sum(ledger["trained"])))
    text.append(inert(str(batch.pop("excluded", ""))))
    text.append(f"  {inert(str(batch.pop('node')))}", style="not bold dim")
    batch.pop("kind")
    for name, value in batch.items():
        text.append(f"  {inert(name)} {inert(json.dumps(value, ensure_ascii=False))}", style="not bold dim")
    return text


def _signed(value: float) -> str:
    return f"{value:+.4g}" if value else "0"


def _colour(value: float) -> str:
    return "green" if value > 0 else "red" if value < 0 else "not bold"
