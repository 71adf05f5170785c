"""One contestant of `learner_vs_trl.py`, in a process and, for TRL, a venv of its own; started by that script.

    python benchmarks/learner_worker.py KIND JOB.json

KIND is `agentrl`, `agentrl-head` (critic as a head on the policy's trunk), `trl-ppo`, `trl-grpo`, or
`trl-grpo-own-width` (each micro-batch its own generation batch, so padded to its own longest row). For each line on
standard input it makes one update on the job's episodes and prints one line of JSON: the CPU seconds of the update and
what else was counted.

TRL trains as its documentation says, by `train()`. Only generation is replaced: it returns the job's episodes and its
time is not counted. TRL's PPO has no mask for tool output, so it trains on those tokens as well; its reward model is
replaced by one that costs nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TextIO

import numpy as np


class Job(NamedTuple):
    """What every contestant is told.

    Attributes:
        model: Folder with the model and a tokenizer.
        episodes: The .npz file that `long_tail.write` made.
        epochs: Passes over the episodes, each with one optimiser step.
        microbatch: TRL's rows in a forward pass.
        tokens: Our tokens in a forward pass, padding included.
        packing: Whether we pack several episodes into a line.
        seed: The episodes' seed, for us, who make them again.
        n_episodes: Their number, for us.
    """

    model: str
    episodes: str
    epochs: int
    microbatch: int
    tokens: int
    packing: bool
    seed: int
    n_episodes: int


class Episodes(NamedTuple):
    """The episodes as lists, one entry each."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    rewards: list[float]

    @classmethod
    def read(cls, path: str) -> Episodes:
        """Reads what `long_tail.write` wrote."""
        found = np.load(path)
        ends = found["length_B"].cumsum()
        starts, middles = ends - found["length_B"], ends - found["length_B"] + found["prompt_B"]
        ids, mask = found["token_ids"].tolist(), found["is_action"].astype(int).tolist()
        return cls(
            [ids[a:b] for a, b in zip(starts, middles, strict=True)],
            [ids[a:b] for a, b in zip(middles, ends, strict=True)],
            [mask[a:b] for a, b in zip(middles, ends, strict=True)],
            found["reward_B"].tolist(),
        )


class Gate:
    """Stands where a trainer would generate: one update lies between two visits."""

    def __init__(self, answers: TextIO) -> None:
        """Answers go there; standard output is left to the trainers."""
        self._answers = answers
        self._began_s: float | None = None
        self.notes: dict[str, float] = {}

    def arrive(self) -> None:
        """Ends an update, if one was running, and waits to be asked for the next; without a next the process ends."""
        if self._began_s is not None:
            took_s = time.process_time() - self._began_s
            print(json.dumps({"cpu_s": took_s, **self.notes}), file=self._answers, flush=True)
        self.notes.clear()
        if not sys.stdin.readline():
            self._answers.close()
            os._exit(0)  # From inside another program's training loop.

    def leave(self) -> None:
        """Starts the clock."""
        self._began_s = time.process_time()

    def count(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function so that its CPU seconds are noted under a name; they stay part of the update."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            found = work(*args, **kwargs)
            self.notes[name] = self.notes.get(name, 0.0) + time.process_time() - began
            return found

        return counted


def run_agentrl(job: Job, gate: Gate, critic: str) -> None:
    """Our learner: policy and critic trained."""
    from transformers import AutoModelForCausalLM

    from agentrl.config import RunConfig
    from agentrl.learner.model import ActorCritic
    from agentrl.learner.ppo import PPOLearner
    from benchmarks.long_tail import LongTail, relabel

    policy = AutoModelForCausalLM.from_pretrained(job.model)
    optim = {"lr": 1e-9}
    ppo = {"epochs": job.epochs, "minibatches": 1, "microbatch_tokens": job.tokens, "packing": job.packing}
    config = RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": {"path": job.model, "critic": critic},
            "ppo": ppo | {"target_kl": None, "policy": optim, "critic": optim},
        }
    )
    model = ActorCritic(policy, config.model, logit_chunk=config.ppo.logit_chunk)
    model.begin_rl(reference=False)
    learner = PPOLearner(model, config)
    shape = LongTail(job.n_episodes, vocab_size=model.vocab_size, seed=job.seed)
    trajectories = relabel(shape.trajectories(), model)
    while True:
        gate.arrive()
        gate.leave()
        gate.notes["steps"] = learner.update(trajectories)["ppo/steps"]


