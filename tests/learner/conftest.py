"""Small models and hand-made trajectories for the learner's tests."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agentrl.config import RunConfig
from agentrl.learner.batch import MicroBatch, make_microbatches, read_rollout
from agentrl.learner.model import ActorCritic
from agentrl.types import EndReason, Task, Trajectory, Turn

sys.path.insert(0, str(Path(__file__).parent))  # Parts that lie beside the tests.

VOCAB = 24
CPU = torch.device("cpu")


def make_model(seed: int = 0, *, family: str = "llama", dtype: torch.dtype = torch.float32, tied: bool = True):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 96,
        "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**sizes)) if family == "llama" else Qwen2ForCausalLM(Qwen2Config(**sizes))
    return model.to(dtype).eval()


def make_config(**changes) -> RunConfig:
    """`ppo` and `sft` sections by keyword; everything else small and quick."""
    lora, critic = changes.pop("lora", None), changes.pop("critic", "separate")
    seed, temperature = changes.pop("seed", 0), changes.pop("temperature", 1.0)
    model = {"path": "none", "critic": critic, "lora": lora}
    rollout = {"sampling": {"temperature": temperature}}
    return RunConfig.model_validate({"name": "t", "model": model, "rollout": rollout, "seed": seed, **changes})


def make_actor_critic(config: RunConfig, *, reference: bool = False, seed: int = 0, **model) -> ActorCritic:
    actor_critic = ActorCritic(make_model(seed, **model), config.model, logit_chunk=config.ppo.logit_chunk)
    actor_critic.begin_rl(reference=reference)
    return actor_critic


def make_trajectory(
    turns: Sequence[tuple[int, int, float]],
    *,
    seed: int,
    end: EndReason = EndReason.SUBMITTED,
    trailing: int = 0,
    name: str = "",
) -> Trajectory:
    """Random tokens; each turn is (prompt tokens, sampled tokens, reward). Logprobs are filled in by `relabel`."""
    rng = random.Random(seed)

    def draw(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(n))

    made = tuple(
        Turn(draw(n_prompt), draw(n_sampled), (-1.0,) * n_sampled, 0, "stop", "", reward=reward)
        for n_prompt, n_sampled, reward in turns
    )
    task = Task(f"t/{seed}", "toy", "")
    n_sampled = sum(n for _, n, _ in turns)
    return Trajectory(name or f"e{seed}", task, seed, (), made, end, trailing_ids=draw(trailing), n_sampled=n_sampled)


def relabel(model: ActorCritic, trajectories: Sequence[Trajectory], temperature: float = 1.0) -> list[Trajectory]:
    """The trajectories with the logprobs that an exact engine would have reported."""
    good = [trajectory for trajectory in trajectories if trajectory.end.in_loss]
    logprob_N = torch.zeros(sum(trajectory.n_sampled for trajectory in good), dtype=torch.float64)
    for micro in micros_of(good, 1000):
        with torch.no_grad():
            logprob_N[micro.index_N] = model.policy_logprobs(micro, temperature).logprob_N.double().clamp(max=0.0)
    logprobs = iter(logprob_N.tolist())
    return [with_logprobs(t, logprobs) if t.end.in_loss else t for t in trajectories]


def with_logprobs(trajectory: Trajectory, logprobs: Iterator[float]) -> Trajectory:
    turns = (replace(turn, logprobs=tuple(next(logprobs) for _ in turn.sampled_ids)) for turn in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def micros_of(trajectories: Sequence[Trajectory], budget: int = 10**6) -> list[MicroBatch]:
    rollout = read_rollout(trajectories, context=10**6, vocab_size=VOCAB)
    return make_microbatches(rollout, range(len(rollout.rows)), budget, CPU)


def micro_of(trajectories: Sequence[Trajectory]) -> MicroBatch:
    (micro,) = micros_of(trajectories)
    return micro


def unequal_batch(seed: int = 0) -> list[Trajectory]:
    """Episodes of 1 to 40 sampled tokens, 1 to 4 turns, an end of each kind."""
    return [
        make_trajectory([(3, 1, 1.0)], seed=seed + 1),
        make_trajectory([(5, 9, 0.0), (7, 3, 0.25), (2, 6, 1.0)], seed=seed + 2),
        make_trajectory([(2, 40, -0.5)], seed=seed + 3, end=EndReason.MAX_TOKENS),
        make_trajectory([(4, 2, 0.0), (20, 2, 0.0)], seed=seed + 4, end=EndReason.CUT, trailing=6),
        make_trajectory([(3, 5, 0.1), (1, 5, 0.1), (1, 5, 0.1), (9, 5, 0.0)], seed=seed + 5, end=EndReason.MAX_TURNS),
        make_trajectory([(8, 17, 0.5), (3, 1, 0.0)], seed=seed + 6),
    ]


class Kit:
    """What the tests of this folder make things with."""

    model = staticmethod(make_model)
    config = staticmethod(make_config)
    actor_critic = staticmethod(make_actor_critic)
    trajectory = staticmethod(make_trajectory)
    relabel = staticmethod(relabel)
    micro = staticmethod(micro_of)
    micros = staticmethod(micros_of)
    batch = staticmethod(unequal_batch)
    vocab = VOCAB


@pytest.fixture
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
