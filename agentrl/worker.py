"""Work that can be killed: a function that runs in a program of its own.

A Worker starts that program by exec (never by fork), so that it inherits no lock, socket or secret, and speaks
length-prefixed JSON with it over two pipes. Starting takes about 30 ms and the import of the function's module; a call
of a warm one about 0.05 ms.

What is covered:
- A deadline kills the program and everything it started, also processes that called setsid or were orphaned, before
  `call` raises. So do `close`, an exception in the middle of a call (Ctrl-C), and the caller's own end by any signal.
- Address space, CPU time of one call, size of written files and size of a reply are bounded.
- The environment is clean, the folder is `/`, standard input is empty and output goes nowhere: printing breaks nothing.
- After a crash or a kill the next call starts a new program. After a fork the child's copy starts one of its own.

What is not covered:
- It is no sandbox. The function is trusted, what it is given is not: it may read files and open sockets as the caller
  may, and code that means harm can write to the pipes or kill its supervisor.
- Processes that multiply faster than they are found and killed, and processes in another PID namespace.
- What a call leaves running in the background lives until the next kill or close.
- Elsewhere than on Linux only the working process itself is killed, and memory is not bounded.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from agentrl.errors import WorkerCallError, WorkerDied, WorkerError, WorkerTimeout
from agentrl.types import JSON

_CHILD = str(Path(__file__).with_name("_worker_child.py"))
_MIB = 1 << 20
_END_TIMEOUT_S = 10.0
_inheritors: weakref.WeakSet[Worker | WorkerPool] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """What one call may take.

    Attributes:
        memory_mib: Address space beyond what importing the function's module took, MiB.
        cpu_s: CPU time of the working process in one call, seconds; rounded up by at most one.
        file_mib: Largest file that may be written, MiB; 0 for none.
        reply_mib: Largest reply, MiB.
        start_s: Wall time that starting and importing may take, seconds; a call's deadline does not pay for it.
    """

    memory_mib: int = 512
    cpu_s: int = 60
    file_mib: int = 64
    reply_mib: int = 8
    start_s: float = 30.0

    def as_setup(self) -> dict[str, int]:
        """The numbers that the program needs, in bytes and seconds."""
        return {
            "memory_bytes": self.memory_mib * _MIB,
            "cpu_s": self.cpu_s,
            "file_bytes": self.file_mib * _MIB,
            "reply_bytes": self.reply_mib * _MIB,
        }


class Worker:
    """One function in one program; see the module for what is promised.

    Args:
        target: `module:function`; it takes one JSON value and returns one. The module is found on this process's
            `sys.path`.
        limits: Bounds of a call.
        env: Environment variables besides PATH and LANG.
    """

    def __init__(
        self, target: str, limits: WorkerLimits | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        module, _, function = target.partition(":")
        if not module or not function:
            raise WorkerError(f"expected a worker's target as 'module:function', found {target!r}.")
        self.target = target
        self.limits = limits or WorkerLimits()
        self._env = {"PATH": os.defpath, "LANG": "C.UTF-8", **(env or {})}
        self._lock = threading.Lock()
        self._program: _Program | None = None
        self._closed = False
        _survive_forks(self)

    def call(self, payload: JSON, deadline_s: float) -> JSON:
        """Runs the function on `payload`; one call at a time, others wait for it without losing their own time.

        Args:
            payload: JSON-able.
            deadline_s: Wall time from when the work begins, seconds.

        Returns:
            What the function returned.

        Raises:
            WorkerTimeout: The deadline passed; nothing that the call started is left.
            WorkerDied: The program ended by itself: a crash, or a limit that kills.
            WorkerCallError: The function raised, its reply is too large or no JSON, or it cannot be imported.
        """
        request = json.dumps(payload).encode()
        with self._lock:
            if self._closed:
                raise WorkerError(f"worker {self.target} is closed: make a new one.")
            program = self._program or self._start()
            reply = self._exchange(program, request, deadline_s)
        if "error" in reply:
            raise WorkerCallError(reply["error"])
        return reply["ok"]

    def close(self) -> None:
        """Ends the program and all it started, after a call that is under way. May be called again."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> _Program:
        self._program = program = _Program(self._env, self.limits.reply_mib * _MIB)
        path = [str(Path(entry).absolute()) for entry in sys.path]
        setup = {"target": self.target, "path": path, "limits": self.limits.as_setup()}
        reply = self._exchange(program, json.dumps(setup).encode(), self.limits.start_s)
        if "error" in reply:
            self._end()
            raise WorkerCallError(f"{reply['error']} (while worker {self.target} was imported)")
        return program

    def _exchange(self, program: _Program, request: bytes, deadline_s: float) -> dict[str, JSON]:
        settled = False
        try:
            frame = program.exchange(request, deadline_s)
            settled = True
        except TimeoutError as error:
            raise WorkerTimeout(
                f"worker {self.target} did not answer within {deadline_s:g} s and was killed with all it started."
            ) from error
        except (EOFError, OSError) as error:
            raise WorkerDied(f"worker {self.target} ended in a call: {program.obituary()}") from error
        finally:
            if not settled:
                self._end()
        reply: dict[str, JSON] = json.loads(frame)
        return reply

    def _end(self) -> None:
        if self._program is not None:
            self._program.end()
            self._program = None

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        if self._program is not None:
            self._program.abandon()
            self._program = None


