from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import errors
from agentrl.errors import InvariantError, did_you_mean
from agentrl.types import (
    EndReason,
    Generation,
    Message,
    Sampling,
    Task,
    ToolSchema,
    Trajectory,
    Turn,
    canonical_json,
)

TASK = Task("train/000001", "Toy-v0", "Count.", {"target": 3})

#                      terminated truncated error  bootstraps in_loss in_baseline in_metrics
OUTCOMES = {
    "submitted": (True, False, False, False, True, True, True),
    "answered": (True, False, False, False, True, True, True),
    "gave_up": (True, False, False, False, True, True, True),
    "forbidden": (True, False, False, False, True, True, True),
    "agent_fault": (True, False, False, False, True, True, True),
    "max_turns": (False, True, False, False, True, True, True),
    "max_tokens": (False, True, False, False, True, True, True),
    "context_full": (False, True, False, False, True, True, True),
    "time_limit": (False, True, False, False, True, True, True),
    "too_many_malformed": (False, True, False, False, True, True, True),
    "cut": (False, True, False, True, True, False, False),
    "sandbox_error": (False, False, True, False, False, False, False),
    "verifier_error": (False, False, True, False, False, False, False),
    "policy_error": (False, False, True, False, False, False, False),
    "env_error": (False, False, True, False, False, False, False),
}


def test_the_outcome_table_has_every_end_reason():
    assert set(OUTCOMES) == set(EndReason)


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_outcome_table(name):
    end = EndReason(name)
    found = (
        end.is_terminated,
        end.is_truncated,
        end.is_error,
        end.bootstraps,
        end.in_loss,
        end.in_baseline,
        end.in_metrics,
    )
    assert found == OUTCOMES[name]


def turn(prompt, sampled, reward=0.0, logprobs=None) -> Turn:
    logprobs = tuple(-0.5 for _ in sampled) if logprobs is None else logprobs
    return Turn(tuple(prompt), tuple(sampled), logprobs, 0, "stop", "text", reward=reward)


def trajectory(turns, **kwargs) -> Trajectory:
    n_sampled = sum(len(t.sampled_ids) for t in turns)
    return Trajectory("e", TASK, 0, (), tuple(turns), EndReason.SUBMITTED, **{"n_sampled": n_sampled, **kwargs})


def test_pack_lays_two_turns_out_flat():
    packed = trajectory([turn([1, 2], [3, 4], 0.5), turn([5], [6], 1.0)], trailing_ids=(7, 8)).pack()
    assert packed.token_ids_T.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert packed.is_action_T.tolist() == [False, False, True, True, False, True, False, False]
    assert packed.turn_id_T.tolist() == [0, 0, 0, 0, 1, 1, 2, 2]
    assert packed.logprob_T.tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5, 0.0, 0.0]
    assert packed.reward_T.tolist() == [0.0, 0.0, 0.0, 0.5, 0.0, 1.0, 0.0, 0.0]
    assert [array.dtype for array in dataclasses.astuple(packed)] == [np.int64, bool, np.int64, np.float64, np.float64]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 99), max_size=4),
            st.lists(st.integers(0, 99), min_size=1, max_size=4),
            st.floats(-1, 1),
        ),
        max_size=5,
    ),
    st.lists(st.integers(0, 99), max_size=3),
)
def test_pack_conserves_tokens_and_rewards(turns, trailing):
    made = trajectory([turn(*parts) for parts in turns], trailing_ids=tuple(trailing))
    packed = made.pack()
    assert len(packed.token_ids_T) == made.n_tokens
    assert packed.token_ids_T[packed.is_action_T].tolist() == [t for _, sampled, _ in turns for t in sampled]
    assert packed.reward_T[packed.is_action_T].sum() == pytest.approx(made.reward, abs=1e-12)
    assert not packed.reward_T[~packed.is_action_T].any()
    assert np.all(np.diff(packed.turn_id_T) >= 0)


def test_a_sampled_token_that_is_neither_kept_nor_dropped_breaks_conservation():
    with pytest.raises(InvariantError, match="sampled 4 tokens, 2 are in its turns and 1 were dropped"):
        trajectory([turn([1], [2, 3])], n_sampled=4, dropped={"after_end": 1})
    trajectory([turn([1], [2, 3])], n_sampled=3, dropped={"after_end": 1})


def test_every_sampled_token_has_a_logprob():
    with pytest.raises(InvariantError, match="2 sampled tokens with 1 logprobs"):
        trajectory([turn([1], [2, 3], logprobs=(-0.1,))])
    with pytest.raises(InvariantError, match="expected one logprob per sampled token, found 1 for 2"):
        Generation((1, 2), (-0.1,), "stop")


def test_a_reward_needs_a_token_to_land_on():
    with pytest.raises(InvariantError, match=r"turn 1: a reward of 1\.0 has no sampled token"):
        trajectory([turn([1], [2]), turn([3], [], 1.0)]).pack()
    trajectory([turn([1], [2]), turn([3], [])]).pack()


def test_task_digest_is_of_the_content():
    same = Task("train/000001", "Toy-v0", "Count.", {"target": 3})
    assert TASK.digest == same.digest
    assert len(TASK.digest) == 64
    for changed in ({"id": "train/2"}, {"instruction": "Count!"}, {"data": {"target": 4}}, {"split": "dev"}):
        assert dataclasses.replace(TASK, **changed).digest != TASK.digest


def test_canonical_json_is_one_text():
    assert (
        canonical_json({"b": 1, "a": [1.5, "é"]})
        == canonical_json({"a": [1.5, "é"], "b": 1})
        == '{"a":[1.5,"é"],"b":1}'
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(float("nan"))


def test_message_and_schema_in_the_shapes_of_endpoints():
    assert Message("user", "hi").as_dict() == {"role": "user", "content": "hi"}
    assert Message("tool", "1", name="look").as_dict() == {"role": "tool", "content": "1", "name": "look"}
    shown = ToolSchema("look", "Looks.", {"type": "object", "properties": {}}).as_openai()
    assert shown["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    }


@pytest.mark.parametrize(
    ("sampling", "cuts"),
    [(Sampling(), False), (Sampling(top_p=0.9), True), (Sampling(top_k=5), True), (Sampling(min_p=0.1), True)],
)
def test_sampling_says_whether_it_cuts_the_support(sampling, cuts):
    assert sampling.cuts_support is cuts


def test_every_error_pickles_and_has_an_exit_code():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.AgentRLError)]
    assert len(kinds) >= 20
    for kind in kinds:
        copy = pickle.loads(pickle.dumps(kind("what was expected")))
        assert type(copy) is kind
        assert str(copy) == "what was expected"
        assert kind.exit_code in (1, 2, 3)


def test_did_you_mean():
    assert did_you_mean("submt", ["submit", "run"]) == " Did you mean 'submit'?"
    assert did_you_mean("xyz", ["submit", "run"]) == " Known: run, submit."
    assert did_you_mean("xyz", []) == ""
