"""A run that is killed in a named phase goes on, bit for bit, as if it had not been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl._store import EpisodeFolder, tokens_of
from agentrl.learner.checkpoint import read_state, verify
from agentrl.run import RunDir

PROGRAM = Path(__file__).parent / "replay" / "resume_phases.py"
PHASES = [
    "SFT step",
    "SFT checkpoint",
    "first evaluation",
    "warm-up",
    "collecting",
    "line of an episode",
    "packing of tokens",
    "trained rewards",
    "scoring",
    "between micro-batches",
    "between policy and critic",
    "between minibatches",
    "record of the update",
    "weights of the checkpoint",
    "state of the checkpoint",
    "before the rename",
    "after the rename",
    "evaluation",
    "summary of the evaluation",
    "half a line of metrics",
    "whole line of metrics",
    "last evaluation",
    "result",
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True, env=environment, timeout=840
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def _metrics(run: RunDir) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in run.read_metrics()]


def _episodes(run: RunDir) -> dict[str, list[object]]:
    """Every episode that counts, with its tokens and without what is timed."""
    folders = [path for path in run.episode_folders() if path.parts[0] != "attempts"]
    return {str(path): _in(EpisodeFolder(run.path / path)) for path in folders}


def _in(folder: EpisodeFolder) -> list[object]:
    tokens = [[array.tolist() for array in tokens_of(trajectory)] for trajectory in folder.trajectories()]
    return [*map(_untimed, folder.records()), tokens]


def _untimed(value):
    if isinstance(value, dict):
        # Where tokens lie in a folder follows from the order in which its episodes ended.
        return {k: _untimed(v) for k, v in value.items() if k not in {"timings", "duration_s", "tokens"}}
    return [_untimed(inner) for inner in value] if isinstance(value, list) else value


def _same(a: object, b: object, where: str = "state") -> None:
    """Bitwise equality of two training states."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype, where
        assert torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in {"runs_dir", "times", "elapsed"}:
                _same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for i, (left, right) in enumerate(zip(a, b, strict=True)):
            _same(left, right, f"{where}[{i}]")
    else:
        assert a == b or (a != a and b != b), where


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("phase", PHASES)
def test_a_kill_in_this_phase_changes_nothing(runs: Path, phase: str) -> None:
    whole, killed = RunDir.open(runs / "whole" / "run"), RunDir.open(runs / phase / "run")
    assert _metrics(killed) == _metrics(whole)
    assert [line["iteration"] for line in _metrics(whole)] == [1, 2, 3, 4]
    for row, other in zip(killed.result["evals"], whole.result["evals"], strict=True):
        assert row == other
    for last in (4, 2):
        ours, theirs = killed.checkpoint_dir(last), whole.checkpoint_dir(last)
        verify(ours)
        for name in ("model.safetensors", "trainer/critic.safetensors", "trainer/reference/model.safetensors"):
            _same(load_file(ours / name), load_file(theirs / name), name)
        _same(read_state(ours / "trainer/state.pt"), read_state(theirs / "trainer/state.pt"))
    for iteration in (2, 3, 4):
        _same(load_file(killed.learning_path(iteration)), load_file(whole.learning_path(iteration)))
        with (
            safe_open(killed.learning_path(iteration), "pt") as one,
            safe_open(whole.learning_path(iteration), "pt") as two,
        ):
            assert one.metadata() == two.metadata()
    assert _episodes(killed) == _episodes(whole)
    assert json.loads(killed.config_path.read_text())["name"] == "run"


def test_every_phase_of_the_program_is_tested(runs: Path) -> None:
    assert sorted(path.name for path in runs.iterdir()) == sorted(["whole", *PHASES])


def test_what_a_resume_went_back_behind_is_kept_aside(runs: Path) -> None:
    run = RunDir.open(runs / "scoring" / "run")
    assert (run.path / "attempts/1/rollouts/000003/episodes.jsonl").is_file()
    assert len(run.manifest["resumed"]) == 2
    assert not (RunDir.open(runs / "whole" / "run").path / "attempts").exists()
    torn = RunDir.open(runs / "line of an episode" / "run").path / "attempts/1/rollouts/000003"
    assert len((torn / "episodes.jsonl").read_text().splitlines()) == 1
