"""Files that survive a kill: lines appended whole, documents replaced whole, a full disk named as such."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from filelock import FileLock, Timeout

from agentrl.errors import RunError, UsageError
from agentrl.types import JSON

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_BLOCK = 1 << 16


def locked(folder: Path) -> AbstractContextManager[object]:
    """Takes the lock of a folder that one process at a time may write; a context that gives it back.

    Raises:
        UsageError: If another process has it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / ".lock", thread_local=False).acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"another process is writing {folder}: wait for it, stop it, or choose another folder or name."
        ) from None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        raise UsageError(f"expected a folder to write to, but {folder}: {error.strerror}. Choose another.") from error


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turns "no space left" into a RunError that says where, how much is free, and what to do.

    Raises:
        RunError: If the disk, the quota or the file-size limit is used up. Other errors pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        free_mib = shutil.disk_usage(path.parent).free >> 20
        raise RunError(
            f"no room left to write {path} ({error.strerror}; {free_mib} MiB free there). Everything finished before"
            " is kept: free some space, then start again where it stopped (a run with --resume)."
        ) from error


def read_lines(path: Path) -> Iterator[JSON]:
    """Yields the records of a JSON-lines file; none where it does not exist.

    A last line without its newline was being written when the process died, and is left out.

    Raises:
        RunError: If a whole line is no JSON.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RunError(f"{path}, line {number}: expected one JSON record, but: {error}.") from error


def read_json(path: Path) -> dict[str, JSON] | None:
    """Reads one JSON document, an object; None where there is no file.

    Raises:
        RunError: If it holds something else.
    """
    try:
        content: dict[str, JSON] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise RunError(f"{path}: expected a JSON document, but: {error}. Remove it or restore it.") from error
    return content


def write_whole(path: Path, content: str | bytes) -> None:
    """Replaces a file in one step: readers see the old content or the new, and a crash leaves one of them.

    Raises:
        RunError: If there is no room.
    """
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    with naming_full_disk(path):
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def write_json(path: Path, value: JSON) -> None:
    """Writes one JSON document for people and programs: indented, replaced in one step, null for what is not finite."""
    write_whole(path, json.dumps(finite(value), indent=2, default=_plain) + "\n")


def finite(value: JSON) -> JSON:
    """The value with null in the place of NaN and infinities, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


def _plain(value: object) -> JSON:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"expected a JSON-able value, found {value!r} ({type(value).__name__}).")


class Appender:
    """A file that grows by whole records: what was appended survives a kill, what was half written is taken back."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Opens `path` for appending, cut to `size` bytes where given."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file: FileIO = path.open("ab", buffering=0)
        if size is not None:
            os.ftruncate(self._file.fileno(), size)

    @classmethod
    def lines(cls, path: Path) -> Self:
        """Opens a JSON-lines file, a torn last line cut off."""
        return cls(path, end_of_lines(path))

    def append(self, data: bytes) -> None:
        """Appends all of `data` or nothing.

        Raises:
            RunError: If there is no room.
        """
        handle = self._file.fileno()
        with naming_full_disk(self._path):
            start = os.fstat(handle).st_size
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(handle, rest) :]
            except OSError:
                os.ftruncate(handle, start)
                raise

    def append_record(self, record: JSON) -> None:
        """Appends one JSON line. Escaped to ASCII, so that any text a model wrote can be stored."""
        self.append(line_of(record))

    def close(self) -> None:
        """Closes the file; more than once does no harm."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def line_of(record: JSON) -> bytes:
    """One JSON line, as `append_record` writes it."""
    return json.dumps(record, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"


def end_of_lines(path: Path) -> int:
    """The offset behind the last newline, bytes; 0 where the file does not exist."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        while position > 0:
            start = max(0, position - _BLOCK)
            file.seek(start)
            found = file.read(position - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            position = start
    return 0
