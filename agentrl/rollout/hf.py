"""HFPolicy: samples from a transformers model in this process, many episodes in lock-step.

A batch is one token a row and step. Rows that finish leave it. The last token of a prompt is the first that is fed to
the decoding loop, so that prefilling needs no logits and all rows start alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentrl.errors import ConfigError, InvariantError, PolicyError
from agentrl.rollout._model import Backbone
from agentrl.rollout._sample import draw
from agentrl.rollout.codec import Codec
from agentrl.rollout.kv import DecodeCache, PrefillCache, Slab
from agentrl.rollout.requests import GenerationRequest, draws
from agentrl.types import FinishReason, Generation, Sampling

PREFILL_TOKENS = 4096
"""Padded tokens in one forward pass over prompts."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Tokens of a slot's episode whose keys and values are still to be computed: positions start to end."""

    slot: int
    start: int
    end: int


@dataclass(slots=True)
class _Rows:
    """The rows that still sample, in the order of their slots; all tensors are on the model's device.

    Attributes:
        row_B: int64, index of the wave's request.
        fed_B: int64, the token that is fed next.
        position_B: int64, where it goes.
        cap_B: int64, tokens that the row may sample.
        noise_BS: float64, one uniform number a step.
    """

    row_B: Tensor
    fed_B: Tensor
    position_B: Tensor
    cap_B: Tensor
    noise_BS: Tensor

    def take(self, keep: list[int]) -> _Rows:
        index = torch.tensor(keep, device=self.row_B.device)
        kept = (self.row_B, self.fed_B, self.position_B, self.cap_B, self.noise_BS)
        return _Rows(*(tensor.index_select(0, index) for tensor in kept))


