"""Rows and micro-batches: nothing lost, nothing doubled, states one before their tokens, bad input named."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.errors import InvariantError
from agentrl.learner.batch import make_microbatches, read_rollout
from agentrl.types import EndReason

CPU = torch.device("cpu")


def read(trajectories, context=96):
    return read_rollout(trajectories, context=context, vocab_size=24)


def test_a_row_by_hand(kit):
    """Prompt of 2, two sampled, observation of 1, one sampled: actions at 2, 3 and 5, states at 1, 2 and 4."""
    trajectory = kit.trajectory([(2, 2, 0.5), (1, 1, 1.0)], seed=3)
    rollout = read([trajectory])
    (row,) = rollout.rows
    packed = trajectory.pack()
    assert row.action_N.tolist() == [2, 3, 5]
    assert rollout.reward_N.tolist() == [0.0, 0.5, 1.0]
    assert rollout.turn_id_N.tolist() == [0, 0, 1]
    assert rollout.start_B.tolist() == [0, 3]
    (micro,) = make_microbatches(rollout, [0], 100, CPU)
    assert micro.state_N.tolist() == [1, 2, 4]
    assert micro.final_B.tolist() == [5]
    assert micro.target_N.tolist() == packed.token_ids_T[[2, 3, 5]].tolist()


def test_flat_arrays_of_an_uneven_batch(kit):
    batch = kit.batch()
    rollout = read(batch)
    expected = np.concatenate([t.pack().reward_T[t.pack().is_action_T] for t in batch])
    assert rollout.reward_N.tolist() == expected.tolist()
    assert rollout.reward_N.sum().item() == pytest.approx(sum(t.reward for t in batch))
    assert rollout.n_actions == sum(t.n_sampled for t in batch)
    assert torch.bincount(rollout.episode_id_N).tolist() == [t.n_sampled for t in batch]
    assert rollout.bootstraps_B.tolist() == [t.end is EndReason.CUT for t in batch]


@given(
    shapes=st.lists(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3), min_size=1, max_size=9
    ),
    budget=st.integers(16, 120),
    packing=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_microbatches_hold_every_token_once_within_the_budget(kit, shapes, budget, packing, rng):
    batch = [kit.trajectory([(a, b, 0.0) for a, b in turns], seed=i) for i, turns in enumerate(shapes)]
    rollout = read(batch)
    rows = list(range(len(batch)))
    rng.shuffle(rows)
    micros = make_microbatches(rollout, rows, budget, CPU, packing)
    seen = torch.cat([micro.index_N for micro in micros])
    assert sorted(seen.tolist()) == list(range(rollout.n_actions))
    assert sorted(torch.cat([micro.row_B for micro in micros]).tolist()) == sorted(rows)
    for micro in micros:
        assert micro.token_ids_BT.numel() <= budget or len(micro.row_B) == 1
        flat = micro.token_ids_BT.flatten()
        # The token after the state is the target: no shift, and no state in another row.
        assert torch.equal(flat[micro.state_N + 1], micro.target_N)
        places = micro.position_ids.expand_as(micro.token_ids_BT).flatten()
        rows_of_it = [rollout.rows[row] for row in micro.row_B.tolist()]
        assert torch.equal(places[micro.state_N], torch.cat([row.action_N - 1 for row in rows_of_it]))
        assert torch.equal(places[micro.final_B], torch.tensor([row.n_tokens - 1 for row in rows_of_it]))
        assert torch.equal(flat[micro.final_B], torch.stack([row.token_ids_T[-1] for row in rows_of_it]))
        each = torch.tensor([row.action_N.numel() for row in rows_of_it])
        assert torch.equal(micro.row_B.repeat_interleave(each), rollout.episode_id_N[micro.index_N])


def test_rows_of_like_length_share_a_microbatch(kit):
    """Lengths 10 to 80 in a budget of 160: sorted, the padding is a small part; in the given order it is not."""
    batch = [kit.trajectory([(n - 5, 5, 0.0)], seed=n) for n in (10, 80, 11, 79, 12, 78, 13, 77)]
    micros = make_microbatches(read(batch), range(8), 160, CPU)
    padded = sum(micro.token_ids_BT.numel() for micro in micros)
    assert padded <= 1.05 * sum(t.n_tokens for t in batch)


def test_observations_are_invisible_in_the_flat_arrays(kit):
    """P8: more tool output between two turns changes neither rewards, nor turns, nor episodes."""
    short, long = (read([kit.trajectory([(2, 3, 0.1), (gap, 4, 1.0)], seed=1)]) for gap in (1, 60))
    for name in ("reward_N", "turn_id_N", "episode_id_N"):
        assert torch.equal(getattr(short, name), getattr(long, name))


def test_errors_and_empty_episodes_are_left_out_and_counted(kit):
    good = kit.trajectory([(2, 3, 1.0)], seed=1)
    failed = replace(kit.trajectory([(2, 3, 0.0)], seed=2), end=EndReason.ENV_ERROR)
    empty = kit.trajectory([(4, 0, 0.0)], seed=3, end=EndReason.CUT)
    rollout = read([failed, good, empty, failed])
    assert [row.episode for row in rollout.rows] == [good.id]
    assert (rollout.n_error, rollout.n_empty) == (2, 1)
    assert read([failed]).n_actions == 0


def with_turn(trajectory, **changes):
    return replace(trajectory, turns=(replace(trajectory.turns[0], **changes), *trajectory.turns[1:]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rewards_and_logprobs_that_are_not_finite_are_refused(kit, bad):
    trajectory = kit.trajectory([(2, 3, 1.0), (2, 2, 0.0)], seed=1, name="000001/t/0")
    with pytest.raises(InvariantError, match=r"000001/t/0.*reward of sampled token 2 is"):
        read([with_turn(trajectory, reward=bad)])
    with pytest.raises(InvariantError, match=r"logprob of sampled token 1 is"):
        read([with_turn(trajectory, logprobs=(-1.0, bad, -1.0))])


def test_logprobs_above_zero_are_refused(kit):
    trajectory = kit.trajectory([(2, 2, 1.0)], seed=1)
    with pytest.raises(InvariantError, match="probabilities or logits"):
        read([with_turn(trajectory, logprobs=(-1.0, 0.4))])


def test_a_row_beyond_the_context_names_the_setting(kit):
    with pytest.raises(InvariantError, match=r"has 30 tokens.*at most 29.*rollout.max_context"):
        read([kit.trajectory([(10, 20, 0.0)], seed=1)], context=29)


def test_a_sampled_token_needs_a_token_before_it(kit):
    with pytest.raises(InvariantError, match="prompt's tokens are missing"):
        read([kit.trajectory([(0, 3, 1.0)], seed=1)])


@pytest.mark.parametrize("token", [-1, 24])
def test_unknown_token_ids_are_refused(kit, token):
    trajectory = kit.trajectory([(2, 2, 1.0)], seed=1)
    with pytest.raises(InvariantError, match=rf"token id {token}, expected 0 to 23"):
        read([with_turn(trajectory, sampled_ids=(3, token))])


def test_attempts_at_one_task_are_a_group(kit):
    """Numbered in the order of first appearance, after errors and empty episodes were left out."""
    by_task = [kit.trajectory([(2, 3, 1.0)], seed=seed, name=f"e{k}") for k, seed in enumerate((7, 3, 7, 5, 3))]
    assert read(by_task).group_B.tolist() == [0, 1, 0, 2, 1]
    failed = replace(kit.trajectory([(2, 3, 0.0)], seed=9), end=EndReason.ENV_ERROR)
    assert read([failed, *by_task[1:], failed]).group_B.tolist() == [0, 1, 2, 0]
    assert read([failed]).group_B.tolist() == []
    assert read(by_task).group_B.dtype == torch.int64
