"""From trajectories to what the model reads: rows, their model tokens laid out flat, and micro-batches by token budget.

Two layouts meet here. The trunk reads rows [B, T], padded on the right. Everything else (logprobs, values, advantages,
losses) lives in flat arrays [N] over the model tokens of all rows, one row after the other; `MicroBatch.index_N` leads
from the one to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import InvariantError
from agentrl.learner.packing import LINE_TOKENS, fill_lines, group_lines
from agentrl.types import Packed, Trajectory


@dataclass(frozen=True, slots=True)
class Row:
    """One trajectory as the learner reads it.

    Attributes:
        episode: The trajectory's id.
        token_ids_T: int64, all tokens.
        action_N: int64, positions of the sampled tokens; at least 1, since the state of a token is read one before it.
        turn_id_N: int64.
        logprob_N: float64, the engine's.
        reward_N: float64; a turn's reward on its last token.
        bootstraps: Whether the critic's value of the final state stands for what would have come.
        versions: Versions of the policy that sampled it, sorted.
        task: Id of the task that was attempted.
    """

    episode: str
    token_ids_T: Tensor
    action_N: Tensor
    turn_id_N: Tensor
    logprob_N: Tensor
    reward_N: Tensor
    bootstraps: bool
    versions: tuple[int, ...]
    task: str

    @property
    def n_tokens(self) -> int:
        """Length of the row, tokens."""
        return self.token_ids_T.numel()


@dataclass(frozen=True, slots=True)
class Rollout:
    """The rows of a batch and their model tokens, flat.

    Attributes:
        rows: In the order of the trajectories.
        start_B: [B + 1] where each row's model tokens begin in the flat arrays; the last entry is N.
        episode_id_N: int64, the row of each model token.
        turn_id_N: int64.
        logprob_N: float64, the engine's.
        reward_N: float64.
        bootstraps_B: bool.
        group_B: int64, 0 to G - 1 in the order of first appearance; the attempts at one task share a number.
        n_error: Trajectories left out because they ended in an error.
        n_empty: Trajectories left out because the policy sampled nothing in them.
    """

    rows: tuple[Row, ...]
    start_B: Tensor
    episode_id_N: Tensor
    turn_id_N: Tensor
    logprob_N: Tensor
    reward_N: Tensor
    bootstraps_B: Tensor
    group_B: Tensor
    n_error: int = 0
    n_empty: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], n_error: int = 0, n_empty: int = 0) -> Rollout:
        """Lays rows out one after the other."""
        start_B = torch.tensor([0, *(row.action_N.numel() for row in rows)]).cumsum(0)
        nothing = torch.zeros(0)
        groups: dict[str, int] = {}
        return cls(
            tuple(rows),
            start_B,
            torch.repeat_interleave(torch.arange(len(rows)), start_B.diff()),
            torch.cat([nothing.long(), *(row.turn_id_N for row in rows)]),
            torch.cat([nothing.double(), *(row.logprob_N for row in rows)]),
            torch.cat([nothing.double(), *(row.reward_N for row in rows)]),
            torch.tensor([row.bootstraps for row in rows], dtype=torch.bool),
            torch.tensor([groups.setdefault(row.task, len(groups)) for row in rows], dtype=torch.int64),
            n_error,
            n_empty,
        )

    @property
    def n_actions(self) -> int:
        """N, the model tokens of all rows."""
        return self.reward_N.numel()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the trunk together, in lines that are padded on the right; a packed line holds several.

    Attributes:
        token_ids_BT: int64. No attention mask is needed: what stands to the right never reaches a causal model's
            states.
        position_ids: [1, T] for padded rows; [B, T] with restarts at 0 where a line holds several rows.
        state_N: int64, flat index into B * T of the state before each model token.
        target_N: int64, the model tokens.
        final_B: int64, flat index into B * T of each row's last state.
        index_N: int64, place of each model token in the rollout's flat arrays.
        row_B: int64, which rows these are.
    """

    token_ids_BT: Tensor
    position_ids: Tensor
    state_N: Tensor
    target_N: Tensor
    final_B: Tensor
    index_N: Tensor
    row_B: Tensor


def read_rollout(trajectories: Sequence[Trajectory], *, context: int, vocab_size: int) -> Rollout:
    """Lays out the trajectories that are trained on, and counts the others.

    Args:
        trajectories: A collected batch. Those whose end is not `in_loss` (errors) or that hold no sampled token are
            left out and counted.
        context: Longest row that the model can read, tokens.
        vocab_size: Token ids must be below it.

    Raises:
        InvariantError: If a trajectory cannot be trained on: a reward or logprob that is not finite, a logprob above 0,
            a sampled token without a token before it, more tokens than the context, an unknown token id.
    """
    rows: list[Row] = []
    n_error = n_empty = 0
    for trajectory in trajectories:
        if not trajectory.end.in_loss:
            n_error += 1
        elif not any(turn.sampled_ids for turn in trajectory.turns):
            n_empty += 1
        else:
            rows.append(_read_row(trajectory, context, vocab_size))
    return Rollout.of(rows, n_error, n_empty)


