"""Credit assignment over model tokens: boundary GAE as a log-depth scan, whitening, explained variance.

Only tokens that the policy sampled exist here: the arrays are one-dimensional over the model tokens of all episodes,
one episode after the other, so that no observation can stand between two actions. Everything is a pure function in
float64.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from agentrl.config import AdvantageConfig
from agentrl.errors import InvariantError

MIN_RETURN_VARIANCE = 1e-6
"""Below this variance of the returns, explained variance says nothing and is NaN."""


def boundary_gae(
    rewards_N: Tensor,
    values_N: Tensor,
    turn_id_N: Tensor,
    episode_id_N: Tensor,
    bootstrap_B: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with one (gamma, lambda) inside a turn and another across its end.

    For model token j of an episode, with the pair (g, l) of the step from j to j + 1 (the token pair inside a turn, the
    turn pair on the last token of a turn, and so on the episode's last token):

        delta_j = r_j + g_j V_{j+1} - V_j,    A_j = delta_j + g_j l_j A_{j+1},    V_{n+1} = bootstrap,  A_{n+1} = 0

    The value targets are R_j = A'_j + V_j, where A' is the same recursion with `lambda_value` everywhere.

    Args:
        rewards_N: Reward on each model token, reward units.
        values_N: V_j, the critic's value of the state before token j.
        turn_id_N: Integers; a change between neighbours of an episode is the end of a turn.
        episode_id_N: Integers from 0, never falling: episodes lie one after the other.
        bootstrap_B: Value of the final state, by episode id; 0 where the end is an end.
        config: The discounts and lambdas.

    Returns:
        Advantages and value targets, [N] float64 each.

    Raises:
        InvariantError: If the arrays do not belong together.

    Source: Schulman et al., arXiv:1506.02438; decoupled targets, Yuan et al., arXiv:2503.01491.
    """
    _check_layout(rewards_N, values_N, turn_id_N, episode_id_N, bootstrap_B)
    if rewards_N.numel() == 0:
        return rewards_N.double(), rewards_N.double()
    reward_N, value_N = rewards_N.double(), values_N.double()
    is_last_N = torch.ones_like(episode_id_N, dtype=torch.bool)
    is_last_N[:-1] = episode_id_N[1:] != episode_id_N[:-1]
    in_turn_N = ~is_last_N
    in_turn_N[:-1] &= turn_id_N[1:] == turn_id_N[:-1]

    gamma_N = _pick(in_turn_N, config.gamma_token, config.gamma_turn)
    lambda_N = _pick(in_turn_N, config.lambda_token, config.lambda_turn)
    next_value_N = torch.where(is_last_N, bootstrap_B.double()[episode_id_N], torch.roll(value_N, -1))
    delta_N = reward_N + gamma_N * next_value_N - value_N
    carry_N = torch.where(is_last_N, 0.0, gamma_N)
    longest = int(torch.bincount(episode_id_N).max())
    advantages_N = reverse_scan(delta_N, carry_N * lambda_N, longest)
    returns_N = reverse_scan(delta_N, carry_N * config.lambda_value, longest) + value_N
    return advantages_N, returns_N


def reverse_scan(delta_N: Tensor, carry_N: Tensor, longest: int) -> Tensor:
    """Solves x_j = delta_j + carry_j x_{j+1} for all j by doubling, in log2(longest) steps.

    Args:
        delta_N: The terms.
        carry_N: The factors; 0 where an episode ends.
        longest: Most tokens in one episode: no factor reaches further.

    Returns:
        x, [N]. A non-finite term stays in its episode, since a factor of 0 cuts and does not multiply.
    """
    x_N, carry_N = delta_N.clone(), carry_N.clone()
    step = 1
    while step < min(longest, delta_N.numel()):
        reach_N = carry_N[:-step]
        ahead_N = torch.where(reach_N == 0, 0.0, reach_N * x_N[step:])
        doubled_N = reach_N * carry_N[step:]
        x_N[:-step] += ahead_N
        carry_N = torch.nn.functional.pad(doubled_N, (0, step))
        step *= 2
    return x_N


def whiten(
    advantages_N: Tensor, mode: Literal["none", "scale", "full"], min_std: float
) -> tuple[Tensor, dict[str, float]]:
    """Brings the advantages of a whole rollout batch to a common scale, before it is split into minibatches.

    Args:
        advantages_N: Advantages of every model token of the batch.
        mode: `full` takes off the mean and divides by the deviation, `scale` only divides, `none` leaves them.
        min_std: Floor of the (unbiased) deviation, so that noise around a constant is not blown up.

    Returns:
        The advantages, and their mean and deviation before. A single token has no deviation and is left as it is.
    """
    n = advantages_N.numel()
    mean = float(advantages_N.mean()) if n else 0.0
    std = float(advantages_N.std()) if n > 1 else 0.0
    metrics = {"ppo/advantage_mean": mean, "ppo/advantage_std": std}
    if mode == "none" or n <= 1:
        return advantages_N, metrics
    shift = mean if mode == "full" else 0.0
    return (advantages_N - shift) / max(std, min_std), metrics


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Share of the variance of the returns that the values explain: 1 - Var(R - V) / Var(R).

    Returns:
        1 for perfect values, 0 for a constant, below 0 for worse than a constant, NaN where the returns hardly vary.
    """
    if returns_N.numel() < 2:
        return math.nan
    variance = float(returns_N.double().var())
    if variance < MIN_RETURN_VARIANCE:
        return math.nan
    return 1.0 - float((returns_N.double() - values_N.double()).var()) / variance


def _pick(in_turn_N: Tensor, token: float, turn: float) -> Tensor:
    turn_N = torch.full(in_turn_N.shape, turn, dtype=torch.float64, device=in_turn_N.device)
    return turn_N.masked_fill_(in_turn_N, token)


def _check_layout(
    rewards_N: Tensor, values_N: Tensor, turn_id_N: Tensor, episode_id_N: Tensor, bootstrap_B: Tensor
) -> None:
    shapes = [tuple(x.shape) for x in (rewards_N, values_N, turn_id_N, episode_id_N)]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise InvariantError(
            "expected rewards, values, turn ids and episode ids as flat arrays over the same model tokens, found shapes"
            f" {shapes}."
        )
    if episode_id_N.numel() == 0:
        return
    if bool((episode_id_N[1:] < episode_id_N[:-1]).any()) or int(episode_id_N[0]) < 0:
        raise InvariantError(
            "expected episode ids from 0 that never fall (episodes one after the other); sort the rows."
        )
    if int(episode_id_N[-1]) >= bootstrap_B.numel():
        raise InvariantError(
            f"expected a bootstrap value for each episode, found {bootstrap_B.numel()} for episode id"
            f" {int(episode_id_N[-1])}."
        )
