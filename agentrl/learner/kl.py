"""The KL to the reference policy: its weight, fixed or adapted to a target, and the figures that it is steered by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from agentrl.config import KlConfig
from agentrl.errors import InvariantError
from agentrl.learner import invariants
from agentrl.learner.batch import MicroBatch
from agentrl.learner.losses import kl_k1, kl_k3
from agentrl.learner.model import ActorCritic

MAX_CHANGE = 0.2
"""The relative error of the KL that the controller sees is clipped to this on both sides."""


class KlController:
    """The weight of the KL: constant, or moved in proportion to how far the KL is from its target.

    Attributes:
        coef: The weight of the next update.
    """

    def __init__(self, config: KlConfig) -> None:
        """Starts at `config.coef`; without `config.target` it stays there."""
        self._config = config
        self.coef = config.coef

    def observe(self, kl: float, n_episodes: int) -> None:
        """Adapts the weight after an update: coef <- coef (1 + e n / horizon), e = clip(KL / target - 1, -0.2, 0.2).

        A batch counts for one horizon at most, so that no factor comes near 0 or below it.

        Args:
            kl: The KL of the update's episodes, counted as `config.stat` says, nats.
            n_episodes: n, how many these were.

        Raises:
            InvariantError: If the KL is not finite.

        Source: Ziegler et al., arXiv:1909.08593.
        """
        if self._config.target is None:
            return
        if not math.isfinite(kl):
            raise InvariantError(f"the KL to the reference is {kl}, expected a finite number: the weights are damaged.")
        error = min(max(kl / self._config.target - 1.0, -MAX_CHANGE), MAX_CHANGE)
        self.coef *= 1.0 + error * min(n_episodes / self._config.horizon, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next weight depends on."""
        return {"coef": self.coef}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self.coef = float(state["coef"])


def kl_stat(k1_N: Tensor, episode_id_N: Tensor, stat: str) -> float:
    """The KL of a batch of episodes as one number, nats.

    Args:
        k1_N: log(policy / reference) of each sampled token.
        episode_id_N: Integers from 0.
        stat: `token_mean`: each episode's mean over its tokens, then the mean over episodes; `seq_sum`: each episode's
            sum, then the mean over episodes. A target for one is no target for the other.

    Returns:
        The figure; 0 without tokens.
    """
    length_B = torch.bincount(episode_id_N)
    sum_B = torch.zeros(length_B.shape, dtype=torch.float64).index_add(0, episode_id_N, k1_N.double())
    counted_B = length_B > 0
    if not bool(counted_B.any()):
        return 0.0
    found_B = sum_B[counted_B] / (length_B[counted_B] if stat == "token_mean" else 1)
    return float(found_B.mean())


@torch.no_grad()
def score_reference(
    model: ActorCritic, micros: Iterable[MicroBatch], temperature: float, logprob_N: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Logprobs of the sampled tokens under the reference, and how far the policy is from it.

    Args:
        model: Has a reference.
        micros: The whole rollout.
        temperature: Of sampling; the reference is tempered alike.
        logprob_N: The policy's, of all tokens.

    Returns:
        reference_N, float64 on the CPU, and the metrics `ppo/kl_ref` (k3) and `ppo/kl_ref_k1`, means over tokens.

    Raises:
        InvariantError: If a logprob is not finite.
    """
    reference_N = torch.zeros_like(logprob_N)
    for micro in micros:
        reference_N[micro.index_N] = model.reference_logprobs(micro, temperature).double().cpu()
    invariants.check_finite(reference_N, "of the reference's logprobs")
    k3, k1 = kl_k3(logprob_N, reference_N).mean(), kl_k1(logprob_N, reference_N).mean()
    return reference_N, {"ppo/kl_ref": float(k3), "ppo/kl_ref_k1": float(k1)}