def make_microbatches(
    rollout: Rollout, rows: Sequence[int], budget: int, device: torch.device, packing: bool = False
) -> list[MicroBatch]:
    """Splits rows into micro-batches by token budget, lines of like length together.

    Args:
        rollout: Where the rows are.
        rows: Which ones.
        budget: Most tokens of a micro-batch, padding included; a longer row goes alone.
        device: Where the model is.
        packing: Whether several rows share a line. The model must keep them apart: see `ActorCritic.check_packing`.
    """
    lengths = [rollout.rows[row].n_tokens for row in rows]
    lines = fill_lines(lengths, min(budget, LINE_TOKENS)) if packing else [[index] for index in range(len(lengths))]
    widths = [sum(lengths[index] for index in line) for line in lines]
    return [
        _lay_out(rollout, [[rows[index] for index in lines[line]] for line in group], device)
        for group in group_lines(widths, budget)
    ]


def _lay_out(rollout: Rollout, lines: Sequence[Sequence[int]], device: torch.device) -> MicroBatch:
    width = max(sum(rollout.rows[row].n_tokens for row in line) for line in lines)
    token_ids_BT = torch.zeros(len(lines), width, dtype=torch.int64)
    positions: list[Tensor] = []
    placed: list[tuple[int, Row, int]] = []
    for number, line in enumerate(lines):
        end = 0
        for row in line:
            start, end = end, end + rollout.rows[row].n_tokens
            token_ids_BT[number, start:end] = rollout.rows[row].token_ids_T
            positions.append(torch.arange(end - start))
            placed.append((row, rollout.rows[row], number * width + start))
        # What is left of a line counts as a row: its places start at 0 again, so that none is beyond the context.
        positions.append(torch.arange(width - end))
    # One line of places for all leaves the attention without a mask, which is faster; the first line is the longest.
    n_lines = 1 if len(placed) == len(lines) else len(lines)
    position_ids = torch.cat(positions)[: n_lines * width].view(n_lines, width)
    first_B = rollout.start_B.tolist()
    return MicroBatch(
        token_ids_BT.to(device),
        position_ids.to(device),
        torch.cat([row.action_N - 1 + start for _, row, start in placed]).to(device),
        torch.cat([row.token_ids_T[row.action_N] for _, row, _ in placed]).to(device),
        torch.tensor([start + row.n_tokens - 1 for _, row, start in placed]).to(device),
        torch.cat([torch.arange(first_B[index], first_B[index + 1]) for index, _, _ in placed]),
        torch.tensor([index for index, _, _ in placed]),
    )


def _read_row(trajectory: Trajectory, context: int, vocab_size: int) -> Row:
    packed = trajectory.pack()
    _check_row(trajectory.id, packed, context, vocab_size)
    action_N = np.flatnonzero(packed.is_action_T)
    return Row(
        trajectory.id,
        torch.from_numpy(packed.token_ids_T),
        torch.from_numpy(action_N),
        torch.from_numpy(packed.turn_id_T[action_N]),
        torch.from_numpy(packed.logprob_T[action_N]),
        torch.from_numpy(packed.reward_T[action_N]),
        trajectory.end.bootstraps,
        tuple(sorted({turn.policy_version for turn in trajectory.turns})),
        trajectory.task.id,
    )


def _check_row(episode: str, packed: Packed, context: int, vocab_size: int) -> None:
    n = packed.token_ids_T.size
    if n > context:
        raise InvariantError(
            f"episode {episode} has {n} tokens, and the model reads at most {context}: set rollout.max_context to"
            f" {context} or less, so that the collector ends the episode in time."
        )
    if packed.is_action_T[0]:
        raise InvariantError(
            f"episode {episode} begins with a sampled token: expected at least one token before it, because a token's"
            " logprob and value are read from the state before it. The prompt's tokens are missing."
        )
    lowest, highest = int(packed.token_ids_T.min()), int(packed.token_ids_T.max())
    if lowest < 0 or highest >= vocab_size:
        raise InvariantError(
            f"episode {episode} holds token id {lowest if lowest < 0 else highest}, expected 0 to {vocab_size - 1}: the"
            " tokenizer and the model do not belong together."
        )
    logprob_N, reward_N = packed.logprob_T[packed.is_action_T], packed.reward_T[packed.is_action_T]
    for what, values, source in (("reward", reward_N, "reward tree"), ("logprob", logprob_N, "policy's engine")):
        if not np.isfinite(values).all():
            where = int(np.flatnonzero(~np.isfinite(values))[0])
            raise InvariantError(
                f"episode {episode}: the {what} of sampled token {where} is {values[where]}, expected a finite number:"
                f" look at the {source}."
            )
    if (logprob_N > 1e-3).any():
        raise InvariantError(
            f"episode {episode}: the engine reports a logprob of {logprob_N.max():.4g}, expected at most 0: are these"
            " probabilities or logits?"
        )
