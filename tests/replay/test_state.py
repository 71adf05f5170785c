"""Checkpoints of a real run: what is damaged is skipped and said, what belongs elsewhere is refused."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from words_run import WORLD, words_config

from agentrl.cli import main
from agentrl.errors import CheckpointError
from agentrl.learner import checkpoint
from agentrl.run import RunDir
from agentrl.train import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(words_config(folder))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunDir:
    """A copy that is not complete: it can be resumed."""
    copy = RunDir.open(shutil.copytree(trained, tmp_path / "run"))
    (copy.path / "result.json").unlink()
    return copy


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _metrics(run: RunDir) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.read_metrics()]


@pytest.mark.parametrize("damage", [_cut, _flip, Path.unlink])
def test_any_damaged_file_makes_the_checkpoint_before_it_the_last(
    run: RunDir, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    last, before = run.checkpoint_dir(4), run.checkpoint_dir(2)
    files = [path.relative_to(last) for path in last.rglob("*") if path.is_file()]
    assert {"model.safetensors", "manifest.json", "trainer/state.pt"} <= {str(path) for path in files}
    for name in files:
        if name.name == "manifest.json" and damage is _flip:
            continue
        kept = (last / name).read_bytes()
        damage(last / name)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert checkpoint.latest_good(run.checkpoints) == before, name
        assert str(last) in caplog.text
        assert name.name in caplog.text
        (last / name).write_bytes(kept)
    assert checkpoint.latest_good(run.checkpoints) == last


def test_a_resume_from_the_one_before_ends_as_the_run_did(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    metrics, weights = _metrics(run), (run.checkpoint_dir(4) / "model.safetensors").read_bytes()
    _flip(run.checkpoint_dir(4) / "trainer" / "state.pt")
    with caplog.at_level(logging.WARNING):
        train(words_config(run.path.parent), resume=True)
    assert "trainer/state.pt" in caplog.text
    assert _metrics(run) == metrics
    assert (run.checkpoint_dir(4) / "model.safetensors").read_bytes() == weights


def _rewritten(run: RunDir, change: Callable[[dict[str, Any]], object]) -> None:
    """The last checkpoint with another state: whole by its own manifest."""
    last = run.checkpoint_dir(4)
    state = checkpoint.read_state(last / "trainer" / "state.pt")
    change(state)

    def write(draft: Path) -> None:
        shutil.copytree(last, draft, dirs_exist_ok=True, ignore=shutil.ignore_patterns("manifest.json", "state.pt"))
        checkpoint.write_state(draft / "trainer" / "state.pt", state)

    checkpoint.save(run.checkpoints, last.name, write, keep=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["config"].update(seed=9), r"another config.*\n  seed: 9 -> 0"),
        (lambda state: state.pop("config"), "which config"),
        (lambda state: state["learner"].pop("order"), "another training state.*order"),
        (lambda state: state["position"].update(laps=1), "another training state.*laps"),
        (lambda state: state["reward"].update(tree="0" * 64), "belongs to another tree"),
        (lambda state: state.update(reference=[x - 0.1 for x in state["reference"]]), r"the reference policy"),
    ],
)
def test_what_belongs_elsewhere_is_refused(
    run: RunDir, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    before = _metrics(run)
    _rewritten(run, change)
    with pytest.raises(CheckpointError, match=message):
        train(words_config(run.path.parent), resume=True)
    assert _metrics(run) == before, "nothing was truncated"


def test_a_line_that_a_kill_kept_from_the_file_is_written_by_the_resume(run: RunDir) -> None:
    metrics = _metrics(run)
    run.truncate_metrics(3)
    shutil.rmtree(run.eval_dir(4))
    train(words_config(run.path.parent), resume=True)
    assert _metrics(run) == metrics
    times = {key: value for key, value in run.read_metrics()[-1].items() if key.startswith("time/")}
    assert times["time/iteration"] >= times["time/rollout"] + times["time/learn"] + times["time/eval"]


def test_eval_refuses_a_damaged_checkpoint(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", WORLD, "-m", str(run.path), "-s", "dev", "-n", "1", "--checkpoint"]
    _flip(run.checkpoint_dir(4) / "model.safetensors")
    assert main([*arguments, "4"]) == 1
    assert "model.safetensors is not what was written" in capsys.readouterr().err
    assert main([*arguments, "2"]) == 0
