"""AdamW with a rate schedule, its own gradient clip, and a guard against gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from agentrl.config import OptimConfig
from agentrl.errors import InvariantError

MAX_SKIPS_IN_A_ROW = 3
"""So many steps with gradients that are not finite end the run."""

Schedule = Callable[[int], float]
"""From the number of steps taken to the factor of the learning rate."""


def linear_warmup(warmup_steps: int) -> Schedule:
    """Rises linearly over the first steps (never 0), then stays at 1."""
    return lambda step: min(1.0, (step + 1) / (warmup_steps + 1))


def cosine(warmup_steps: int, total_steps: int, floor: float = 0.1) -> Schedule:
    """Rises linearly over the first steps, then falls to `floor` along a cosine, and stays there."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / (warmup_steps + 1)
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


class Optimizer:
    """AdamW over one group of weights.

    Attributes:
        steps: Steps taken.
        skipped: Steps not taken, because the gradient was not finite.
    """

    def __init__(
        self, name: str, parameters: Iterable[torch.nn.Parameter], config: OptimConfig, schedule: Schedule
    ) -> None:
        """Builds it.

        Args:
            name: Whose weights these are, for messages.
            parameters: What it trains.
            config: Rate, decay, clip.
            schedule: Factor of the rate, by steps taken.
        """
        self._name = name
        self._parameters = list(parameters)
        self._config = config
        self._schedule = schedule
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay
        )
        self.steps = 0
        self.skipped = 0
        self._skips_in_a_row = 0

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        return self._config.lr * self._schedule(self.steps)

    def step(self) -> tuple[float, bool]:
        """Clips the gradients to the configured norm, takes a step, and clears them.

        Where the norm is not finite nothing moves and the gradients are dropped.

        Returns:
            The norm before clipping, and whether a step was taken.

        Raises:
            InvariantError: After MAX_SKIPS_IN_A_ROW such gradients in a row.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        finite = math.isfinite(norm)
        if finite:
            for group in self._adamw.param_groups:
                group["lr"] = self.lr
            self._adamw.step()
            self.steps += 1
            self._skips_in_a_row = 0
        self.clear()
        if not finite:
            self.skipped += 1
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
                raise InvariantError(
                    f"the {self._name}'s gradient was not finite {self._skips_in_a_row} times in a row: expected finite"
                    " losses. Look for rewards of huge size, lower the learning rate, or take an earlier checkpoint."
                )
        return norm, finite

    def clear(self) -> None:
        """Drops the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        counters = {"steps": self.steps, "skipped": self.skipped, "skips_in_a_row": self._skips_in_a_row}
        return {"adamw": self._adamw.state_dict(), **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave."""
        self._adamw.load_state_dict(state["adamw"])
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._skips_in_a_row = state["skips_in_a_row"]
