"""What padding costs: the same gradients from rows padded at random, by token budget, and packed.

    python benchmarks/batching.py [--episodes 64] [--repeats 5]

* `padded`: rows in random order, --rows to a micro-batch, each padded to its longest: what most trainers do;
* `budget`: the learner's default, rows of like length together, so many tokens to a micro-batch;
* `packed`: `ppo.packing`, several rows to a line.

Prints how much of what the trunk reads is episodes and not padding, and the CPU time of the forward and backward passes
of policy and critic over the whole batch against the padded way. The sums of the logprobs and values are compared
first. One thread, float32, a random Llama of 4.3 million parameters.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import tyro

from agentrl.config import ModelConfig
from agentrl.learner.batch import MicroBatch, Rollout, make_microbatches, read_rollout
from agentrl.learner.model import ActorCritic
from benchmarks.long_tail import LongTail, small_llama
from benchmarks.timing import interleaved, times_as_fast


@dataclass(frozen=True)
class Options:
    """Sizes."""

    episodes: int = 64
    """Episodes; lognormal, mean 250, at most 1024 tokens, a fifth of them sampled."""
    mean: int = 250
    """Their mean length, tokens."""
    rows: int = 8
    """Rows of a micro-batch of the padded way."""
    budget: int = 2048
    """Tokens of a micro-batch of the other two."""
    vocab: int = 4096
    """Entries of the model's vocabulary."""
    hidden: int = 256
    """Width of the model."""
    repeats: int = 5
    """Rounds."""
    seed: int = 1
    """Of the episodes."""


def padded(rollout: Rollout, rows: int, seed: int) -> list[MicroBatch]:
    """Rows in random order, each micro-batch as wide as its longest row."""
    order = list(range(len(rollout.rows)))
    random.Random(seed).shuffle(order)
    groups = [order[start : start + rows] for start in range(0, len(order), rows)]
    return [micro for group in groups for micro in make_microbatches(rollout, group, 10**9, torch.device("cpu"))]


def gradients(model: ActorCritic, micros: Sequence[MicroBatch]) -> tuple[float, float]:
    """One pass over all micro-batches, policy and critic; gives the sums of the logprobs and of the values."""
    logprob_sum = value_sum = 0.0
    for micro in micros:
        logprob_N = model.policy_logprobs(micro, 1.0).logprob_N
        logprob_N.sum().backward()  # type: ignore[no-untyped-call]
        value_N = model.values(micro).value_N
        value_N.square().sum().backward()  # type: ignore[no-untyped-call]
        logprob_sum, value_sum = (
            logprob_sum + float(logprob_N.detach().sum()),
            value_sum + float(value_N.detach().sum()),
        )
    model.zero_grad()
    return logprob_sum, value_sum


def main(options: Options) -> dict[str, list[float]]:
    """Checks, measures, prints; gives the CPU seconds by round."""
    torch.set_num_threads(1)
    shape = LongTail(options.episodes, mean=options.mean, vocab_size=options.vocab, seed=options.seed)
    model = ActorCritic(small_llama(options.vocab, options.hidden), ModelConfig(path="random", critic="separate"))
    torch.nn.init.normal_(model.critic["head"].weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    rollout = read_rollout(shape.trajectories(), context=model.context, vocab_size=options.vocab)
    make = partial(make_microbatches, rollout, range(len(rollout.rows)), options.budget, torch.device("cpu"))
    ways = {"padded": padded(rollout, options.rows, options.seed), "budget": make(), "packed": make(packing=True)}
    sums = [gradients(model, micros) for micros in ways.values()]
    torch.testing.assert_close(torch.tensor(sums[1:]), torch.tensor(sums[:1] * 2), rtol=1e-4, atol=1e-2)
    took_s = interleaved({name: partial(gradients, model, micros) for name, micros in ways.items()}, options.repeats)
    tokens = sum(row.n_tokens for row in rollout.rows)
    print(f"{options.episodes} episodes, {tokens} tokens, {rollout.n_actions} of them sampled")
    for name, micros in ways.items():
        read = sum(micro.token_ids_BT.numel() for micro in micros)
        print(
            f"{name}: {len(micros)} micro-batches, {read} tokens read, {100 * tokens / read:.1f} % of them episodes,"
            f" {statistics.median(took_s[name]):.2f} CPU s, {times_as_fast(took_s['padded'], took_s[name])} as fast"
        )
    return took_s


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
