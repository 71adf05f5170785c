"""Keys and values of many episodes, kept from turn to turn in one slab for each layer.

Decoding reads all rows of a batch at every step, so a batch's rows must lie side by side: its episodes are moved into
the first slots before the first step, and a row that finishes changes places with the last one that goes on. Attention
then reads views, never copies. A slot holds an episode's keys and values from position 0 on; what lies behind its
length is finite rubbish that the mask hides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentrl.errors import ConfigError

_STEP = 256  # positions are reserved in multiples of this


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's keys and values for one token: heads, units of a key, units of a value."""

    heads: int
    key_units: int
    value_units: int


@dataclass(slots=True, eq=False)
class Slot:
    """What a slot holds: the episode, the tokens whose keys and values are in it, and when it was last used."""

    episode: str | None = None
    token_ids: list[int] = field(default_factory=list)
    used: int = 0


class Slab:
    """Slots for episodes' keys and values, under a byte budget; the episode that was used least recently goes first."""

    def __init__(self, layers: Sequence[LayerShape], dtype: torch.dtype, device: torch.device, budget: int) -> None:
        """Makes an empty slab; memory is taken when it is needed.

        Args:
            layers: Shapes, by layer.
            dtype: Of keys and values.
            device: Where they are kept.
            budget: Bytes that they may take.
        """
        self._options: dict[str, Any] = {"dtype": dtype, "device": device}
        self._layers = tuple(layers)
        self._budget = budget
        self._bytes_per_token = dtype.itemsize * sum(s.heads * (s.key_units + s.value_units) for s in layers)
        self._clock = 0
        self.clear()

    def most_rows(self, positions: int) -> int:
        """How many episodes of this length fit into the budget.

        Args:
            positions: Tokens of the longest one.

        Raises:
            ConfigError: If not even one does.
        """
        need = self._bytes_per_token * _rounded(max(positions, self.positions))
        if need > self._budget:
            raise ConfigError(
                f"rollout.kv_cache_mib is {self._budget / 2**20:.0f}, but the keys and values of one episode of"
                f" {positions} tokens take {need / 2**20:.0f} MiB: raise it, or lower rollout.max_context."
            )
        return self._budget // need

    def gather(self, episodes: Sequence[str], positions: int) -> list[int]:
        """Moves a batch's episodes into the first slots, with room for their tokens.

        Args:
            episodes: [B] names, all different, at most `most_rows(positions)`.
            positions: Tokens that the longest of them will hold.

        Returns:
            [B] for each of the first slots, the index of its episode.
        """
        index = {episode: k for k, episode in enumerate(episodes)}
        self._reserve(index, positions)
        n = len(episodes)
        at = {slot.episode: k for k, slot in enumerate(self.slots) if slot.episode in index}
        for episode in episodes:
            if episode not in at:
                at[episode] = self._free_slot(index)
                self.slots[at[episode]] = Slot(episode)
        outside = sorted(k for k in at.values() if k >= n)
        inside = [k for k in range(n) if self.slots[k].episode not in index]
        for source, target in zip(outside, inside, strict=True):
            held = max(len(self.slots[k].token_ids) for k in (source, target))
            self.swap(source, target, held)
        self._clock += 1
        for slot in self.slots[:n]:
            slot.used = self._clock
        return [index[str(slot.episode)] for slot in self.slots[:n]]

    def swap(self, a: int, b: int, n: int) -> None:
        """Changes the places of two slots.

        Args:
            a: One of them.
            b: The other.
            n: Positions in use in the longer one.
        """
        if a == b:
            return
        for store in (*self.keys, *self.values):
            kept = store[a, :, :n].clone()
            store[a, :, :n] = store[b, :, :n]
            store[b, :, :n] = kept
        self.slots[a], self.slots[b] = self.slots[b], self.slots[a]

    def release(self, episode: str) -> None:
        """Frees an episode's slot, if it has one."""
        for k, slot in enumerate(self.slots):
            if slot.episode == episode:
                self.slots[k] = Slot()

    def clear(self) -> None:
        """Forgets every episode and gives the memory back: how many rows fit then depends on nothing from before."""
        self.positions = 0
        self.slots: list[Slot] = []
        self.keys: list[Tensor] = [torch.empty(0, s.heads, 0, s.key_units, **self._options) for s in self._layers]
        self.values: list[Tensor] = [torch.empty(0, s.heads, 0, s.value_units, **self._options) for s in self._layers]

    def _free_slot(self, wanted: Mapping[str, int]) -> int:
        for k, slot in enumerate(self.slots):
            if slot.episode is None:
                return k
        return min((slot.used, k) for k, slot in enumerate(self.slots) if slot.episode not in wanted)[1]

    def _reserve(self, wanted: Mapping[str, int], positions: int) -> None:
        positions = _rounded(max(positions, self.positions))
        room = self._budget // (self._bytes_per_token * positions)
        held = {slot.episode for slot in self.slots if slot.episode is not None}
        rows = len(held.union(wanted))
        n_slots = min(room, len(self.slots) if rows <= len(self.slots) else max(rows, 2 * len(self.slots)))
        if n_slots == len(self.slots) and positions == self.positions:
            return
        kept = [slot for slot in self.slots if slot.episode is not None]
        kept = sorted(kept, key=lambda slot: (slot.episode not in wanted, -slot.used))[:n_slots]
        sources = [(self.slots.index(slot), len(slot.token_ids)) for slot in kept]
        for stores in (self.keys, self.values):
            for layer, old in enumerate(stores):
                new = torch.zeros(n_slots, old.shape[1], positions, old.shape[3], **self._options)
                for target, (source, n) in enumerate(sources):
                    new[target, :, :n] = old[source, :, :n]
                stores[layer] = new
        self.slots = [*kept, *(Slot() for _ in range(n_slots - len(kept)))]
        self.positions = positions


