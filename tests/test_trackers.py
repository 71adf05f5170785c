from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.errors import MissingError
from agentrl.run import RunDir
from agentrl.trackers import make_tracker, tracked

pytest.importorskip("tensorboard")


def config(tmp_path: Path, *trackers: str) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "runs_dir": tmp_path, "model": {"path": "m"}, "trackers": trackers})


def steps(path: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    events = EventAccumulator(str(path))
    events.Reload()
    names = events.Tags()["tensors"]
    return {name: [(e.step, float(make_ndarray(e.tensor_proto))) for e in events.Tensors(name)] for name in names}


def test_tensorboard_shows_what_metrics_hold_after_a_resume(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path, "tensorboard")) as run, tracked(run.config, run):
        for i in range(4):
            run.append_metrics(i, {"reward/mean": float(i), "ppo/kl": None})
    with RunDir.create(config(tmp_path, "tensorboard"), resume=True) as run, tracked(run.config, run):
        run.truncate_metrics(1)
        run.append_metrics(2, {"reward/mean": 20.0})
    assert steps(run.path / "tensorboard") == {"reward/mean": [(0, 0.0), (1, 1.0), (2, 20.0)]}


def test_a_failing_tracker_is_dropped_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunDir.create(config(tmp_path, "tensorboard")) as run:
        (run.path / "tensorboard").write_text("in the way")
        with caplog.at_level(logging.WARNING), tracked(run.config, run):
            for i in range(3):
                run.append_metrics(i, {"a": 1.0})
    assert len(run.read_metrics()) == 3
    assert len(caplog.records) == 1
    assert "the tracker tensorboard failed and is left out" in caplog.text


def test_a_missing_tracker_is_told_of_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="pip install nowhere_to_be_found"):
        make_tracker("nowhere_to_be_found")
    with RunDir.create(config(tmp_path)) as run, tracked(run.config, run):
        run.append_metrics(0, {"a": 1.0})
    assert not (run.path / "tensorboard").exists()
