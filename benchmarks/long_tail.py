"""A batch of multi-turn episodes as agents make them: many short, a few long, a fifth of the tokens sampled.

The other benchmarks import it; the tokens are random, since no speed depends on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.types import EndReason, Task, Trajectory, Turn

ATTEMPTS = 4
"""Episodes of one task; they share its prompt."""
FIRST_ID = 3
"""Lower token ids are left to padding and the like."""


@dataclass(frozen=True)
class LongTail:
    """Lengths are lognormal, cut at both ends, with a mean that is met exactly to within a token."""

    episodes: int = 32
    """Episodes, a multiple of 4."""
    mean: int = 250
    """Mean length, tokens."""
    longest: int = 1024
    """Longest, tokens."""
    shortest: int = 64
    """Shortest, tokens."""
    sigma: float = 1.0
    """Deviation of the logarithm of the length."""
    actions: float = 0.2
    """Share of the tokens that the policy sampled."""
    vocab_size: int = 4096
    """Token ids stay below it."""
    seed: int = 1
    """Of lengths, turns, tokens and rewards."""

    def lengths(self) -> list[int]:
        """One length for each episode, tokens."""
        normal_B = np.random.default_rng(self.seed).normal(size=self.episodes)
        low, high = 0.0, np.log(self.longest) + 1.0
        for _ in range(60):
            middle = (low + high) / 2
            length_B = np.exp(middle + self.sigma * normal_B).clip(self.shortest, self.longest)
            low, high = (middle, high) if length_B.mean() < self.mean else (low, middle)
        return [round(float(length)) for length in length_B]

    def trajectories(self) -> list[Trajectory]:
        """The episodes; their logprobs are made up, see `relabel`."""
        rng = np.random.default_rng(self.seed + 1)
        prompts = [self._draw(rng, int(rng.integers(24, 41))) for _ in range(-(-self.episodes // ATTEMPTS))]
        return [self._episode(rng, k, length, prompts[k // ATTEMPTS]) for k, length in enumerate(self.lengths())]

    def _episode(self, rng: np.random.Generator, k: int, length: int, prompt: tuple[int, ...]) -> Trajectory:
        n_turns = min(8, max(2, length // 80))
        n_sampled = max(n_turns, round(self.actions * length))
        sampled = _split(rng, n_sampled, n_turns)
        observed = _split(rng, max(n_turns - 1, length - n_sampled - len(prompt)), n_turns - 1)
        prompts = [prompt, *(self._draw(rng, n) for n in observed)]
        turns = tuple(
            Turn(before, self._draw(rng, n), (-1.0,) * n, 0, "stop", "")
            for before, n in zip(prompts, sampled, strict=True)
        )
        turns = (*turns[:-1], replace(turns[-1], reward=float(rng.integers(2))))
        task = Task(f"train/{k // ATTEMPTS}", "long tail", "")
        return Trajectory(f"e{k}", task, k, (), turns, EndReason.SUBMITTED, n_sampled=n_sampled)

    def _draw(self, rng: np.random.Generator, n: int) -> tuple[int, ...]:
        return tuple(int(i) for i in rng.integers(FIRST_ID, self.vocab_size, size=n))


def _split(rng: np.random.Generator, total: int, parts: int) -> list[int]:
    """Splits a number of tokens at random; each part has at least one."""
    return [int(n) + 1 for n in rng.multinomial(total - parts, [1 / parts] * parts)]


def relabel(trajectories: Sequence[Trajectory], model: Any) -> list[Trajectory]:
    """The episodes with the logprobs that an exact engine would have reported, at temperature 1.

    Args:
        trajectories: Episodes without errors.
        model: An ActorCritic.
    """
    import torch

    from agentrl.learner.batch import make_microbatches, read_rollout

    rollout = read_rollout(trajectories, context=model.context, vocab_size=model.vocab_size)
    logprob_N = torch.zeros(rollout.n_actions, dtype=torch.float64)
    for micro in make_microbatches(rollout, range(len(rollout.rows)), 4096, model.device):
        with torch.no_grad():
            logprob_N[micro.index_N] = model.policy_logprobs(micro, 1.0).logprob_N.double().clamp(max=0.0).cpu()
    logprobs = iter(logprob_N.tolist())
    return [replace(t, turns=tuple(_with_logprobs(turn, logprobs) for turn in t.turns)) for t in trajectories]


def _with_logprobs(turn: Turn, logprobs: Iterator[float]) -> Turn:
    return replace(turn, logprobs=tuple(next(logprobs) for _ in turn.sampled_ids))


def write(trajectories: Sequence[Trajectory], path: Path) -> None:
    """Writes what another program needs to train on the episodes, as an .npz file of flat arrays."""
    packs = [trajectory.pack() for trajectory in trajectories]
    np.savez(
        path,
        token_ids=np.concatenate([pack.token_ids_T for pack in packs]),
        is_action=np.concatenate([pack.is_action_T for pack in packs]),
        length_B=np.array([pack.token_ids_T.size for pack in packs]),
        prompt_B=np.array([len(trajectory.turns[0].prompt_ids) for trajectory in trajectories]),
        reward_B=np.array([trajectory.reward for trajectory in trajectories]),
    )


def small_llama(vocab_size: int, hidden_size: int = 256, layers: int = 4, context: int = 1024) -> Any:
    """A random Llama, by default of 4.3 million parameters, the same for the same arguments."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden_size // 64),
        num_key_value_heads=max(1, hidden_size // 64),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
