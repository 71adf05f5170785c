"""The slab: who sits where, what moves along, and what goes when the budget is full."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.rollout.kv import LayerShape, Slab

SHAPES = (LayerShape(2, 3, 5), LayerShape(1, 4, 4))
BYTES_PER_TOKEN = 4 * (2 * 8 + 1 * 8)


def make_slab(rows: int, positions: int = 256) -> Slab:
    return Slab(SHAPES, torch.float32, torch.device("cpu"), BYTES_PER_TOKEN * positions * rows)


def write(slab: Slab, episode: str, mark: float, n: int) -> None:
    slot = next(k for k, s in enumerate(slab.slots) if s.episode == episode)
    slab.slots[slot].token_ids = [int(mark)] * n
    for store in (*slab.keys, *slab.values):
        store[slot, :, :n] = mark


def marks(slab: Slab, episode: str) -> set[float]:
    slot = next(k for k, s in enumerate(slab.slots) if s.episode == episode)
    n = len(slab.slots[slot].token_ids)
    return {value for store in (*slab.keys, *slab.values) for value in store[slot, :, :n].unique().tolist()}


def test_a_batch_takes_the_first_slots_and_brings_its_contents():
    slab = make_slab(8)
    assert slab.gather(["a", "b", "c"], 10) == [0, 1, 2]
    for k, episode in enumerate("abc"):
        write(slab, episode, k + 1, 4)
    order = slab.gather(["c", "d"], 10)
    assert {["c", "d"][k] for k in order} == {s.episode for s in slab.slots[:2]}
    assert marks(slab, "c") == {3.0}
    assert marks(slab, "a") == {1.0}
    assert marks(slab, "b") == {2.0}


def test_shapes_and_room_follow_the_requests():
    slab = make_slab(4)
    slab.gather(["a"], 10)
    assert slab.positions == 256
    assert slab.keys[0].shape == (1, 2, 256, 3)
    assert slab.values[0].shape == (1, 2, 256, 5)
    write(slab, "a", 7, 200)
    slab.gather(["b"], 257)
    assert slab.positions == 512
    assert len(slab.slots) == 2
    assert marks(slab, "a") == {7.0}


def test_the_episode_used_least_recently_goes_first():
    slab = make_slab(2)
    slab.gather(["a", "b"], 10)
    slab.gather(["a"], 10)
    slab.gather(["c"], 10)
    assert {s.episode for s in slab.slots} == {"a", "c"}


def test_a_longer_episode_evicts_others_before_its_own_batch():
    slab = make_slab(2)
    slab.gather(["b"], 10)
    slab.gather(["a"], 10)
    write(slab, "b", 2, 9)
    slab.gather(["b"], 300)
    assert [s.episode for s in slab.slots] == ["b"]
    assert marks(slab, "b") == {2.0}


def test_clear_and_release_forget():
    slab = make_slab(4)
    slab.gather(["a", "b"], 10)
    slab.release("a")
    slab.release("nobody")
    assert {s.episode for s in slab.slots} == {None, "b"}
    slab.gather(["b"], 300)
    assert slab.most_rows(10) < make_slab(4).most_rows(10)
    slab.clear()
    assert (slab.slots, slab.positions) == ([], 0)
    assert slab.most_rows(10) == make_slab(4).most_rows(10)


def test_a_budget_that_holds_no_episode_is_refused_with_the_key_that_mends_it():
    slab = make_slab(2)
    assert slab.most_rows(256) == 2
    assert slab.most_rows(300) == 1
    with pytest.raises(ConfigError, match=r"rollout.kv_cache_mib is 0.*300000 tokens.*rollout.max_context"):
        slab.most_rows(300000)


@given(st.lists(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True), max_size=12), st.data())
@settings(max_examples=60, deadline=None)
def test_no_batch_ever_mixes_episodes_up(batches, data):
    slab = make_slab(4)
    held: dict[str, float] = {}
    for k, batch in enumerate(batches):
        order = slab.gather(batch, data.draw(st.sampled_from([10, 200])))
        assert [slab.slots[i].episode for i in range(len(batch))] == [batch[i] for i in order]
        alive = {s.episode for s in slab.slots}
        held = {episode: mark for episode, mark in held.items() if episode in alive}
        for episode in batch:
            if slab.slots[[s.episode for s in slab.slots].index(episode)].token_ids:
                assert marks(slab, episode) == {held[episode]}
            write(slab, episode, float(k), data.draw(st.integers(1, 10)))
            held[episode] = float(k)
