"""The collector over message policies: order, ends, retries, errors, hangs, interrupts; and demonstrations."""

from __future__ import annotations

import functools
import signal
import threading
import time

import pytest
import rollout_parts as parts
from toy_world import SUBMIT, Log, ToyEnv, add, requests_of, trouble

from agentrl.config import RolloutConfig
from agentrl.errors import AbandonedError, ConfigError, InvariantError, PolicyError, TooManyErrors, UsageError
from agentrl.policy import ScriptedPolicy
from agentrl.reward.ledger import check_trajectory
from agentrl.rollout._batch import Batch
from agentrl.rollout._episode import Limits
from agentrl.rollout._stage import Stage
from agentrl.rollout.codec import Codec
from agentrl.rollout.collector import Collector
from agentrl.types import EndReason, EpisodeRequest, Reply, Sampling

CODEC = Codec(parts.make_tokenizer())
NO_LIMIT = {"max_error_rate": 1.0}


def collect(policy, requests, *, log=None, codec=None, on_episode=None, **config):
    log = log or Log()
    with Collector(functools.partial(ToyEnv, log), policy, codec, RolloutConfig(**config)) as collector:
        return collector.collect(requests, on_episode=on_episode)


def expert(env, task):
    return env.expert(task)


def test_every_request_comes_back_once_sorted_by_id():
    log, seen = Log(), []
    requests = requests_of(40)
    found = collect(expert, requests[::-1], log=log, on_episode=seen.append, concurrency=7, threads=3)
    assert [t.id for t in found] == [r.id for r in requests]
    assert sorted(t.id for t in seen) == [r.id for r in requests]
    assert {t.end for t in found} == {EndReason.SUBMITTED}
    assert len(log.made) <= 7
    assert log.torn_down == 40
    assert log.closed == len(log.made)
    assert 1 <= log.most_at_once <= 3


def test_a_trajectory_holds_what_happened():
    (found,) = collect(ScriptedPolicy([add(3), "what?", SUBMIT]), requests_of(1))
    assert [turn.text for turn in found.turns] == [add(3), "what?", SUBMIT]
    assert found.turns[0].results[0].content == "sum 3"
    assert found.turns[1].malformed is not None
    assert [turn.reward for turn in found.turns] == pytest.approx([-0.25, -0.25, 0.05])
    assert found.reward == pytest.approx(0.3 - 0.75)
    assert check_trajectory(found) < 1e-9
    assert [message.role for message in found.opening] == ["system", "user"]
    assert found.n_sampled == 0
    assert {"policy", "env", "tools"} <= found.turns[0].timings.keys()


def test_equal_requests_give_equal_trajectories():
    def bare(found):
        return [(t.id, t.opening, t.end, t.ledger, [(n.text, n.reward, n.prompt_ids) for n in t.turns]) for t in found]

    first = collect(expert, requests_of(20), codec=CODEC, concurrency=8)
    second = collect(expert, requests_of(20), codec=CODEC, concurrency=3, threads=1)
    assert bare(first) == bare(second)


def test_demonstrations_carry_the_tokens_that_a_model_would_have_sampled():
    (found,) = collect(ScriptedPolicy([add(3), SUBMIT]), requests_of(1), codec=CODEC)
    assert [turn.sampled_ids[-1] for turn in found.turns] == [CODEC.stop_id] * 2
    assert [CODEC.decode(turn.sampled_ids) for turn in found.turns] == [add(3), SUBMIT]
    assert {p for turn in found.turns for p in turn.logprobs} == {0.0}
    assert found.n_sampled == sum(len(turn.sampled_ids) for turn in found.turns)
    text = CODEC.tokenizer.decode(found.pack().token_ids_T.tolist())
    assert text.startswith("<|im_start|>system\nCount.")
    assert f"<|im_start|>assistant\n{add(3)}<|im_end|>\n<|im_start|>user\nsum 3<|im_end|>\n" in text
    assert text.endswith(f"<|im_start|>assistant\n{SUBMIT}<|im_end|>")


class CutShort:
    def act(self, messages, tools, sampling):
        return Reply("```add\n{", "length")


def test_a_message_that_its_cap_cut_ends_the_episode():
    (found,) = collect(CutShort(), requests_of(1), codec=CODEC)
    assert found.end is EndReason.MAX_TOKENS
    assert found.turns[0].finish_reason == "length"
    assert CODEC.stop_id not in found.turns[0].sampled_ids
    assert found.reward == pytest.approx(-0.25)
    assert check_trajectory(found) < 1e-9


