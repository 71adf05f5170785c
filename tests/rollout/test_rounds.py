"""The collector over a local model: tokens that are whole, rounds that repeat bit for bit, and what ends episodes."""

from __future__ import annotations

import functools

import pytest
import rollout_parts as parts
import torch
from toy_world import Log, ToyEnv, requests_of

from agentrl.config import RolloutConfig
from agentrl.errors import InvariantError, PolicyError, TooManyErrors, UsageError
from agentrl.rollout.codec import Codec
from agentrl.rollout.collector import Collector
from agentrl.rollout.hf import HFPolicy
from agentrl.types import EndReason, EpisodeRequest, Generation, Sampling

TOKENIZER = parts.make_tokenizer()
CODEC = Codec(TOKENIZER)
END = CODEC.stop_id
MODEL = parts.tiny_llama(len(TOKENIZER), end_id=END, max_position_embeddings=2048).double()
SAMPLING = Sampling(max_tokens=24)

torch.set_num_threads(1)


def collect(policy, requests, *, log=None, seed=0, on_episode=None, sampling=SAMPLING, **config):
    log = log or Log()
    make = functools.partial(ToyEnv, log, max_turns=3)
    with Collector(make, policy, CODEC, RolloutConfig(**config), seed) as collector:
        return collector.collect(requests, sampling, on_episode)


def bare(found):
    kept = [(t.id, t.end, t.opening, t.ledger, t.dropped, t.trailing_ids) for t in found]
    turns = [[(n.prompt_ids, n.sampled_ids, n.text, n.reward, n.results) for n in t.turns] for t in found]
    return kept, turns


class Scripted:
    """Samples what a script says, through the same door as a model."""

    policy_version = 3

    def __init__(self, say):
        self.say = say
        self.batches = []
        self.released = []

    def generate_batch(self, requests):
        self.batches.append([request.episode for request in requests])
        return [self.answer(request) for request in requests]

    def answer(self, request):
        ids = CODEC.encode_reply(self.say(request))
        kept = ids[: request.sampling.max_tokens]
        return Generation(tuple(kept), (-0.5,) * len(kept), "stop" if kept == ids else "length", 3)

    def release(self, episode):
        self.released.append(episode)


def say_add(request):
    return '```add\n{"n": 1}\n```'


def test_a_trajectory_is_exactly_the_tokens_that_the_model_saw():
    seen = {}

    def say(request):
        seen.setdefault(request.episode, []).append(list(request.token_ids))
        return say_add(request)

    found = collect(Scripted(say), requests_of(5))
    for trajectory in found:
        packed = trajectory.pack()
        ids = packed.token_ids_T.tolist()
        for k, prompt in enumerate(seen[f"{trajectory.id}#0"]):
            assert ids[: len(prompt)] == prompt
            assert not packed.is_action_T[len(prompt) - 1]
            assert packed.is_action_T[len(prompt)]
            assert packed.turn_id_T[len(prompt)] == k
        assert packed.is_action_T.sum() == trajectory.n_sampled
        assert {turn.policy_version for turn in trajectory.turns} == {3}
        assert trajectory.end is EndReason.MAX_TURNS


def test_what_the_packed_tokens_say_is_what_the_template_prints():
    (found,) = collect(Scripted(say_add), requests_of(1))
    packed = TOKENIZER.decode(found.pack().token_ids_T.tolist())
    env = ToyEnv(max_turns=3)
    env.reset(seed=found.seed, options={"task": found.task})
    for turn in found.turns:
        env.step(turn.text)
    assert packed + "\n" == CODEC.render(env.messages, generate=False)


@pytest.mark.parametrize("deterministic", [True, False])
def test_sampled_ids_are_kept_as_they_came(deterministic):
    found = collect(HFPolicy(MODEL, CODEC), requests_of(12), deterministic=deterministic, concurrency=5)
    assert len(found) == 12
    for trajectory in found:
        for turn in trajectory.turns:
            assert turn.text == CODEC.decode(turn.sampled_ids)
            assert len(turn.sampled_ids) == len(turn.logprobs) <= 24
            assert (turn.sampled_ids[-1] == END) == (turn.finish_reason == "stop")
        ends = {turn.finish_reason for turn in trajectory.turns}
        assert (trajectory.end is EndReason.MAX_TOKENS) == ("length" in ends)


def test_rounds_repeat_bit_for_bit_whatever_the_threads():
    one = collect(HFPolicy(MODEL, CODEC), requests_of(12), concurrency=5, threads=4)
    two = collect(HFPolicy(MODEL, CODEC), requests_of(12)[::-1], concurrency=5, threads=1)
    assert bare(one) == bare(two)
    assert [[n.logprobs for n in t.turns] for t in one] == [[n.logprobs for n in t.turns] for t in two]
    assert bare(collect(HFPolicy(MODEL, CODEC), requests_of(12), concurrency=5, seed=1)) != bare(one)


def test_concurrency_and_kept_keys_change_no_episode():
    one = collect(HFPolicy(MODEL, CODEC), requests_of(10), concurrency=10)
    two = collect(HFPolicy(MODEL, CODEC, kv_cache_mib=2), requests_of(10), concurrency=3)
    assert bare(one) == bare(two)


