"""A stored iteration is computed again from its files alone, and what was changed by hand is found and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from words_run import words_config

import agentrl
from agentrl.cli import main
from agentrl.errors import RunError, UsageError
from agentrl.learner.record import UpdateRecord
from agentrl.run import RunDir
from agentrl.train import train

UPDATE = 3
"""An iteration with an update: the first one warms the critic up."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(words_config(folder))
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _wrong(run: Path, *, weights: bool = False) -> dict[str, str]:
    """Quantities that differ, and where."""
    found = agentrl.replay_iteration(run, UPDATE, weights=weights)
    assert found.ok == all(row.ok for row in found.rows)
    return {row.what: row.worst.where for row in found.rows if not row.ok}


def _edit_episode(run: Path, change: Callable[[dict], None], iteration: int = UPDATE) -> dict:
    path = run / f"rollouts/{iteration:06d}/episodes.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    change(records[1])
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records[1]


def _edit_record(run: Path, **changes: object) -> UpdateRecord:
    path = run / f"rollouts/{UPDATE:06d}/learning.safetensors"
    record = UpdateRecord.load(path)
    changed = replace(record, **{name: change(getattr(record, name)) for name, change in changes.items()})
    changed.save(path)
    return changed


def _at(place: int, by: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[place] += by
        return y

    return change


@pytest.mark.parametrize("iteration", [2, 3, 4])
def test_an_update_is_found_again(trained: Path, iteration: int) -> None:
    found = agentrl.replay_iteration(trained, iteration)
    assert found.ok
    assert found.warnings == ()
    compared = {row.what: row.compared for row in found.rows}
    record = UpdateRecord.load(RunDir.open(trained).learning_path(iteration))
    n_tokens = record.old_logprob_N.numel()
    assert n_tokens > 40
    for what in ("advantages", "value targets", "importance weights", "tokens in the policy's loss"):
        assert compared[what] == n_tokens
    assert compared["policy loss"] == compared["value loss"] == len(record.steps) == 4
    assert compared["metrics.jsonl, losses"] >= 10
    assert compared["ledgers"] > 200
    assert max(row.largest for row in found.rows) < 1e-6
    assert record.advantage_N.abs().max() > 0.1, "a batch that teaches nothing would prove nothing"
    assert any(step.stepped for step in record.steps)
    moved = record.steps[-1].logprob_N - record.old_logprob_N
    assert moved.nan_to_num().abs().max() > 1e-4


def test_a_warm_up_has_rewards_and_no_update(trained: Path) -> None:
    found = agentrl.replay_iteration(trained, 1)
    assert found.ok
    assert [row.what for row in found.rows] == ["rewards of turns", "ledgers", "metrics.jsonl, rewards and credit"]
    assert "warmed the critic up" in found.warnings[0]


def test_a_changed_reward_is_found_at_its_turn(run: Path) -> None:
    def change(record: dict) -> None:
        record["turns"][-1]["reward"] += 1e-6

    record = _edit_episode(run, change)
    assert _wrong(run) == {"rewards of turns": f"episode {record['id']}, turn {len(record['turns']) - 1}"}


def test_changed_evidence_changes_all_that_follows(run: Path) -> None:
    def change(record: dict) -> None:
        record["ledger"]["evidence"]["Count"][-1]["value"]["value"] += 1

    record = _edit_episode(run, change)
    wrong = _wrong(run)
    assert {"rewards of turns", "ledgers", "advantages", "value targets"} <= set(wrong)
    assert record["id"] in wrong["rewards of turns"]


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["ledger"]["steps"][0]["entry"]["children"][0].update(value=0.125),
        lambda record: record["ledger"].update(success=not record["ledger"]["success"]),
        lambda record: record.update(success=None),
        lambda record: record["ledger"]["batch"].update(deviation=2.0),
    ],
)
def test_a_changed_ledger_is_found(run: Path, change: Callable[[dict], None]) -> None:
    record = _edit_episode(run, change)
    assert record["id"] in _wrong(run)["ledgers"]


