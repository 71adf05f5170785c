"""The compatibility face: what Gymnasium's own checks and vector environments say of a ToolEnv."""

from __future__ import annotations

import warnings
from collections import UserDict
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from agentrl.plugins import load_object
from agentrl.spaces import TextSpace

TOY = Path(__file__).parent / "toy_env.py"
ToyEnv, call = load_object(f"{TOY}:ToyEnv", "toy"), load_object(f"{TOY}:fence", "toy")
ADD, SUBMIT = call("add"), call("submit")


@pytest.fixture
def toy_id():
    gymnasium.register("agentrl/ToyForTests-v0", entry_point=ToyEnv)
    yield "agentrl/ToyForTests-v0"
    del gymnasium.registry["agentrl/ToyForTests-v0"]


def test_check_env_passes_without_a_warning(toy_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(gymnasium.make(toy_id).unwrapped)
        check_env(gymnasium.make(toy_id, format="fenced", render_mode="ansi").unwrapped)


def test_wrappers_of_make_raise_no_warning(toy_id):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gymnasium.make(toy_id, format="fenced", max_turns=3)
        env.reset(seed=1, options={"task": "train/000000"})
        env.step(ADD)
        assert env.step(SUBMIT)[1:4] == (1.0, True, False)
        env.close()


@pytest.mark.parametrize("kind", [SyncVectorEnv, AsyncVectorEnv])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_vector_environments_step_and_reset_themselves(kind, mode):
    """One succeeds, one fails, one breaks: infos of every shape side by side, and a new episode after."""
    options = {"shared_memory": False} if kind is AsyncVectorEnv else {}
    makers = [lambda: ToyEnv(format="fenced")] * 3
    vector = kind(makers, autoreset_mode=mode, **options)
    observations, infos = vector.reset(seed=11, options={"task": "train/000000"})
    assert observations == vector.reset(seed=11, options={"task": "train/000000"})[0]
    assert len(set(observations)) == 3
    assert list(infos["task"]) == ["train/000000"] * 3
    ends = {}
    for actions in [
        (ADD, "prose", ADD),
        (SUBMIT, "prose", call("trouble", "bug")),
        (ADD, "prose", ADD),
        (ADD, ADD, ADD),
    ]:
        observations, rewards, terminations, truncations, infos = vector.step(actions)
        final = infos.get("final_info", infos)
        for i in np.flatnonzero(terminations | truncations):
            success = bool(final["success"][i]) if final.get("_success", [False] * 3)[i] else None
            ends[int(i)] = (final["end"][i], float(rewards[i]), success)
            assert final["ledger"][i] is None or isinstance(final["ledger"][i], UserDict)
        if mode is AutoresetMode.SAME_STEP and (terminations | truncations).any():
            assert all("Count to" in observations[i] for i in np.flatnonzero(terminations | truncations))
    assert ends == {0: ("submitted", 1.0, True), 1: ("too_many_malformed", 0.0, False), 2: ("env_error", 0.0, None)}
    assert set(observations) == {"The count is 1.", "The count is 2."} or mode is AutoresetMode.NEXT_STEP
    vector.close()


def test_the_registered_default_is_asynchronous_without_shared_memory():
    vector = gymnasium.make_vec("agentrl/Sql-v0", num_envs=2)
    assert isinstance(vector, AsyncVectorEnv)
    observations, infos = vector.reset(seed=0)
    assert len(observations) == len(infos["task"]) == 2
    vector.close()


def test_text_space():
    space = TextSpace(seed=3)
    samples = [space.sample() for _ in range(100)]
    assert all(text in space for text in samples)
    assert samples == [TextSpace(seed=3).sample(), *samples[1:]]
    assert all(text in space for text in ("", "→ ö\n", "x" * 10**6))
    assert 3 not in space
    assert "xx" not in TextSpace(1)
    assert space == TextSpace() != TextSpace(5)
    assert hash(space) == hash(TextSpace())
    assert repr(TextSpace(5)) == "TextSpace(5)"
    assert not space.is_np_flattenable
    with pytest.raises(ValueError, match="neither a mask nor a probability"):
        space.sample(mask=())
