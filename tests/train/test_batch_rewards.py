"""Batch nodes in whole runs: what is trained on, what is kept, and a resume that ends as the run would have."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from agentrl.config import RunConfig
from agentrl.errors import CheckpointError, ConfigError, InvariantError, RunError
from agentrl.learner import checkpoint
from agentrl.reward import RewardTree
from agentrl.reward.ledger import check_trajectory
from agentrl.reward.transform import is_trained
from agentrl.run import EpisodeFolder, RunDir
from agentrl.train import train
from agentrl.train.sft import STATE

COMPONENTS = """
import agentrl

@agentrl.component(name="vowels")
def vowels(episode):
    return agentrl.Score(sum(turn.text.count("e") for turn in episode.turns) % 7 / 7)

@agentrl.component(name="short", when="turn")
def short(episode):
    return agentrl.Score(1.0 if len(episode.turns[-1].text) % 2 else 0.25)
"""

SUM = """
[[children]]
weight = 1.0
component = "phi.py:vowels"

[[children]]
weight = 0.25
component = "phi.py:short"
"""

REWARDS = {
    "normalised": 'kind = "normalised"\nmin_std = 0.01\n' + SUM,
    "constrained": """
kind = "constrained"
budget = 0.1
eta = 0.5
objective = { component = "phi.py:vowels" }
safeguards = [{ component = "phi.py:short", role = "safeguard" }]
""",
    "group_relative": 'kind = "group_relative"\nmin_std = 0.01\n' + SUM,
}


def _config(folder: Path, kind: str, **changes: object) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "phi.py").write_text(COMPONENTS)
    (folder / "reward.toml").write_text(REWARDS[kind])
    tiny = {"vocab_size": 400, "hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "context": 512}
    has_critic = kind != "group_relative"
    tables: dict[str, object] = {
        "name": "small",
        "runs_dir": folder / "runs",
        "threads": 1,
        "env": {"settings": {"kinds": ["count"], "domains": ["shop"]}, "reward": str(folder / "reward.toml")},
        "model": {"critic": "head" if has_critic else "none", "tiny": {**tiny, "corpus_tasks": 8}},
        "rollout": {"tasks": 2, "episodes_per_task": 3, "sampling": {"max_tokens": 12}},
        "ppo": {
            "iterations": 4,
            "warmup_collections": int(has_critic),
            "policy": {"lr": 1e-2},
            "advantage": {"estimator": "boundary" if has_critic else "reinforce_pp"},
        },
        "eval": {"tasks": 2, "greedy": False},
        "checkpoint": {"every": 1, "keep": 9},
    }
    return RunConfig.model_validate(tables | changes)


@pytest.fixture(scope="module", params=list(REWARDS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, RunConfig, RunDir]:
    config = _config(tmp_path_factory.mktemp(request.param), request.param)
    train(config)
    return request.param, config, RunDir.open(config.runs_dir / config.name)


def _without_times(run: RunDir) -> list[dict[str, object]]:
    return [{key: v for key, v in line.items() if not key.startswith("time/")} for line in run.read_metrics()]


def _episodes(run: RunDir, iteration: int) -> list[object]:
    return [
        [t.id, t.ledger, [(turn.reward, turn.text, turn.sampled_ids) for turn in t.turns]]
        for t in run.rollouts(iteration).trajectories()
    ]


def test_what_is_trained_can_be_computed_again_from_what_is_kept(finished: tuple[str, RunConfig, RunDir]) -> None:
    _, config, run = finished
    tree = RewardTree.load(str(config.env.reward))
    lines = run.read_metrics()
    state = tree.start_state()
    moved = 0
    for line in lines:
        folder = run.rollouts(int(line["iteration"]))
        assert folder.reward_state == state
        kept = folder.trajectories()
        batch = tree.transform(kept, folder.reward_state)
        assert list(batch.trajectories) == kept
        assert all(check_trajectory(t) <= 1e-9 and is_trained(t) for t in kept)
        assert {name: line[name] for name in batch.metrics} == batch.metrics
        raw = [sum(t.ledger["raw"]) for t in kept]
        assert line["reward/mean"] == pytest.approx(sum(raw) / len(raw))
        assert line["reward/trained_mean"] == pytest.approx(sum(t.reward for t in kept) / len(kept), abs=1e-12)
        records = folder.records()
        assert [r["reward"] for r in records] == [t.reward for t in kept]
        moved += sum(t.ledger["raw"] != t.ledger["trained"] for t in kept)
        state = batch.state
    assert moved > 0
    last = run.checkpoint_dir(int(lines[-1]["iteration"]))
    assert checkpoint.read_state(last / STATE)["reward"] == state


def test_evaluation_reads_the_children(finished: tuple[str, RunConfig, RunDir]) -> None:
    _, _, run = finished
    folders = [path for path in run.episode_folders() if path.parts[0] == "evals"]
    assert folders
    for path in folders:
        for t in EpisodeFolder(run.path / path).trajectories():
            assert "batch" not in t.ledger
            assert t.reward == pytest.approx(t.ledger["total"])


def test_a_resume_ends_as_the_run_that_was_not_stopped(finished: tuple[str, RunConfig, RunDir], tmp_path: Path) -> None:
    _, config, whole = finished
    stopped = config.model_copy(update={"runs_dir": tmp_path})
    shutil.copytree(whole.path, tmp_path / config.name)
    run = RunDir.open(tmp_path / config.name)
    last = len(whole.read_metrics())
    (run.path / "result.json").unlink()
    for iteration in range(3, last + 1):
        shutil.rmtree(run.checkpoint_dir(iteration))
    # As a kill leaves it before its episodes are transformed.
    (run.rollouts(3).path / "reward_state.json").unlink()
    shutil.rmtree(run.eval_dir("ppo-heldout-sampled"))
    train(stopped, resume=True)
    assert _without_times(run) == _without_times(whole)
    for iteration in range(1, last + 1):
        assert _episodes(run, iteration) == _episodes(whole, iteration)
        assert run.rollouts(iteration).reward_state == whole.rollouts(iteration).reward_state
    states = [checkpoint.read_state(r.checkpoint_dir(last) / STATE) for r in (run, whole)]
    assert states[0]["reward"] == states[1]["reward"]
    models = [r.checkpoint_dir(last) / "model.safetensors" for r in (run, whole)]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert torch.equal(states[0]["torch_rng"], states[1]["torch_rng"])


@pytest.mark.parametrize("finished", ["constrained"], indirect=True)
def test_a_resume_under_another_reward_is_refused(finished: tuple[str, RunConfig, RunDir], tmp_path: Path) -> None:
    _, config, whole = finished
    shutil.copytree(whole.path, tmp_path / config.name)
    (tmp_path / config.name / "result.json").unlink()
    shutil.rmtree(tmp_path / config.name / "evals")
    reward = Path(str(config.env.reward))
    text = reward.read_text()
    try:
        reward.write_text(text.replace("budget = 0.1", "budget = 0.2"))
        with pytest.raises(CheckpointError, match="the state of the reward belongs to another tree"):
            train(config.model_copy(update={"runs_dir": tmp_path}), resume=True)
    finally:
        reward.write_text(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"critic": "head", "tiny": {"corpus_tasks": 8}}, "ppo": {}}, "expected model.critic = 'none'"),
        ({"rollout": {"tasks": 2, "episodes_per_task": 1}}, "episodes_per_task of at least 2, found 1"),
    ],
)
def test_a_group_needs_siblings_and_no_critic(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(_config(tmp_path, "group_relative", **changes))
    assert not (tmp_path / "runs").exists()


def test_episodes_are_rewritten_whole_or_not_at_all(finished: tuple[str, RunConfig, RunDir], tmp_path: Path) -> None:
    _, _, whole = finished
    shutil.copytree(whole.rollouts(1).path, tmp_path / "000001")
    folder = EpisodeFolder(tmp_path / "000001")
    before, text = folder.trajectories(), (tmp_path / "000001" / "episodes.jsonl").read_bytes()
    folder.rewrite(before)
    assert (tmp_path / "000001" / "episodes.jsonl").read_bytes() == text
    stranger = dataclasses.replace(before[0], id="stranger")
    with pytest.raises(RunError, match="to hold episode stranger with .* found no such episode"):
        folder.rewrite([before[1], stranger])
    shorter = dataclasses.replace(before[1], trailing_ids=(1, 2, 3))
    with pytest.raises(RunError, match="cannot be rewritten"):
        folder.rewrite([shorter])
    assert (tmp_path / "000001" / "episodes.jsonl").read_bytes() == text
    folder.append(shorter)
    folder.rewrite([shorter])
    assert folder.trajectories()[1] == shorter
    assert folder.trajectories()[0] == before[0]


def test_a_ledger_that_does_not_add_up_stops_the_run_by_name(finished: tuple[str, RunConfig, RunDir]) -> None:
    _, _, whole = finished
    episode = whole.rollouts(2).trajectories()[0]
    episode.ledger["trained"][-1] += 1e-6
    with pytest.raises(InvariantError, match=f"episode {episode.id}: the ledger does not add up"):
        check_trajectory(episode)
