"""Functions that tests run in a Worker; found there through `sys.path`, as a plugin's would be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def echo(value):
    return value


def noisy(value):
    print("garbage " * 1000)
    sys.stdout.flush()
    os.write(1, b"\x00\x00\x00\x01x" * 100)
    os.write(2, b"more garbage")
    return {"read": sys.stdin.read(), "value": value}


def surroundings(_):
    return {
        "env": dict(os.environ),
        "cwd": str(Path.cwd()),
        "fds": [path.name for path in Path("/proc/self/fd").iterdir()],
    }


def take_memory(mib):
    return len(bytearray(mib << 20))


def burn(_):
    while True:
        pass


def write(job):
    Path(job["path"]).write_bytes(b"x" * job["size"])


def reply_of(size):
    return "x" * size


def not_json(_):
    return {1, 2}


def not_a_number(_):
    return float("nan")


def crash(kind):
    if kind == "signal":
        os.kill(os.getpid(), 11)
    if kind == "exit":
        os._exit(7)
    raise SystemExit("left")


def spawn(job):
    """Starts a child, a grandchild of its own session and an orphan; writes their pids; then works or returns."""
    shell = (
        'echo $$ >> "$0"; (setsid sh -c \'echo $$ >> "$0"; exec sleep 60\' "$0" &);'
        ' setsid sh -c \'echo $$ >> "$0"; sleep 60\' "$0" & sleep 60'
    )
    subprocess.Popen(["/bin/sh", "-c", shell, job["pids"]])
    while len(Path(job["pids"]).read_text().split() if Path(job["pids"]).exists() else []) < 3:
        time.sleep(0.01)
    time.sleep(job["then_sleep"])
    if job.get("die"):
        os._exit(3)
    return os.getpid()


def loaded(_):
    return sorted(sys.modules)