def test_another_state_of_the_batch_node_trains_on_other_rewards(run: Path) -> None:
    path = run / f"rollouts/{UPDATE:06d}/reward_state.json"
    state = json.loads(path.read_text())
    state["node"]["m2"] *= 2
    path.write_text(json.dumps(state))
    assert {"rewards of turns", "ledgers", "value targets"} <= set(_wrong(run))


def test_a_changed_advantage_is_found_at_its_token(run: Path) -> None:
    record = _edit_record(run, advantage_N=_at(-1, 1e-3))
    wrong = _wrong(run)
    assert record.episodes[-1] in wrong["advantages"]
    turns = RunDir.open(run).rollouts(UPDATE).trajectories()[-1].turns
    place = f"turn {len(turns) - 1}, token {len(turns[-1].sampled_ids) - 1}"
    assert wrong["advantages"].endswith(place)
    assert wrong.keys() == {"advantages", "policy loss", "metrics.jsonl, losses"}


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("old_value_N", {"advantages"}),
        ("return_N", {"value targets", "value loss"}),
        ("reference_N", {"advantages", "metrics.jsonl, rewards and credit"}),
        ("old_logprob_N", {"advantages", "policy loss", "metrics.jsonl, rewards and credit"}),
        ("weight_N", {"importance weights", "policy loss"}),
    ],
)
def test_a_changed_array_is_found(run: Path, field: str, expected: set[str]) -> None:
    _edit_record(run, **{field: _at(5, 0.01)})
    assert expected <= set(_wrong(run))


@pytest.mark.parametrize(
    ("field", "expected"),
    [("keep_N", "tokens in the policy's loss"), ("value_keep_N", "tokens in the value loss")],
)
def test_a_changed_mask_is_found(run: Path, field: str, expected: str) -> None:
    def flip(mask_N: torch.Tensor) -> torch.Tensor:
        other_N = mask_N.clone()
        other_N[7] = ~other_N[7]
        return other_N

    _edit_record(run, **{field: flip})
    assert expected in _wrong(run)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy_loss": 0.001}, "policy loss"),
        ({"value_loss": 0.001}, "value loss"),
        ({"kl_loss": 0.001}, "kl loss"),
        ({"entropy_bonus": -0.001}, "entropy bonus"),
    ],
)
def test_a_changed_loss_is_found_at_its_minibatch(run: Path, changes: dict[str, float], expected: str) -> None:
    def change(steps: tuple) -> tuple:
        changed = {name: getattr(steps[2], name) + by for name, by in changes.items()}
        return (*steps[:2], replace(steps[2], **changed), *steps[3:])

    _edit_record(run, steps=change)
    assert _wrong(run)[expected] == "minibatch 2"


def test_a_changed_logprob_of_a_step_changes_its_loss(run: Path) -> None:
    def change(steps: tuple) -> tuple:
        at = int((~steps[3].logprob_N.isnan()).nonzero()[0])
        return (*steps[:3], replace(steps[3], logprob_N=_at(at, -0.01)(steps[3].logprob_N)))

    _edit_record(run, steps=change)
    assert _wrong(run)["policy loss"] == "minibatch 3"


