"""The program that a Worker starts. It is run by path and imports no agentrl, so that it is up in about 20 ms.

Two processes: a supervisor, and under it the one that does the work. The supervisor adopts whatever the work leaves
behind (PR_SET_CHILD_SUBREAPER), so when the caller closes its pipe, asks with SIGTERM, or is itself gone, it finds and
kills every descendant, also those that called setsid or lost their parent.

Frames on both pipes: four bytes of length, big-endian, then JSON. The first request is
`{"target", "path", "limits"}`; each further one is a payload. A reply is `{"ok": value}` or `{"error": text}`.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_TIMEOUT_S = 5.0
_ERROR_CHARS = 2000


def main() -> None:
    """Splits into the supervisor and the process that works."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the caller's thread may have blocked the signals needed here
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # what the function prints must never reach the pipe of replies
    os.close(null)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    supervisor = os.getpid()
    signals = _signal_pipe()
    worker = os.fork()
    if worker:
        os.close(replies)
        _supervise(worker, requests, signals)
    else:
        _leave_supervisor(signals)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:
            _work(requests, replies)
    os._exit(0)


def _prctl(option: int, value: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# -- the supervisor ---------------------------------------------------------------------------------------------------


def _signal_pipe() -> tuple[int, int]:
    """A pipe that gets a byte at SIGTERM and SIGCHLD: poll then wakes without a race."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    return readable, writable


def _leave_supervisor(signals: tuple[int, int]) -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for fd in signals:
        os.close(fd)


def _supervise(worker: int, requests: int, signals: tuple[int, int]) -> None:
    """Waits for the worker's end, a SIGTERM, or the caller's end of the pipe; then kills all there is, and ends."""
    poll = select.poll()
    poll.register(requests, 0)  # no events asked for: only the hang-up is reported
    poll.register(signals[0], select.POLLIN)
    codes: dict[int, int] = {}
    stop = False
    while worker not in codes and not stop:
        ready = dict(poll.poll())
        stop = requests in ready or (signals[0] in ready and signal.SIGTERM in os.read(signals[0], 64))
        codes |= _reap()
    if worker not in codes:
        os.kill(worker, signal.SIGKILL)
    codes |= _kill_descendants()  # a worker that was already dying keeps the exit code of its own
    code = codes.get(worker, 0)
    os._exit(code if code >= 0 else 128 - code)


def _reap() -> dict[int, int]:
    """Collects the children that have ended: their exit codes, negative for signals."""
    codes = {}
    while _has_children():
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _kill_descendants() -> dict[int, int]:
    """Kills until no child is left: orphans come to the supervisor, so none can hide behind a dead parent."""
    codes: dict[int, int] = {}
    give_up = time.monotonic() + _KILL_TIMEOUT_S
    while _has_children() and time.monotonic() < give_up:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.001)
        codes |= _reap()
    return codes


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            stat = (entry / "stat").read_text(errors="replace")
        except OSError:
            continue
        parent = int(stat.rpartition(")")[2].split()[1])
        children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


# -- the worker -------------------------------------------------------------------------------------------------------


def _work(requests: int, replies: int) -> None:
    """Answers requests until the pipe ends."""
    first = _receive(requests)
    if first is None:
        return
    setup = json.loads(first)
    limits = setup["limits"]
    sys.path[:] = setup["path"]
    function, problem = _load(setup["target"])
    _send(replies, {"ok": None} if function else {"error": problem})
    if function is None:
        return
    _limit(limits)
    while (request := _receive(requests)) is not None:
        _limit_cpu(limits["cpu_s"])
        _send_capped(replies, _answer(function, request), limits["reply_bytes"])


def _load(target: str) -> tuple[Callable[[Any], Any] | None, str]:
    """The boundary to the import of someone's module: whatever goes wrong in it is reported, not raised."""
    import importlib

    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return None, _describe(error)
    return (function, "") if callable(function) else (None, f"TypeError: {target} is not callable")


def _answer(function: Callable[[Any], Any], request: bytes) -> bytes:
    """The boundary to the function: whatever it raises is reported to the caller."""
    try:
        return json.dumps({"ok": function(json.loads(request))}, allow_nan=False).encode()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return json.dumps({"error": _describe(error)}).encode()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARS]


def _limit(limits: Mapping[str, int]) -> None:
    """Sets the limits of calls: what importing took comes on top of the memory that a call may take."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file_bytes"],) * 2)
    if sys.platform == "linux":
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + limits["memory_bytes"],) * 2)


def _limit_cpu(cpu_s: int) -> None:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + 1 + cpu_s, hard))


def _send_capped(replies: int, reply: bytes, cap: int) -> None:
    if len(reply) > cap:
        _send(replies, {"error": f"OverflowError: the reply has {len(reply)} bytes, at most {cap} are allowed"})
    else:
        _send_frame(replies, reply)


def _send(replies: int, reply: Mapping[str, Any]) -> None:
    _send_frame(replies, json.dumps(reply).encode())


def _send_frame(fd: int, data: bytes) -> None:
    view = memoryview(len(data).to_bytes(4, "big") + data)
    while view:
        view = view[os.write(fd, view) :]


def _receive(fd: int) -> bytes | None:
    head = _read(fd, 4)
    return None if head is None else _read(fd, int.from_bytes(head, "big"))


def _read(fd: int, size: int) -> bytes | None:
    chunks = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


if __name__ == "__main__":
    main()
