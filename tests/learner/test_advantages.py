"""Boundary GAE against a plain loop, the worked example, and the properties of credit assignment."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config import AdvantageConfig
from agentrl.errors import InvariantError
from agentrl.learner.advantages import boundary_gae, explained_variance, reverse_scan, whiten

F64 = torch.float64


def loop_gae(rewards, values, turns, bootstrap, gamma, lam):
    """One episode, token after token from the end; gamma and lam are (token, turn) pairs."""
    n = len(rewards)
    advantages, ahead, next_value = [0.0] * n, 0.0, bootstrap
    for j in reversed(range(n)):
        inside = j + 1 < n and turns[j + 1] == turns[j]
        g, decay = gamma[0 if inside else 1], lam[0 if inside else 1]
        ahead = rewards[j] + g * next_value - values[j] + g * decay * ahead
        advantages[j], next_value = ahead, values[j]
    return advantages


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


def config(gamma=(1.0, 1.0), lam=(1.0, 1.0), lam_value=None):
    return AdvantageConfig(
        gamma_token=gamma[0],
        gamma_turn=gamma[1],
        lambda_token=lam[0],
        lambda_turn=lam[1],
        lambda_value=lam[1] if lam_value is None else lam_value,
    )


finite = st.floats(-2, 2, allow_nan=False)
unit = st.floats(0, 1)


@st.composite
def episodes(draw):
    """Flat arrays of 1 to 6 episodes with 1 to 12 tokens each, and what the loop needs."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        n = draw(st.integers(1, 12))
        steps = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        turns = [sum(steps[1 : j + 1]) for j in range(n)]
        numbers = st.lists(finite, min_size=n, max_size=n)
        made.append((draw(numbers), draw(numbers), turns, draw(st.one_of(st.just(0.0), finite))))
    return made


def flat(made):
    ids = [b for b, (r, *_) in enumerate(made) for _ in r]
    return (
        torch.tensor([x for r, *_ in made for x in r], dtype=F64),
        torch.tensor([x for _, v, *_ in made for x in v], dtype=F64),
        torch.tensor([x for _, _, t, _ in made for x in t]),
        torch.tensor(ids),
        torch.tensor([b for *_, b in made], dtype=F64),
    )


@given(episodes(), unit, unit, unit, unit, unit)
@settings(max_examples=150, deadline=None)
def test_scan_equals_the_plain_loop(made, gamma_token, gamma_turn, lambda_token, lambda_turn, lambda_value):
    chosen = config((gamma_token, gamma_turn), (lambda_token, lambda_turn), lambda_value)
    advantages, returns = boundary_gae(*flat(made), chosen)
    start = 0
    for rewards, values, turns, bootstrap in made:
        stop = start + len(rewards)
        expected = loop_gae(rewards, values, turns, bootstrap, (gamma_token, gamma_turn), (lambda_token, lambda_turn))
        targets = loop_gae(rewards, values, turns, bootstrap, (gamma_token, gamma_turn), (lambda_value, lambda_value))
        assert advantages[start:stop].tolist() == pytest.approx(expected, abs=1e-12)
        assert (returns[start:stop] - flat(made)[1][start:stop]).tolist() == pytest.approx(targets, abs=1e-12)
        start = stop


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 1000])
def test_scan_reaches_across_every_length(length):
    """With all factors 1 the scan is the sum of what follows, however long the episode."""
    x = reverse_scan(torch.ones(length, dtype=F64), torch.tensor([1.0] * (length - 1) + [0.0], dtype=F64), length)
    assert x.tolist() == [float(length - j) for j in range(length)]


V = [0.5, 0.4, 0.6, 0.8, 0.7]
R = [0.0, 0.0, 0.1, 0.0, 1.0]
TURNS = [0, 0, 0, 1, 1]
ACTION = config((0.9, 0.9), (0.5, 0.5))


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


@given(episodes())
@settings(max_examples=50, deadline=None)
def test_p1_without_discount_the_advantage_is_the_rest_minus_the_value(made):
    advantages, _ = boundary_gae(*flat(made), config())
    expected = [sum(r[j:]) + b - v[j] for r, v, _, b in made for j in range(len(r))]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-11)


@given(episodes(), unit, unit)
@settings(max_examples=50, deadline=None)
def test_p2_lambda_one_gives_discounted_monte_carlo_returns(made, gamma_token, gamma_turn):
    _, returns = boundary_gae(*flat(made), config((gamma_token, gamma_turn), (1.0, 1.0), 1.0))
    expected = []
    for r, _, turns, b in made:
        ahead, back = b, []
        for j in reversed(range(len(r))):
            inside = j + 1 < len(r) and turns[j + 1] == turns[j]
            ahead = r[j] + (gamma_token if inside else gamma_turn) * ahead
            back.append(ahead)
        expected += reversed(back)
    assert returns.tolist() == pytest.approx(expected, abs=1e-11)


