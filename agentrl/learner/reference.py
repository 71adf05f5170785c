"""Whether the KL's reference is still the policy that it was.

It is made anew at each resume, in part from files that are not the checkpoint's: the base that adapters stand on.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from agentrl.errors import CheckpointError
from agentrl.learner.batch import Rollout, Row, make_microbatches
from agentrl.learner.model import ActorCritic

_PROBE_TOKENS = 32
_SAME = {torch.float64: 1e-6, torch.float32: 1e-3}
_SAME_LOW_PRECISION = 0.1


def reference_probe(model: ActorCritic) -> list[float] | None:
    """What the reference says of a fixed row of tokens, nats; None where there is no reference.

    Args:
        model: After `begin_rl`, or with a checkpoint loaded.
    """
    if not model.has_reference:
        return None
    n = min(_PROBE_TOKENS, model.context, model.vocab_size)
    ids_T = torch.arange(n) * max(1, model.vocab_size // n) % model.vocab_size
    nothing_N = torch.zeros(n - 1)
    row = Row(
        "probe", ids_T, torch.arange(1, n), nothing_N.long(), nothing_N.double(), nothing_N.double(), False, (), "probe"
    )
    (micro,) = make_microbatches(Rollout.of([row]), [0], n, model.device)
    found: list[float] = model.reference_logprobs(micro, 1.0).double().tolist()
    return found


def check_reference(folder: Path, recorded: Sequence[float] | None, model: ActorCritic) -> None:
    """Compares the reference with the one that a checkpoint was written with.

    Args:
        folder: The checkpoint.
        recorded: What `reference_probe` gave then.
        model: With the checkpoint loaded.

    Raises:
        CheckpointError: If it is another policy; rounding of another machine or type is not.
    """
    found = reference_probe(model)
    if recorded is None or found is None:
        return
    allowed = _SAME.get(model.dtype, _SAME_LOW_PRECISION)
    gaps = [abs(a - b) for a, b in zip(recorded, found, strict=False)]
    if len(recorded) != len(found) or not max(gaps) <= allowed:
        raise CheckpointError(
            f"the reference policy of the KL is not the one that {folder} was trained against: its logprobs of a fixed"
            f" text differ by up to {max(gaps, default=0.0):.3g} nats, expected at most {allowed:g}. The model that the"
            " run starts from (model.path), or its SFT, was changed since: put it back, or start a new run."
        )
