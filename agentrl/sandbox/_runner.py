"""The program that serves a sandbox from inside. Only the standard library: it runs on whatever Python the image has.

It is sent over its own standard input when the sandbox starts, together with `_runner_call.py` and `_runner_files.py`,
and then answers one request at a time. A frame on either pipe is a header (id of the request, length of the JSON,
length of the body), JSON and bytes. It trusts the host and distrusts everything that it starts:

- With the capabilities KILL, SETUID and SETGID (Docker) or as PID 1 (bubblewrap) it is out of its children's reach, and
  it makes itself non-dumpable, so that none may trace it, read its memory or take its file descriptors.
- A deadline ends in kill(-1, SIGKILL), which reaches every process of the namespace but init and the runner. It needs
  no fork, so that it works when no process can be made, and no process escapes it by forking, setsid or a dead parent.
- While a program runs it watches its own input for the host's end, and it has an absolute lifetime.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import json
import os
import select
import signal
import struct
import sys
import time
from typing import Any, NoReturn

HEADER = struct.Struct(">QII")
MAX_HEAD = 1 << 22
MAX_BODY = 1 << 27
LIBC = ctypes.CDLL(None)
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
KILL_S = 5.0


def main(calls: Any, files: Any) -> None:
    """Serves until the host goes away or the lifetime is over.

    Args:
        calls: The module `_runner_call`.
        files: The module `_runner_files`.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    wake, wake_in = os.pipe()
    for fd in (wake, wake_in):
        os.set_blocking(fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    host = Host(requests, replies)
    number, config, _ = host.receive()
    for module in config.get("preload", ()):
        try:
            __import__(module)
        except ImportError:
            continue
    gc.collect()
    gc.freeze()  # what is there now is shared by all forks: a collection in one would copy every page of it
    runner = Runner(host, wake, config, (calls, files))
    host.send(number, {"status": "ok", "python": sys.version.split()[0]})
    with contextlib.suppress(HostGone):
        runner.serve()
    runner.kill_all()
    os._exit(0)


def prctl(option: int, value: int) -> None:
    """Sets a property of this process."""
    LIBC.prctl(option, value, 0, 0, 0)


class HostGone(Exception):
    """The other end of the pipe is closed."""


class Host:
    """Frames from and to the host."""

    def __init__(self, requests: int, replies: int) -> None:
        self.requests = requests
        self.replies = replies

    def receive(self) -> tuple[int, dict[str, Any], bytes]:
        """Reads one frame: id, JSON, body."""
        number, head, body = HEADER.unpack(self._read(HEADER.size))
        if head > MAX_HEAD or body > MAX_BODY:
            raise HostGone
        return number, json.loads(self._read(head)), self._read(body)

    def send(self, number: int, head: dict[str, Any], body: bytes = b"") -> None:
        """Writes one frame."""
        text = json.dumps(head).encode()
        view = memoryview(HEADER.pack(number, len(text), len(body)) + text + body)
        while view:
            view = view[os.write(self.replies, view) :]

    def gone(self) -> NoReturn:
        """Ends the service: the host closed its end."""
        raise HostGone

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self.requests, min(size - len(data), 1 << 20))
            if not chunk:
                raise HostGone
            data += chunk
        return bytes(data)


class Counters:
    """What the control group counts, of either version: kills for memory, refused forks, CPU time."""

    PLACES = (
        ("oom", "/sys/fs/cgroup/memory/memory.oom_control", b"oom_kill ", 1.0),
        ("oom", "/sys/fs/cgroup/memory.events", b"oom_kill ", 1.0),
        ("pids", "/sys/fs/cgroup/pids/pids.events", b"max ", 1.0),
        ("pids", "/sys/fs/cgroup/pids.events", b"max ", 1.0),
        ("cpu_s", "/sys/fs/cgroup/cpuacct/cpuacct.usage", b"", 1e-9),
        ("cpu_s", "/sys/fs/cgroup/cpu.stat", b"usage_usec ", 1e-6),
    )

    def __init__(self) -> None:
        self._open: list[tuple[str, int, bytes, float]] = []
        for name, path, key, unit in self.PLACES:
            try:
                self._open.append((name, os.open(path, os.O_RDONLY), key, unit))
            except OSError:
                continue

    def read(self) -> dict[str, float]:
        """The numbers now."""
        found = {}
        for name, fd, key, unit in self._open:
            for line in os.pread(fd, 4096, 0).splitlines():
                if line.startswith(key):
                    found[name] = float(line[len(key) :]) * unit
        return found


class Runner:
    """Runs what the host asks for."""

    def __init__(self, host: Host, wake: int, config: dict[str, Any], modules: tuple[Any, Any]) -> None:
        self.host, self.wake, self.config = host, wake, config
        self.calls, self.files = modules
        self.ends_at = time.monotonic() + config["lifetime_s"]
        self.counters = Counters()
        self.ended: dict[int, tuple[int, Any]] = {}
        # kill(-1) outside a namespace of its own would take the whole machine along.
        self.kills_all = config["kill"] == "namespace" and (os.getpid() == 1 or os.getppid() == 1)
        self.groups: set[int] = set()

    def serve(self) -> None:
        """Answers requests, and collects the orphans that come to PID 1 in between."""
        poll = select.poll()
        poll.register(self.host.requests, select.POLLIN)
        poll.register(self.wake, select.POLLIN)
        while time.monotonic() < self.ends_at:
            ready = {fd for fd, _ in poll.poll(min(60.0, self.ends_at - time.monotonic()) * 1000 + 1)}
            if self.wake in ready:
                self.reap()
            if self.host.requests in ready:
                number, head, body = self.host.receive()
                reply, data = self.answer(head, body)
                self.host.send(number, reply, data)

    def answer(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """One request: JSON and bytes of the reply."""
        if head["op"] == "ping":
            return {"status": "ok"}, b""
        if head["op"] == "kill":
            return {"status": "ok", "survivors": self.kill_all()}, b""
        self.ended.clear()
        reply: tuple[dict[str, Any], bytes] = self.calls.Call(self, head, body).run()
        return reply

    def fork(self) -> int:
        """Forks; where no process can be made, the agent's own are in the way and are killed."""
        try:
            return os.fork()
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.ENOMEM):
                raise
            self.kill_all()
            return os.fork()

    def reap(self) -> None:
        """Collects children that have ended: their status and what they used."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.wake, 4096)
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self.ended[pid] = (status, usage)

    def kill_all(self) -> bool:
        """Kills every process but init and this one, until the kernel knows of no other. True if some are left."""
        if not self.kills_all:
            for group in self.groups:
                try:
                    os.killpg(group, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
            self.groups.clear()
            self.reap()
            return False
        give_up = time.monotonic() + KILL_S
        pause = 0.0002
        while time.monotonic() < give_up:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                return False
            self.reap()
            time.sleep(pause)
            pause = min(0.02, pause * 1.5)
        return True