def test_a_changed_line_of_metrics_is_found(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[UPDATE - 1]["reward/mean"] += 1e-6
    lines[UPDATE - 1]["loss/policy"] += 1e-3
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = {"metrics.jsonl, rewards and credit": "reward/mean", "metrics.jsonl, losses": "loss/policy"}
    assert _wrong(run) == expected


def test_a_record_of_other_episodes_is_found(run: Path) -> None:
    _edit_record(run, episodes=lambda names: (*names[:-1], "another"))
    assert set(_wrong(run)) == {"episodes and tokens"}
    shutil.copy(run / "rollouts/000002/learning.safetensors", run / f"rollouts/{UPDATE:06d}/learning.safetensors")
    assert set(_wrong(run)) == {"episodes and tokens"}


def test_an_adaptive_coefficient_is_believed_and_a_fixed_one_is_not(run: Path) -> None:
    _edit_record(run, kl_coef=lambda coef: 2 * coef)
    assert {"advantages", "metrics.jsonl, rewards and credit"} <= set(_wrong(run))
    tables = json.loads((run / "config.json").read_text())
    tables["ppo"]["kl"]["target"] = None
    (run / "config.json").write_text(json.dumps(tables))
    assert "KL coefficient" in _wrong(run)


def test_the_weights_say_it_again(run: Path) -> None:
    """The checkpoint of iteration 2 is what iteration 3 began with."""
    found = agentrl.replay_iteration(run, 3, weights=True)
    assert found.ok
    by_weights = {row.what: row for row in found.rows if "by the weights" in row.what}
    assert {name.partition(",")[0] for name in by_weights} == {"logprobs", "values", "reference's logprobs"}
    assert all(row.compared > 40 and row.largest < 1e-5 for row in by_weights.values())
    _edit_record(run, old_logprob_N=_at(3, 1e-3), reference_N=_at(4, 1e-3), final_B=_at(1, 1e-3))
    wrong = _wrong(run, weights=True)
    assert {name for name in wrong if "by the weights" in name} == set(by_weights)
    with pytest.raises(UsageError, match=r"expected one of the iterations 3, 5,"):
        agentrl.replay_iteration(run, 4, weights=True)
    (run / "checkpoints/000002/model.safetensors").write_bytes(b"no model")
    with pytest.raises(RunError, match=r"model\.safetensors"):
        agentrl.replay_iteration(run, 3, weights=True)


def test_what_is_not_there_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no iteration 9: .* which are 1 to 4"):
        agentrl.replay_iteration(run, 9)
    with pytest.raises(UsageError, match="no run directory"):
        agentrl.replay_iteration(tmp_path, 1)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    (run / "rollouts/000003/learning.safetensors").unlink()
    found = agentrl.replay_iteration(run, 3)
    assert found.ok
    assert "not finished" in found.warnings[0]


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("learning.safetensors", "cut"),
        ("learning.safetensors", "gone"),
        ("tokens.safetensors", "cut"),
        ("tokens.safetensors", "gone"),
        ("episodes.jsonl", "cut"),
        ("reward_state.json", "cut"),
        ("reward_state.json", "gone"),
    ],
)
def test_a_damaged_file_is_named(run: Path, name: str, cut: str) -> None:
    path = run / f"rollouts/{UPDATE:06d}" / name
    data = path.read_bytes()
    path.unlink()
    if cut == "cut":
        path.write_bytes(b"{" + data[: len(data) // 2] + b"\n")
    with pytest.raises(RunError, match=name.partition(".")[0]):
        agentrl.replay_iteration(run, UPDATE)


@pytest.mark.parametrize(("key", "value"), [("reward", "0" * 64), ("source", "0" * 64), ("env", "Words-v9")])
def test_another_environment_is_said_and_the_replay_goes_on(run: Path, key: str, value: str) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["environment"][key]
    manifest["environment"][key] = value
    (run / "manifest.json").write_text(json.dumps(manifest))
    found = agentrl.replay_iteration(run, UPDATE)
    assert found.ok
    assert len(found.warnings) == 1
    assert key in found.warnings[0]
    assert value in found.warnings[0]


def test_the_command(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["replay", str(run), "--iteration", str(UPDATE)]
    assert main(arguments) == 0
    assert "everything that was recorded is found again" in capsys.readouterr().out
    record = _edit_record(run, advantage_N=_at(0, 0.5))
    assert main(arguments) == 1
    shown = capsys.readouterr().out
    assert "it differs in advantages" in shown
    assert main([*arguments, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    row = next(row for row in found["rows"] if row["what"] == "advantages")
    assert (found["ok"], row["ok"]) == (False, False)
    assert row["worst"]["where"] == f"episode {record.episodes[0]}, turn 0, token 0"
    assert row["worst"]["recorded"] - row["worst"]["found"] == pytest.approx(0.5)
    assert main(["replay", str(run)]) == 2
    assert "--iteration N" in capsys.readouterr().err
