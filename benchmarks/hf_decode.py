"""How much HFPolicy gains by decoding episodes together, and by keeping keys and values from turn to turn.

Prints two ratios of wall time: decoding 16 episodes one by one over decoding them together (the goal is at least 3),
and reading every prompt anew over keeping what was read, for 16 episodes of 4 turns. The tokens are compared as well.

    python benchmarks/hf_decode.py [MODEL]     # smollm2, a folder or a hub id; a small random Llama without it
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from agentrl.rollout.codec import Codec
from agentrl.rollout.hf import HFPolicy
from agentrl.rollout.requests import GenerationRequest
from agentrl.types import Generation, Sampling

EPISODES, TURNS, PROMPT, OBSERVATION = 16, 4, 256, 64
SAMPLING = Sampling(max_tokens=32)


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


def requests_of(prompts: list[list[int]], turn: int, sampling: Sampling = SAMPLING) -> list[GenerationRequest]:
    """One request for each episode."""
    return [GenerationRequest(str(k), prompt, sampling, (k, turn)) for k, prompt in enumerate(prompts)]


def timed(work: Callable[[], list[Generation]], times: int = 1) -> tuple[float, list[Generation]]:
    """Seconds of the quickest time, and what the work gave."""
    took_s: list[float] = []
    for _ in range(times):
        began = time.perf_counter()
        found = work()
        took_s.append(time.perf_counter() - began)
    return min(took_s), found


def main() -> None:
    """Measures both."""
    model, codec = load(sys.argv[1] if len(sys.argv) > 1 else None)
    vocab = min(model.config.vocab_size, len(codec.tokenizer)) - 20
    rng = np.random.default_rng(0)

    def some(n: int) -> list[int]:
        return [int(i) + 20 for i in rng.integers(vocab, size=n)]

    prompts = [some(PROMPT + 4 * k) for k in range(EPISODES)]
    keeps, forgets = HFPolicy(model, codec), HFPolicy(model, codec)
    for policy in (keeps, forgets):  # Prompts are read before the clock starts.
        policy.generate_batch(requests_of(prompts, 0, Sampling(max_tokens=1)))
    alone_s, alone = timed(lambda: [forgets.generate_batch([request])[0] for request in requests_of(prompts, 0)], 2)
    together_s, together = timed(lambda: keeps.generate_batch(requests_of(prompts, 0)), 2)
    same = sum(a.token_ids == b.token_ids for a, b in zip(alone, together, strict=True))
    print(f"{alone_s / together_s:.2f} times as fast: {EPISODES} episodes together, not one by one ({same} equal)")

    kept_s = read_s = 0.0
    same = 0
    said = together
    for turn in range(1, TURNS):
        prompts = [p + list(g.token_ids) + some(OBSERVATION) for p, g in zip(prompts, said, strict=True)]
        took_s, said = timed(lambda: keeps.generate_batch(requests_of(prompts, turn)))  # noqa: B023
        kept_s += took_s
        forgets.weights_changed()
        took_s, again = timed(lambda: forgets.generate_batch(requests_of(prompts, turn)))  # noqa: B023
        read_s += took_s
        same += sum(a.token_ids == b.token_ids for a, b in zip(said, again, strict=True))
    messages = EPISODES * (TURNS - 1)
    print(f"{read_s / kept_s:.2f} times as fast: keys and values kept, not read anew ({same} of {messages} equal)")


if __name__ == "__main__":
    main()
