"""The update at about a billion parameters on one GPU: tokens per second, model FLOP utilisation, memory, precision.

    python benchmarks/gpu_learner.py --json out.json        # one GPU of 80 GB or more, at most 8 minutes
    python benchmarks/gpu_learner.py --toy                  # the same on the CPU in seconds

First the agreement: logprobs and the gradient of the first step of one model in bfloat16 against its float32 self, on a
few episodes. Then the update (`PPOLearner.update`: scoring, advantages, forward and backward passes of policy and
critic, optimiser steps) of random bfloat16 weights, in several layouts. What does not fit into --limit-s is left out,
which is said; out of memory is a result as well.

FLOPs are the model's: 2 for each weight of the trunk and token, causal attention, the head for sampled tokens, 3 times
a forward pass for forward and backward, nothing for padding or recomputation. Utilisation is against --peak-tflops.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from agentrl.config import RunConfig
from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.learner.model import ActorCritic
from agentrl.learner.ppo import PPOLearner
from agentrl.types import Trajectory
from benchmarks.long_tail import LongTail, relabel


@dataclass(frozen=True)
class Options:
    """Sizes; the defaults are those of Llama 3.2 1B."""

    hidden: int = 2048
    """Width."""
    layers: int = 16
    """Decoder layers."""
    intermediate: int = 8192
    """Width inside the MLP."""
    heads: int = 32
    """Attention heads."""
    kv_heads: int = 8
    """Heads of keys and values."""
    vocab: int = 128_256
    """Entries of the vocabulary."""
    episodes: int = 64
    """Episodes of an update, a multiple of 4."""
    mean: int = 1000
    """Their mean length, tokens."""
    longest: int = 4096
    """Their greatest length, tokens."""
    budgets: tuple[int, ...] = (16_384, 32_768)
    """Tokens of a micro-batch that are tried."""
    critic: Literal["head", "separate"] = "separate"
    """The critic: a head on the policy's trunk, or a trunk of its own."""
    repeats: int = 5
    """Updates that are timed in each layout, after one that is not."""
    peak_tflops: float = 989.0
    """The GPU's dense bfloat16 peak: 989 for an H100 or H200."""
    limit_s: float = 400.0
    """No layout begins after so many seconds."""
    device: str = "cuda"
    """Where."""
    toy: bool = False
    """A model of a few thousand weights on the CPU, to show that the script runs."""
    json: Path | None = None
    """Where the figures go as JSON."""

    def effective(self) -> Options:
        """The sizes that are used."""
        if not self.toy:
            return self
        toy = replace(self, hidden=32, layers=2, intermediate=64, heads=4, kv_heads=2, vocab=128, device="cpu")
        return replace(toy, episodes=4, mean=80, longest=128, budgets=(256,), repeats=1)


