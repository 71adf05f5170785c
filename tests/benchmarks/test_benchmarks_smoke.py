"""Each benchmark runs at toy size; what it measures is not looked at, what it compares must be equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks import batching, gae_scan, gpu_learner, hf_decode, learner_vs_trl, logprob_memory  # noqa: E402
from benchmarks.learner_worker import Episodes  # noqa: E402
from benchmarks.long_tail import LongTail, write  # noqa: E402
from benchmarks.timing import times_as_fast  # noqa: E402


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_long_tail_is_as_it_says() -> None:
    for seed in range(3):
        trajectories = LongTail(32, seed=seed).trajectories()
        lengths = [t.n_tokens for t in trajectories]
        assert abs(np.mean(lengths) - 250) < 2
        assert max(lengths) <= 1024
        assert sum(t.n_sampled for t in trajectories) / sum(lengths) == pytest.approx(0.2, abs=0.01)
        assert all(len(t.turns) >= 2 for t in trajectories)
    assert max(LongTail().lengths()) == 1024
    assert LongTail().trajectories() == LongTail().trajectories()
    # The attempts at a task share its prompt.
    first = [t.turns[0].prompt_ids for t in LongTail().trajectories()]
    assert first[0] == first[3] != first[4]


def test_episodes_reach_the_other_program_unchanged(tmp_path: Path) -> None:
    trajectories = LongTail(4, mean=90, longest=128).trajectories()
    write(trajectories, tmp_path / "episodes.npz")
    found = Episodes.read(str(tmp_path / "episodes.npz"))
    for k, trajectory in enumerate(trajectories):
        pack = trajectory.pack()
        assert found.prompts[k] + found.completions[k] == pack.token_ids_T.tolist()
        assert [0] * len(found.prompts[k]) + found.masks[k] == pack.is_action_T.astype(int).tolist()
        assert found.rewards[k] == trajectory.reward


def test_median_of_ratios() -> None:
    # Ratios by round 2, 3, 4: not the ratio of the medians' 5 / 2.
    assert times_as_fast([4.0, 3.0, 20.0], [2.0, 1.0, 5.0]) == "3.00 times (2.00 to 4.00 in 3 rounds)"


def test_own_worker_answers(tmp_path: Path) -> None:
    options = learner_vs_trl.Options(contestants=("agentrl",), repeats=1, episodes=4, seed=0)
    job, useful, tokens = learner_vs_trl.prepare(options, tmp_path)
    assert 0.15 * tokens < useful < 0.25 * tokens
    kept = json.loads(job.read_text(encoding="utf-8"))
    learner_vs_trl.small_llama(640, hidden_size=32, layers=1).save_pretrained(kept["model"])
    found = learner_vs_trl.compete(options, job, tmp_path)
    assert [one["steps"] for one in found["agentrl"]] == [1.0]
    medians = learner_vs_trl.report(found, useful)
    assert all(seconds > 0 for seconds in medians.values())


def test_gae_scan() -> None:
    took_s = gae_scan.main(gae_scan.Options(rows=3, width=64, turn=4, part=2, repeats=1))
    assert set(took_s) == {"scan", "columns", "tokens", "floats"}


def test_batching() -> None:
    took_s = batching.main(batching.Options(episodes=8, mean=80, budget=512, vocab=64, hidden=64, repeats=1))
    assert set(took_s) == {"padded", "budget", "packed"}


def test_decoding() -> None:
    took = hf_decode.main(hf_decode.Options(episodes=2, turns=2, prompt=16, observation=4, message=3, repeats=1))
    assert (took.equal_first, took.equal_later) == (2, 2)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")
def test_logprob_memory() -> None:
    # Only in this process: 4 MiB of logits can be seen, and the chunked way must not need more than the plain one.
    options = logprob_memory.Options(tokens=512, hidden=16, vocab=8192, chunk=64)
    plain = logprob_memory.measure("plain", "forward", options)
    chunked = logprob_memory.measure("chunked", "forward", options)
    assert plain["mib"] > 16
    assert chunked["mib"] < plain["mib"]


def test_gpu_learner_on_a_cpu(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    gpu_learner.main(gpu_learner.Options(toy=True, json=path))
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["layout"] for row in found["rows"]] == ["padded", "packed", "packed, checkpointing"]
    assert all(row["tokens_per_s"] > 0 for row in found["rows"])
    assert found["agreement"]["gradient_cosine"] > 0.98


def test_flops_are_counted_by_hand() -> None:
    options = gpu_learner.Options(hidden=4, layers=1, intermediate=8, heads=2, kv_heads=1, vocab=10, critic="head")
    (trajectory,) = LongTail(1, mean=64, longest=64).trajectories()
    # Attention 2 * 16 + 2 * 4 * 1 * 2 = 48 weights, MLP 3 * 4 * 8 = 96; 64 tokens of which 13 are sampled.
    forward = 2 * 144 * 64 + 2 * 4 * 64**2
    assert trajectory.n_sampled == 13
    assert gpu_learner.update_flops(options, [trajectory]) == 4 * (forward + 2 * 10 * 4 * 13)
