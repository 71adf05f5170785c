"""AdamW with a rate schedule, its own gradient clip, and a guard against gradients that are not finite.

Weights of 16 bits are trained through a float32 copy: bfloat16 has no number between 1 and 1.0078, so that steps of
1e-6 would be lost to rounding, all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from agentrl.config import OptimConfig
from agentrl.errors import CheckpointError, InvariantError

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
    """AdamW over one group of weights, in float32 at least.

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
        self._masters = [_master(weight) for weight in self._parameters]
        trained = [
            weight if master is None else master for weight, master in zip(self._parameters, self._masters, strict=True)
        ]
        # As a group, because a plain list may not be empty.
        group = {"params": trained}
        self._adamw = torch.optim.AdamW([group], lr=config.lr, betas=config.betas, weight_decay=config.weight_decay)
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
            self._lend_gradients()
            self._adamw.step()
            self._round_masters()
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
        for weight, _ in self._pairs():
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on."""
        counters = {"steps": self.steps, "skipped": self.skipped, "skips_in_a_row": self._skips_in_a_row}
        masters = [master.detach() for _, master in self._pairs()]
        return {"adamw": self._adamw.state_dict(), "masters": masters, **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave.

        Raises:
            CheckpointError: If it belongs to weights of another type.
        """
        pairs, masters = list(self._pairs()), state.get("masters", [])
        if len(pairs) != len(masters):
            raise CheckpointError(
                f"the {self._name}'s optimiser holds {len(masters)} float32 copies of weights, expected {len(pairs)}:"
                " the checkpoint was made with another model.dtype."
            )
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (_, master), stored in zip(pairs, masters, strict=True):
                master.copy_(stored)
        self.steps, self.skipped = state["steps"], state["skipped"]
        self._skips_in_a_row = state["skips_in_a_row"]

    def _pairs(self) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
        """The weights that have a master, and it."""
        for weight, master in zip(self._parameters, self._masters, strict=True):
            if master is not None:
                yield weight, master

    @torch.no_grad()
    def _lend_gradients(self) -> None:
        for weight, master in self._pairs():
            # Weights that somebody else has changed since, by loading them or by training with another optimiser, are
            # where the next step starts from.
            master.copy_(torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype)))
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)

    @torch.no_grad()
    def _round_masters(self) -> None:
        for weight, master in self._pairs():
            weight.copy_(master)


def _master(weight: torch.nn.Parameter) -> torch.nn.Parameter | None:
    """A float32 copy of weights that are coarser, None of others."""
    if torch.promote_types(weight.dtype, torch.float32) == weight.dtype:
        return None
    if hasattr(weight, "grad_dtype"):  # torch 2.10 and later: micro-batches add up in float32 too
        weight.grad_dtype = torch.float32
    return torch.nn.Parameter(weight.detach().float())