def run_ppo(job: Job, gate: Gate) -> None:
    """TRL's PPO (1.12.0 is the last release with it): policy and value model trained."""
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # type: ignore[import-not-found]

    episodes = Episodes.read(job.episodes)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    pad = tokenizer.pad_token_id
    policy = AutoModelForCausalLM.from_pretrained(job.model)
    value = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=1)
    reference = AutoModelForCausalLM.from_pretrained(job.model)
    reference.forward = gate.count("reference_s", reference.forward)
    responses = _padded(episodes.completions, pad, left=False)
    saved: list[Any] = []

    def fixed(model: Any, queries: Any, rows: int, pad_id: int, config: Any) -> tuple[Any, Any]:
        del model, rows, pad_id, config
        query_responses = torch.cat([_padded(episodes.prompts, pad, left=True), responses], dim=1)
        if not saved:
            saved.append(_logits(policy, query_responses, queries.shape[1], pad))
        gate.arrive()
        gate.leave()
        return query_responses, saved[0]

    ppo_trainer.batch_generation = fixed
    n = len(episodes.prompts)
    config = PPOConfig(
        **_common(job, n),
        num_ppo_epochs=job.epochs,
        total_episodes=n * 10_000,
        local_rollout_forward_batch_size=job.microbatch,
        response_length=responses.shape[1],
        temperature=1.0,
        num_sample_generations=0,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=_free_reward_model(),
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": episodes.prompts}),
    )
    trainer.train()


def run_grpo(job: Job, gate: Gate, *, own_width: bool) -> None:
    """TRL's GRPO without a reference (beta 0): the policy alone is trained."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    episodes = Episodes.read(job.episodes)
    n = len(episodes.prompts)
    place = 0

    def fixed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        nonlocal place
        del trainer
        rows = slice(place, place + len(prompts))
        if place == 0:
            gate.arrive()
            gate.leave()
        place = (place + len(prompts)) % n
        completions = episodes.completions[rows]
        return {
            "prompt_ids": episodes.prompts[rows],
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": episodes.masks[rows],
            "score": episodes.rewards[rows],
        }

    def score(completions: list[str], **columns: Any) -> list[float]:
        del completions
        return list(columns["score"])

    config = GRPOConfig(
        **_common(job, n),
        steps_per_generation=1 if own_width else None,
        num_iterations=job.epochs,
        num_generations=4,
        max_completion_length=1024,
        max_steps=10_000,
        temperature=1.0,
        beta=0.0,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"{k}" for k in range(n)]}),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        rollout_func=fixed,
    )
    trainer.train()


def _common(job: Job, n_episodes: int) -> dict[str, Any]:
    """TRL's settings: float32 on the CPU, and no gradient checkpointing, which would cost it a third forward pass."""
    return {
        "output_dir": str(Path(job.episodes).with_name("out")),
        "per_device_train_batch_size": job.microbatch,
        "gradient_accumulation_steps": n_episodes // job.microbatch,
        "learning_rate": 1e-9,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 10_000,
        "save_strategy": "no",
        "disable_tqdm": True,
    }


def _padded(rows: list[list[int]], pad: int, *, left: bool) -> Any:
    import torch

    width = max(len(row) for row in rows)
    return torch.tensor([[pad] * (width - len(r)) + r if left else r + [pad] * (width - len(r)) for r in rows])


def _logits(policy: Any, ids: Any, prompt: int, pad: int) -> Any:
    """What generation would have left behind: the logits of every response token."""
    import torch

    with torch.no_grad():
        parts = [
            policy(row, attention_mask=(row != pad).long(), use_cache=False).logits[:, prompt - 1 : -1]
            for row in ids.split(4)
        ]
    return torch.cat(parts)


def _free_reward_model() -> Any:
    """Looks like a sequence classifier to TRL, and computes nothing."""
    import torch

    class Free(torch.nn.Module):
        base_model_prefix = "trunk"

        def trunk(self, input_ids: Any, **unused: Any) -> Any:
            del unused
            return SimpleNamespace(hidden_states=[input_ids[..., None] % 2])

        def score(self, states: Any) -> Any:
            return states.float()

    return Free()


def main() -> None:
    """Serves one contestant."""
    import torch

    torch.set_num_threads(1)
    kind, job = sys.argv[1], Job(**json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # The trainers print.
    gate = Gate(answers)
    if kind == "trl-ppo":
        run_ppo(job, gate)
    elif kind.startswith("trl-grpo"):
        run_grpo(job, gate, own_width=kind == "trl-grpo-own-width")
    else:
        run_agentrl(job, gate, "head" if kind == "agentrl-head" else "separate")


if __name__ == "__main__":
    main()
