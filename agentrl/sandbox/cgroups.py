"""Control groups for sandboxes that no engine bounds: memory, processor share, processes of all programs together."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.sandbox.contract import Limits
from agentrl.sandbox.owner import owner_state, owner_token

ROOT = Path("/sys/fs/cgroup")
PARENT = "agentrl"
_PERIOD_US = 100_000
_REMOVE_S = 3.0


@dataclass(frozen=True)
class _Layout:
    """Where one version keeps things: the parents of our groups, and how to read a counter."""

    parents: tuple[Path, ...]
    settings: Callable[[Limits], dict[str, str]]
    counters: tuple[tuple[str, str, str, float], ...]


def _settings_v1(limits: Limits) -> dict[str, str]:
    return {
        "memory/memory.limit_in_bytes": str(limits.memory),
        "memory/memory.memsw.limit_in_bytes?": str(limits.memory),
        "pids/pids.max": str(limits.pids + 2),
        "cpu/cpu.cfs_period_us": str(_PERIOD_US),
        "cpu/cpu.cfs_quota_us": str(int(limits.cpu_cores * _PERIOD_US)),
    }


def _settings_v2(limits: Limits) -> dict[str, str]:
    return {
        "memory.max": str(limits.memory),
        "memory.swap.max?": "0",
        "pids.max": str(limits.pids + 2),
        "cpu.max": f"{int(limits.cpu_cores * _PERIOD_US)} {_PERIOD_US}",
    }


_V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
_V1 = _Layout(
    tuple(ROOT / name / PARENT for name in _V1_CONTROLLERS),
    _settings_v1,
    (
        ("oom", "memory/memory.oom_control", "oom_kill ", 1.0),
        ("pids", "pids/pids.events", "max ", 1.0),
        ("cpu_s", "cpuacct/cpuacct.usage", "", 1e-9),
    ),
)
_V2 = _Layout(
    (ROOT / PARENT,),
    _settings_v2,
    (
        ("oom", "memory.events", "oom_kill ", 1.0),
        ("pids", "pids.events", "max ", 1.0),
        ("cpu_s", "cpu.stat", "usage_usec ", 1e-6),
    ),
)


def layout() -> _Layout | None:
    """The control groups that this process may make, or None: that takes root, or a hierarchy handed over to it."""
    if all((ROOT / name / "cgroup.procs").is_file() for name in _V1_CONTROLLERS):
        return _V1 if os.access(ROOT / "memory", os.W_OK) else None
    try:
        offered = (ROOT / "cgroup.controllers").read_text().split()
    except OSError:
        return None
    return _V2 if {"memory", "pids", "cpu"} <= set(offered) and os.access(ROOT, os.W_OK) else None


class ControlGroup:
    """One sandbox's group in every hierarchy. Its name holds its owner, so that a reaper can tell.

    Args:
        name: Of the sandbox.
        limits: Of the sandbox.
        found: From `layout`.

    Raises:
        OSError: The kernel refuses it.
    """

    def __init__(self, name: str, limits: Limits, found: _Layout) -> None:
        self._layout = found
        self._folders = [parent / f"{name}@{owner_token()}" for parent in found.parents]
        for parent in found.parents:
            parent.mkdir(exist_ok=True)
        if found is _V2:
            for folder in (ROOT, ROOT / PARENT):
                (folder / "cgroup.subtree_control").write_text("+memory +pids +cpu")
        for folder in self._folders:
            folder.mkdir()
        for key, value in found.settings(limits).items():
            path = self._path(key.rstrip("?"))
            if path.exists() or not key.endswith("?"):
                path.write_text(value)

    def add(self, pid: int) -> None:
        """Moves a process; what it starts from then on follows."""
        for folder in self._folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def read(self) -> dict[str, float]:
        """Kills for memory, refused forks, seconds of CPU time, so far."""
        found = {}
        for name, key, start, unit in self._layout.counters:
            found[name] = 0.0
            for line in self._path(key).read_text().splitlines():
                if line.startswith(start):
                    found[name] = float(line[len(start) :]) * unit
        return found

    def remove(self) -> bool:
        """Kills what is in it and removes it. Whether that was done in time."""
        return all(_remove(folder) for folder in self._folders)

    def _path(self, key: str) -> Path:
        controller, _, name = key.rpartition("/")
        if not controller:
            return self._folders[0] / name
        return self._folders[_V1_CONTROLLERS.index(controller)] / name


def _remove(folder: Path) -> bool:
    give_up = time.monotonic() + _REMOVE_S
    while folder.is_dir():
        with contextlib.suppress(OSError):
            folder.rmdir()
            return True
        with contextlib.suppress(OSError, ValueError):
            for pid in (folder / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
        if time.monotonic() > give_up:
            return False
        time.sleep(0.005)
    return True


def left_behind() -> Iterator[Path]:
    """Groups whose owners are dead."""
    found = layout()
    for parent in found.parents if found else ():
        for folder in sorted(parent.glob("*@*")):
            if owner_state(folder.name.partition("@")[2]) == "dead":
                yield folder


def remove_left_behind() -> int:
    """Kills and removes the groups of dead owners: how many sandboxes that were."""
    return len({folder.name for folder in left_behind() if _remove(folder)})
