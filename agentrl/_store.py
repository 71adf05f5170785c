"""Episodes on disk: `episodes.jsonl` to read and grep, `tokens.safetensors` for the token arrays.

While a folder is being written its tokens are in `tokens.partial`, which only grows: each episode's ids (int32), then
its logprobs (float64), little-endian. An episode's tokens are written before its line, so that a line that is there can
be read back; a kill loses at most the episode that was being written. `finish` turns the partial file into
`tokens.safetensors` (`token_ids`, `logprobs`, all episodes after one another) and removes it. Each line says where its
episode's tokens are, in elements. The last line of an id counts: a second attempt replaces the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from agentrl._files import Appender, end_of_lines, line_of, read_json, read_lines, write_json, write_whole
from agentrl.errors import RunError
from agentrl.types import JSON, EndReason, Message, Task, ToolCall, ToolResult, Trajectory, Turn

_ID = np.dtype("<i4")
_LOGPROB = np.dtype("<f8")


class Tokens(NamedTuple):
    """The token arrays of one episode, or of all in a folder."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float64]


class Extent(NamedTuple):
    """Where an episode's tokens are among those of its folder, in elements."""

    first_id: int
    n_ids: int
    first_logprob: int
    n_logprobs: int

    @property
    def start(self) -> int:
        """Offset in `tokens.partial`, bytes."""
        return self.first_id * _ID.itemsize + self.first_logprob * _LOGPROB.itemsize

    @property
    def stop(self) -> int:
        """Offset behind it in `tokens.partial`, bytes."""
        return self.start + self.n_ids * _ID.itemsize + self.n_logprobs * _LOGPROB.itemsize


