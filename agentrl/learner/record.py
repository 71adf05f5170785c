"""What an update learned from, as it was learned from: enough to compute its losses again without any weights.

One safetensors file an update. Arrays are those of the rollout's N model tokens (as `Rollout` lays them out) and B
rows; what a minibatch met is kept for its own tokens only. Numbers and names are JSON in the file's metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentrl._files import write_whole
from agentrl.errors import RunError

_FORMAT = 1
_ARRAYS = (
    "old_logprob_N",
    "known_N",
    "old_value_N",
    "final_B",
    "advantage_N",
    "return_N",
    "weight_N",
    "keep_N",
    "value_keep_N",
)
_MET = ("logprob_N", "value_N", "entropy_N")
_NUMBERS = ("policy_loss", "value_loss", "kl_loss", "entropy_bonus")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one minibatch met, before the optimiser moved anything.

    Attributes:
        rows: Its rows, as indices into the record's `episodes`.
        logprob_N: float64, the policy's logprobs of the rollout's N tokens; NaN outside the minibatch.
        value_N: float64, the critic's values; NaN outside the minibatch, and everywhere without a critic.
        entropy_N: float64, nats; NaN outside the minibatch.
        stepped: Whether the policy's optimiser took a step; False after an early stop and for a gradient that was not
            finite.
        policy_loss: The clipped surrogate, as the learner computed it.
        value_loss: As the learner computed it, before any coefficient; 0 without a critic.
        kl_loss: What the KL to the reference added to the loss; 0 where it is in the reward or absent.
        entropy_bonus: What the entropy added to the loss, so never above 0.
    """

    rows: tuple[int, ...]
    logprob_N: Tensor
    value_N: Tensor
    entropy_N: Tensor
    stepped: bool
    policy_loss: float
    value_loss: float
    kl_loss: float = 0.0
    entropy_bonus: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """What one update learned from. Floats are float64, everything is on the CPU.

    Attributes:
        episodes: Ids of the rollout's B rows, in order.
        kl_coef: The KL coefficient in force in this update; 0 where there is none.
        old_logprob_N: The policy's logprobs before the update, 0 where `known_N` is False.
        known_N: bool; where they were computed. Elsewhere the update's own, detached, stood for them.
        reference_N: The reference's logprobs; None where no KL was asked for.
        old_value_N: The critic's values before the update; 0 without a critic.
        final_B: The critic's values of the rows' final states.
        advantage_N: As the policy's loss read them, whitened.
        return_N: Value targets.
        weight_N: Importance weights of the policy's token losses.
        keep_N: bool; False where a token was kept out of the policy's loss.
        value_keep_N: bool; tokens with a value loss.
        steps: The minibatches, in order.
    """

    episodes: tuple[str, ...]
    kl_coef: float
    old_logprob_N: Tensor
    known_N: Tensor
    reference_N: Tensor | None
    old_value_N: Tensor
    final_B: Tensor
    advantage_N: Tensor
    return_N: Tensor
    weight_N: Tensor
    keep_N: Tensor
    value_keep_N: Tensor
    steps: tuple[StepRecord, ...] = ()

    def save(self, path: Path) -> None:
        """Writes the record in one step: a kill leaves the whole file or none.

        Raises:
            RunError: If there is no room.
        """
        from safetensors.torch import save

        # Copies, since two fields may be one tensor, which the format refuses.
        tensors = {name: getattr(self, name).clone() for name in _ARRAYS}
        if self.reference_N is not None:
            tensors["reference_N"] = self.reference_N.clone()
        met_N = [_met(step) for step in self.steps]
        nothing = torch.zeros(0)
        tensors["step_index"] = torch.cat([nothing.int(), *(index.int() for index in met_N)])
        for name in _MET:
            parts = (getattr(step, name)[index] for step, index in zip(self.steps, met_N, strict=True))
            tensors[f"step_{name}"] = torch.cat([nothing.double(), *parts])
        steps = [
            {"rows": list(step.rows), "stepped": step.stepped, "tokens": index.numel()}
            | {name: getattr(step, name) for name in _NUMBERS}
            for step, index in zip(self.steps, met_N, strict=True)
        ]
        facts = {"format": _FORMAT, "episodes": list(self.episodes), "kl_coef": self.kl_coef, "steps": steps}
        write_whole(path, save(tensors, {"agentrl": json.dumps(facts)}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads what `save` wrote.

        Raises:
            RunError: If the file is missing, damaged, or of another format.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads((file.metadata() or {})["agentrl"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            if facts["format"] != _FORMAT:
                raise RunError(f"{path} has format {facts['format']}, expected {_FORMAT}: read it with its agentrl.")
            return cls(
                episodes=tuple(facts["episodes"]),
                kl_coef=facts["kl_coef"],
                reference_N=tensors.get("reference_N"),
                steps=_steps(facts["steps"], tensors),
                **{name: tensors[name] for name in _ARRAYS},
            )
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            if isinstance(error, RunError):
                raise
            raise RunError(
                f"{path} cannot be read as the record of an update ({type(error).__name__}: {error}): it is missing,"
                " damaged, or was written by something else."
            ) from error


def _met(step: StepRecord) -> Tensor:
    """Where a minibatch met anything: places in the rollout's flat arrays."""
    nothing_N = step.logprob_N.isnan() & step.value_N.isnan() & step.entropy_N.isnan()
    return (~nothing_N).nonzero().flatten()


def _steps(facts: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor]) -> tuple[StepRecord, ...]:
    blank_N = torch.full(tensors["old_logprob_N"].shape, math.nan, dtype=torch.float64)
    steps, start = [], 0
    for step in facts:
        part = slice(start, start := start + step["tokens"])
        index = tensors["step_index"][part].long()
        logprob_N, value_N, entropy_N = (blank_N.index_put((index,), tensors[f"step_{name}"][part]) for name in _MET)
        numbers = {name: float(step[name]) for name in _NUMBERS}
        steps.append(StepRecord(tuple(step["rows"]), logprob_N, value_N, entropy_N, step["stepped"], **numbers))
    return tuple(steps)
