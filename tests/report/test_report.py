from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.evaluate import compare, summarise
from agentrl.report import write_report
from agentrl.report.episodes import episode_view, pick_episodes, visible
from agentrl.report.terminal import difference, eval_tables, interval, result_tables, share
from agentrl.run import RunDir
from agentrl.types import EndReason, Message, Task, ToolCall, ToolResult, Trajectory, Turn

EVIL = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"> {{ 7*7 }}"
    " \x1b[31m\u202e \ud800"
)


def entry(value: float) -> dict:
    leaf = {"node": "sql/correct", "kind": "leaf", "role": "objective", "value": value, "evidence": {"why": EVIL}}
    return {
        "node": "root",
        "kind": "weighted_sum",
        "value": value,
        "children": [leaf | {"weight": 1.0, "contribution": value}],
    }


def episode(
    i: int, success: bool, text: str = "hello", end: EndReason = EndReason.SUBMITTED, n_turns: int = 2
) -> Trajectory:
    call, result = ToolCall("run_sql", {"query": text}), ToolResult("run_sql", text, "tool_error", truncated=3)
    turn = Turn((1,), (2,), (-0.5,), 0, "stop", text, (call,), (result,), "not a call" if i % 2 else None)
    ledger = None
    if not end.is_error:
        ledger = {
            "steps": [{"turn": n_turns - 1, "reward": 1.0, "entry": entry(1.0)}],
            "components": {"sql/correct": 1.0},
        }
    return Trajectory(
        f"heldout/{i:05d}/0",
        Task(f"heldout/{i}", "Sql-v0", f"Question {i}? {text[:200]}", {"level": i % 2}),
        i,
        (Message("system", f"Be good. {text}"), Message("user", text)),
        (turn,) * n_turns,
        end,
        ledger,
        None if end.is_error else success,
        n_sampled=n_turns,
        error=f"broke: {text}" if end.is_error else None,
    )


def made(tmp_path: Path, episodes: list[Trajectory], iterations: int = 3, name: str = "r") -> RunDir:
    config = RunConfig.model_validate({"name": name, "runs_dir": tmp_path, "model": {"tiny": {}}})
    with RunDir.create(config) as run:
        for i in range(iterations):
            line = {f"metric/{k}": i * 0.5 for k in range(25)}
            line |= {"reward/mean": 0.1 * i, "reward/sql/correct": 0.2, "rollout/success": 0.5, "ppo/kl": float("nan")}
            line |= {"rollout/end/submitted": 0.75, "rollout/end/max_turns": 0.25, "critic/explained_variance": None}
            run.append_metrics(i, line)
        with run.rollouts(0) as folder:
            for trajectory in episodes:
                folder.append(trajectory)
    return run


