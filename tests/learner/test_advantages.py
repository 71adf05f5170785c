"""Credit assignment with a critic: worked examples, layouts, whitening. Properties: test_gae_properties.py."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from agentrl.config import AdvantageConfig
from agentrl.errors import InvariantError
from agentrl.learner.advantages import (
    action_gae,
    adaptive_lambda,
    boundary_gae,
    reverse_scan,
    turn_gae,
    turn_starts,
    whiten,
)

F64 = torch.float64


def run(rewards, values, turns, bootstrap, config):
    n = len(rewards)
    return boundary_gae(
        torch.tensor(rewards, dtype=F64),
        torch.tensor(values, dtype=F64),
        torch.tensor(turns),
        torch.zeros(n, dtype=torch.int64),
        torch.tensor([bootstrap], dtype=F64),
        config,
    )


def tensors(*numbers):
    return (torch.tensor(each, dtype=F64) for each in numbers)


def flat(made):
    rewards, values, turns, bootstraps = zip(*made, strict=True)
    ids = [b for b, r in enumerate(rewards) for _ in r]
    joined = [[x for part in parts for x in part] for parts in (rewards, values, turns)]
    return (*tensors(*joined[:2]), torch.tensor(joined[2]), torch.tensor(ids), torch.tensor(bootstraps, dtype=F64))


def config(gamma=(1.0, 1.0), lam=(1.0, 1.0), lam_value=None):
    return AdvantageConfig(
        gamma_token=gamma[0],
        gamma_turn=gamma[1],
        lambda_token=lam[0],
        lambda_turn=lam[1],
        lambda_value=lam[1] if lam_value is None else lam_value,
    )


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 1000])
def test_scan_reaches_across_every_length(length):
    """With all factors 1 the scan is the sum of what follows, however long the episode."""
    x = reverse_scan(torch.ones(length, dtype=F64), torch.tensor([1.0] * (length - 1) + [0.0], dtype=F64), length)
    assert x.tolist() == [float(length - j) for j in range(length)]


V = [0.5, 0.4, 0.6, 0.8, 0.7]
R = [0.0, 0.0, 0.1, 0.0, 1.0]
TURNS = [0, 0, 0, 1, 1]
ACTION = config((0.9, 0.9), (0.5, 0.5))
TURN = config((1.0, 0.9), (1.0, 0.5))


def exact(*texts):
    return [float(Fraction(text)) for text in texts]


@pytest.mark.parametrize(
    ("chosen", "bootstrap", "advantages", "returns"),
    [
        (ACTION, 0.0, exact("-57023/1600000", "18553/80000", "817/4000", "-7/200", "3/10"), None),
        (ACTION, 0.9, exact("-38789/16000000", "244579/800000", "14731/40000", "659/2000", "111/100"), None),
        (config((1, 0.9), (0.5, 0.5)), 0.0, exact("97/1600", "257/800", "97/400", "1/20", "3/10"), None),
        (config((1, 0.9), (0.5, 0.5)), 0.9, exact("1699/16000", "3299/8000", "1699/4000", "91/200", "111/100"), None),
        (config((1, 0.9), (1, 0.5)), 0.0, exact("41/100", "51/100", "31/100", "1/5", "3/10"), None),
        (config((1, 0.9), (1, 0.5)), 0.9, exact("1549/2000", "1749/2000", "1349/2000", "101/100", "111/100"), None),
        (
            config((0.9, 0.9), (0.5, 0.5), 1.0),
            0.0,
            exact("-57023/1600000", "18553/80000", "817/4000", "-7/200", "3/10"),
            [0.7371, 0.819, 0.91, 0.9, 1.0],
        ),
        (
            config((0.9, 0.9), (0.5, 0.5), 1.0),
            0.9,
            exact("-38789/16000000", "244579/800000", "14731/40000", "659/2000", "111/100"),
            [1.268541, 1.40949, 1.5661, 1.629, 1.81],
        ),
    ],
    ids=[
        "a/term",
        "a/trunc",
        "e*.5/term",
        "e*.5/trunc",
        "e*1/term",
        "e*1/trunc",
        "a-decoupled/term",
        "a-decoupled/trunc",
    ],
)
def test_worked_example_of_two_turns(chosen, bootstrap, advantages, returns):
    """Tokens a0 a1 a2 | o3 o4 | a5 a6, fractions computed by hand."""
    found, targets = run(R, V, TURNS, bootstrap, chosen)
    assert found.tolist() == pytest.approx(advantages, abs=1e-12)
    if returns is None and chosen.lambda_token == chosen.lambda_turn:
        returns = [a + v for a, v in zip(advantages, V, strict=True)]
    if returns is not None:
        assert targets.tolist() == pytest.approx(returns, abs=1e-12)


def test_turn_credit_inside_a_turn_is_the_turns_own_with_a_baseline_per_token():
    """At the first token of a turn e* is turn-level GAE; all value targets of a turn with lambda 1 are equal."""
    advantages, _ = run(R, V, TURNS, 0.0, config((1, 0.9), (1, 0.5)))
    assert advantages[0] == pytest.approx(0.41, abs=1e-12)
    _, returns = run(R, V, TURNS, 0.0, config((1, 0.9), (1, 0.5), 1.0))
    assert returns[:3].tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)


@pytest.mark.parametrize(
    ("bootstrap", "advantages", "targets"),
    [
        (0.0, [0.41] * 3 + [0.2] * 2, [0.91] * 3 + [1.0] * 2),
        (0.9, [0.7745] * 3 + [1.01] * 2, [1.2745] * 3 + [1.81] * 2),
    ],
    ids=["term", "trunc"],
)
def test_worked_example_of_turn_gae(bootstrap, advantages, targets):
    """A_2 = 1 + 0 - .8 = .2 and A_1 = .1 + .9 * .8 - .5 + .45 * .2 = .41; values inside a turn are not read."""
    wild = torch.tensor([0.5, 99.0, -99.0, 0.8, 99.0], dtype=F64)
    zeros, final = torch.zeros(5, dtype=torch.int64), torch.tensor([bootstrap], dtype=F64)
    found, returns = turn_gae(torch.tensor(R, dtype=F64), wild, torch.tensor(TURNS), zeros, final, TURN)
    assert found.tolist() == pytest.approx(advantages, abs=1e-12)
    assert returns.tolist() == pytest.approx(targets, abs=1e-12)


def test_turn_gae_sums_the_rewards_inside_a_turn_and_decouples_its_targets():
    """Turns of rewards 3 and 5, V = 1 and 2, gamma .5: lambda 0 gives 3 + 1 - 1 and 5 - 2, targets 3 + 2.5 and 5."""
    rewards = torch.tensor([1.0, 2.0, 5.0], dtype=F64)
    values, turns = torch.tensor([1.0, 7.0, 2.0], dtype=F64), torch.tensor([4, 4, 6])
    zeros, chosen = torch.zeros(3, dtype=torch.int64), config((1.0, 0.5), (1.0, 0.0), 1.0)
    found, returns = turn_gae(rewards, values, turns, zeros, torch.zeros(1), chosen)
    assert found.tolist() == [3.0, 3.0, 3.0]
    assert returns.tolist() == [5.5, 5.5, 5.0]


def test_action_gae_takes_the_turns_pair_at_every_token():
    found, targets = action_gae(*tensors(R, V), torch.zeros(5, dtype=torch.int64), torch.zeros(1), TURN)
    assert found.tolist() == pytest.approx([-0.035639375, 0.2319125, 0.20425, -0.035, 0.3], abs=1e-12)
    assert targets.tolist() == pytest.approx([0.464360625, 0.6319125, 0.80425, 0.765, 1.0], abs=1e-12)


def test_a_length_adaptive_lambda_counts_turns_and_stays_inside_its_bounds():
    """1 - 1 / (alpha K): with alpha .5, 1 turn gives -1 -> 0, 4 turns .5, 10 turns .8; an empty episode 0."""
    turns = torch.tensor([0, 0, 0, 1, 2, 2, 3, *range(10)])
    ids = torch.tensor([0, 0, *[1] * 5, *[2] * 10])
    turns[2] = 0
    chosen = config((1.0, 1.0), (1.0, 0.3)).model_copy(update={"lambda_alpha": 0.5})
    assert adaptive_lambda(turns, ids, 4, chosen).tolist() == pytest.approx([0.0, 0.5, 0.8, 0.0])
    assert adaptive_lambda(turns, ids, 3, config((1.0, 1.0), (1.0, 0.3))).tolist() == [0.3, 0.3, 0.3]
    # Two turns of one token: A_1 = r_1 + V_2 - V_1 + (1 - 1 / (1 * 2)) A_2 = 0 + 1 - 0 + .5 * (3 - 1) = 2.
    chosen = chosen.model_copy(update={"lambda_alpha": 1.0, "lambda_value": 1.0})
    found, targets = run([0.0, 3.0], [0.0, 1.0], [0, 1], 0.0, chosen)
    assert found.tolist() == [2.0, 2.0]
    assert targets.tolist() == [3.0, 3.0]
    # `action` counts tokens: the same two tokens in one turn.
    found, _ = action_gae(*tensors([0.0, 3.0], [0.0, 1.0]), torch.zeros(2, dtype=torch.int64), torch.zeros(1), chosen)
    assert found.tolist() == [2.0, 2.0]


def test_turns_start_where_the_turn_or_the_episode_changes():
    starts = turn_starts(torch.tensor([0, 0, 2, 0, 0]), torch.tensor([0, 0, 0, 0, 1]))
    assert starts.tolist() == [True, False, True, True, True]
    assert turn_starts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_episodes_do_not_touch_each_other_not_even_through_nan():
    made = [(R, V, TURNS, 0.0), ([math.nan] * 3, [math.nan] * 3, [0, 0, 1], math.nan), (R, V, TURNS, 0.9)]
    advantages, returns = boundary_gae(*flat(made), AdvantageConfig())
    alone, _ = run(R, V, TURNS, 0.0, AdvantageConfig())
    last, _ = run(R, V, TURNS, 0.9, AdvantageConfig())
    assert advantages[:5].tolist() == pytest.approx(alone.tolist(), abs=1e-12)
    assert advantages[8:].tolist() == pytest.approx(last.tolist(), abs=1e-12)
    assert returns[8:].isfinite().all()


def test_layout_mistakes_are_named():
    r, v, t, e, b = flat([(R, V, TURNS, 0.0), (R, V, TURNS, 0.0)])
    with pytest.raises(InvariantError, match="flat arrays"):
        boundary_gae(r[:-1], v, t, e, b, AdvantageConfig())
    with pytest.raises(InvariantError, match="never fall"):
        boundary_gae(r, v, t, e.flip(0), b, AdvantageConfig())
    with pytest.raises(InvariantError, match="bootstrap value for each episode"):
        boundary_gae(r, v, t, e, b[:1], AdvantageConfig())
    empty = torch.zeros(0)
    assert boundary_gae(empty, empty, empty.long(), empty.long(), b, AdvantageConfig())[0].numel() == 0
    assert turn_gae(empty, empty, empty.long(), empty.long(), b, AdvantageConfig())[0].numel() == 0
    assert action_gae(empty, empty, empty.long(), b, AdvantageConfig())[0].numel() == 0
    with pytest.raises(InvariantError, match="flat arrays"):
        turn_gae(r[:-1], v, t, e, b, AdvantageConfig())


def test_whitening():
    x = torch.tensor([1.0, 2.0, 6.0], dtype=F64)
    std = math.sqrt(7.0)
    full, metrics = whiten(x, "full", 0.1)
    assert full.tolist() == pytest.approx([-2 / std, -1 / std, 3 / std])
    assert metrics == {"ppo/advantage_mean": 3.0, "ppo/advantage_std": pytest.approx(std)}
    assert whiten(x, "scale", 0.1)[0].tolist() == pytest.approx([1 / std, 2 / std, 6 / std])
    assert whiten(x, "none", 0.1)[0].tolist() == x.tolist()


def test_whitening_does_not_blow_up_noise_and_leaves_a_single_token_alone():
    noise = torch.tensor([1.0, 1.0 + 1e-9, 1.0 - 1e-9], dtype=F64)
    assert whiten(noise, "full", 0.1)[0].abs().max() < 1e-7
    assert whiten(torch.tensor([0.7], dtype=F64), "full", 0.1)[0].tolist() == [0.7]
    assert whiten(torch.zeros(0, dtype=F64), "full", 0.1)[0].numel() == 0
