"""What a probe works with: a sandbox, and a look at it from the host that does not go through it."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.sandbox.bubblewrap import BubblewrapBackend
from agentrl.sandbox.contract import MIB, ExecResult, Limits, Sandbox

LIMITS = Limits(wall_s=20.0, memory=256 * MIB, pids=64, tmp_bytes=60 * MIB, tmp_inodes=4096, file_size=64 * MIB)
SECRET_NAME = "AGENTRL_PROBE_SECRET"
SECRET = f"secret-{uuid.uuid4().hex}"


@dataclass
class Box:
    """One sandbox under test, and how to get another like it."""

    sandbox: Sandbox
    another: Callable[[], Sandbox]

    def python(self, source: str, *arguments: str, wall_s: float = 20.0, **options: Any) -> ExecResult:
        """Runs a program of its own: a new interpreter, as an agent would start one."""
        limits = replace(self.sandbox.limits, wall_s=wall_s)
        return self.sandbox.exec(["python3", "-c", source, *arguments], limits=limits, **options)

    def facts(self, source: str, *arguments: str, **options: Any) -> Any:
        """What a program printed last, as JSON."""
        done = self.python(source, *arguments, **options)
        assert done.ok, done
        return json.loads(done.stdout.decode().strip().splitlines()[-1])

    def usable(self) -> None:
        """The next step works."""
        done = self.sandbox.exec(["echo", "still here"])
        assert done.ok, done
        assert done.stdout == b"still here\n"

    def clean(self) -> None:
        """Takes away what a probe left, so that the next can use the same sandbox."""
        self.sandbox.exec(
            ["sh", "-c", "chmod -R u+rwx /workspace/* /tmp/*; rm -rf /workspace/* /workspace/.[!.]* /tmp/*"]
        )


class UserBubblewrap(BubblewrapBackend):
    """The backend as a user without root and control groups starts it, on this machine's own /usr."""

    def __init__(self) -> None:
        super().__init__(control_groups=False)
        self._root = False

    def _command(self, image: str, limits: Limits, rules: int) -> list[str]:
        command = super()._command(image, limits, rules)
        if os.geteuid() != 0:
            return command
        return ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--", *command]


def nonce() -> str:
    """A word that stands in no other process's arguments."""
    return f"probe-{uuid.uuid4().hex}"


def survivors(word: str) -> list[int]:
    """Living processes of this machine whose arguments hold a word, as the host sees them; not this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) == os.getpid():
            continue
        try:
            named = word.encode() in (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if named and state not in "ZX":
            found.append(int(entry.name))
    return found


@contextmanager
def secret_in_environment() -> Iterator[None]:
    """A variable of the host that no sandbox may see."""
    os.environ[SECRET_NAME] = SECRET
    try:
        yield
    finally:
        del os.environ[SECRET_NAME]


@dataclass(frozen=True)
class Probe:
    """One attempt, its id in the table, and the guarantee that it holds a backend to."""

    id: str
    title: str
    guarantee: str
    run: Callable[[Box], None]
    fresh: bool


PROBES: dict[str, Probe] = {}


def probe(name: str, title: str, guarantee: str, *, fresh: bool = False) -> Callable[[Callable[[Box], None]], Any]:
    """Adds a probe to the table. A fresh one gets a sandbox of its own."""

    def add(run: Callable[[Box], None]) -> Callable[[Box], None]:
        assert name not in PROBES
        PROBES[name] = Probe(name, title, guarantee, run, fresh)
        return run

    return add