class Reader(HTMLParser):
    """Every element and attribute as a browser would see it."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    return reader


def test_a_report_shows_a_run(tmp_path: Path) -> None:
    ours, theirs = [episode(i, True) for i in range(8)], [episode(i, i < 4) for i in range(8)]
    run = made(tmp_path, ours)
    rows = [
        {"policy": name, "split": "heldout", "temperature": t, "summary": summarise(found).as_dict()}
        for name, found in (("sft", theirs), ("ppo", ours))
        for t in (1.0, 0.0)
    ]
    found = {"a": "ppo", "b": "sft", "split": "heldout", "temperature": 1.0} | asdict(compare(ours, theirs))
    run.write_result({"evals": rows, "differences": [found], "wall_s": 90.0, "peak_memory_mib": 2048.0})
    page = write_report(run).read_text()
    text = re.sub(r"<[^>]+>", "", page)
    for expected in ("ppo", "100.0 %", "50.0 %", "ppo - sft on heldout, T = 1: +50.0 points", "1.5 min", "2.00 GiB"):
        assert expected in text
    for expected in (
        "Success",
        "Ends by reason",
        "Reward by component",
        "sql/correct",
        "25 more metrics",
        "8 of rollouts/000000",
    ):
        assert expected in text
    assert "Explained variance" not in text, "no iteration has a number for it"
    assert page.count('class="episode"') == 8


def test_a_run_that_has_just_begun_has_a_report(tmp_path: Path) -> None:
    page = write_report(made(tmp_path, [], iterations=0)).read_text()
    assert "config.json" in page
    assert "Training" not in page


def test_what_models_write_is_inert(tmp_path: Path) -> None:
    episodes = [episode(i, False, EVIL, [EndReason.SUBMITTED, EndReason.ENV_ERROR][i % 2]) for i in range(4)]
    page = write_report(made(tmp_path, episodes)).read_text()
    reader = read(page)
    assert reader.tags.count("script") == 1
    assert "img" not in reader.tags
    assert [name for name, _ in reader.attributes if name.startswith("on")] == []
    assert "{{ 7*7 }}" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", page)
    assert "\\u001b[31m\\u202e \\ud800" in page


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    page = write_report(made(tmp_path, [episode(0, True)])).read_text()
    reader = read(page)
    assert {name for name, _ in reader.attributes} & {"src", "href", "action", "srcset", "poster"} == set()
    assert "url(" not in page
    assert "@import" not in page
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(reader.attributes)["content"] and next(v for _, v in reader.attributes if v and "default-src" in v)
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in policy


def test_hostile_episodes_stay_inert_in_a_browser(tmp_path: Path, missing_part) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        missing_part("chromium", "no browser to open the report in")
    path = write_report(made(tmp_path, [episode(i, i % 2 == 0, EVIL) for i in range(4)]))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'chrome'}", "--dump-dom"]
    done = subprocess.run([browser, *flags, path.as_uri()], capture_output=True, text=True, timeout=60, check=False)
    assert "<title>r - agentrl</title>" in done.stdout
    assert done.stdout.count("<img") == 0


def test_long_runs_and_long_texts_stay_under_a_megabyte(tmp_path: Path) -> None:
    episodes = [episode(i, i % 3 == 0, "<&'\"" * 1_500, n_turns=20) for i in range(13)]
    path = write_report(made(tmp_path, episodes, iterations=200))
    assert path.stat().st_size < 1_000_000
    assert path.read_text().count('class="episode"') == 12


def test_a_dozen_different_episodes_are_picked(tmp_path: Path) -> None:
    episodes = [episode(i, True) for i in range(30)] + [episode(30, False, end=EndReason.MAX_TURNS)]
    episodes.append(episode(31, False, end=EndReason.ENV_ERROR))
    picked = pick_episodes(made(tmp_path, episodes))
    assert len(picked) == 12
    assert {"max_turns", "env_error", "submitted"} == {record["end"] for record in picked}
    assert [record["id"] for record in picked] == sorted(record["id"] for record in picked)


def test_the_evaluation_of_the_runs_policy_is_shown_first(tmp_path: Path) -> None:
    run = made(tmp_path, [episode(9, True)])
    from agentrl._store import EpisodeFolder

    for name, policy, temperature in (("a", "ppo", 1.0), ("b", "ppo", 0.0), ("c", "sft", 1.0)):
        with EpisodeFolder(run.eval_dir(name)) as folder:
            folder.write_request({"policy": policy, "sampling": {"temperature": temperature}})
            folder.append(episode(1, True))
    run.write_result({"differences": [{"a": "ppo"}]})
    assert pick_episodes(run)[0]["folder"] == "evals/a"


def test_an_error_has_no_reward(tmp_path: Path) -> None:
    record = pick_episodes(made(tmp_path, [episode(0, False, end=EndReason.ENV_ERROR)]))[0]
    view = episode_view(record, 100)
    assert (view["outcome"], view["reward"]) == ("error", None)


def test_hidden_characters_are_spelt_out_and_long_texts_cut() -> None:
    assert visible("a\tb\nc\x07\u200bd", 100) == "a\tb\nc\\u0007\\u200bd"
    assert visible("x" * 50 + "y" * 50, 20) == "x" * 10 + "\n... 80 characters left out ...\n" + "y" * 10


def test_tables_for_the_terminal() -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    summary = summarise([episode(i, i < 3) for i in range(4)])
    console.print(eval_tables(summary))
    console.print(
        result_tables({"evals": [{"policy": "[b]p", "split": "s", "temperature": 0, "summary": summary.as_dict()}]})
    )
    text = console.export_text()
    assert "75.0 %" in text
    assert "[b]p" in text
    assert "greedy" in text
    assert (share(None), interval(None), interval([None, None])) == ("-", "-", "-")


def test_a_difference_is_a_sentence() -> None:
    row = {"a": "ppo", "b": "sft", "split": "heldout", "temperature": 1.0, "mean": 0.12, "low": 0.05, "high": 0.19}
    row |= {"p_value": 0.0123, "n_clusters": 200}
    assert difference(row) == (
        "ppo - sft on heldout, T = 1: +12.0 points (95 % +5.0 to +19.0; p = 0.0123; paired over 200 tasks)"
    )


@pytest.mark.parametrize("name", ["report.html", "report.css", "report.js"])
def test_the_page_is_package_data(name: str) -> None:
    from importlib.resources import files

    assert (files("agentrl.report") / "template" / name).is_file()