def test_a_full_context_ends_the_episode_and_its_reward_lands_on_the_last_message():
    (whole,) = collect(ScriptedPolicy(lambda messages: add(1)), requests_of(1), codec=CODEC)
    assert whole.end is EndReason.MAX_TURNS
    first, second = (len(turn.prompt_ids) + len(turn.sampled_ids) for turn in whole.turns[:2])
    for limit in (first, first + len(whole.turns[1].prompt_ids)):
        (found,) = collect(ScriptedPolicy(lambda messages: add(1)), requests_of(1), codec=CODEC, max_context=limit)
        assert found.end is EndReason.CONTEXT_FULL
        assert len(found.turns) == 1
        assert found.turns[0].reward == pytest.approx(-0.25 + 0.1)
        assert check_trajectory(found) < 1e-9
        assert found.trailing_ids == ()
    (found,) = collect(ScriptedPolicy(lambda messages: add(1)), requests_of(1), codec=CODEC, max_context=first + second)
    assert len(found.turns) == 2


def test_a_message_that_does_not_fit_is_dropped_and_counted():
    (whole,) = collect(expert, requests_of(1), codec=CODEC)
    limit = whole.n_tokens - 1
    (found,) = collect(expert, requests_of(1), codec=CODEC, max_context=limit)
    lost = len(whole.turns[1].sampled_ids)
    assert found.end is EndReason.CONTEXT_FULL
    assert found.dropped == {"context_full": lost}
    assert found.n_sampled == whole.n_sampled
    assert found.n_tokens <= limit


def test_an_opening_that_does_not_fit_is_the_configs_fault():
    (found,) = collect(expert, requests_of(1), codec=CODEC, max_context=20, **NO_LIMIT)
    assert found.end is EndReason.ENV_ERROR
    assert "the opening of task train/000 takes" in found.error
    assert "raise rollout.max_context" in found.error


@pytest.mark.parametrize("deterministic", [True, False])
def test_tool_time_ends_an_episode_only_outside_deterministic_mode(deterministic):
    config = RolloutConfig(deterministic=deterministic, episode_timeout_s=30.0)
    stage = Stage(ToyEnv, threads=1, calls=1, timeout_s=30.0)
    batch = Batch(requests_of(1), config, Limits(None, None), stage, None)
    run = batch.begin()
    run.start()
    run.take(Reply(trouble("sleep")), 0.0)
    assert 0.3 <= run.tool_s < 30.0
    assert batch.why_end(run) is None
    run.tool_s = 30.1
    assert batch.why_end(run) == (None if deterministic else (EndReason.TIME_LIMIT, None))
    run.finish(EndReason.TIME_LIMIT)
    assert run.trajectory().end is EndReason.TIME_LIMIT
    stage.close()


def test_errors_are_tried_again_and_their_tokens_counted():
    log = Log()
    log.failures_left = 1
    policy = ScriptedPolicy([add(1), trouble("sometimes"), SUBMIT])
    found = collect(policy, requests_of(3), log=log, codec=CODEC, threads=1, concurrency=1)
    assert [t.attempt for t in found] == [1, 0, 0]
    assert {t.end for t in found} == {EndReason.SUBMITTED}
    lost = sum(len(turn.sampled_ids) for turn in found[0].turns[:2])
    assert found[0].dropped == {"failed_attempt": lost}
    assert found[1].dropped == {}


@pytest.mark.parametrize(("kind", "end"), [("setup", EndReason.ENV_ERROR), ("evidence", EndReason.VERIFIER_ERROR)])
def test_one_bad_episode_never_ends_the_run(kind, end):
    log = Log()
    requests = requests_of(5)
    requests[2] = EpisodeRequest("e002", requests_of(3, trouble=kind)[2].task, 1)
    found = collect(expert, requests, log=log, max_retries=2)
    assert [t.end for t in found] == [EndReason.SUBMITTED] * 2 + [end] + [EndReason.SUBMITTED] * 2
    assert found[2].attempt == 2
    assert sum(turn.reward for turn in found[2].turns[1:]) == 0.0
    assert found[2].success is None
    assert "no world today" in found[2].error or "the scales broke" in found[2].error
    assert log.set_up.count("train/002") == 3


class Fails:
    def __init__(self, error):
        self.error = error

    def act(self, messages, tools, sampling):
        raise self.error


@pytest.mark.parametrize("error", [PolicyError("the endpoint is gone"), ZeroDivisionError("a bug")])
def test_a_policy_that_fails_ends_its_episode_as_policy_error(error):
    (found,) = collect(Fails(error), requests_of(1), max_retries=0, **NO_LIMIT)
    assert found.end is EndReason.POLICY_ERROR
    assert str(error) in found.error
    assert found.turns == ()


@pytest.mark.parametrize("error", [InvariantError("stale"), ConfigError("no key"), KeyboardInterrupt()])
def test_what_concerns_the_whole_run_goes_through_and_closes_everything(error):
    log = Log()
    with pytest.raises(type(error)):
        collect(Fails(error), requests_of(3), log=log)
    assert log.closed == len(log.made)
    assert log.torn_down == len(log.set_up)


