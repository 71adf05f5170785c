"""Drawing one token: the distribution, the logprobs, the cuts, and the noise."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentrl.rollout._sample import cut, draw
from agentrl.rollout.requests import draws
from agentrl.types import Sampling

LOGITS = torch.tensor([[math.log(0.5), math.log(0.25), math.log(0.15), math.log(0.1)]])


def test_the_draw_inverts_the_distribution_function():
    noise = torch.tensor([0.0, 0.4999, 0.5001, 0.7499, 0.7501, 0.8999, 0.9001, 1 - 2.0**-32], dtype=torch.float64)
    ids, logprobs = draw(LOGITS.expand(8, 4), noise, Sampling())
    assert ids.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [math.log(p) for p in (0.5, 0.5, 0.25, 0.25, 0.15, 0.15, 0.1, 0.1)]
    assert logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_logprobs_are_those_of_the_sampling_temperature():
    _, logprobs = draw(LOGITS, torch.tensor([0.0], dtype=torch.float64), Sampling(temperature=0.5))
    powers = [p**2 for p in (0.5, 0.25, 0.15, 0.1)]
    assert logprobs.item() == pytest.approx(math.log(powers[0] / sum(powers)), abs=1e-6)


def test_greedy_takes_the_likeliest_with_its_logprob_at_temperature_1():
    ids, logprobs = draw(LOGITS.flip(1), torch.tensor([0.0], dtype=torch.float64), Sampling(temperature=0.0))
    assert ids.item() == 3
    assert logprobs.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_frequencies_are_the_probabilities():
    n = 20000
    noise = torch.from_numpy(draws(("frequencies",), n))
    ids, _ = draw(LOGITS.expand(n, 4), noise, Sampling())
    found = np.bincount(ids.numpy(), minlength=4) / n
    assert found == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=4 * math.sqrt(0.25 / n))


def test_a_token_of_probability_0_is_never_drawn():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    noise = torch.tensor([0.0, 0.5, 1 - 2.0**-32], dtype=torch.float64)
    ids, _ = draw(logits.expand(3, 5), noise, Sampling())
    assert ids.tolist() == [1, 3, 3]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=1), [0]),
        (Sampling(top_k=3), [0, 1, 2]),
        (Sampling(top_k=99), [0, 1, 2, 3]),
        (Sampling(top_p=0.5), [0]),
        (Sampling(top_p=0.51), [0, 1]),
        (Sampling(top_p=0.8), [0, 1, 2]),
        (Sampling(min_p=0.25), [0, 1, 2]),
        (Sampling(top_k=3, top_p=0.8), [0, 1]),
        (Sampling(top_p=1e-9), [0]),
    ],
)
def test_cuts_keep_what_they_say(sampling, kept):
    left = cut(LOGITS.exp(), sampling)[0]
    assert left.nonzero().flatten().tolist() == kept


def test_a_cut_draws_from_what_is_left_and_reports_the_whole_distribution():
    noise = torch.tensor([0.0, 0.66, 0.67, 0.999], dtype=torch.float64)
    ids, logprobs = draw(LOGITS.expand(4, 4), noise, Sampling(top_k=2))
    assert ids.tolist() == [0, 0, 1, 1]
    assert logprobs.tolist() == pytest.approx([math.log(0.5)] * 2 + [math.log(0.25)] * 2, abs=1e-6)


def test_draws_depend_on_their_key_alone_and_extend():
    assert draws((0, "a", 1), 5).tolist() == draws((0, "a", 1), 9)[:5].tolist()
    assert draws((0, "a", 1), 5).tolist() != draws((0, "a", 2), 5).tolist()
    assert draws((0, "a1"), 5).tolist() != draws((0, "a", 1), 5).tolist()
    many = draws(("uniform",), 50000)
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert many.mean() == pytest.approx(0.5, abs=0.006)
