"""A whole run in small: its files, its refusals, and what it does when it is asked again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, UsageError
from agentrl.evaluate import EvalOptions, evaluate
from agentrl.run import RunDir
from agentrl.train import sft, train

SHAPED = """
kind = "weighted_sum"

[[children]]
component = "sql/correct"

[[children]]
kind = "shaping"
potential = { component = "phi.py:phi" }
gamma_turn = 0.9
"""

COMPONENTS = """
import agentrl

@agentrl.component(name="phi", when="turn")
def phi(episode):
    return agentrl.Score(0.5)

@agentrl.component(name="vowels")
def vowels(episode):
    return agentrl.Score(sum(turn.text.count("e") for turn in episode.turns) % 7 / 7)
"""


def _config(folder: Path, **changes: object) -> RunConfig:
    tiny = {"vocab_size": 400, "hidden_size": 32, "layers": 1, "heads": 2, "intermediate_size": 64, "context": 512}
    tables: dict[str, object] = {
        "name": "small",
        "runs_dir": folder,
        "threads": 1,
        "env": {"settings": {"kinds": ["count"], "domains": ["shop"]}},
        "model": {"critic": "head", "tiny": {**tiny, "corpus_tasks": 8}},
        "sft": {"episodes": 16, "steps": 4, "batch_episodes": 4, "checkpoint_every": 2},
        "rollout": {"tasks": 2, "episodes_per_task": 2, "sampling": {"max_tokens": 12}},
        "ppo": {"iterations": 2, "warmup_collections": 1},
        "eval": {"tasks": 3, "splits": ["heldout", "heldout_domains"]},
        "checkpoint": {"every": 1},
    }
    return RunConfig.model_validate(tables | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, object]]:
    config = _config(tmp_path_factory.mktemp("runs"), baseline={"sft_continued": True})
    return config, train(config)


def test_a_run_leaves_what_the_readme_says(finished: tuple[RunConfig, dict[str, object]]) -> None:
    config, result = finished
    run = RunDir.open(config.runs_dir / config.name)
    assert [line["iteration"] for line in run.read_metrics()] == [1, 2, 3]
    assert [line["step"] for line in run.read_sft_metrics()] == [1, 2, 3, 4]
    assert [line["ppo/updates"] for line in run.read_metrics()] == [0, 1, 2]
    assert len(run.rollouts(3).trajectories()) == 4
    for name in [
        "manifest.json",
        "result.json",
        "report.html",
        "model/made/model.safetensors",
        "sft/000004/config.json",
    ]:
        assert (run.path / name).is_file(), name
    assert run.manifest["environment"]["task_digests"].keys() == {"heldout", "heldout_domains"}
    policies = [(row["policy"], row["split"], row["temperature"]) for row in result["evals"]]
    assert policies == [
        (policy, split, temperature)
        for policy in ["sft", "ppo", "sft continued"]
        for split in ["heldout", "heldout_domains"]
        for temperature in [1.0, 0.0]
    ]
    assert {row["b"] for row in result["differences"]} == {"sft", "sft continued"}


def test_ppo_moves_the_policy_and_warm_up_does_not(
    finished: tuple[RunConfig, dict[str, object]], tmp_path: Path
) -> None:
    reward = tmp_path / "vowels.toml"
    reward.write_text('component = "phi.py:vowels"')
    (tmp_path / "phi.py").write_text(COMPONENTS)
    config = _config(tmp_path, env={"reward": str(reward), "format": "fenced"}, sft=None)
    made = finished[0].runs_dir / "small" / "model" / "made"
    train(config.model_copy(update={"model": config.model.model_copy(update={"tiny": None, "path": str(made)})}))
    run = RunDir.open(config.runs_dir / config.name)
    start = load_file(made / "model.safetensors")
    warmed = load_file(run.checkpoint_dir(1) / "model.safetensors")
    trained = load_file(run.checkpoint_dir(3) / "model.safetensors")
    assert all(torch.equal(start[name], warmed[name]) for name in start)
    assert any(not torch.equal(start[name], trained[name]) for name in start)


def test_a_name_is_used_once_and_a_finished_run_stays(finished: tuple[RunConfig, dict[str, object]]) -> None:
    config, result = finished
    with pytest.raises(UsageError, match="--resume"):
        train(config)
    with pytest.raises(UsageError, match=r"ppo\.iterations"):
        train(config.model_copy(update={"ppo": config.ppo.model_copy(update={"iterations": 9})}), resume=True)
    again = train(config, resume=True)
    assert again["evals"] == json.loads(json.dumps(result["evals"]))


def test_a_run_evaluates_as_itself(finished: tuple[RunConfig, dict[str, object]]) -> None:
    from agentrl.train.parts import build_parts

    config, result = finished
    run = RunDir.open(config.runs_dir / config.name)
    parts = build_parts(config, run.checkpoint_dir(3))
    options = EvalOptions(seed=config.seed, rollout=config.rollout)
    summary, _ = evaluate(
        parts.make, parts.policy, split="heldout", tasks=3, sampling=config.rollout.sampling, options=options
    )
    row = next(r for r in result["evals"] if (r["policy"], r["split"], r["temperature"]) == ("ppo", "heldout", 1.0))
    assert json.loads(json.dumps(summary.as_dict())) == json.loads(json.dumps(row["summary"]))


def test_sft_alone_needs_its_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[sft\]"):
        sft(_config(tmp_path, sft=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sft": {"demonstrator": "slopy_expert", "episodes": 4, "steps": 1}}, "sloppy_expert"),
        ({"eval": {"splits": ["heldot"]}}, "heldout"),
        ({"eval": {"every": 1, "dev_split": "de"}}, "dev"),
        ({"env": {"settings": {"levels": [9]}}}, "9"),
        ({"env": {"id": "Sq-v0"}}, "Sql-v0"),
    ],
)
def test_a_name_that_is_wrong_is_told_before_anything_starts(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        train(_config(tmp_path, **changes))
    assert list(tmp_path.iterdir()) == []


def test_sft_leaves_a_run_that_train_goes_on_with_and_never_undoes_it(tmp_path: Path) -> None:
    config = _config(tmp_path, eval={"tasks": 2, "greedy": False})
    alone = sft(config)
    assert [row["policy"] for row in alone["evals"]] == ["sft"]
    whole = train(config, resume=True)
    assert [row["policy"] for row in whole["evals"]] == ["sft", "ppo"]
    Path(str(whole["report"])).unlink()
    again = sft(config, resume=True)
    assert again["evals"] == json.loads(json.dumps(whole["evals"]))
    assert Path(str(again["report"])).is_file()


def test_shaping_under_another_discount_is_refused(tmp_path: Path) -> None:
    reward = tmp_path / "shaped.toml"
    reward.write_text(SHAPED)
    (tmp_path / "phi.py").write_text(COMPONENTS)
    with pytest.raises(ConfigError, match="gamma_turn"):
        train(_config(tmp_path, env={"reward": str(reward)}, sft=None))


def test_lora_with_a_critic_adapter_trains_and_resumes(
    finished: tuple[RunConfig, dict[str, object]], tmp_path: Path
) -> None:
    made = finished[0].runs_dir / "small" / "model" / "made"
    model = {"path": str(made), "lora": {"rank": 2, "alpha": 4}, "critic": "adapter"}
    ppo = {"iterations": 1, "warmup_collections": 1, "kl": {"coef": 0.01}}
    config = _config(tmp_path, model=model, ppo=ppo)
    config = config.model_copy(update={"env": config.env.model_copy(update={"format": "fenced"})})
    result = train(config)
    run = RunDir.open(config.runs_dir / config.name)
    assert (run.checkpoint_dir(2) / "policy" / "adapter_model.safetensors").is_file()
    assert "ppo/kl_ref" in run.read_metrics()[-1]
    assert {row["policy"] for row in result["evals"]} == {"sft", "ppo"}


def test_a_budget_of_tokens_ends_a_run(tmp_path: Path) -> None:
    config = _config(tmp_path, ppo={"iterations": 50, "warmup_collections": 1, "rollout_tokens": 1000})
    result = train(config)
    spent = [line["rollout/tokens"] for line in RunDir.open(config.runs_dir / config.name).read_metrics()]
    assert spent[-2] < 1000 <= spent[-1] == result["rollout_tokens"]
