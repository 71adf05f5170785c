"""Checkpoints that are whole or not there: written beside, hashed, synced, then renamed.

A checkpoint is a folder `NAME` under a root, with a `manifest.json` of the SHA-256 and size of every file in it. A kill
at any moment leaves the earlier ones untouched; a damaged one is noticed and the one before is taken.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl._files import naming_full_disk
from agentrl.configfile import differences
from agentrl.errors import AgentRLError, CheckpointError
from agentrl.types import JSON

MANIFEST = "manifest.json"
_DRAFT = ".draft-"
_FORMAT = 1
_LOG = logging.getLogger(__name__)


def save(root: Path, name: str, write: Callable[[Path], None], *, keep: int) -> Path:
    """Writes a checkpoint in one step, then removes old ones.

    Args:
        root: Where checkpoints are; made if it does not exist.
        name: Of this one; names sort by age, as `000010` does. One of the same name is replaced.
        write: Puts the content into the folder that it is given (`ActorCritic.save`, `write_state`, the tokenizer).
        keep: Checkpoints that stay beside the last one's predecessor, so `keep + 1` in all.

    Returns:
        The checkpoint's folder.

    Raises:
        RunError: If there is no room; the draft is removed and nothing else is touched.
    """
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{_DRAFT}*"):
        shutil.rmtree(leftover)
    draft, final = root / f"{_DRAFT}{name}", root / name
    with naming_full_disk(final):
        try:
            draft.mkdir()
            _write_content(draft, write)
            _sync(draft, _write_manifest(draft))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    if final.exists():
        replaced = root / f"{_DRAFT}replaced-{name}"
        final.rename(replaced)
        draft.rename(final)
        shutil.rmtree(replaced)
    else:
        draft.rename(final)
    _sync_folder(root)
    for old in _by_age(root)[: -(keep + 1)]:
        shutil.rmtree(old)
    return final


def latest_good(root: Path) -> Path | None:
    """The newest checkpoint whose files are what its manifest says; damaged ones are skipped with a warning."""
    for folder in reversed(_by_age(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            _LOG.warning("%s Taking the one before.", error)
        else:
            return folder
    return None


def verify(folder: Path) -> None:
    """Compares every file with the manifest.

    Raises:
        CheckpointError: If a file is missing, cut short, or changed; it names the file.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} is damaged: its {MANIFEST} cannot be read ({error}).") from error
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != expected["bytes"]:
            found = "no such file" if size is None else f"{size} bytes"
            raise CheckpointError(
                f"checkpoint {folder} is damaged: {name}: expected {expected['bytes']} bytes, found {found}."
            )
        if _digest(path) != expected["sha256"]:
            raise CheckpointError(f"checkpoint {folder} is damaged: the content of {name} is not what was written.")


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Writes a state dict: tensors, numbers, texts, and lists, tuples and dicts of these.

    Raises:
        OSError: If it cannot be written.
    """
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            torch.save(dict(state), file)
        except RuntimeError as error:
            # torch's archive writer raises this in the place of the file's own error.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def read_state(path: Path) -> dict[str, Any]:
    """Reads what `write_state` wrote, onto the CPU; never executes anything in the file.

    Raises:
        CheckpointError: If it cannot be read.
    """
    import pickle

    import torch

    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read as a training state: {error}") from error
    return state


def check_config(folder: Path, state: Mapping[str, Any], config: Mapping[str, JSON]) -> None:
    """Refuses a checkpoint of another config.

    Args:
        folder: The checkpoint.
        state: What `read_state` read in it; its `config` is compared.
        config: The run's tables. `runs_dir` may differ: it says where the run is, not what it is.

    Raises:
        CheckpointError: If keys differ; it lists them.
    """
    if "config" not in state:
        raise CheckpointError(f"checkpoint {folder} does not say which config it is of: another agentrl wrote it.")
    changed = [line for line in differences(state["config"], config) if line.split(":")[0] != "runs_dir"]
    if changed:
        listed = "\n".join(f"  {line}" for line in changed)
        raise CheckpointError(
            f"checkpoint {folder} belongs to another config; these keys differ (checkpoint -> run):\n{listed}\n"
            "Put the run's own checkpoints back, or remove this one: the run then goes on from the one before."
        )


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """While a state is taken over: what does not fit is said to be this checkpoint's.

    Raises:
        CheckpointError: If parts of the state are missing or of other shapes.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, AgentRLError):
            raise
        raise CheckpointError(
            f"checkpoint {folder} holds another training state than this agentrl reads ({type(error).__name__}:"
            f" {error}). Go on with the version that wrote it (manifest.json names it), or start a new run."
        ) from error


def _by_age(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def _write_content(draft: Path, write: Callable[[Path], None]) -> None:
    from safetensors import SafetensorError

    try:
        write(draft)
    except SafetensorError as error:
        # Its writer is in Rust and tells the system's error number in words only.
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def _write_manifest(draft: Path) -> list[Path]:
    paths = sorted(path for path in draft.rglob("*") if path.is_file())
    files = {
        path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in paths
    }
    manifest = draft / MANIFEST
    manifest.write_text(json.dumps({"format": _FORMAT, "files": files}, indent=1) + "\n", encoding="utf-8")
    return [*paths, manifest]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(draft: Path, files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for folder in {draft, *(path.parent for path in files)}:
        _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
