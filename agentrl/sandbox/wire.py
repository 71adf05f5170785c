"""Frames between the host and the runner of a sandbox, and the program text that the host sends first."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from functools import cache
from importlib import resources
from typing import Any

HEADER = struct.Struct(">QII")
MAX_HEAD = 1 << 22
MAX_BODY = 1 << 27
_CHUNK = 1 << 18

BOOT = """
import os, sys, types
def read(size):
    data = b""
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            os._exit(0)
        data += chunk
    return data
def load(name):
    module = types.ModuleType(name)
    exec(compile(read(int(read(8))), "<" + name + ">", "exec"), module.__dict__)
    return module
runner, calls, files = load("runner"), load("calls"), load("files")
runner.main(calls, files)
"""
"""What the interpreter in the sandbox is started with (`python3 -I -B -c`): it reads the runner and becomes it."""


class WireError(Exception):
    """The other side closed, or what it sent is no frame that was asked for."""


@cache
def runner_text() -> bytes:
    """The runner's parts, each behind eight digits of its length."""
    folder = resources.files("agentrl.sandbox")
    parts = [folder.joinpath(f"{name}.py").read_bytes() for name in ("_runner", "_runner_call", "_runner_files")]
    return b"".join(b"%08d" % len(part) + part for part in parts)


class Stream(ABC):
    """Bytes to and from a runner. One thread at a time."""

    @abstractmethod
    def fileno_in(self) -> int:
        """Descriptor that is ready when the runner wrote."""

    @abstractmethod
    def fileno_out(self) -> int:
        """Descriptor that is ready when the runner can take more."""

    @abstractmethod
    def send(self, data: memoryview) -> int:
        """Sends some of it without waiting: how much.

        Raises:
            BlockingIOError: Nothing can be sent now.
            OSError: The other side is gone.
        """

    @abstractmethod
    def receive(self) -> bytes:
        """What the runner wrote next, without waiting; empty at the end.

        Raises:
            BlockingIOError: Nothing is there now.
            OSError: The other side is gone.
        """

    @abstractmethod
    def diagnostics(self) -> str:
        """The last that the runner's interpreter said of itself; a traceback, where it broke."""

    @abstractmethod
    def shut(self) -> None:
        """Ends the connection but keeps the descriptors, since another thread may be waiting on them. Never raises."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the descriptors, once no other thread uses them. May be called again, never raises."""


class Channel:
    """Requests and replies over a stream. One thread at a time.

    Args:
        stream: It is closed with the channel.
    """

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._number = 0
        self._buffer = bytearray()

    def start(self, config: dict[str, Any], deadline_s: float) -> dict[str, Any]:
        """Sends the runner and its settings, and waits until it serves.

        Raises:
            WireError, TimeoutError, OSError: As `exchange`.
        """
        self._send(runner_text(), time.monotonic() + deadline_s)
        return self.exchange(config, b"", deadline_s)[0]

    def exchange(self, head: dict[str, Any], body: bytes, deadline_s: float) -> tuple[dict[str, Any], bytes]:
        """One request and its reply.

        Raises:
            TimeoutError: It did not answer in time.
            WireError: It ended, or answered something else.
            OSError: The connection broke.
        """
        deadline = time.monotonic() + deadline_s
        self._number += 1
        text = json.dumps(head).encode()
        if len(text) > MAX_HEAD or len(body) > MAX_BODY:
            raise WireError(f"a request of {len(text)} and {len(body)} bytes is larger than a frame may be")
        self._send(HEADER.pack(self._number, len(text), len(body)) + text + body, deadline)
        number, head_size, body_size = HEADER.unpack(self._receive(HEADER.size, deadline))
        if number != self._number or head_size > MAX_HEAD or body_size > MAX_BODY:
            raise WireError(f"expected the reply to request {self._number}, found id {number}")
        reply: dict[str, Any] = json.loads(self._receive(head_size, deadline))
        return reply, self._receive(body_size, deadline)

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self.stream.send(view[:_CHUNK]) :]
            except BlockingIOError:
                _wait(self.stream.fileno_out(), select.POLLOUT, deadline)

    def _receive(self, size: int, deadline: float) -> bytes:
        while len(self._buffer) < size:
            try:
                chunk = self.stream.receive()
            except BlockingIOError:
                _wait(self.stream.fileno_in(), select.POLLIN, deadline)
                continue
            if not chunk:
                raise WireError("the runner ended")
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data


def _wait(fd: int, events: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError


class DockerStream(Stream):
    """The hijacked connection of an attached container: raw bytes in, multiplexed frames of stdout and stderr out.

    Args:
        connection: The socket of the engine.
        wrapper: What the engine's client gave the socket in, and has to be closed with it.
    """

    def __init__(self, connection: socket.socket, wrapper: Any) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._wrapper = wrapper
        self._raw = bytearray()
        self._stderr = bytearray()

    def fileno_in(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def fileno_out(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, data: memoryview) -> int:
        """As Stream.send."""
        return self._socket.send(data)

    def receive(self) -> bytes:
        """As Stream.receive: what is of stdout. Each part has a header: kind, three zeros, length."""
        while True:
            if len(self._raw) >= 8:
                size = int.from_bytes(self._raw[4:8], "big")
                if len(self._raw) >= 8 + size:
                    kind, data = self._raw[0], bytes(self._raw[8 : 8 + size])
                    del self._raw[: 8 + size]
                    if kind == 1 and data:
                        return data
                    self._stderr += data
                    del self._stderr[:-4096]
                    continue
            chunk = self._socket.recv(_CHUNK)
            if not chunk:
                return b""
            self._raw += chunk

    def diagnostics(self) -> str:
        """The tail of the container's stderr."""
        return self._stderr.decode(errors="replace").strip()

    def shut(self) -> None:
        """As Stream.shut: the runner sees the end of its input, and who waits here is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """As Stream.close."""
        for part in (getattr(self._wrapper, "_response", None), self._wrapper, self._socket):
            if part is not None:
                with contextlib.suppress(OSError, ValueError):  # the second where one has closed the other's file
                    part.close()


class PipeStream(Stream):
    """The standard input and output of a runner that is a child of this process.

    Args:
        process: With pipes for both.
        errors: Descriptor of the file that its standard error goes to; closed with the stream.
    """

    def __init__(self, process: subprocess.Popen[bytes], errors: int) -> None:
        self._pipes = [pipe for pipe in (process.stdin, process.stdout) if pipe is not None]
        self._errors = errors
        for pipe in self._pipes:
            os.set_blocking(pipe.fileno(), False)

    def fileno_in(self) -> int:
        """The pipe of what it writes."""
        return self._pipes[1].fileno()

    def fileno_out(self) -> int:
        """The pipe of what it reads."""
        return self._pipes[0].fileno()

    def send(self, data: memoryview) -> int:
        """As Stream.send."""
        return os.write(self.fileno_out(), data)

    def receive(self) -> bytes:
        """As Stream.receive."""
        return os.read(self.fileno_in(), _CHUNK)

    def diagnostics(self) -> str:
        """The tail of its standard error."""
        try:
            size = os.fstat(self._errors).st_size
            return os.pread(self._errors, 4096, max(0, size - 4096)).decode(errors="replace").strip()
        except OSError:
            return ""

    def shut(self) -> None:
        """As Stream.shut: nothing takes the place of the pipe to the runner, which sees the end of its input."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno_out(), inheritable=False)
            os.close(null)

    def close(self) -> None:
        """As Stream.close."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.close()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1
