"""The commands on a whole run, small but real: train, then everything that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli import main

TOY = f"{Path(__file__).parent / 'toy_env.py'}:ToyEnv"
TOML = f"""
name = "toy"
[env]
id = {TOY!r}
format = "fenced"
[model]
critic = "head"
[model.tiny]
[sft]
[rollout.sampling]
max_tokens = 24
[eval]
splits = ["dev"]
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "toy.toml").write_text(TOML)
    assert main(["train", "-c", str(folder / "toy.toml"), "--smoke", "--runs-dir", str(folder)]) == 0
    return folder / "toy-smoke"


def test_a_run_leaves_what_the_design_names(trained: Path) -> None:
    names = {path.name for path in trained.iterdir()}
    assert {"config.json", "manifest.json", "metrics.jsonl", "rollouts", "checkpoints", "evals", "result.json"} <= names
    assert (trained / "report.html").stat().st_size > 10_000
    result = json.loads((trained / "result.json").read_text())
    assert {row["policy"] for row in result["evals"]} == {"sft", "ppo"}
    assert all(row["n_clusters"] == 4 for row in result["differences"])


def test_a_complete_run_is_not_run_again(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["train", "-c", str(trained / "config.json")]
    assert main([*again, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["evals"]
    assert main(again) == 2


def test_a_run_is_evaluated_at_its_newest_checkpoint(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", TOY, "-m", str(trained), "-s", "dev", "-n", "3", "--json"]
    newest = max(path.name for path in (trained / "checkpoints").iterdir())
    assert main(arguments) == 0
    first = capsys.readouterr()
    assert json.loads(first.out)["n_total"] == 3
    folder = trained / "evals" / f"checkpoints-{newest}-dev-T1"
    before = (folder / "episodes.jsonl").read_bytes()
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(first.out)
    assert (folder / "episodes.jsonl").read_bytes() == before, "nothing was run again"


def test_an_older_checkpoint_is_named_by_its_iteration(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", TOY, "-m", str(trained), "-s", "dev", "-n", "1", "--checkpoint", "1"]) == 0
    assert main(["eval", TOY, "-m", str(trained), "-s", "dev", "-n", "1", "--checkpoint", "77"]) == 2
    assert "expected one of 000001" in capsys.readouterr().err


def test_a_hugging_face_folder_is_evaluated(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = next((trained / "model").iterdir())
    flags = ["-s", "dev", "-n", "2", "-T", "0", "--format", "fenced", "--max-tokens", "16", "--json"]
    assert main(["eval", TOY, "-m", str(model), *flags]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["n_total"], summary["n_error"]) == (2, 0)
    assert main(["eval", TOY, "-m", str(model), "-s", "dev"]) == 2
    assert "env.format" in capsys.readouterr().err


def test_a_model_that_is_nowhere_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["eval", TOY, "-m", str(tmp_path), "-s", "dev", "-n", "1"]) == 3
    assert str(tmp_path) in capsys.readouterr().err


def test_an_episode_of_a_run_is_explained(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(trained / "rollouts" / "000001"), "000001/00000"]) == 2
    assert "/0" in capsys.readouterr().err
    record = json.loads((trained / "rollouts" / "000001" / "episodes.jsonl").read_text().splitlines()[0])
    assert main(["explain", str(trained), record["id"]]) == 0
    assert "on token" in capsys.readouterr().out