def test_too_many_errors_stop_the_run_with_their_cause_and_lose_nothing():
    seen = []
    requests = requests_of(10) + [
        EpisodeRequest(f"z{k}", requests_of(1, trouble="setup")[0].task, 0) for k in range(10)
    ]
    with pytest.raises(
        TooManyErrors, match=r"5 of 20 episodes.*1 retries.*0.2.*5 of them: env_error: OSError: no world"
    ):
        collect(expert, requests, on_episode=seen.append, threads=1, concurrency=1)
    assert [t.id for t in seen] == [f"e{k:03d}" for k in range(10)] + [f"z{k}" for k in range(5)]


def test_an_environment_that_hangs_is_abandoned_and_the_others_go_on():
    log = Log()
    hang = ScriptedPolicy([trouble("hang"), SUBMIT])
    requests = requests_of(6)
    policy = lambda env, task: hang if task.id == "train/002" else env.expert(task)  # noqa: E731
    began = time.monotonic()
    found = collect(policy, requests, log=log, threads=1, episode_timeout_s=0.3, max_retries=0)
    assert time.monotonic() - began < 10
    log.release.set()
    assert [t.end for t in found].count(EndReason.SUBMITTED) == 5
    assert found[2].end is EndReason.ENV_ERROR
    assert "did not return within 0.3 s" in found[2].error


def test_four_hanging_environments_end_the_run():
    log = Log()
    threading.Timer(2.0, log.release.set).start()
    with pytest.raises(AbandonedError, match=r"4 environments hang.*Worker or a sandbox") as caught:
        collect(ScriptedPolicy([trouble("hang")]), requests_of(9), log=log, episode_timeout_s=0.2, **NO_LIMIT)
    assert caught.value.exit_code == 3


def test_stop_cuts_what_runs_and_begins_nothing_new():
    log, seen = Log(), []

    class Stops:
        def act(self, messages, tools, sampling):
            if len(messages) > 3:
                collector.stop()
            return Reply(add(1))

    collector = Collector(functools.partial(ToyEnv, log), Stops(), CODEC, RolloutConfig(concurrency=2))
    with collector:
        found = collector.collect(requests_of(20), on_episode=seen.append)
    assert 1 <= len(found) <= 2
    assert {t.end for t in found} == {EndReason.CUT}
    assert all(CODEC.tokenizer.decode(list(t.trailing_ids)).endswith("<|im_start|>assistant\n") for t in found)
    assert all(t.pack().turn_id_T[-1] == len(t.turns) for t in found)
    assert sorted(t.id for t in seen) == [t.id for t in found]


def test_ctrl_c_while_policies_think_closes_the_environments():
    log, seen = Log(), []

    class Presses:
        def act(self, messages, tools, sampling):
            if messages[1].content.startswith("Count to 2."):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                time.sleep(0.2)
            return Reply(SUBMIT)

    with pytest.raises(KeyboardInterrupt):
        collect(Presses(), requests_of(5), log=log, on_episode=seen.append, concurrency=1)
    assert [t.id for t in seen] == ["e000", "e001"]
    assert log.closed == len(log.made) == 1
    assert log.torn_down == len(log.set_up)


def test_an_interrupt_closes_the_environments_and_keeps_what_was_finished():
    log, seen = Log(), []
    requests = requests_of(8)
    interrupts = ScriptedPolicy([trouble("interrupt")])
    policy = lambda env, task: interrupts if task.id == "train/005" else env.expert(task)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        collect(policy, requests, log=log, on_episode=seen.append, threads=1, concurrency=1)
    assert [t.id for t in seen] == [f"e{k:03d}" for k in range(5)]
    assert log.closed == len(log.made)
    assert log.torn_down == len(log.set_up)


def test_ids_are_unique():
    with pytest.raises(UsageError, match="one request for each id, found 'e000' more than once"):
        collect(expert, [*requests_of(2), *requests_of(1)])


def test_many_episodes_wait_for_slow_policies_together():
    together = threading.Barrier(32)

    class Slow:
        def act(self, messages, tools, sampling):
            together.wait(timeout=30)
            return Reply(SUBMIT)

    assert {t.end for t in collect(Slow(), requests_of(64), concurrency=32)} == {EndReason.SUBMITTED}


def test_sampling_reaches_the_policy():
    seen = []

    class Looks:
        def act(self, messages, tools, sampling):
            seen.append((sampling, [tool.name for tool in tools], messages[-1].role))
            return Reply(SUBMIT)

    collect(Looks(), requests_of(1), sampling=Sampling(temperature=0.3))
    assert seen == [(Sampling(temperature=0.3), ["add", "trouble", "submit"], "user")]
