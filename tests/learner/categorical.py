"""One state and a handful of actions: expectations and gradients are sums, exact to the last digits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from agentrl.config import LossConfig
from agentrl.learner.losses import Share, policy_loss

F64 = torch.float64


class Categorical:
    """A policy pi = softmax(logits), a reference, and the policy mu that the samples come from."""

    def __init__(self, seed: int, *, stale: bool = False, actions: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(3, actions, generator=generator, dtype=F64)
        self.logits = draws[0].requires_grad_(True)
        self.reference = draws[1].log_softmax(0)
        pi = self.logits.detach().log_softmax(0)
        self.sampler = (draws[0].detach() + 0.7 * draws[2]).log_softmax(0) if stale else pi
        self.share = Share(torch.ones(actions, dtype=torch.bool), self.sampler.exp(), actions)
        """Each action counts as often as it is sampled, so that a loss is its expectation."""

    def gradient(self, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Of a function of log pi, by the logits."""
        return torch.autograd.grad(of(self.logits.log_softmax(0)), self.logits, allow_unused=True)[0]

    @property
    def reverse(self) -> torch.Tensor:
        """The gradient of KL(pi, reference)."""
        return self.gradient(lambda log_pi: (log_pi.exp() * (log_pi - self.reference)).sum())

    @property
    def forward(self) -> torch.Tensor:
        """The gradient of KL(reference, pi)."""
        return self.gradient(lambda log_pi: (self.reference.exp() * (self.reference - log_pi)).sum())

    def in_loss(self, estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The expected gradient of an estimate that is a loss."""
        return self.gradient(lambda log_pi: (self.sampler.exp() * estimate(log_pi, self.reference)).sum())

    def in_reward(self, estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The expected gradient of the policy's loss where an estimate is taken off the reward."""

        def loss(log_pi: torch.Tensor) -> torch.Tensor:
            advantage = -estimate(log_pi, self.reference).detach()
            return policy_loss(log_pi, self.sampler, advantage, self.share, LossConfig(dual_clip=None))[0]

        return self.gradient(loss)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.dot(a, b) / (a.norm() * b.norm()))