@given(episodes(), unit)
@settings(max_examples=50, deadline=None)
def test_p3_p4_lambda_zero_is_the_td_error_and_gamma_zero_the_reward(made, gamma):
    td, _ = boundary_gae(*flat(made), config((gamma, gamma), (0.0, 0.0)))
    expected = [r[j] + gamma * ([*v[1:], b][j]) - v[j] for r, v, _, b in made for j in range(len(r))]
    assert td.tolist() == pytest.approx(expected, abs=1e-12)
    short, _ = boundary_gae(*flat(made), config((0.0, 0.0), (0.7, 0.3)))
    assert short.tolist() == pytest.approx([x - y for r, v, *_ in made for x, y in zip(r, v, strict=True)], abs=1e-12)


@given(episodes(), unit, unit, unit)
@settings(max_examples=50, deadline=None)
def test_p5_values_that_are_exact_on_the_path_leave_no_advantage(made, gamma, lambda_token, lambda_turn):
    rewards, _, turns, ids, bootstrap = flat(made)
    _, exact_values = boundary_gae(rewards, torch.zeros_like(rewards), turns, ids, bootstrap, config((gamma, gamma)))
    chosen = config((gamma, gamma), (lambda_token, lambda_turn))
    advantages, _ = boundary_gae(rewards, exact_values, turns, ids, bootstrap, chosen)
    assert advantages.abs().max() < 1e-11


@given(episodes(), unit, unit, unit, unit)
@settings(max_examples=50, deadline=None)
def test_p6_potential_shaping_changes_nothing(made, gamma_token, gamma_turn, lambda_token, lambda_turn):
    chosen = config((gamma_token, gamma_turn), (lambda_token, lambda_turn))
    plain, _ = boundary_gae(*flat(made), chosen)
    shaped = []
    for r, v, turns, b in made:
        phi = [math.sin(3.0 * j + b) for j in range(len(r) + 1)]
        gammas = [gamma_token if j + 1 < len(r) and turns[j + 1] == turns[j] else gamma_turn for j in range(len(r))]
        rewards = [r[j] + gammas[j] * phi[j + 1] - phi[j] for j in range(len(r))]
        shaped.append((rewards, [x - p for x, p in zip(v, phi, strict=False)], turns, b - phi[-1]))
    changed, _ = boundary_gae(*flat(shaped), chosen)
    assert (changed - plain).abs().max() < 1e-11


@given(episodes(), st.floats(-3, 3))
@settings(max_examples=50, deadline=None)
def test_p7_linear_in_rewards_values_and_bootstrap(made, factor):
    chosen = config((0.9, 0.8), (0.7, 0.6))
    plain, _ = boundary_gae(*flat(made), chosen)
    r, v, t, e, b = flat(made)
    scaled, _ = boundary_gae(factor * r, factor * v, t, e, factor * b, chosen)
    assert (scaled - factor * plain).abs().max() < 1e-11


@given(episodes(), unit, unit)
@settings(max_examples=50, deadline=None)
def test_p9_equal_pairs_are_action_gae_whatever_the_turns(made, gamma, lam):
    chosen = config((gamma, gamma), (lam, lam))
    r, v, t, e, b = flat(made)
    with_turns, _ = boundary_gae(r, v, t, e, b, chosen)
    without, _ = boundary_gae(r, v, torch.zeros_like(t), e, b, chosen)
    assert torch.equal(with_turns, without)


def test_p10_truncation_at_a_state_with_an_exact_value_only_loses_the_tail():
    """A_full[i] = A_trunc[i] + (gamma lambda)^(n - i) A_full[n] when the bootstrap is V_n."""
    gamma, lam, cut = 0.9, 0.8, 3
    chosen = config((gamma, gamma), (lam, lam))
    full, _ = run(R, V, [0] * 5, 0.0, chosen)
    short, _ = run(R[:cut], V[:cut], [0] * cut, V[cut], chosen)
    expected = [float(short[i] + (gamma * lam) ** (cut - i) * full[cut]) for i in range(cut)]
    assert full[:cut].tolist() == pytest.approx(expected, abs=1e-12)


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


def test_explained_variance():
    returns = torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.full((4,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4)))
    assert math.isnan(explained_variance(returns[:1], returns[:1]))
