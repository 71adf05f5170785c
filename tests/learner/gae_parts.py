"""Episodes by chance, and credit assignment with a critic written as plain loops over them, for comparison."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from agentrl.config import AdvantageConfig
from agentrl.learner.advantages import action_gae, boundary_gae, turn_gae

F64 = torch.float64
ESTIMATORS = ("boundary", "action", "turn")

finite = st.floats(-2, 2, allow_nan=False)
unit = st.floats(0, 1)


class Episode(NamedTuple):
    """Over the model tokens of one episode; turns are numbers that change where a turn ends."""

    rewards: list[float]
    values: list[float]
    turns: list[int]
    bootstrap: float


class Step(NamedTuple):
    """What an estimator takes for one step: a token, or all tokens of a turn."""

    tokens: list[int]
    reward: float
    value: float
    gamma: float
    lam: float


@st.composite
def episodes(draw):
    """1 to 4 episodes of 1 to 9 tokens each."""
    made = []
    for _ in range(draw(st.integers(1, 4))):
        n = draw(st.integers(1, 9))
        steps = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        turns = [sum(steps[1 : j + 1]) for j in range(n)]
        numbers = st.lists(finite, min_size=n, max_size=n)
        made.append(Episode(draw(numbers), draw(numbers), turns, draw(st.one_of(st.just(0.0), finite))))
    return made


def flat(made):
    ids = [b for b, episode in enumerate(made) for _ in episode.rewards]
    return (
        torch.tensor([x for episode in made for x in episode.rewards], dtype=F64),
        torch.tensor([x for episode in made for x in episode.values], dtype=F64),
        torch.tensor([x for episode in made for x in episode.turns]),
        torch.tensor(ids),
        torch.tensor([episode.bootstrap for episode in made], dtype=F64),
    )


def config_of(estimator, gamma=(1.0, 1.0), lam=(1.0, 1.0), lam_value=None, alpha=None):
    """Pairs are (inside a turn, across its end); estimators other than `boundary` take the second."""
    first = (gamma[0], lam[0]) if estimator == "boundary" else (1.0, 1.0)
    return AdvantageConfig(
        estimator=estimator,
        gamma_token=first[0],
        lambda_token=first[1],
        gamma_turn=gamma[1],
        lambda_turn=lam[1],
        lambda_alpha=alpha,
        lambda_value=lam[1] if lam_value is None else lam_value,
    )


def estimate(config, made):
    """Ours: advantages and value targets of all episodes, one after the other."""
    rewards, values, turns, ids, bootstrap = flat(made)
    if config.estimator == "action":
        return action_gae(rewards, values, ids, bootstrap, config)
    gae = turn_gae if config.estimator == "turn" else boundary_gae
    return gae(rewards, values, turns, ids, bootstrap, config)


def steps_of(config, episode) -> list[Step]:
    """What the estimator sees of an episode."""
    places = list(range(len(episode.rewards)))
    parts = [[j] for j in places]
    if config.estimator == "turn":
        parts = [[j for j in places if episode.turns[j] == turn] for turn in sorted(set(episode.turns))]
    lam_turn = config.lambda_turn
    if config.lambda_alpha is not None:
        count = len(parts) if config.estimator == "action" else len(set(episode.turns))
        lam_turn = min(1.0, max(0.0, 1.0 - 1.0 / (config.lambda_alpha * count)))
    steps = []
    for part in parts:
        after = part[-1] + 1
        inside = (
            config.estimator == "boundary" and after < len(places) and episode.turns[after] == episode.turns[after - 1]
        )
        gamma, lam = (config.gamma_token, config.lambda_token) if inside else (config.gamma_turn, lam_turn)
        steps.append(Step(part, math.fsum(episode.rewards[j] for j in part), episode.values[part[0]], gamma, lam))
    return steps


def by_loop(config, made) -> tuple[list[float], list[float]]:
    """The recursion, one step after the other from the end: advantages, and value targets less values."""
    advantages, targets = [], []
    for episode in made:
        found, wanted = [0.0] * len(episode.rewards), [0.0] * len(episode.rewards)
        ahead = wanted_ahead = 0.0
        next_value = episode.bootstrap
        for step in reversed(steps_of(config, episode)):
            delta = step.reward + step.gamma * next_value - step.value
            ahead = delta + step.gamma * step.lam * ahead
            wanted_ahead = delta + step.gamma * config.lambda_value * wanted_ahead
            for j in step.tokens:
                found[j], wanted[j] = ahead, wanted_ahead + step.value
            next_value = step.value
        advantages += found
        targets += wanted
    return advantages, targets


def by_sums(config, made) -> list[float]:
    """Discounted returns without any recursion: each step's sum over all later ones, and the bootstrap."""
    returns = []
    for episode in made:
        found = [0.0] * len(episode.rewards)
        steps = steps_of(config, episode)
        for i, step in enumerate(steps):
            discounts = [math.prod(s.gamma for s in steps[i:k]) for k in range(i, len(steps) + 1)]
            terms = [d * s.reward for d, s in zip(discounts, steps[i:], strict=False)]
            for j in step.tokens:
                found[j] = math.fsum([*terms, discounts[-1] * episode.bootstrap])
        returns += found
    return returns
