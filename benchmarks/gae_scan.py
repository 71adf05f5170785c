"""Credit assignment at 64 x 4096 tokens, a fifth of them sampled: the scan against the loops that others use.

    python benchmarks/gae_scan.py [--repeats 5]

* `scan`: `boundary_gae` over the sampled tokens, which the learner holds flat, float64;
* `columns`: a Python loop over the 4096 columns of padded float32 rows, each step vectorised over the batch, which
  carries the sums across the tokens that were not sampled;
* `tokens`: a Python loop over the tokens of float32 rows, reading and writing tensor elements, as trainers that loop
  over each row do; a part of the rows is measured and scaled;
* `floats`: the same loop over the sampled tokens as plain Python floats, the quickest way to write it.

All give advantages and value targets, and the same ones, which is checked first. The goals are 30 times as fast as the
columns and 300 times as the tokens. One thread.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import NamedTuple

import torch
import tyro
from torch import Tensor

from agentrl.config import AdvantageConfig
from agentrl.learner.advantages import boundary_gae
from benchmarks.timing import interleaved, times_as_fast

CONFIG = AdvantageConfig(gamma_turn=0.99, lambda_turn=0.95)


@dataclass(frozen=True)
class Options:
    """Size and number of rounds."""

    rows: int = 64
    """Episodes."""
    width: int = 4096
    """Tokens of each."""
    turn: int = 32
    """Sampled tokens in a turn; the observation before them is four times as long."""
    part: int = 4
    """Rows that the loop over tokens is measured on."""
    repeats: int = 5
    """Rounds."""


class Batch(NamedTuple):
    """Rewards and values as rows, and where the sampled tokens are."""

    reward_BT: Tensor
    value_BT: Tensor
    is_action_BT: Tensor
    turn_BT: Tensor


def make_batch(options: Options) -> Batch:
    """Random rewards and values; every row has observations and turns in the same rhythm, shifted."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.width)
    place_BT = torch.arange(options.width) + torch.arange(options.rows)[:, None]
    period = 5 * options.turn
    is_action_BT = place_BT % period >= 4 * options.turn
    reward_BT = torch.randn(shape, generator=generator) * is_action_BT
    return Batch(reward_BT, torch.randn(shape, generator=generator), is_action_BT, place_BT // period)


class Flat(NamedTuple):
    """The sampled tokens alone, as the learner holds them."""

    reward_N: Tensor
    value_N: Tensor
    turn_id_N: Tensor
    episode_id_N: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Flat:
        """Leaves everything else out."""
        mask_BT = batch.is_action_BT
        episode_BT = torch.arange(mask_BT.shape[0])[:, None].expand_as(mask_BT)
        return cls(batch.reward_BT[mask_BT], batch.value_BT[mask_BT], batch.turn_BT[mask_BT], episode_BT[mask_BT])


def scan(flat: Flat, rows: int) -> tuple[Tensor, Tensor]:
    """What the learner does; [N] each."""
    return boundary_gae(*flat, torch.zeros(rows), CONFIG)


def columns(batch: Batch) -> tuple[Tensor, Tensor]:
    """One step for each column, from the last to the first; [B, T] each."""
    rows, width = batch.reward_BT.shape
    next_value_B, next_turn_B = torch.zeros(rows), torch.full((rows,), -1)
    carry_B, target_B = torch.zeros(rows), torch.zeros(rows)
    advantages, returns = [], []
    for t in reversed(range(width)):
        value_B, turn_B, mask_B = batch.value_BT[:, t], batch.turn_BT[:, t], batch.is_action_BT[:, t]
        same_B = turn_B == next_turn_B
        gamma_B = torch.where(same_B, CONFIG.gamma_token, CONFIG.gamma_turn)
        lambda_B = torch.where(same_B, CONFIG.lambda_token, CONFIG.lambda_turn)
        delta_B = batch.reward_BT[:, t] + gamma_B * next_value_B - value_B
        carry_B = torch.where(mask_B, delta_B + gamma_B * lambda_B * carry_B, carry_B)
        target_B = torch.where(mask_B, delta_B + gamma_B * CONFIG.lambda_value * target_B, target_B)
        next_value_B = torch.where(mask_B, value_B, next_value_B)
        next_turn_B = torch.where(mask_B, turn_B, next_turn_B)
        advantages.append(carry_B)
        returns.append(target_B + value_B)
    return torch.stack(advantages[::-1], dim=1), torch.stack(returns[::-1], dim=1)


def tokens(batch: Batch, rows: int) -> tuple[Tensor, Tensor]:
    """One step for each token of the first rows, on elements of tensors; [rows, T] each."""
    advantage_BT = torch.zeros(rows, batch.reward_BT.shape[1])
    return_BT = torch.zeros_like(advantage_BT)
    for b in range(rows):
        next_value, next_turn = torch.zeros(()), torch.tensor(-1)
        carry, target = torch.zeros(()), torch.zeros(())
        for t in reversed(range(batch.reward_BT.shape[1])):
            if not batch.is_action_BT[b, t]:
                continue
            value, turn = batch.value_BT[b, t], batch.turn_BT[b, t]
            gamma, lambda_ = _pair(bool(turn == next_turn))
            delta = batch.reward_BT[b, t] + gamma * next_value - value
            carry, target = delta + gamma * lambda_ * carry, delta + gamma * CONFIG.lambda_value * target
            advantage_BT[b, t], return_BT[b, t] = carry, target + value
            next_value, next_turn = value, turn
    return advantage_BT, return_BT


def floats(batch: Batch) -> tuple[Tensor, Tensor]:
    """One step for each sampled token, in Python's floats; [N] each."""
    advantages: list[float] = []
    returns: list[float] = []
    for reward_T, value_T, mask_T, turn_T in zip(*batch, strict=True):
        rewards, values, turns = reward_T[mask_T].tolist(), value_T[mask_T].tolist(), turn_T[mask_T].tolist()
        advantages_N, returns_N = [0.0] * len(rewards), [0.0] * len(rewards)
        next_value, next_turn, carry, target = 0.0, -1, 0.0, 0.0
        for j in reversed(range(len(rewards))):
            gamma, lambda_ = _pair(turns[j] == next_turn)
            delta = rewards[j] + gamma * next_value - values[j]
            carry, target = delta + gamma * lambda_ * carry, delta + gamma * CONFIG.lambda_value * target
            advantages_N[j], returns_N[j] = carry, target + values[j]
            next_value, next_turn = values[j], turns[j]
        advantages += advantages_N
        returns += returns_N
    return torch.tensor(advantages), torch.tensor(returns)


def _pair(same_turn: bool) -> tuple[float, float]:
    return (CONFIG.gamma_token, CONFIG.lambda_token) if same_turn else (CONFIG.gamma_turn, CONFIG.lambda_turn)


def check(batch: Batch, flat: Flat, part: int) -> None:
    """All four ways must agree before they are compared.

    Raises:
        AssertionError: If they do not.
    """
    n_part = int(batch.is_action_BT[:part].sum())
    for expected_N, column_BT, token_BT, float_N in zip(
        scan(flat, batch.reward_BT.shape[0]), columns(batch), tokens(batch, part), floats(batch), strict=True
    ):
        torch.testing.assert_close(column_BT[batch.is_action_BT], expected_N.float(), rtol=1e-3, atol=1e-3)
        mask_BT = batch.is_action_BT[:part]
        torch.testing.assert_close(token_BT[mask_BT], expected_N[:n_part].float(), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(float_N, expected_N.float(), rtol=1e-5, atol=1e-5)


def main(options: Options) -> dict[str, list[float]]:
    """Checks, measures, prints; gives the CPU seconds by round."""
    torch.set_num_threads(1)
    batch = make_batch(options)
    flat, part = Flat.of(batch), min(options.part, options.rows)
    check(batch, flat, part)
    works = {
        "scan": lambda: scan(flat, options.rows),
        "columns": lambda: columns(batch),
        "tokens": lambda: tokens(batch, part),
        "floats": lambda: floats(batch),
    }
    took_s = interleaved(works, options.repeats)
    took_s["tokens"] = [one_s * options.rows / part for one_s in took_s["tokens"]]
    print(f"{options.rows} x {options.width} tokens, {flat.reward_N.numel()} of them sampled; 1 thread")
    for name, times in took_s.items():
        print(f"{name:8} {1000 * statistics.median(times):10.2f} CPU ms")
    for name in ("columns", "tokens", "floats"):
        print(f"the scan is {times_as_fast(took_s[name], took_s['scan'])} as fast as the loop over {name}")
    return took_s


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
