"""What policy, critic and reference said before an update, said again by the weights of the checkpoint before it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from agentrl.errors import UsageError
from agentrl.learner.batch import Rollout
from agentrl.learner.checkpoint import verify
from agentrl.learner.credit import Scored, score
from agentrl.learner.kl import score_reference
from agentrl.learner.minibatch import Objective
from agentrl.learner.record import UpdateRecord
from agentrl.replay.compare import Row
from agentrl.run import RunDir
from agentrl.train.parts import build_parts, set_threads

_SAME = 1e-4
"""Largest gap of a logprob or value in float32: the order of sums is another on another machine."""
_SAME_LOW_PRECISION = 0.1


def weights_rows(
    run: RunDir, iteration: int, rollout: Rollout, record: UpdateRecord, place: Callable[[int], str]
) -> list[Row]:
    """Scores the recorded tokens with the weights that the update began with.

    Args:
        run: Its checkpoint of the iteration before is loaded.
        iteration: The iteration of the update.
        rollout: What the update learned from.
        record: What it said of these tokens.
        place: Says where a place in the flat arrays is.

    Raises:
        UsageError: If there is no such checkpoint; the message says which iterations follow one.
        CheckpointError: If it is damaged or does not fit.
        MissingError: If the model that the run starts from is not here.
    """
    folder = run.checkpoint_dir(iteration - 1)
    if not folder.is_dir():
        there = sorted(int(path.name) + 1 for path in run.checkpoints.glob("[0-9]*"))
        raise UsageError(
            f"{run.path} has no checkpoint of iteration {iteration - 1}, with whose weights iteration {iteration}"
            f" began: expected one of the iterations {', '.join(map(str, there)) or '(none)'}, or no --weights."
        )
    verify(folder)
    config = run.config
    set_threads(config)
    model = build_parts(config, run.model_dir if config.model.tiny is not None else str(config.model.path)).model
    model.begin_rl(reference=config.ppo.kl.needs_reference)
    model.load(folder)
    temperature = config.rollout.sampling.temperature
    micros = Objective(model, config.ppo, temperature).micros(rollout)
    found = Scored.blank(rollout)
    score(model, micros, temperature, found, what="both" if model.has_critic else "policy")
    allowed = _SAME if model.dtype in {torch.float32, torch.float64} else _SAME_LOW_PRECISION
    known_N = torch.where(record.known_N, found.logprob_N, 0.0)
    rows = [Row("logprobs, by the weights", tolerance=allowed).also_tokens(record.old_logprob_N, known_N, place)]
    if model.has_critic:
        values = Row("values, by the weights", tolerance=allowed)
        values = values.also_tokens(record.old_value_N, found.value_N, place)
        rows.append(values.also_tokens(record.final_B, found.final_B, lambda row: f"the end of {record.episodes[row]}"))
    if record.reference_N is not None:
        reference_N, _ = score_reference(model, micros, temperature, found.logprob_N)
        row = Row("reference's logprobs, by the weights", tolerance=allowed)
        rows.append(row.also_tokens(record.reference_N, reference_N, place))
    return rows