class HFPolicy:
    """A TokenPolicy and BatchPolicy over a decoder-only transformers model, on CPU or GPU.

    Logprobs are those of the whole distribution at the sampling temperature, float32. Every end token of the model
    stops a message, and is part of it. The model object may be shared with a learner: it is left as it was found.

    Attributes:
        codec: As given.
        policy_version: Number of weight updates behind the policy.
        max_context: The longest trajectory that the model takes, tokens; None where its configuration does not say.
        stop_ids: Tokens that end a message.
    """

    def __init__(
        self, model: Any, codec: Codec, *, kv_cache_mib: int = 1024, seed: int = 0, policy_version: int = 0
    ) -> None:
        """Makes a policy of a loaded model.

        Args:
            model: A transformers causal language model, or a peft model around one, the policy's adapter active.
            codec: Its codec.
            kv_cache_mib: Byte budget of keys and values, MiB.
            seed: Of the draws of `generate`; requests of `generate_batch` carry their own keys.
            policy_version: Where counting starts, in a run that is resumed.

        Raises:
            ConfigError: If this model cannot be sampled from here; says what to do.
        """
        self.codec = codec
        self._backbone = Backbone(model)
        end_ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
        named = [] if end_ids is None else [end_ids] if isinstance(end_ids, int) else end_ids
        self.stop_ids = codec.stop_ids.union(named)
        self.max_context = self._backbone.max_positions
        self.policy_version = policy_version
        self._seed = seed
        self._calls = 0
        device = self._backbone.device
        self._slab = Slab(self._backbone.layers, self._backbone.dtype, device, kv_cache_mib * 2**20)
        n_vocab = self._backbone.n_vocab
        if len(codec.tokenizer) > n_vocab:
            raise ConfigError(
                f"the tokenizer has {len(codec.tokenizer)} tokens and the model embeds {n_vocab}: they do not belong"
                " together. Load both from one folder, or resize the model's embeddings."
            )
        self._is_stop_V = torch.zeros(n_vocab, dtype=torch.bool, device=device)
        self._is_stop_V[sorted(self.stop_ids)] = True

    async def generate(self, token_ids: Sequence[int], sampling: Sampling) -> Generation:
        """Samples one message; see TokenPolicy. Calls that go on where the last one ended reuse its keys and values."""
        self._calls += 1
        key = (self._seed, "generate", self._calls)
        return self.generate_batch([GenerationRequest("generate", token_ids, sampling, key)])[0]

    async def update(self, source: object = None) -> None:  # noqa: ARG002
        """The shared model has new weights; see `weights_changed`."""
        self.weights_changed()

    def weights_changed(self) -> None:
        """Counts a weight update, and forgets all keys and values: they belong to the old weights."""
        self.policy_version += 1
        self.forget()

    def forget(self) -> None:
        """Gives back what only speeds sampling up. Which episodes decode together depends on nothing from before then.

        A run does this before and after every collection and evaluation: a resumed one decodes in the same batches,
        bit for bit, and the learner has the memory to itself.
        """
        self._backbone.weights_changed()
        self._slab.clear()

    def release(self, episode: str) -> None:
        """Frees the keys and values of an episode that has ended."""
        self._slab.release(episode)

    def generate_batch(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Samples one message for each request, in lock-step.

        Args:
            requests: Of different episodes. They may sample differently; those that sample alike decode together.

        Returns:
            In the order of the requests.

        Raises:
            PolicyError: If a prompt leaves no room in the model's context.
            InvariantError: If the model's logits are not finite.
            ConfigError: If the budget of keys and values does not hold one episode.
        """
        alike: dict[tuple[float, ...], list[int]] = {}
        for k, request in enumerate(requests):
            sampling = request.sampling
            alike.setdefault((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), []).append(k)
        found: dict[int, Generation] = {}
        try:
            with self._backbone.generating():
                for indices in alike.values():
                    for wave in self._waves(requests, indices):
                        found.update(zip(wave, self._sample([requests[k] for k in wave]), strict=True))
        except BaseException:
            # What was being written is not what the slots say they hold.
            self._slab.clear()
            raise
        return [found[k] for k in range(len(requests))]

    def _waves(self, requests: Sequence[GenerationRequest], indices: list[int]) -> Iterator[list[int]]:
        positions = max(len(requests[k].token_ids) + self._cap(requests[k]) for k in indices)
        rows = self._slab.most_rows(positions)
        for start in range(0, len(indices), rows):
            yield indices[start : start + rows]

    def _cap(self, request: GenerationRequest) -> int:
        n = len(request.token_ids)
        room = request.sampling.max_tokens if self.max_context is None else self.max_context - n
        if room < 1 or n < 1:
            raise PolicyError(
                f"a prompt of {n} tokens cannot be continued: expected 1 to {(self.max_context or 1) - 1} tokens. Lower"
                " rollout.max_context to end such episodes as context_full."
            )
        return min(request.sampling.max_tokens, room)

    def _sample(self, requests: list[GenerationRequest]) -> list[Generation]:
        caps = [self._cap(request) for request in requests]
        longest = max(len(request.token_ids) + cap for request, cap in zip(requests, caps, strict=True))
        order = self._slab.gather([request.episode for request in requests], longest)
        prompts = [list(requests[k].token_ids) for k in order]
        self._prefill(prompts)
        noise = np.zeros((len(order), max(caps)))
        for row, k in enumerate(order):
            noise[row, : caps[k]] = draws(requests[k].noise_key, caps[k])
        device = self._backbone.device
        rows = _Rows(
            torch.arange(len(order), device=device),
            torch.tensor([prompt[-1] for prompt in prompts], device=device),
            torch.tensor([len(prompt) - 1 for prompt in prompts], device=device),
            torch.tensor([caps[k] for k in order], device=device),
            torch.from_numpy(noise).to(device),
        )
        sampled = self._decode(rows, prompts, requests[0].sampling)
        by_request = sorted(zip(order, sampled, strict=True), key=lambda pair: pair[0])
        return [generation for _, generation in by_request]

    def _decode(self, rows: _Rows, prompts: list[list[int]], sampling: Sampling) -> list[Generation]:
        """Decodes until all rows have finished; gives their messages in the order of `prompts`."""
        n, steps = rows.noise_BS.shape
        device = rows.row_B.device
        id_BS = torch.zeros(n, steps, dtype=torch.long, device=device)
        logprob_BS = torch.zeros(n, steps, device=device)
        cache = DecodeCache(self._slab)
        at = list(range(n))  # the request of each active slot
        counts = [0] * n
        width = max(len(prompt) for prompt in prompts)
        slot_B = torch.arange(n, device=device)
        for step in range(steps):
            cache.aim(slot_B, rows.position_B, width + step)
            position_B1 = rows.position_B[:, None]
            mask = self._backbone.mask(position_B1, width + step)
            hidden_B1H = self._backbone.hidden(rows.fed_B[:, None], position_B1, mask, cache)
            drawn_B, logprob_B = draw(self._backbone.logits(hidden_B1H[:, 0]), rows.noise_BS[:, step], sampling)
            id_BS[rows.row_B, step], logprob_BS[rows.row_B, step] = drawn_B, logprob_B
            rows.fed_B, rows.position_B = drawn_B, rows.position_B + 1
            ended = (self._is_stop_V[drawn_B] | (rows.cap_B == step + 1)).nonzero().flatten().tolist()
            if not ended:
                continue
            for slot in ended:
                counts[at[slot]] = step + 1
                self._slab.slots[slot].token_ids = prompts[at[slot]] + id_BS[at[slot], :step].tolist()
            keep = self._leave(ended, at, width + step)
            if not keep:
                break
            rows = rows.take(keep)
            slot_B = slot_B[: len(keep)]
            width = max(len(prompts[k]) for k in at)
        return self._messages(id_BS, logprob_BS, counts)

    def _leave(self, ended: list[int], at: list[int], n: int) -> list[int]:
        """Moves the rows of some slots behind those that go on; gives for each that goes on the slot that it was in."""
        keep = list(range(len(at)))
        for slot in reversed(ended):
            last = len(at) - 1
            self._slab.swap(slot, last, n)
            at[slot], keep[slot] = at[last], keep[last]
            at.pop()
            keep.pop()
        return keep

    def _prefill(self, prompts: list[list[int]]) -> None:
        """Brings keys and values up to each prompt's last token, which is left to the first step."""
        missing: list[_Stretch] = []
        for slot, (held, prompt) in enumerate(zip(self._slab.slots, prompts, strict=False)):
            start = _shared(held.token_ids, prompt[:-1])
            held.token_ids = prompt[:-1]
            if start < len(prompt) - 1:
                missing.append(_Stretch(slot, start, len(prompt) - 1))
        for chunk in _chunks(missing, PREFILL_TOKENS):
            self._prefill_chunk(chunk, prompts)

    def _prefill_chunk(self, chunk: list[_Stretch], prompts: list[list[int]]) -> None:
        width = max(stretch.end for stretch in chunk)
        longest = max(stretch.end - stretch.start for stretch in chunk)
        ids_BT = np.zeros((len(chunk), longest), dtype=np.int64)
        positions_BT = np.zeros_like(ids_BT)
        real_BT = np.zeros(ids_BT.shape, dtype=np.bool_)
        for row, stretch in enumerate(chunk):
            n = stretch.end - stretch.start
            ids_BT[row, :n] = prompts[stretch.slot][stretch.start : stretch.end]
            # Padding takes the last position again: it is in range for any model, and nothing is written for it.
            positions_BT[row] = np.minimum(np.arange(stretch.start, stretch.start + longest), stretch.end - 1)
            real_BT[row, :n] = True
        slots_B = np.array([stretch.slot for stretch in chunk])
        row_N, column_N = real_BT.nonzero()
        device = self._backbone.device

        def moved(array: npt.NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(array).to(device)

        source_N = (moved(row_N), moved(column_N))
        target_N = (moved(slots_B[row_N]), moved(positions_BT[row_N, column_N]))
        cache = PrefillCache(self._slab, moved(slots_B), source_N, target_N, width)
        positions = moved(positions_BT)
        self._backbone.hidden(moved(ids_BT), positions, self._backbone.mask(positions, width), cache)

    def _messages(self, id_BS: Tensor, logprob_BS: Tensor, counts: list[int]) -> list[Generation]:
        if not bool(torch.isfinite(logprob_BS).all()):
            raise InvariantError(
                "the policy's logits are not finite: the weights have diverged, or the type overflows. Go back to an"
                " earlier checkpoint with a lower learning rate, or use float32."
            )
        messages: list[Generation] = []
        for ids, logprobs, n in zip(id_BS.tolist(), logprob_BS.tolist(), counts, strict=True):
            reason: FinishReason = "stop" if ids[n - 1] in self.stop_ids else "length"
            messages.append(Generation(tuple(ids[:n]), tuple(logprobs[:n]), reason, self.policy_version))
        return messages


def _shared(held: list[int], wanted: list[int]) -> int:
    """Length of the longest common start."""
    n = min(len(held), len(wanted))
    if held[:n] == wanted[:n]:
        return n
    return next(k for k in range(n) if held[k] != wanted[k])


def _chunks(missing: list[_Stretch], budget: int) -> Iterator[list[_Stretch]]:
    """Batches of at most `budget` padded tokens, like lengths together; what is longer than it comes in pieces."""
    while missing:
        missing = sorted(missing, key=lambda s: (s.start - s.end, s.slot))
        longest = min(missing[0].end - missing[0].start, budget)
        n = budget // longest
        chunk, missing = missing[:n], missing[n:]
        yield [_Stretch(s.slot, s.start, min(s.end, s.start + longest)) for s in chunk]
        missing += [_Stretch(s.slot, s.start + longest, s.end) for s in chunk if s.end - s.start > longest]