def _rounded(positions: int) -> int:
    return -(-positions // _STEP) * _STEP


class DecodeCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The first rows of a slab as a transformers cache, while each of them gets one token a step."""

    def __init__(self, slab: Slab) -> None:
        super().__init__(layers=[])
        self._slab = slab
        self._rows_B = torch.empty(0, dtype=torch.long)
        self._position_B = self._rows_B
        self._width = 0

    def aim(self, rows_B: Tensor, position_B: Tensor, width: int) -> None:
        """Says where the next step writes and how far it reads.

        Args:
            rows_B: [B] int64, 0 to B - 1.
            position_B: [B] int64, where each row's new token goes.
            width: Positions that are read.
        """
        self._rows_B, self._position_B, self._width = rows_B, position_B, width

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Writes one token's keys and values for each row and gives views of all of them; see Cache."""
        keys, values = self._slab.keys[layer_idx], self._slab.values[layer_idx]
        keys[self._rows_B, :, self._position_B] = key_states[:, :, 0]
        values[self._rows_B, :, self._position_B] = value_states[:, :, 0]
        n = len(self._rows_B)
        return keys[:n, :, : self._width], values[:n, :, : self._width]


class PrefillCache(Cache):  # type: ignore[misc]  # transformers is untyped here
    """Some rows of a slab as a transformers cache, while each of them gets a stretch of new tokens.

    Attributes:
        slots_B: [B] int64, the rows' slots.
        source_N: ([N], [N]) int64: row and column in the batch of each token that is not padding.
        target_N: ([N], [N]) int64: slot and position where its keys and values go.
        width: Positions that are read.
    """

    def __init__(
        self, slab: Slab, slots_B: Tensor, source_N: tuple[Tensor, Tensor], target_N: tuple[Tensor, Tensor], width: int
    ) -> None:
        super().__init__(layers=[])
        self._slab = slab
        self.slots_B, self.source_N, self.target_N, self.width = slots_B, source_N, target_N, width

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        """Writes the new tokens' keys and values and gives copies of the rows with them; see Cache."""
        both = ((self._slab.keys[layer_idx], key_states), (self._slab.values[layer_idx], value_states))
        rows, columns = self.source_N
        slots, positions = self.target_N
        for store, states in both:
            store[slots, :, positions] = states[rows, :, columns]
        return both[0][0][self.slots_B, :, : self.width], both[1][0][self.slots_B, :, : self.width]
