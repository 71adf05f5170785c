"""It learns, through the pipeline of a run: and where credit is assigned wrongly it does not."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from worlds import Bandit, Coin, Copy, Key, LongKey, Pipeline, config_of, prepare, said_right

from agentrl.config import AdvantageConfig
from agentrl.learner.advantages import boundary_gae, whiten
from agentrl.learner.batch import Rollout, make_microbatches, read_rollout
from agentrl.learner.credit import Scored, make_targets, score
from agentrl.types import Trajectory

CPU = torch.device("cpu")
FOUR = functools.partial(Key, max_turns=4)


@pytest.fixture(scope="module")
def taught(tmp_path_factory) -> Path:
    """A model that sends messages of three digits; it serves every world of keys."""
    return prepare(functools.partial(Key, max_turns=2), tmp_path_factory.mktemp("keys"))


def learn(pipeline: Pipeline, updates: int, solved: Callable[[Trajectory], float]) -> float:
    """Trains; gives the mean of the last five collections, and ends as soon as five in a row are above .97."""
    start, learner = time.process_time(), pipeline.begin()
    for _ in range(pipeline.config.ppo.warmup_collections):
        learner.warmup(pipeline.collect())
    found: list[float] = []
    for _ in range(updates):
        batch = pipeline.collect()
        found.append(sum(map(solved, batch)) / len(batch))
        if len(found) >= 5 and min(found[-5:]) > 0.97:
            break
        pipeline.update(batch)
    cpu_s = time.process_time() - start
    print(f"{len(found)} collections, {sum(found[-5:]) / 5:.3f} in the last five, {cpu_s:.0f} s of CPU time")
    return sum(found[-5:]) / 5


def reward_of(trajectory: Trajectory) -> float:
    return trajectory.reward


def naive_estimator(pipeline: Pipeline):
    """GAE that steps from token to token through the observations too, with the critic's values there: trap T1.

    Every token from the first to the last sampled one counts as an action; what the sampled ones get of it is used.
    """
    config = AdvantageConfig(lambda_token=0.95, lambda_turn=0.95, lambda_value=0.95)

    def estimate(rollout, scored, penalty_N, ppo):
        targets, metrics = make_targets(rollout, scored, penalty_N, ppo)
        rows, masks = [], []
        for row in rollout.rows:
            first, last = int(row.action_N[0]), int(row.action_N[-1])
            everything_N = torch.arange(first, last + 1)
            reward_N = torch.zeros(everything_N.numel(), dtype=torch.float64)
            reward_N[row.action_N - first] = row.reward_N
            blank_N = torch.zeros_like(reward_N)
            rows.append(
                replace(row, action_N=everything_N, turn_id_N=blank_N.long(), logprob_N=blank_N, reward_N=reward_N)
            )
            masks.append(torch.isin(everything_N, row.action_N))
        whole, mask_N = Rollout.of(rows), torch.cat(masks)
        values = Scored.blank(whole)
        micros = make_microbatches(whole, range(len(rows)), ppo.microbatch_tokens, CPU)
        score(pipeline.model, micros, 1.0, values, what="critic")
        ends_B = torch.zeros(len(rows), dtype=torch.float64)
        advantage_N, return_N = boundary_gae(
            whole.reward_N, values.value_N, whole.turn_id_N, whole.episode_id_N, ends_B, config
        )
        advantage_N, _ = whiten(advantage_N[mask_N], "full", 0.1)
        return replace(targets, advantage_N=advantage_N, return_N=return_N[mask_N]), metrics

    return estimate


@pytest.mark.parametrize(
    "model",
    [{"critic": "separate"}, {"critic": "head"}, {"critic": "adapter", "lora": {"rank": 16}}],
    ids=["separate", "head", "lora"],
)
def test_bandit(taught, model):
    with Pipeline(Bandit, config_of(taught, model=model)) as pipeline:
        assert learn(pipeline, 60, reward_of) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("world", "updates"), [(FOUR, 60), (LongKey, 90)], ids=["4-turns", "8-turns"])
def test_a_key_that_pays_with_the_last_message(taught, world, updates):
    with Pipeline(world, config_of(taught)) as pipeline:
        assert learn(pipeline, updates, reward_of) >= 0.95


@pytest.mark.slow
def test_credit_that_decays_across_observations_finds_no_key(taught, monkeypatch):
    """The control: the same run, one function changed, must fail, or the test above would prove nothing."""
    with Pipeline(FOUR, config_of(taught)) as pipeline:
        monkeypatch.setattr("agentrl.learner.ppo.make_targets", naive_estimator(pipeline))
        assert learn(pipeline, 60, reward_of) < 0.8


@pytest.mark.slow
def test_each_token_of_a_copy_gets_its_own_credit(tmp_path):
    with Pipeline(Copy, config_of(prepare(Copy, tmp_path))) as pipeline:
        assert learn(pipeline, 120, reward_of) >= 0.95


@pytest.mark.slow
def test_the_value_changes_where_the_world_decides(taught):
    """A coin falls after the first message: before it the key is worth half, after it all or nothing."""
    with Pipeline(Coin, config_of(taught)) as pipeline:
        assert learn(pipeline, 60, said_right) >= 0.95
        for _ in range(4):
            pipeline.learner.warmup(pipeline.collect())
        batch = [trajectory for trajectory in pipeline.collect() if said_right(trajectory)]
        before_B, after_B = values_around_the_observation(pipeline, batch)
    lucky_B = torch.tensor([trajectory.turns[0].results[0].content == "1" for trajectory in batch])
    print(before_B[lucky_B].mean(), before_B[~lucky_B].mean(), after_B[lucky_B].mean(), after_B[~lucky_B].mean())
    assert 0.35 <= before_B.mean() <= 0.65
    assert abs(before_B[lucky_B].mean() - before_B[~lucky_B].mean()) < 0.1
    assert after_B[lucky_B].mean() > 0.85
    assert after_B[~lucky_B].mean() < 0.15


def values_around_the_observation(pipeline: Pipeline, batch: list[Trajectory]) -> tuple[torch.Tensor, torch.Tensor]:
    """The critic's values before the last token of the first message, and before the first one of the second."""
    rollout = read_rollout(batch, context=pipeline.model.context, vocab_size=pipeline.model.vocab_size)
    scored = Scored.blank(rollout)
    score(pipeline.model, make_microbatches(rollout, range(len(batch)), 4096, CPU), 1.0, scored, what="critic")
    second_B = torch.tensor([int((row.turn_id_N == 0).sum()) for row in rollout.rows])
    return scored.value_N[rollout.start_B[:-1] + second_B - 1], scored.value_N[rollout.start_B[:-1] + second_B]
