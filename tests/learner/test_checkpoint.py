"""Checkpoints: whole or not there, damage noticed, old ones pruned, a full disk and a kill survived."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import CheckpointError, RunError
from agentrl.learner.checkpoint import latest_good, read_state, save, verify, write_state


def content(text: str, size: int = 100):
    def write(folder: Path) -> None:
        (folder / "trainer").mkdir()
        (folder / "config.json").write_text(text)
        (folder / "trainer" / "blob").write_bytes(text.encode() * size)

    return write


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_checkpoint_and_its_manifest(tmp_path):
    folder = save(tmp_path / "checkpoints", "000010", content("ten"), keep=2)
    assert folder == tmp_path / "checkpoints" / "000010"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {"config.json", "trainer/blob"}
    assert manifest["files"]["config.json"]["bytes"] == 3
    assert len(manifest["files"]["config.json"]["sha256"]) == 64
    verify(folder)
    assert latest_good(tmp_path / "checkpoints") == folder
    assert latest_good(tmp_path / "nowhere") is None


def test_old_ones_are_pruned_and_the_predecessor_stays(tmp_path):
    for i in range(6):
        save(tmp_path, f"{i:06d}", content(str(i)), keep=1)
    assert names(tmp_path) == ["000004", "000005"]


def test_the_same_name_is_replaced(tmp_path):
    save(tmp_path, "000001", content("old"), keep=2)
    save(tmp_path, "000001", content("new"), keep=2)
    assert names(tmp_path) == ["000001"]
    assert (tmp_path / "000001" / "config.json").read_text() == "new"


def damage_cut(folder: Path) -> str:
    path = folder / "trainer" / "blob"
    path.write_bytes(path.read_bytes()[:-1])
    return "trainer/blob"


def damage_bit(folder: Path) -> str:
    path = folder / "trainer" / "blob"
    path.write_bytes(b"X" + path.read_bytes()[1:])
    return "trainer/blob"


def damage_gone(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return "manifest.json"


@pytest.mark.parametrize("damage", [damage_cut, damage_bit, damage_gone, damage_manifest])
def test_a_damaged_checkpoint_is_skipped_with_a_warning(tmp_path, damage, caplog):
    good = save(tmp_path, "000001", content("one"), keep=2)
    bad = save(tmp_path, "000002", content("two"), keep=2)
    name = damage(bad)
    with pytest.raises(CheckpointError, match=name):
        verify(bad)
    with caplog.at_level(logging.WARNING):
        assert latest_good(tmp_path) == good
    assert "000002" in caplog.text
    damage(good)
    assert latest_good(tmp_path) is None


def by_torch(folder: Path) -> None:
    write_state(folder / "state.pt", {"weights": torch.zeros(300_000)})


def by_safetensors(folder: Path) -> None:
    save_file({"weights": torch.zeros(300_000)}, folder / "model.safetensors")


def by_python(folder: Path) -> None:
    (folder / "text").write_bytes(bytes(2_000_000))


@pytest.mark.parametrize("write", [by_torch, by_safetensors, by_python])
def test_no_room_is_named_and_loses_nothing(tmp_path, write):
    """A limit on the size of files stands for the full disk: the same door, without the need for a disk."""
    first = save(tmp_path, "000001", content("one"), keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(RunError, match=r"no room left to write .*000002.*--resume"):
            save(tmp_path, "000002", write, keep=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["000001"]
    verify(first)
    save(tmp_path, "000002", write, keep=2)
    assert latest_good(tmp_path).name == "000002"


def test_a_writer_that_fails_leaves_no_draft(tmp_path):
    def write(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, "000001", write, keep=2)
    assert names(tmp_path) == []


def test_killed_while_writing(tmp_path):
    """kill -9 at six moments of an endless series of checkpoints: the last good one is always whole and never older."""
    program = """
import sys
from pathlib import Path
from agentrl.learner.checkpoint import save
root, first = Path(sys.argv[1]), int(sys.argv[2])
def write(folder):
    for part in range(20):
        (folder / f"part{part}").write_bytes(bytes([part]) * 20000)
for i in range(first, first + 10**6):
    save(root, f"{i:06d}", write, keep=1)
    print(i, flush=True)
"""
    done = 0
    for attempt in range(6):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), str(done + 1)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(1 + attempt % 2):
            done = int(process.stdout.readline())
        time.sleep(0.004 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        process.stdout.close()
        done = int(rest[-1]) if rest else done
        folder = latest_good(tmp_path)
        assert int(folder.name) >= done
        done = int(folder.name)
    assert all(name.startswith((".draft-", "0")) for name in names(tmp_path))
    save(tmp_path, f"{done + 1:06d}", content("end"), keep=1)
    assert not [name for name in names(tmp_path) if name.startswith(".")]


def test_state_round_trip_and_what_is_no_state(tmp_path):
    state = {
        "tensor": torch.arange(5, dtype=torch.float64) / 3,
        "generator": torch.Generator().manual_seed(4).get_state(),
        "nested": {"list": [1, 2.5, "x", None, True], "tuple": (1, 2**70)},
    }
    write_state(tmp_path / "deep" / "state.pt", state)
    found = read_state(tmp_path / "deep" / "state.pt")
    assert torch.equal(found["tensor"], state["tensor"])
    assert torch.equal(found["generator"], state["generator"])
    assert found["nested"] == state["nested"]
    (tmp_path / "cut.pt").write_bytes((tmp_path / "deep" / "state.pt").read_bytes()[:200])
    for path in (tmp_path / "cut.pt", tmp_path / "nothing.pt"):
        with pytest.raises(CheckpointError, match="cannot be read as a training state"):
            read_state(path)


def test_a_state_file_is_never_executed(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"x": Evil()}, tmp_path / "evil.pt", pickle_module=pickle)
    with pytest.raises(CheckpointError):
        read_state(tmp_path / "evil.pt")
    assert not (tmp_path / "executed").exists()