def test_slots_are_refilled_in_the_order_of_ids_and_episodes_are_released():
    policy = Scripted(say_add)
    seen = []
    collect(policy, requests_of(7), concurrency=3, on_episode=lambda t: seen.append(t.id))
    assert policy.batches[0] == ["e000#0", "e001#0", "e002#0"]
    assert policy.batches[3] == ["e003#0", "e004#0", "e005#0"]
    assert policy.batches[6] == ["e006#0"]
    assert seen == [f"e{k:03d}" for k in range(7)]
    assert sorted(policy.released) == [f"e{k:03d}#0" for k in range(7)]


def test_the_last_message_gets_the_room_that_is_left():
    asked = []

    def say(request):
        asked.append((len(request.token_ids), request.sampling.max_tokens))
        return say_add(request)

    (whole,) = collect(Scripted(say), requests_of(1))
    first = len(whole.turns[0].prompt_ids) + len(whole.turns[0].sampled_ids)
    limit = first + len(whole.turns[1].prompt_ids) + 4
    (found,) = collect(Scripted(say), requests_of(1), max_context=limit)
    assert asked[-1] == (limit - 4, 4)
    assert found.end is EndReason.CONTEXT_FULL
    assert found.n_tokens == limit
    assert found.turns[1].finish_reason == "length"
    (found,) = collect(Scripted(say), requests_of(1), sampling=Sampling(max_tokens=3))
    assert found.end is EndReason.MAX_TOKENS


def test_the_models_own_context_is_a_limit():
    model = parts.tiny_llama(len(TOKENIZER), end_id=END, max_position_embeddings=768)
    found = collect(HFPolicy(model, CODEC), requests_of(1), sampling=Sampling(max_tokens=768))
    assert max(t.n_tokens for t in found) <= 768


class FailsOnce(Scripted):
    def __init__(self, error):
        super().__init__(say_add)
        self.error = error

    def generate_batch(self, requests):
        if self.error is not None and requests[0].token_ids and len(self.batches) == 1:
            error, self.error = self.error, None
            raise error
        return super().generate_batch(requests)


@pytest.mark.parametrize("error", [PolicyError("out of memory"), RuntimeError("a bug")])
def test_a_batch_that_fails_is_sampled_again_with_other_noise(error):
    policy = FailsOnce(error)
    found = collect(policy, requests_of(3))
    assert [t.end for t in found] == [EndReason.MAX_TURNS] * 3
    assert [t.attempt for t in found] == [1] * 3
    assert found[0].dropped == {"failed_attempt": len(found[0].turns[0].sampled_ids)}
    assert "e000#1" in policy.batches[1]


def test_a_policy_that_always_fails_stops_the_run_and_names_the_cause():
    class Fails(Scripted):
        def generate_batch(self, requests):
            raise PolicyError("the engine is dead")

    with pytest.raises(TooManyErrors, match="policy_error: the engine is dead"):
        collect(Fails(say_add), requests_of(3))


def test_a_broken_invariant_goes_through():
    policy = FailsOnce(InvariantError("not finite"))
    log = Log()
    with pytest.raises(InvariantError):
        collect(policy, requests_of(3), log=log)
    assert log.closed == len(log.made)


def test_an_interrupt_while_sampling_keeps_what_was_finished():
    log, seen = Log(), []

    class Interrupted(Scripted):
        def generate_batch(self, requests):
            if len(self.batches) == 4:
                raise KeyboardInterrupt
            return super().generate_batch(requests)

    with pytest.raises(KeyboardInterrupt):
        collect(Interrupted(say_add), requests_of(6), log=log, on_episode=seen.append, concurrency=2)
    assert [t.id for t in seen] == ["e000", "e001"]
    assert log.closed == len(log.made)
    assert log.torn_down == len(log.set_up)


def test_stop_packs_what_the_value_is_read_from():
    def say(request):
        collector.stop()
        return say_add(request)

    collector = Collector(functools.partial(ToyEnv, Log()), Scripted(say), CODEC, RolloutConfig(concurrency=2))
    with collector:
        found = collector.collect(requests_of(5), SAMPLING)
    assert [t.end for t in found] == [EndReason.CUT] * 2
    assert TOKENIZER.decode(list(found[0].trailing_ids)) == (
        "\n<|im_start|>user\nsum 1<|im_end|>\n<|im_start|>assistant\n"
    )
    assert found[0].pack().token_ids_T.tolist()[-len(found[0].trailing_ids) :] == list(found[0].trailing_ids)


def test_a_local_model_needs_its_codec():
    with pytest.raises(UsageError, match="needs its codec"):
        Collector(ToyEnv, Scripted(say_add), None, RolloutConfig())


def test_what_was_finished_in_the_round_that_stops_the_run_is_kept():
    seen = []
    requests = requests_of(6)
    requests[1] = EpisodeRequest("e001", requests_of(2, trouble="evidence")[1].task, 1)
    with pytest.raises(TooManyErrors):
        collect(Scripted(say_add), requests, on_episode=lambda t: seen.append(t.id), max_retries=0, max_error_rate=0.1)
    assert seen == ["e000", "e001", "e002", "e003", "e004", "e005"]