class WorkerPool:
    """Warm workers of one function, shared by the threads of a process and started as they are needed.

    Args:
        target: As for Worker.
        size: Most programs at once.
        limits: Bounds of a call.
        env: As for Worker.
    """

    def __init__(
        self, target: str, size: int, limits: WorkerLimits | None = None, *, env: Mapping[str, str] | None = None
    ) -> None:
        if size < 1:
            raise WorkerError(f"expected a pool of at least 1 worker, found size {size}.")
        self._workers = [Worker(target, limits, env=env) for _ in range(size)]
        self._after_fork()
        _survive_forks(self)

    def call(self, payload: JSON, deadline_s: float) -> JSON:
        """As `Worker.call`, by whichever worker is free; waiting for one does not count towards the deadline."""
        worker = self._free.get()
        try:
            return worker.call(payload, deadline_s)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Closes every worker. May be called again."""
        for worker in self._workers:
            worker.close()

    def _after_fork(self) -> None:
        # Last in, first out: the worker that was just used is warm, and the others may never have to start.
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._free.put(worker)


class _Program:
    """The started program: its pipes, and its end."""

    def __init__(self, env: Mapping[str, str], reply_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env=dict(env),
            start_new_session=True,
        )
        assert self._process.stdin is not None  # noqa: S101 (both are pipes, which the type does not say)
        assert self._process.stdout is not None  # noqa: S101
        self._requests = self._process.stdin.fileno()
        self._replies = self._process.stdout.fileno()
        self._reply_bytes = reply_bytes
        for fd in (self._requests, self._replies):
            os.set_blocking(fd, False)
        self._finalizer = weakref.finalize(self, _end, self._process)

    def exchange(self, request: bytes, deadline_s: float) -> bytes:
        """Sends a frame and reads one.

        Raises:
            TimeoutError: Neither was done in time.
            EOFError: The program closed its end, or its frame is longer than a reply may be.
            OSError: The pipe broke.
        """
        deadline = time.monotonic() + deadline_s
        self._write(len(request).to_bytes(4, "big") + request, deadline)
        size = int.from_bytes(self._read(4, deadline), "big")
        if size > self._reply_bytes:
            raise EOFError
        return self._read(size, deadline)

    def obituary(self) -> str:
        """Waits for the program's end and says how it ended."""
        self.end()
        code = self._process.returncode
        if code <= 128:
            return f"exit code {code}. The next call starts a new one."
        name = signal.Signals(code - 128).name if code - 128 in set(signal.Signals) else f"signal {code - 128}"
        return f"killed by {name} (a crash, or a limit on memory or CPU time). The next call starts a new one."

    def end(self) -> None:
        """Kills the program with all it started and waits for that."""
        self._finalizer()

    def abandon(self) -> None:
        """In a forked child: lets go of pipes that belong to the parent, whose program lives on."""
        self._finalizer.detach()
        _close_pipes(self._process)
        self._process.returncode = 0

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._requests, view) :]
            except BlockingIOError:
                _wait(self._requests, select.POLLOUT, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            _wait(self._replies, select.POLLIN, deadline)
            chunk = os.read(self._replies, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return bytes(data)


def _wait(fd: int, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


def _end(process: subprocess.Popen[bytes]) -> None:
    # SIGTERM as well as the closed pipe: a forked copy of this process may hold the pipe open.
    process.terminate()
    _close_pipes(process)
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _survive_forks(inheritor: Worker | WorkerPool) -> None:
    _inheritors.add(inheritor)
    _hook_forks()


@cache
def _hook_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for inheritor in list(_inheritors):
        inheritor._after_fork()
