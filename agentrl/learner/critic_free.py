"""Credit assignment without a critic: attempts at a task against each other (GRPO, RLOO), and REINFORCE++.

GRPO and RLOO know one number of an episode, its return: the plain sum of its rewards. Where a KL penalty is in the
rewards, its sum over the episode is in the return. That sum is the estimate of the KL of whole episodes, so it is
centred in the group as every other reward is; a per-token rest of the penalty would need a baseline per token, which a
group has not. Its noise grows with the length of the episodes: with these two, k2 in the loss is the quieter choice.

Flat arrays as in `advantages`; pure functions in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.errors import InvariantError
from agentrl.learner.advantages import episode_ends, reverse_scan


@dataclass(frozen=True, slots=True)
class Groups:
    """The returns of the attempts at each task, seen from the episode.

    Attributes:
        size_B: int64, attempts in the episode's group that count.
        centred_B: The return less the group's mean; exactly 0 where all returns of the group are equal.
        std_B: Unbiased deviation of the group's returns; 0 where it has fewer than two.
    """

    size_B: Tensor
    centred_B: Tensor
    std_B: Tensor

    @classmethod
    def of(cls, returns_B: Tensor, group_B: Tensor, counts_B: Tensor | None = None) -> Groups:
        """Compares returns within their groups.

        Args:
            returns_B: Return of each episode, reward units.
            group_B: int64 from 0; attempts at one task share a number.
            counts_B: bool; False keeps an episode out of its group's statistics (it was cut, so its return is not
                known), while it still gets those of the others. All count where not given.
        """
        returns_B = returns_B.double()
        counts_B = torch.ones_like(group_B, dtype=torch.bool) if counts_B is None else counts_B
        n_groups = int(group_B.max()) + 1 if group_B.numel() else 0
        zeros_G = torch.zeros(n_groups, dtype=torch.float64)
        counted_G = group_B[counts_B]
        size_G = zeros_G.index_add(0, counted_G, torch.ones_like(returns_B)[counts_B])
        # From the group's lowest return on: the mean of equal numbers need not be that number, but that of zeros is.
        lowest_G = torch.full_like(zeros_G, torch.inf).scatter_reduce(0, counted_G, returns_B[counts_B], "amin")
        above_B = returns_B - torch.where(size_G > 0, lowest_G, 0.0)[group_B]
        mean_G = zeros_G.index_add(0, counted_G, above_B[counts_B]) / size_G.clamp(min=1)
        centred_B = above_B - mean_G[group_B]
        square_G = zeros_G.index_add(0, counted_G, centred_B[counts_B].square())
        std_G = torch.where(size_G > 1, square_G / (size_G - 1).clamp(min=1), 0.0).sqrt()
        return cls(size_G[group_B].long(), centred_B, std_G[group_B])


def episode_returns(rewards_N: Tensor, episode_id_N: Tensor, n_episodes: int) -> Tensor:
    """Sum of each episode's rewards, [B] float64, reward units."""
    return torch.zeros(n_episodes, dtype=torch.float64).index_add_(0, episode_id_N, rewards_N.double())


def grpo(groups: Groups, min_std: float | None) -> Tensor:
    """Group-relative advantages: the return less its group's mean, over the group's deviation.

    Args:
        groups: The returns, compared.
        min_std: Floor of the deviation; None leaves the division out (Dr. GRPO, which has no bias towards tasks whose
            returns hardly differ).

    Returns:
        Advantages, [B]; 0 in groups under two attempts and in groups without spread.

    Source: Shao et al., arXiv:2402.03300; Liu et al., arXiv:2503.20783.
    """
    scale_B = 1.0 if min_std is None else groups.std_B.clamp(min=min_std)
    return torch.where(groups.size_B > 1, groups.centred_B / scale_B, 0.0)


def rloo(groups: Groups) -> Tensor:
    """Leave-one-out advantages: the return less the mean of the group's others, n / (n - 1) times less its own mean.

    Returns:
        Advantages, [B]; 0 in groups under two attempts.

    Source: Ahmadian et al., arXiv:2402.14740.
    """
    n_B = groups.size_B.double()
    return torch.where(n_B > 1, groups.centred_B * n_B / (n_B - 1).clamp(min=1), 0.0)


def reinforce_pp(rewards_N: Tensor, episode_id_N: Tensor, gamma: float) -> Tensor:
    """What is still to come at each model token, discounted from model token to model token.

    It starts anew at the end of an episode and nowhere else: what later turns earn reaches the earlier ones.

    Returns:
        Returns, [N] float64. They become advantages by `advantages.whiten` over the whole batch.

    Source: Hu et al., arXiv:2501.03262.
    """
    carry_N = torch.full(rewards_N.shape, gamma, dtype=torch.float64).masked_fill_(episode_ends(episode_id_N), 0.0)
    longest = int(torch.bincount(episode_id_N).max()) if episode_id_N.numel() else 0
    return reverse_scan(rewards_N.double(), carry_N, longest)


def refuse_cut(bootstraps_B: Tensor, episodes: tuple[str, ...], estimator: str) -> None:
    """Without a critic nothing stands for the rest of an episode that was cut.

    Raises:
        InvariantError: If an episode's end asks for a bootstrap.
    """
    if not bool(bootstraps_B.any()):
        return
    cut = [episode for episode, is_cut in zip(episodes, bootstraps_B.tolist(), strict=True) if is_cut]
    named = ", ".join(cut[:3]) + (", ..." if len(cut) > 3 else "")
    raise InvariantError(
        f"{len(cut)} of {len(episodes)} episodes were cut ({named}), and estimator {estimator!r} has no critic to say"
        " what they would have earned: expected episodes that ended. Collect them to their end, or use an estimator"
        " that has a critic ('boundary', 'action', 'turn')."
    )
