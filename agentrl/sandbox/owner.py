"""Whose a sandbox is: a token that says whether the process that made it still lives.

A process id alone says little, since ids are used again: the token also holds when the process began, which boot of the
machine that was in, and in which PID namespace the id counts.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Literal

LABEL = "agentrl.sandbox"
OWNER_LABEL = "agentrl.owner"
EXPIRES_LABEL = "agentrl.expires"


def owner_token() -> str:
    """This process's token: `pid.start.namespace.boot`, hexadecimal but for the ids."""
    pid = os.getpid()
    return f"{pid}.{_started(pid) or 0}.{_namespace()}.{_boot()}"


def owner_state(token: str) -> Literal["alive", "dead", "unknown"]:
    """Whether the process that made a token lives.

    Args:
        token: From `owner_token`, possibly of another process, boot or machine.

    Returns:
        `unknown` for one of another PID namespace or machine, which cannot be looked at from here.
    """
    parts = token.split(".")
    if len(parts) != 4 or not (parts[0].isdigit() and parts[1].isdigit()):
        return "unknown"
    pid, started, namespace, boot = parts
    if boot != _boot() or namespace != _namespace():
        return "unknown"
    return "alive" if _started(int(pid)) == int(started) else "dead"


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None without it, and for a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    rest = stat.rpartition(")")[2].split()
    return None if rest[0] in "ZX" else int(rest[19])


@cache
def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    except OSError:
        return sys.platform


def _namespace() -> str:
    try:
        # Of this process, not cached: a fork may have moved.
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"
