from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl._store import EpisodeFolder, from_record, to_record, tokens_of
from agentrl.config import RunConfig
from agentrl.errors import RunError, UsageError
from agentrl.run import RunDir
from agentrl.types import EndReason, Message, Task, ToolCall, ToolResult, Trajectory, Turn

TEXT = st.text(st.characters(), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
CALLS = st.builds(ToolCall, TEXT, st.dictionaries(TEXT, JSON, max_size=2))
MESSAGES = st.builds(Message, st.sampled_from(["system", "user"]), TEXT, st.lists(CALLS, max_size=1).map(tuple))


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    sampled = draw(IDS)
    n = len(sampled)
    return Turn(
        prompt_ids=draw(IDS),
        sampled_ids=sampled,
        logprobs=tuple(draw(st.lists(st.floats(-1e3, 0), min_size=n, max_size=n))),
        policy_version=draw(st.integers(0, 5)),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        text=draw(TEXT),
        calls=tuple(draw(st.lists(CALLS, max_size=2))),
        results=tuple(draw(st.lists(st.builds(ToolResult, TEXT, TEXT), max_size=2))),
        malformed=draw(st.none() | TEXT),
        reward=draw(st.floats(-1, 1)),
        ledger=draw(JSON),
        timings={"decode": draw(st.floats(0, 1))},
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    made = tuple(draw(st.lists(turns(), max_size=3)))
    kept = sum(len(turn.sampled_ids) for turn in made)
    return Trajectory(
        id=draw(TEXT),
        task=Task(draw(TEXT), "Env-v0", draw(TEXT), draw(st.dictionaries(TEXT, JSON, max_size=2))),
        seed=draw(st.integers(0, 2**31)),
        opening=tuple(draw(st.lists(MESSAGES, max_size=2))),
        turns=made,
        end=draw(st.sampled_from(EndReason)),
        ledger=draw(JSON),
        success=draw(st.none() | st.booleans()),
        trailing_ids=draw(IDS),
        n_sampled=kept + 2,
        dropped={"cut": 2},
        error=draw(st.none() | TEXT),
        attempt=draw(st.integers(0, 2)),
    )


def episode(name: str, n_tokens: int = 4, end: EndReason = EndReason.SUBMITTED, attempt: int = 0) -> Trajectory:
    ids = tuple(range(n_tokens))
    turn = Turn((7, 8), ids, tuple(-0.1 * i for i in ids), 0, "stop", f"said {name}", reward=1.0)
    task = Task(name, "Env-v0", "do it")
    return Trajectory(
        name, task, 0, (Message("user", "go"),), (turn,), end, {"total": 1.0}, True, n_sampled=n_tokens, attempt=attempt
    )


def config(tmp_path: Path, **changes: object) -> RunConfig:
    return RunConfig.model_validate({"name": "r", "runs_dir": tmp_path, "model": {"path": "m"}, **changes})


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(trajectories(), max_size=3, unique_by=lambda t: t.id))
def test_episodes_come_back_exactly(tmp_path_factory: pytest.TempPathFactory, made: list[Trajectory]) -> None:
    folder = EpisodeFolder(tmp_path_factory.mktemp("episodes"))
    for trajectory in made:
        folder.append(trajectory)
    expected = sorted(made, key=lambda t: t.id)
    assert folder.trajectories() == expected, "while it is being written"
    folder.finish()
    assert folder.trajectories() == expected, "after it was finished"
    assert not (folder.path / "tokens.partial").exists()


def test_a_finished_folder_can_grow(tmp_path: Path) -> None:
    with EpisodeFolder(tmp_path) as folder:
        folder.append(episode("b", 3))
    with EpisodeFolder(tmp_path) as folder:
        folder.append(episode("a", 5))
    assert EpisodeFolder(tmp_path).trajectories() == [episode("a", 5), episode("b", 3)]


def test_the_last_attempt_of_an_id_counts(tmp_path: Path) -> None:
    with EpisodeFolder(tmp_path) as folder:
        folder.append(episode("a", 3, EndReason.ENV_ERROR))
        folder.append(episode("a", 5, attempt=1))
    assert EpisodeFolder(tmp_path).trajectories() == [episode("a", 5, attempt=1)]


def test_episodes_without_tokens_need_no_token_file(tmp_path: Path) -> None:
    with EpisodeFolder(tmp_path) as folder:
        folder.append(Trajectory("a", Task("a", "E", "x"), 0, (), (), EndReason.GAVE_UP))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["episodes.jsonl"]
    assert [t.id for t in EpisodeFolder(tmp_path).trajectories()] == ["a"]


def test_numpy_numbers_in_a_ledger_lose_no_episode(tmp_path: Path) -> None:
    made = episode("a")
    with EpisodeFolder(tmp_path) as folder:
        folder.append(Trajectory("a", made.task, 0, (), (), EndReason.SUBMITTED, {"value": np.float32(0.5)}))
    assert EpisodeFolder(tmp_path).trajectories()[0].ledger == {"value": 0.5}


def test_an_episode_that_cannot_be_written_leaves_no_trace(tmp_path: Path) -> None:
    folder = EpisodeFolder(tmp_path)
    folder.append(episode("a", 3))
    with pytest.raises(TypeError, match="expected a JSON-able value"):
        folder.append(dataclasses.replace(episode("b", 50), ledger={"value": object()}))
    folder.append(episode("c", 5))
    assert folder.trajectories() == [episode("a", 3), episode("c", 5)]
    folder.finish()
    assert folder.trajectories() == [episode("a", 3), episode("c", 5)]


def test_a_line_whose_tokens_were_lost_is_dropped(tmp_path: Path) -> None:
    folder = EpisodeFolder(tmp_path)
    for name in "abc":
        folder.append(episode(name))
    folder.close()
    partial = tmp_path / "tokens.partial"
    os.truncate(partial, partial.stat().st_size - 1)
    assert [t.id for t in EpisodeFolder(tmp_path).trajectories()] == ["a", "b"]
    again = EpisodeFolder(tmp_path)
    again.append(episode("d"))
    again.finish()
    assert EpisodeFolder(tmp_path).trajectories() == [episode("a"), episode("b"), episode("d")]


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from agentrl.run import RunDir
from test_run import config, episode
run = RunDir.create(config(Path(sys.argv[1])), resume=True)
for i in range(10_000):
    run.append_metrics(i, {"reward/mean": 0.5})
    with run.rollouts(i) as folder:
        for k in range(4):
            folder.append(episode(f"{i:06d}/{k}", n_tokens=2000))
            print(f"{i:06d}/{k}", flush=True)
"""


@pytest.mark.parametrize("round_", range(6))
def test_kill_9_loses_no_finished_episode(tmp_path: Path, round_: int) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path), str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    written = [process.stdout.readline().strip() for _ in range(1 + 5 * round_)]
    time.sleep(0.003 * round_)
    process.send_signal(signal.SIGKILL)
    written += [line.strip() for line in process.stdout if line.endswith("\n")]
    process.wait()
    run = RunDir.open(tmp_path / "r")
    found = [t for folder in run.episode_folders() for t in EpisodeFolder(run.path / folder).trajectories()]
    assert set(written) <= {t.id for t in found}
    assert all(t == episode(t.id, n_tokens=2000) for t in found)
    lines = run.read_metrics()
    assert [line["iteration"] for line in lines] == list(range(len(lines)))
    with RunDir.create(config(tmp_path), resume=True) as resumed:
        resumed.append_metrics(len(lines), {"reward/mean": 1.0})
        last = resumed.rollouts(len(lines) - 1)
        last.append(episode("late"))
        last.finish()
        assert [t.id for t in last.trajectories()][-1] == "late"
    assert len(run.read_metrics()) == len(lines) + 1


def test_metrics_survive_a_torn_line(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path)) as run:
        run.append_metrics(0, {"a": 1.0, "b": float("nan")})
        run.append_metrics(1, {"a": 2.0})
    path = run.path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    assert run.read_metrics() == [{"iteration": 0, "a": 1.0, "b": None}]
    with RunDir.create(config(tmp_path), resume=True) as again:
        again.append_metrics(1, {"a": 3.0})
    assert [line["a"] for line in run.read_metrics()] == [1.0, 3.0]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path)) as run:
        (run.path / "metrics.jsonl").write_text('{"iteration": 0}\n{oops\n{"iteration": 2}\n')
        with pytest.raises(RunError, match=r"metrics\.jsonl, line 2"):
            run.read_metrics()


def test_a_second_run_of_a_name_must_say_resume(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path)).close()
    with pytest.raises(UsageError, match="--resume, or choose another name"):
        RunDir.create(config(tmp_path))


def test_resume_lists_the_keys_that_differ(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path)).close()
    changed = config(tmp_path, seed=3, ppo={"policy": {"lr": 0.5}}, sft={})
    with pytest.raises(UsageError) as caught:
        RunDir.create(changed, resume=True)
    message = str(caught.value)
    assert "ppo.policy.lr: 0.0001 -> 0.5" in message
    assert "seed: 0 -> 3" in message
    assert "sft: null ->" in message
    assert "runs_dir" not in message


def test_resume_takes_another_spelling_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunDir.create(config(tmp_path)).close()
    monkeypatch.chdir(tmp_path)
    with RunDir.create(config(Path()), resume=True) as run:
        assert len(run.manifest["resumed"]) == 1


def test_a_refused_create_gives_the_lock_back(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path)).close()
    with pytest.raises(UsageError):
        RunDir.create(config(tmp_path))
    RunDir.create(config(tmp_path), resume=True).close()


def test_one_process_writes_a_run(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path)):
        code = "import sys; sys.path.insert(0, sys.argv[2]); from pathlib import Path; from test_run import *\n"
        code += "RunDir.create(config(Path(sys.argv[1])), resume=True)"
        command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "another process is writing" in done.stderr


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("x")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        RunDir.create(config(tmp_path), resume=True)
    with pytest.raises(UsageError, match="is no run directory"):
        RunDir.open(tmp_path / "r")


def test_open_names_a_near_run(tmp_path: Path) -> None:
    RunDir.create(config(tmp_path)).close()
    with pytest.raises(UsageError, match=r"Did you mean '.*/r'"):
        RunDir.open(tmp_path / "rr")


def test_config_and_manifest_are_written_first(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path, threads=2, seed=9)) as run:
        run.update_manifest({"task_digests": {"heldout": "ab"}})
    assert run.config == config(tmp_path, threads=2, seed=9)
    assert run.manifest["task_digests"] == {"heldout": "ab"}
    assert (run.manifest["seed"], run.manifest["threads"]) == (9, 2)
    assert run.manifest["packages"]["pydantic"]
    assert run.manifest["python"].count(".") == 2


def test_a_resume_goes_back_to_the_checkpoint(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path)) as run:
        for i in range(5):
            run.append_metrics(i, {"a": i})
            with run.rollouts(i) as folder:
                folder.append(episode(f"{i}"))
        EpisodeFolder(run.eval_dir(4)).append(episode("dev"))
        EpisodeFolder(run.eval_dir("before")).append(episode("start"))
    with RunDir.create(config(tmp_path), resume=True) as run:
        run.truncate_metrics(2)
        assert run.move_later_rollouts(2) == run.path / "attempts" / "1"
        assert run.move_later_rollouts(2) is None
        assert [line["iteration"] for line in run.read_metrics()] == [0, 1, 2]
        with run.rollouts(3) as folder:
            folder.append(episode("again"))
        assert run.move_later_rollouts(2) == run.path / "attempts" / "2"
    found = [str(folder) for folder in run.episode_folders()]
    assert found[:4] == ["evals/before", "rollouts/000000", "rollouts/000001", "rollouts/000002"]
    assert found[4:7] == [f"attempts/1/{kept}" for kept in ("evals/000004", "rollouts/000003", "rollouts/000004")]
    assert found[7:] == ["attempts/2/rollouts/000003"]


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    code = """
    import resource, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_run import *
    run = RunDir.create(config(Path(sys.argv[1])))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
    folder = run.rollouts(0)
    for k in range(100):
        folder.append(episode(f"{k:03d}", n_tokens=300))
        print(f"{k:03d}", flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "RunError: no room left to write" in done.stderr
    assert "--resume" in done.stderr
    written = done.stdout.split()
    assert 2 < len(written) < 100
    with RunDir.create(config(tmp_path), resume=True) as run:
        folder = run.rollouts(0)
        assert [t.id for t in folder.trajectories()] == written
        folder.append(episode("zzz"))
        folder.finish()
        assert [t.id for t in folder.trajectories()] == [*written, "zzz"]


def test_results_hold_no_nan(tmp_path: Path) -> None:
    with RunDir.create(config(tmp_path)) as run:
        run.write_result({"difference": {"low": float("-inf")}, "n": 3})
        assert json.loads((run.path / "result.json").read_text()) == {"difference": {"low": None}, "n": 3}
        assert run.result == {"difference": {"low": None}, "n": 3}


def test_a_record_is_readable_without_tokens() -> None:
    made = episode("a")
    from agentrl._store import Extent

    record = json.loads(json.dumps(to_record(made, Extent(0, 6, 0, 4))))
    assert record["reward"] == 1.0
    assert record["turns"][0]["text"] == "said a"
    assert from_record(record, tokens_of(made)) == made
