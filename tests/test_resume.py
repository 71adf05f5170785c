"""A run that is killed anywhere goes on as if it had not been."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
name = "run"
threads = 1

[env]
id = "Sql-v0"
settings = { levels = [1], kinds = ["count"], domains = ["shop"] }

[model]
critic = "head"

[model.tiny]
vocab_size = 400
hidden_size = 32
layers = 1
heads = 2
intermediate_size = 64
context = 512
corpus_tasks = 16

[sft]
episodes = 32
steps = 30
batch_episodes = 8
checkpoint_every = 10
optim = { lr = 1e-2 }

[rollout]
tasks = 4
episodes_per_task = 2
sampling = { max_tokens = 24 }

[ppo]
iterations = 8
warmup_collections = 1
policy = { lr = 1e-3 }

[eval]
tasks = 6
every = 3
dev_tasks = 4

[checkpoint]
every = 2
"""


def _start(folder: Path) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("agentrl")), "train", "--config", "run.toml", "--resume", "--json"]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def _prepare(folder: Path) -> Path:
    folder.mkdir()
    (folder / "run.toml").write_text(CONFIG)
    return folder


def _metrics(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


def _evals(folder: Path) -> list[object]:
    result = json.loads((folder / "runs/run/result.json").read_text())
    return [[row["policy"], row["split"], row["temperature"], row["summary"]] for row in result["evals"]]


def _finish(folder: Path) -> None:
    process = _start(folder)
    assert process.wait(timeout=240) == 0, (folder / "log").read_text()[-3000:]


KILLS = 4
"""Named phases are in test_resume_phases.py; these look for one that nobody thought of."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    whole = _prepare(tmp_path / "whole")
    _finish(whole)
    draw = random.Random(20)
    killed, attempt, folders = 0, 0, []
    while killed < KILLS:
        folder = _prepare(tmp_path / f"killed-{attempt}")
        folders.append(folder)
        attempt += 1
        while killed < KILLS:
            process = _start(folder)
            try:
                process.wait(timeout=draw.uniform(2.0, 14.0))
                break
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                killed += 1
        _finish(folder)
    for folder in folders:
        assert _metrics(folder) == _metrics(whole)
        assert _evals(folder) == _evals(whole)
        assert "success" in json.loads((folder / "runs/run/result.json").read_text())["evals"][0]["summary"]


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_the_run_goes_on(tmp_path: Path) -> None:
    folder = _prepare(tmp_path / "interrupted")
    process = _start(folder)
    metrics = folder / "runs/run/metrics.jsonl"
    for _ in range(600):
        if metrics.exists() or process.poll() is not None:
            break
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130, (folder / "log").read_text()[-3000:]
    _finish(folder)
    assert [line["iteration"] for line in _metrics(folder)] == list(range(1, len(_metrics(folder)) + 1))