class EpisodeFolder:
    """A folder of episodes that can be appended to, finished, reopened and read.

    One thread appends at a time. As a context it is finished on a clean exit, and only closed after an error: the
    episodes that were appended are kept either way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: Appender | None = None
        self._partial: Appender | None = None
        self._n_ids = 0
        self._n_logprobs = 0

    def append(self, trajectory: Trajectory) -> None:
        """Writes an episode; when this returns, a kill of the process does not lose it.

        Raises:
            RunError: If there is no room.
        """
        lines, partial = self._opened()
        tokens = tokens_of(trajectory)
        extent = Extent(self._n_ids, len(tokens.ids), self._n_logprobs, len(tokens.logprobs))
        try:
            partial.append(tokens.ids.tobytes() + tokens.logprobs.tobytes())
            lines.append_record(to_record(trajectory, extent))
        except BaseException:
            # The tokens may be there without their line: opening again takes them back.
            self.close()
            raise
        self._n_ids += extent.n_ids
        self._n_logprobs += extent.n_logprobs

    def finish(self) -> None:
        """Writes `tokens.safetensors` and closes the folder; it can be opened again by appending.

        Raises:
            RunError: If there is no room; the partial file stays, and finishing again completes.
        """
        partial = self.path / "tokens.partial"
        if self._partial is None and not partial.exists():
            return
        self._opened()
        tokens = [_read_partial(partial, extent) for extent in self._extents()]
        if any(len(part.ids) for part in tokens):
            from safetensors.numpy import save

            arrays = {
                "token_ids": np.concatenate([part.ids for part in tokens]),
                "logprobs": np.concatenate([part.logprobs for part in tokens]),
            }
            write_whole(self.path / "tokens.safetensors", save(arrays))
        self.close()
        partial.unlink()

    def rewrite(self, trajectories: Sequence[Trajectory]) -> None:
        """Replaces the lines of episodes that are here, all in one step; their tokens stay where they are.

        Raises:
            RunError: If one of them is not here, or has other tokens; nothing is changed then.
        """
        self.close()
        path = self.path / "episodes.jsonl"
        lines = list(read_lines(path))
        place = {record["id"]: number for number, record in enumerate(lines)}
        for trajectory in trajectories:
            number = place.get(trajectory.id)
            extent = None if number is None else extent_of(lines[number])
            tokens = tokens_of(trajectory)
            if number is None or extent is None or extent[1::2] != (len(tokens.ids), len(tokens.logprobs)):
                raise RunError(
                    f"{path} cannot be rewritten: expected it to hold episode {trajectory.id} with"
                    f" {len(tokens.ids)} tokens, found {'no such episode' if extent is None else extent.n_ids}."
                )
            lines[number] = to_record(trajectory, extent)
        write_whole(path, b"".join(line_of(record) for record in lines))

    def close(self) -> None:
        """Closes the files and leaves the folder as a kill would: nothing appended is lost."""
        for file in (self._lines, self._partial):
            if file is not None:
                file.close()
        self._lines = self._partial = None

    def records(self) -> list[dict[str, JSON]]:
        """The episodes without their tokens, sorted by id: all that reports and `explain` need."""
        newest = {record["id"]: record for record in read_lines(self.path / "episodes.jsonl")}
        return [newest[key] for key in sorted(newest)]

    def trajectories(self) -> list[Trajectory]:
        """The episodes whole, sorted by id.

        Raises:
            RunError: If the tokens of an episode are missing.
        """
        partial = self.path / "tokens.partial"
        if partial.exists():
            size = partial.stat().st_size
            whole = [r for r in self.records() if extent_of(r).stop <= size]
            return [from_record(r, _read_partial(partial, extent_of(r))) for r in whole]
        records = self.records()
        packed = self._read_packed() if any(extent_of(r).n_ids for r in records) else Tokens(_NO_IDS, _NO_LOGPROBS)
        return [from_record(r, _cut(packed, extent_of(r))) for r in records]

    @property
    def request(self) -> dict[str, JSON] | None:
        """What an evaluation was asked for; None in a folder that is none, or not yet."""
        return read_json(self.path / "request.json")

    def write_request(self, request: Mapping[str, JSON]) -> None:
        """Writes what the evaluation is of, before its first episode."""
        write_json(self.path / "request.json", request)

    @property
    def reward_state(self) -> dict[str, JSON] | None:
        """The state of the reward's batch node from before these episodes; None where it has none."""
        return read_json(self.path / "reward_state.json")

    def write_reward_state(self, state: Mapping[str, JSON]) -> None:
        """Writes the state of the reward's batch node from before these episodes."""
        write_json(self.path / "reward_state.json", state)

    def write_summary(self, summary: Mapping[str, JSON]) -> None:
        """Writes what the episodes show."""
        write_json(self.path / "summary.json", summary)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        self.close()

    def _opened(self) -> tuple[Appender, Appender]:
        if self._lines is None or self._partial is None:
            self._unpack()
            n_bytes, last = self._whole_part()
            self._n_ids = last.first_id + last.n_ids
            self._n_logprobs = last.first_logprob + last.n_logprobs
            self._lines = Appender(self.path / "episodes.jsonl", n_bytes)
            self._partial = Appender(self.path / "tokens.partial", last.stop)
        return self._lines, self._partial

    def _unpack(self) -> None:
        """Makes the partial file of a folder that was finished, so that it can grow again."""
        partial = self.path / "tokens.partial"
        if partial.exists() or not (self.path / "tokens.safetensors").exists():
            return
        packed = self._read_packed()
        parts = [_cut(packed, extent) for extent in self._extents()]
        write_whole(partial, b"".join(part.ids.tobytes() + part.logprobs.tobytes() for part in parts))

    def _whole_part(self) -> tuple[int, Extent]:
        """Bytes of episodes.jsonl whose episodes have all their tokens, and the last such extent.

        Only a machine that lost power can have a line without its tokens; a killed process cannot.
        """
        path, partial = self.path / "episodes.jsonl", self.path / "tokens.partial"
        size = partial.stat().st_size if partial.exists() else 0
        last, n_bytes = Extent(0, 0, 0, 0), 0
        ends = _line_ends(path)
        for end, extent in zip(ends, self._extents(), strict=True):
            if extent.stop > size:
                break
            last, n_bytes = extent, end
        return n_bytes, last

    def _extents(self) -> list[Extent]:
        return [extent_of(record) for record in read_lines(self.path / "episodes.jsonl")]

    def _read_packed(self) -> Tokens:
        path = self.path / "tokens.safetensors"
        if not path.exists():
            raise RunError(f"{path} is missing: the episodes beside it have tokens that were kept there.")
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(path)
            return Tokens(arrays["token_ids"], arrays["logprobs"])
        except (SafetensorError, KeyError) as error:
            raise RunError(f"{path} is damaged: {error}. The episodes beside it have lost their tokens.") from error


_NO_IDS: npt.NDArray[np.int32] = np.empty(0, dtype=_ID)
_NO_LOGPROBS: npt.NDArray[np.float64] = np.empty(0, dtype=_LOGPROB)


def tokens_of(trajectory: Trajectory) -> Tokens:
    """All token ids of an episode in order, and the logprobs of those that were sampled."""
    ids = [i for turn in trajectory.turns for i in (*turn.prompt_ids, *turn.sampled_ids)]
    logprobs = [value for turn in trajectory.turns for value in turn.logprobs]
    return Tokens(np.asarray([*ids, *trajectory.trailing_ids], dtype=_ID), np.asarray(logprobs, dtype=_LOGPROB))


