"""The smallest run that still has every part: SFT, warm-up, updates, a batch node, an adaptive KL, evaluations."""

from __future__ import annotations

from pathlib import Path

from agentrl.config import RunConfig

WORLD = f"{Path(__file__).with_name('words_world.py')}:WordsEnv"


def words_config(runs_dir: Path, **changes: object) -> RunConfig:
    tables: dict[str, object] = {
        "name": "run",
        "runs_dir": runs_dir,
        "threads": 1,
        "env": {"id": WORLD, "format": "fenced"},
        "model": {
            "critic": "head",
            "tiny": {
                "vocab_size": 320,
                "hidden_size": 16,
                "layers": 1,
                "heads": 2,
                "intermediate_size": 32,
                "context": 256,
                "corpus_tasks": 8,
            },
        },
        "sft": {"episodes": 8, "steps": 40, "batch_episodes": 8, "checkpoint_every": 32, "optim": {"lr": 2e-2}},
        "rollout": {"tasks": 3, "episodes_per_task": 2, "threads": 1, "sampling": {"max_tokens": 12}},
        "ppo": {
            "iterations": 3,
            "epochs": 2,
            "minibatches": 2,
            "microbatch_tokens": 256,
            "warmup_collections": 1,
            "warmup_epochs": 2,
            "policy": {"lr": 1e-3},
            "target_kl": 1.0,
            "kl": {"coef": 0.05, "target": 0.01, "horizon": 10},
        },
        "eval": {"splits": ["dev"], "tasks": 3, "greedy": False, "every": 2, "dev_tasks": 3},
        "checkpoint": {"every": 2},
    }
    return RunConfig.model_validate(tables | changes)
