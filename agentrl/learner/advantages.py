"""Credit assignment with a critic: boundary GAE as a log-depth scan, its presets for tokens and turns, whitening.

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

    The value targets are R_j = A'_j + V_j, where A' is the same recursion with `lambda_value` everywhere. With
    `lambda_alpha` the lambda across turns is the episode's own (`adaptive_lambda`).

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
    is_last_N = episode_ends(episode_id_N)
    in_turn_N = torch.zeros_like(is_last_N)
    in_turn_N[:-1] = ~turn_starts(turn_id_N, episode_id_N)[1:]

    gamma_N = torch.full_like(reward_N, config.gamma_turn).masked_fill_(in_turn_N, config.gamma_token)
    lambda_turn_B = adaptive_lambda(turn_id_N, episode_id_N, bootstrap_B.numel(), config)
    lambda_N = lambda_turn_B[episode_id_N].masked_fill_(in_turn_N, config.lambda_token)
    next_value_N = torch.where(is_last_N, bootstrap_B.double()[episode_id_N], torch.roll(value_N, -1))
    delta_N = reward_N + gamma_N * next_value_N - value_N
    carry_N = torch.where(is_last_N, 0.0, gamma_N)
    longest = int(torch.bincount(episode_id_N).max())
    advantages_N = reverse_scan(delta_N, carry_N * lambda_N, longest)
    returns_N = reverse_scan(delta_N, carry_N * config.lambda_value, longest) + value_N
    return advantages_N, returns_N


def action_gae(
    rewards_N: Tensor, values_N: Tensor, episode_id_N: Tensor, bootstrap_B: Tensor, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """GAE over tokens that knows no turns: `boundary_gae` with each token a turn of its own, so the turn's pair only.

    The length-adaptive lambda then counts tokens, since it is from token to token that this lambda decays.

    Returns:
        Advantages and value targets, [N] float64 each.
    """
    return boundary_gae(rewards_N, values_N, torch.arange(rewards_N.numel()), episode_id_N, bootstrap_B, config)


def turn_gae(
    rewards_N: Tensor,
    values_N: Tensor,
    turn_id_N: Tensor,
    episode_id_N: Tensor,
    bootstrap_B: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """GAE over whole turns: one reward (the sum of its tokens'), one value (at its first token), one advantage each.

    Returns:
        Advantages and value targets, [N] float64 each, the same for all tokens of a turn. A target belongs to the
        turn's first token (`turn_starts`), whose value it corrects: values elsewhere have no meaning here.

    Raises:
        InvariantError: If the arrays do not belong together.

    Source: Turn-PPO, arXiv:2512.17008; VL-DAC, arXiv:2508.04280.
    """
    _check_layout(rewards_N, values_N, turn_id_N, episode_id_N, bootstrap_B)
    is_start_N = turn_starts(turn_id_N, episode_id_N)
    turn_N = is_start_N.long().cumsum(0) - 1
    n_turns = int(is_start_N.sum())
    rewards_K = torch.zeros(n_turns, dtype=torch.float64).index_add_(0, turn_N, rewards_N.double())
    advantages_K, returns_K = boundary_gae(
        rewards_K, values_N[is_start_N], torch.arange(n_turns), episode_id_N[is_start_N], bootstrap_B, config
    )
    return advantages_K[turn_N], returns_K[turn_N]


def adaptive_lambda(turn_id_N: Tensor, episode_id_N: Tensor, n_episodes: int, config: AdvantageConfig) -> Tensor:
    """The lambda across turns, by episode: with `lambda_alpha` 1 - 1 / (alpha K) for K turns, held inside [0, 1].

    Returns:
        lambda_B, float64; `lambda_turn` for all without `lambda_alpha`.

    Source: VAPO, arXiv:2504.05118, with turns in the place of tokens.
    """
    if config.lambda_alpha is None:
        return torch.full((n_episodes,), config.lambda_turn, dtype=torch.float64)
    turns_B = torch.bincount(episode_id_N[turn_starts(turn_id_N, episode_id_N)], minlength=n_episodes)
    return (1.0 - 1.0 / (config.lambda_alpha * turns_B.double())).clamp(0.0, 1.0)


def turn_starts(turn_id_N: Tensor, episode_id_N: Tensor) -> Tensor:
    """bool_N; the first model token of each turn."""
    is_start_N = torch.ones_like(turn_id_N, dtype=torch.bool)
    is_start_N[1:] = (turn_id_N[1:] != turn_id_N[:-1]) | (episode_id_N[1:] != episode_id_N[:-1])
    return is_start_N


def episode_ends(episode_id_N: Tensor) -> Tensor:
    """bool_N; the last model token of each episode."""
    is_last_N = torch.ones_like(episode_id_N, dtype=torch.bool)
    is_last_N[:-1] = episode_id_N[1:] != episode_id_N[:-1]
    return is_last_N


def reverse_scan(delta_N: Tensor, carry_N: Tensor, longest: int) -> Tensor:
    """Solves x_j = delta_j + carry_j x_{j+1} for all j by doubling, in log2(longest) steps.

    Args:
        delta_N: The terms.
        carry_N: The factors; 0 where an episode ends.
        longest: Most tokens in one episode: no factor reaches further.

    Returns:
        x, [N]. A term that is not finite makes NaN of what it reaches, and never leaves its episode.
    """
    bad_N = ~torch.isfinite(delta_N)
    if not bool(bad_N.any()):
        return _doubling(delta_N, carry_N, longest)
    # Apart from the others, since 0 times NaN is NaN and a carry of 0 must cut.
    reached_N = _doubling(bad_N.to(delta_N.dtype), (carry_N != 0).to(delta_N.dtype), longest) > 0
    return _doubling(delta_N.masked_fill(bad_N, 0.0), carry_N, longest).masked_fill_(reached_N, math.nan)


def _doubling(delta_N: Tensor, carry_N: Tensor, longest: int) -> Tensor:
    x_N, carry_N = delta_N.clone(), carry_N.clone()
    next_x_N, next_carry_N = torch.empty_like(x_N), torch.empty_like(carry_N)
    step = 1
    while step < min(longest, delta_N.numel()):
        torch.addcmul(x_N[:-step], carry_N[:-step], x_N[step:], out=next_x_N[:-step])
        next_x_N[-step:] = x_N[-step:]
        torch.mul(carry_N[:-step], carry_N[step:], out=next_carry_N[:-step])
        next_carry_N[-step:] = 0.0
        x_N, next_x_N, carry_N, next_carry_N = next_x_N, x_N, next_carry_N, carry_N
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
    # From the lowest on: the mean of equal numbers need not be that number, but that of zeros is.
    lowest = float(advantages_N.min()) if n else 0.0
    mean = lowest + float((advantages_N - lowest).mean()) if n else 0.0
    std = float(advantages_N.std()) if n > 1 else 0.0
    metrics = {"ppo/advantage_mean": mean, "ppo/advantage_std": std}
    if mode == "none" or n <= 1:
        return advantages_N, metrics
    shift = mean if mode == "full" else 0.0
    return (advantages_N - shift) / max(std, min_std), metrics


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