def to_record(trajectory: Trajectory, extent: Extent) -> dict[str, JSON]:
    """The line of an episode: everything but its token arrays, and its reward for those who grep."""
    return {
        "id": trajectory.id,
        "end": str(trajectory.end),
        "success": trajectory.success,
        "reward": trajectory.reward,
        "task": _task_record(trajectory.task),
        "seed": trajectory.seed,
        "attempt": trajectory.attempt,
        "error": trajectory.error,
        "opening": [_message_record(message) for message in trajectory.opening],
        "turns": [_turn_record(turn) for turn in trajectory.turns],
        "ledger": trajectory.ledger,
        "n_sampled": trajectory.n_sampled,
        "dropped": dict(trajectory.dropped),
        "tokens": extent._asdict(),
    }


def from_record(record: Mapping[str, JSON], tokens: Tokens) -> Trajectory:
    """The trajectory that `to_record` was given."""
    ids, logprobs = tokens.ids.tolist(), tokens.logprobs.tolist()
    turns = []
    for turn in record["turns"]:
        n_prompt, n_sampled = turn["n_prompt"], turn["n_sampled"]
        prompt, sampled, ids = ids[:n_prompt], ids[n_prompt : n_prompt + n_sampled], ids[n_prompt + n_sampled :]
        values, logprobs = logprobs[:n_sampled], logprobs[n_sampled:]
        turns.append(_turn(turn, (tuple(prompt), tuple(sampled), tuple(values))))
    return Trajectory(
        id=record["id"],
        task=Task(**record["task"]),
        seed=record["seed"],
        opening=tuple(_message(message) for message in record["opening"]),
        turns=tuple(turns),
        end=EndReason(record["end"]),
        ledger=record["ledger"],
        success=record["success"],
        trailing_ids=tuple(ids),
        n_sampled=record["n_sampled"],
        dropped=record["dropped"],
        error=record["error"],
        attempt=record["attempt"],
    )


def extent_of(record: Mapping[str, JSON]) -> Extent:
    """Where the tokens of a line's episode are."""
    return Extent(**record["tokens"])


def _read_partial(path: Path, extent: Extent) -> Tokens:
    with path.open("rb") as file:
        file.seek(extent.start)
        data = file.read(extent.stop - extent.start)
    split = extent.n_ids * _ID.itemsize
    return Tokens(np.frombuffer(data[:split], dtype=_ID), np.frombuffer(data[split:], dtype=_LOGPROB))


def _cut(tokens: Tokens, extent: Extent) -> Tokens:
    return Tokens(
        tokens.ids[extent.first_id : extent.first_id + extent.n_ids],
        tokens.logprobs[extent.first_logprob : extent.first_logprob + extent.n_logprobs],
    )


def _line_ends(path: Path) -> Iterator[int]:
    """Offsets behind each whole line, bytes."""
    if not path.exists():
        return
    stop, position = end_of_lines(path), 0
    with path.open("rb") as file:
        for line in file:
            position += len(line)
            if position > stop:
                return
            yield position


def _task_record(task: Task) -> dict[str, JSON]:
    return {f.name: getattr(task, f.name) for f in dataclasses.fields(task)} | {"data": dict(task.data)}


def _message_record(message: Message) -> dict[str, JSON]:
    calls = [_call_record(call) for call in message.tool_calls]
    return {"role": message.role, "content": message.content, "tool_calls": calls, "name": message.name}


def _message(record: Mapping[str, JSON]) -> Message:
    calls = tuple(ToolCall(**call) for call in record["tool_calls"])
    return Message(role=record["role"], content=record["content"], tool_calls=calls, name=record["name"])


def _call_record(call: ToolCall) -> dict[str, JSON]:
    return {"name": call.name, "arguments": dict(call.arguments)}


def _turn_record(turn: Turn) -> dict[str, JSON]:
    return {
        "text": turn.text,
        "calls": [_call_record(call) for call in turn.calls],
        "results": [dataclasses.asdict(result) for result in turn.results],
        "malformed": turn.malformed,
        "reward": turn.reward,
        "ledger": turn.ledger,
        "finish_reason": turn.finish_reason,
        "policy_version": turn.policy_version,
        "n_prompt": len(turn.prompt_ids),
        "n_sampled": len(turn.sampled_ids),
        "timings": dict(turn.timings),
    }


def _turn(record: Mapping[str, JSON], tokens: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]) -> Turn:
    prompt_ids, sampled_ids, logprobs = tokens
    return Turn(
        prompt_ids=prompt_ids,
        sampled_ids=sampled_ids,
        logprobs=logprobs,
        policy_version=record["policy_version"],
        finish_reason=record["finish_reason"],
        text=record["text"],
        calls=tuple(ToolCall(**call) for call in record["calls"]),
        results=tuple(ToolResult(**result) for result in record["results"]),
        malformed=record["malformed"],
        reward=record["reward"],
        ledger=record["ledger"],
        timings=record["timings"],
    )
