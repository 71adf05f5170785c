"""How much HFPolicy gains by decoding episodes together, and by keeping keys and values from turn to turn.

Prints two ratios of CPU time on one thread: decoding episodes one by one over decoding them together (the goal is at
least 3), and reading every prompt anew over keeping what was read, turn after turn. The tokens are compared as well.

    python benchmarks/hf_decode.py                                    # a small random Llama, 16 episodes of 4 turns
    python benchmarks/hf_decode.py --model smollm2 --episodes 8       # the goal of the second ratio is at least 1.5
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import tyro

from agentrl.rollout.codec import Codec
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.requests import GenerationRequest
from agentrl.types import Generation, Sampling
from benchmarks.timing import cpu_s, times_as_fast


@dataclass(frozen=True)
class Options:
    """The model and the conversation."""

    model: str | None = None
    """smollm2, a folder or a hub id; a random Llama of the quickstart's size where not given."""
    episodes: int = 16
    """Episodes that decode together."""
    turns: int = 4
    """Turns of each."""
    prompt: int = 256
    """Tokens of the first prompt; each episode's is 4 longer than the one before."""
    observation: int = 64
    """Tokens between two messages."""
    message: int = 32
    """Most tokens of a message."""
    repeats: int = 5
    """Rounds."""


@dataclass
class Took:
    """CPU seconds by round, and how many messages were equal."""

    alone_s: list[float] = field(default_factory=list)
    together_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)
    kept_s: list[float] = field(default_factory=list)
    equal_first: int = 0
    equal_later: int = 0


def load(name: str | None) -> tuple[Any, Codec]:
    """The model that is named, or a random one of the quickstart's size."""
    if name is not None:
        from agentrl.rollout.load import load_model_and_tokenizer

        model, tokenizer = load_model_and_tokenizer(name)
        return model, Codec(tokenizer, eos_ids=model.generation_config.eos_token_id)
    from transformers import LlamaConfig, LlamaForCausalLM

    from agentrl.config import TinyModel
    from agentrl.learner.tiny import train_tokenizer

    size = TinyModel()
    codec = Codec(train_tokenizer(["a few words"], size))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        eos_token_id=codec.stop_id,
    )
    return LlamaForCausalLM(config), codec


def requests_of(prompts: list[list[int]], turn: int, message: int) -> list[GenerationRequest]:
    """One request for each episode."""
    sampling = Sampling(max_tokens=message)
    return [GenerationRequest(str(k), prompt, sampling, (k, turn)) for k, prompt in enumerate(prompts)]


def timed(work: Callable[[], list[Generation]], times: list[float]) -> list[Generation]:
    """What the work gave; its CPU seconds are added to the list."""
    found: list[Generation] = []
    times.append(cpu_s(lambda: found.extend(work())))
    return found


def equal(some: list[Generation], others: list[Generation]) -> int:
    """How many messages are the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(some, others, strict=True))


def play(keeps: HFPolicy, forgets: HFPolicy, options: Options, vocab: int, took: Took) -> None:
    """One round: the first messages one by one and together, then the later turns with and without what was read."""
    rng = np.random.default_rng(0)

    def some(n: int) -> list[int]:
        return [int(i) + 20 for i in rng.integers(vocab, size=n)]

    prompts = [some(options.prompt + 4 * k) for k in range(options.episodes)]
    for policy in (keeps, forgets):  # Prompts are read before the clock starts.
        policy.weights_changed()
        policy.generate_batch(requests_of(prompts, 0, 1))
    requests = requests_of(prompts, 0, options.message)
    alone = timed(lambda: [forgets.generate_batch([request])[0] for request in requests], took.alone_s)
    said = timed(lambda: keeps.generate_batch(requests), took.together_s)
    took.equal_first += equal(alone, said)
    kept_s: list[float] = []
    read_s: list[float] = []
    for turn in range(1, options.turns):
        prompts = [p + list(g.token_ids) + some(options.observation) for p, g in zip(prompts, said, strict=True)]
        requests = requests_of(prompts, turn, options.message)
        said = timed(lambda: keeps.generate_batch(requests), kept_s)  # noqa: B023
        forgets.weights_changed()
        again = timed(lambda: forgets.generate_batch(requests), read_s)  # noqa: B023
        took.equal_later += equal(said, again)
    took.kept_s.append(sum(kept_s))
    took.read_s.append(sum(read_s))


def main(options: Options) -> Took:
    """Measures and prints both."""
    torch.set_num_threads(1)
    model, codec = load(options.model)
    vocab = min(model.config.vocab_size, len(codec.tokenizer)) - 20
    keeps, forgets = HFPolicy(model, codec), HFPolicy(model, codec)
    took = Took()
    for _ in range(options.repeats):
        play(keeps, forgets, options, vocab, took)
    first, later = options.repeats * options.episodes, options.repeats * options.episodes * (options.turns - 1)
    print(
        f"{options.episodes} episodes together are {times_as_fast(took.alone_s, took.together_s)} as fast as one by one"
        f" ({took.equal_first} of {first} messages equal)"
    )
    print(
        f"keys and values kept over {options.turns} turns are {times_as_fast(took.read_s, took.kept_s)} as fast as"
        f" prompts read anew ({took.equal_later} of {later} messages equal)"
    )
    return took


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