def make_policy(options: Options, dtype: torch.dtype) -> Any:
    """A random Llama on the device; the same weights for each type, to within its precision."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.longest,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(options.device):
        return LlamaForCausalLM(config).to(dtype)


def make_learner(options: Options, dtype: torch.dtype, budget: int, layout: str) -> tuple[ActorCritic, PPOLearner]:
    """An actor-critic and its learner; the layout names packing and gradient checkpointing."""
    optim = {"lr": 1e-6}
    config = RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": {
                "path": "random",
                "critic": options.critic,
                "gradient_checkpointing": "checkpointing" in layout,
            },
            "ppo": {
                "minibatches": 2,
                "microbatch_tokens": budget,
                "packing": "packed" in layout,
                "target_kl": None,
                "policy": optim,
                "critic": optim,
            },
        }
    )
    model = ActorCritic(make_policy(options, dtype), config.model, logit_chunk=config.ppo.logit_chunk)
    model.begin_rl(reference=False)
    return model, PPOLearner(model, config)


def update_flops(options: Options, trajectories: Sequence[Trajectory]) -> float:
    """Model FLOPs of one update of two optimiser steps in one epoch."""
    head_width = options.hidden // options.heads
    attention = 2 * options.hidden**2 + 2 * options.hidden * options.kv_heads * head_width
    trunk = options.layers * (attention + 3 * options.hidden * options.intermediate)
    tokens = sum(t.n_tokens for t in trajectories)
    squares = sum(t.n_tokens**2 for t in trajectories)
    forward = 2.0 * trunk * tokens + 2.0 * options.layers * options.hidden * squares
    head = 2.0 * options.vocab * options.hidden * sum(t.n_sampled for t in trajectories)
    trunks = 1 if options.critic == "head" else 2
    return 4.0 * (trunks * forward + head)  # Scored once, then forward and backward.


def agreement(options: Options, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """How far bfloat16 is from float32: logprobs, and the policy's gradient of their mean."""
    few = sorted(trajectories, key=lambda t: t.n_tokens)[: max(4, len(trajectories) // 8)]
    logprobs: list[torch.Tensor] = []
    gradients: list[list[torch.Tensor]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model, _ = make_learner(options, dtype, options.budgets[0], "")
        rollout = read_rollout(few, context=options.longest, vocab_size=options.vocab)
        found_N = torch.zeros(rollout.n_actions)
        for micro in make_microbatches(rollout, range(len(few)), options.budgets[0], model.device):
            logprob_N = model.policy_logprobs(micro, 1.0).logprob_N
            (-logprob_N.sum() / rollout.n_actions).backward()  # type: ignore[no-untyped-call]
            found_N[micro.index_N] = logprob_N.detach().float().cpu()
        logprobs.append(found_N)
        gradients.append([w.grad.float().cpu() for w in model.policy_parameters() if w.grad is not None])
        del model
        free(options)
    gap_N = (logprobs[1] - logprobs[0]).abs()
    exact, rounded = ([float((a * b).sum()) for a, b in zip(gradients[0], other, strict=True)] for other in gradients)
    norm = sum(exact) ** 0.5
    low_norm = sum(float(g.square().sum()) for g in gradients[1]) ** 0.5
    return {
        "logprob_gap_mean": float(gap_N.mean()),
        "logprob_gap_max": float(gap_N.max()),
        "gradient_cosine": sum(rounded) / (norm * low_norm),
        "gradient_norm_ratio": low_norm / norm,
    }


def throughput(options: Options, trajectories: Sequence[Trajectory], budget: int, layout: str) -> dict[str, Any]:
    """Figures of the update in one layout; a `note` alone where it does not fit into memory."""
    row: dict[str, Any] = {"budget": budget, "layout": layout}
    try:
        model, learner = make_learner(options, torch.bfloat16, budget, layout)
        if options.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        batch = relabel(trajectories, model)
        took_s: list[float] = []
        for _ in range(options.repeats + 1):
            synchronize(options)
            began = time.perf_counter()
            learner.update(batch)
            synchronize(options)
            took_s.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        return row | {"note": f"out of memory: {str(error).splitlines()[0][:80]}"}
    seconds = statistics.median(took_s[1:])
    flops = update_flops(options, trajectories)
    return row | {
        "seconds": seconds,
        "tokens_per_s": sum(t.n_tokens for t in trajectories) / seconds,
        "useful_per_s": sum(t.n_sampled for t in trajectories) / seconds,
        "tflops": flops / seconds / 1e12,
        "mfu": flops / seconds / 1e12 / options.peak_tflops,
        "peak_gib": peak_gib(options),
    }


def synchronize(options: Options) -> None:
    """Waits for the GPU."""
    if options.device != "cpu":
        torch.cuda.synchronize()


def free(options: Options) -> None:
    """Gives the memory of models that are gone back."""
    gc.collect()
    if options.device != "cpu":
        torch.cuda.empty_cache()


def peak_gib(options: Options) -> float:
    """The GPU's peak since the last reset; on a CPU the process's, since its start."""
    if options.device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return torch.cuda.max_memory_allocated() / 2**30


def show(row: dict[str, Any]) -> None:
    """Prints one line of the table."""
    name = f"{row['budget']:6} {row['layout']:24}"
    if "note" in row:
        print(f"{name} {row['note']}", flush=True)
        return
    print(
        f"{name} {row['seconds']:8.2f} s {row['tokens_per_s']:9.0f} tokens/s {row['useful_per_s']:8.0f} useful/s"
        f" {row['tflops']:7.1f} TFLOP/s {100 * row['mfu']:5.1f} % {row['peak_gib']:6.1f} GiB",
        flush=True,
    )


def main(options: Options) -> dict[str, Any]:
    """Measures, prints, writes."""
    began = time.perf_counter()
    options = options.effective()
    torch.set_num_threads(1 if options.device == "cpu" else torch.get_num_threads())
    shape = LongTail(options.episodes, options.mean, options.longest, vocab_size=options.vocab)
    trajectories = shape.trajectories()
    device = "CPU" if options.device == "cpu" else torch.cuda.get_device_name()
    n_weights = sum(
        weight.numel() for weight in make_policy(replace(options, device="meta"), torch.float32).parameters()
    )
    print(f"{n_weights:,} weights, critic {options.critic}, {device}, torch {torch.__version__}")
    found: dict[str, Any] = {"device": device, "weights": n_weights, "options": asdict(options), "rows": []}
    found["agreement"] = agreement(options, trajectories)
    print("bfloat16 against float32: " + ", ".join(f"{name} {value:.4g}" for name, value in found["agreement"].items()))
    for budget in options.budgets:
        for layout in ("padded", "packed", "packed, checkpointing"):
            row: dict[str, Any] = {"budget": budget, "layout": layout, "note": "left out: no time"}
            if time.perf_counter() - began < options.limit_s:
                row = throughput(options, trajectories, budget, layout)
            free(options)
            show(row)
            found["rows"].append(row)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2, default=str), encoding="utf-8")
    return found


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
