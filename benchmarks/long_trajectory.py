"""What one long trajectory costs to train on: a whole PPO update of policy and critic, peak memory and time.

The trajectory fills SmolLM2-135M's context, 8192 tokens, a fifth of them sampled. Each way of training runs in a
process of its own: `lora` has a policy and a critic adapter, `full` trains all weights, with a critic head on the
policy's states. Both use float32, gradient checkpointing (the states between layers are kept, the rest is computed
again) and logits in chunks of 256 tokens. Printed is the process's peak of resident memory, torch and model included
(VmHWM; Linux only). The goal is under 12 GB.

    python benchmarks/long_trajectory.py [--model smollm2] [--tokens 8192] [--threads 1] [--ways lora full]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.config import RunConfig
from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.learner.model import ActorCritic
from agentrl.learner.ppo import PPOLearner
from agentrl.rollout.load import load_model_and_tokenizer
from agentrl.types import EndReason, Task, Trajectory, Turn

TURNS, SAMPLED_SHARE, LIMIT_GB = 16, 0.2, 12.0
WAYS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 16, "alpha": 32}, "critic": "adapter"},
    "full": {"lora": None, "critic": "head"},
}


def settings(way: str, model: str, tokens: int) -> RunConfig:
    """One update with one optimiser step, in little memory."""
    ppo = {"minibatches": 1, "epochs": 1, "microbatch_tokens": max(tokens, 16), "logit_chunk": 256}
    named = {"path": model, "device": "cpu", "gradient_checkpointing": True, **WAYS[way]}
    return RunConfig.model_validate({"name": "long", "model": named, "ppo": ppo})


def long_trajectory(tokens: int, n_vocab: int) -> Trajectory:
    """Random tokens: prompt or tool output, then a message, so many times; each message earns something."""
    rng = np.random.default_rng(0)
    share, turns = tokens // TURNS, list[Turn]()
    for k in range(TURNS):
        n = share + (tokens - share * TURNS if k == 0 else 0)
        n_sampled = int(n * SAMPLED_SHARE)
        seen, said = (tuple(rng.integers(n_vocab, size=size).tolist()) for size in (n - n_sampled, n_sampled))
        turns.append(Turn(seen, said, (-1.0,) * n_sampled, 0, "stop", "", reward=float(rng.uniform(0, 1))))
    n_sampled = sum(len(turn.sampled_ids) for turn in turns)
    task = Task("long/0", "long", "")
    return Trajectory("long", task, 0, (), tuple(turns), EndReason.SUBMITTED, n_sampled=n_sampled)


def as_sampled(model: ActorCritic, trajectory: Trajectory) -> Trajectory:
    """The trajectory with the logprobs that an engine would have reported: the update checks them."""
    rollout = read_rollout([trajectory], context=model.context, vocab_size=model.vocab_size)
    (micro,) = make_microbatches(rollout, [0], 16, model.device)
    with torch.no_grad():
        logprobs = iter(model.policy_logprobs(micro, 1.0).logprob_N.clamp(max=0.0).tolist())
    turns = (replace(turn, logprobs=tuple(next(logprobs) for _ in turn.sampled_ids)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def peak_gb() -> float:
    """Most memory that this process has ever had resident, GB (10^9 bytes)."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def measure(way: str, model: str, tokens: int) -> None:
    """Trains on one trajectory, and prints what it took."""
    config = settings(way, model, tokens)
    loaded = load_model_and_tokenizer(model, "cpu", config.model.dtype).model
    actor_critic = ActorCritic(loaded, config.model, logit_chunk=config.ppo.logit_chunk)
    actor_critic.begin_rl(reference=False)
    learner = PPOLearner(actor_critic, config)
    trajectory = as_sampled(actor_critic, long_trajectory(tokens, actor_critic.vocab_size))
    before = [weight.detach().clone() for weight in actor_critic.policy_parameters()[:4]]
    base_gb, began, began_cpu = peak_gb(), time.perf_counter(), time.process_time()
    metrics = learner.update([trajectory])
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
    after = actor_critic.policy_parameters()
    if metrics["ppo/steps"] != 1 or all(torch.equal(one, other) for one, other in zip(before, after, strict=False)):
        raise SystemExit(f"nothing was trained: {metrics}")
    verdict = f"{'under' if peak_gb() < LIMIT_GB else 'NOT under'} {LIMIT_GB:g}"
    print(
        f"{way}: {trajectory.n_tokens} tokens, {trajectory.n_sampled} of them sampled: peak {peak_gb():.2f} GB"
        f" ({verdict}; {base_gb:.2f} before the update), {took_s:.0f} s, {cpu_s:.0f} s of CPU,"
        f" {torch.get_num_threads()} threads, {config.model.dtype}, gradient checkpointing",
        flush=True,
    )


def main() -> None:
    """Measures each way in a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0, help="0 for one per core")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--here", action="store_true", help="one way, in this process")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.here:
        measure(chosen.ways[0], chosen.model, chosen.tokens)
        return
    shared = ["--model", chosen.model, "--tokens", str(chosen.tokens), "--threads", str(chosen.threads), "--here"]
    for way in chosen.ways:
        subprocess.run([sys.executable, __file__, *shared, "--ways", way], check=True)


if __name__ == "__main__":
    main()
