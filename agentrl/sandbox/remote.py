"""A sandbox that a runner serves: what Docker, bubblewrap and the unsafe local one have in common."""

from __future__ import annotations

import os
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agentrl.sandbox.contract import MIB, TMP, WORKSPACE, Artefact, Entry, ExecResult, Limits, Sandbox
from agentrl.sandbox.errors import FileRefused, SandboxDied, SandboxError, SandboxUsageError
from agentrl.sandbox.wire import MAX_BODY, Channel, WireError
from agentrl.types import JSON

BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORKSPACE,
    "USER": "agent",
    "LOGNAME": "agent",
    "LANG": "C.UTF-8",
    "TMPDIR": TMP,
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""The only variables that a program in a sandbox is given, besides those of its call."""

GRACE_S = 15.0
"""How much longer than its deadline a call may take to be answered before the sandbox counts as lost."""
FILE_S = 30.0
_CLOSED = ExecResult("sandbox_error", evidence={"cause": "the sandbox is closed"})
_LAST_CALL_S = 3.0
MAX_FILES = 10_000
PRELOAD = ("collections", "functools", "itertools", "json", "math", "random", "re", "string", "typing", "dataclasses")


class RunnerSandbox(Sandbox):
    """Speaks with a runner; a subclass says how it is reached and how it is ended.

    Args:
        name: Unique on this machine.
        image: By digest.
        limits: Of the sandbox.
        channel: To the runner, not yet started.
    """

    def __init__(self, name: str, image: str, limits: Limits, channel: Channel) -> None:
        self.id = name
        self.image = image
        self.limits = limits
        self._channel = channel
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._obituary: ExecResult | None = None
        self._closed = False
        self._on_close: list[Callable[[], None]] = []

    # -- what a subclass says -----------------------------------------------------------------------------------------

    @abstractmethod
    def _destroy(self) -> None:
        """Ends the sandbox by force. May be called again."""

    @abstractmethod
    def _cause_of_death(self) -> ExecResult:
        """Why the runner is gone: `oom` where the agent's use of memory took it along, else `sandbox_error`."""

    def _count(self) -> dict[str, float]:
        """What a control group outside counts: `oom`, `pids` and `cpu_s`; empty where the runner counts itself."""
        return {}

    # -- the contract -------------------------------------------------------------------------------------------------

    def start(self, config: Mapping[str, Any], deadline_s: float) -> None:
        """Sends the runner and waits until it serves.

        Raises:
            SandboxError: It did not come up; nothing of it is left.
        """
        try:
            self._channel.start({"preload": PRELOAD, **config}, deadline_s)
        except (OSError, WireError) as error:
            said = self._channel.stream.diagnostics()
            self.close()
            words = said.splitlines()[-1] if said else str(error) or type(error).__name__
            raise SandboxError(f"the sandbox {self.id} did not start within {deadline_s:g} s: {words}") from error

    def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        keep_background: bool = False,
    ) -> ExecResult:
        """As Sandbox.exec."""
        if isinstance(argv, str) or not argv or any("\0" in word for word in argv):
            raise SandboxUsageError(f"expected a program and its arguments, found {argv!r}: use ['sh', '-c', text].")
        head = {"op": "exec", "argv": list(argv)}
        return self._run(head, stdin, cwd, env, limits, keep_background)

    def exec_python(
        self,
        source: str,
        *,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        keep_background: bool = False,
    ) -> ExecResult:
        """As Sandbox.exec_python."""
        text = source.encode(errors="replace")
        return self._run({"op": "python", "source": len(text)}, text + stdin, cwd, env, limits, keep_background)

    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """As Sandbox.write."""
        self._file({"do": "write", "path": path, "mode": mode & 0o777}, path, data)

    def read(self, path: str, max_bytes: int = MIB) -> bytes:
        """As Sandbox.read."""
        return self._file({"do": "read", "path": path, "max_bytes": max_bytes}, path, room=max_bytes)[1]

    def list(self, root: str = WORKSPACE, max_entries: int = 1000) -> tuple[Entry, ...]:
        """As Sandbox.list."""
        reply, _ = self._file({"do": "list", "path": root, "max_entries": max_entries}, root)
        return tuple(Entry(path, kind, size) for path, kind, size in reply["entries"])

    def export(self, allow: Sequence[str], max_bytes: int = 4 * MIB) -> Artefact:
        """As Sandbox.export."""
        head = {"do": "export", "allow": list(allow), "max_bytes": max_bytes, "max_files": MAX_FILES}
        reply, data = self._file(head, WORKSPACE, room=max_bytes)
        files, at = {}, 0
        for path, size in reply["files"]:
            if not _is_plain(path):
                raise SandboxDied(f"the sandbox {self.id} answered with the path {path!r}, which no export may hold.")
            files[path] = data[at : at + size]
            at += size
        return Artefact(files, tuple((path, why) for path, why in reply["skipped"]))

    def ping(self, deadline_s: float = 5.0) -> bool:
        """As Sandbox.ping."""
        with self._lock:
            return self._exchange({"op": "ping"}, b"", deadline_s) is not None

    def close(self) -> None:
        """As Sandbox.close."""
        if os.getpid() != self._pid:
            return  # a forked copy: the sandbox is the parent's
        if self._closed:
            return
        self._closed = True
        self._channel.stream.shut()
        try:
            self._destroy()
        finally:
            # A descriptor that is closed under a thread that waits on it may be another's by the time it wakes.
            if self._lock.acquire(timeout=_LAST_CALL_S):
                self._channel.stream.close()
                self._lock.release()
            for hook in self._on_close:
                hook()

    def on_close(self, hook: Callable[[], None]) -> None:
        """As Sandbox.on_close."""
        self._on_close.append(hook)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _run(
        self,
        head: dict[str, JSON],
        body: bytes,
        cwd: str,
        env: Mapping[str, str] | None,
        limits: Limits | None,
        keep_background: bool,
    ) -> ExecResult:
        call = limits or self.limits
        self.limits.check_call(call)
        if len(body) > MAX_BODY:
            raise SandboxUsageError(f"expected at most {MAX_BODY} bytes of input, found {len(body)}.")
        head |= {"cwd": cwd, "env": {**BASE_ENV, **(env or {})}, "limits": _call_limits(call), "keep": keep_background}
        with self._lock:
            before = self._count()
            answer = self._exchange(head, body, call.wall_s + GRACE_S)
            if answer is None:
                return self._obituary or ExecResult("sandbox_error")
            return self._attribute(_result(*answer), before)

    def _attribute(self, result: ExecResult, before: dict[str, float]) -> ExecResult:
        """Adds what only the host's counters know."""
        after = self._count()
        if not after:
            return result
        kills = int(after["oom"] - before["oom"])
        status = "oom" if kills and result.status in ("nonzero", "signal") else result.status
        evidence = {**result.evidence, "refused_forks": int(after["pids"] - before["pids"])}
        cpu_s = max(result.cpu_s, after["cpu_s"] - before["cpu_s"])
        return replace(result, status=status, oom_kills=kills, cpu_s=cpu_s, evidence=evidence)

    def _file(
        self, head: dict[str, JSON], path: str, body: bytes = b"", *, room: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        if max(room, len(body)) > MAX_BODY // 2:
            raise SandboxUsageError(f"expected at most {MAX_BODY // 2} bytes a transfer, found {max(room, len(body))}.")
        cap = room + 4 * MIB
        limits = {**_call_limits(self.limits), "wall_s": FILE_S, "stdout_cap": cap, "stdout_kill": cap}
        request = {"op": "file", "limits": limits, **head}
        with self._lock:
            answer = self._exchange(request, body, FILE_S + GRACE_S)
        if answer is None:
            words = (self._obituary or ExecResult("sandbox_error")).evidence.get("cause", "it ended")
            raise SandboxDied(f"the sandbox {self.id} is gone ({words}): use a fresh one.")
        result = _result(*answer)
        if not result.ok:
            why = result.evidence.get("problem", result.status)
            raise FileRefused(f"{head['do']} {path}: failed in the sandbox: {why}.")
        size = int.from_bytes(result.stdout[:4], "big")
        reply: dict[str, Any] = _json(result.stdout[4 : 4 + size])
        if "refused" in reply:
            raise FileRefused(f"{head['do']} {path}: {reply['refused']}.")
        return reply, result.stdout[4 + size :]

    def _exchange(
        self, head: dict[str, JSON], body: bytes, deadline_s: float
    ) -> tuple[dict[str, Any], bytes, float] | None:
        """One request; None where the sandbox is or just went out of order, and then `_obituary` says why."""
        if self._obituary is not None or self._closed or os.getpid() != self._pid:
            self._obituary = self._obituary or _CLOSED
            return None
        began = time.monotonic()
        try:
            reply, data = self._channel.exchange(head, body, deadline_s)
        except TimeoutError:
            evidence = {"cause": f"the runner did not answer within {deadline_s:g} s"}
            self._obituary = ExecResult("sandbox_error", evidence=evidence)
        except (OSError, WireError, ValueError):
            self._obituary = _CLOSED if self._closed else self._cause_of_death()
        except BaseException:
            # Ctrl-C between a request and its reply: the next reply would be another call's.
            self._obituary = ExecResult("sandbox_error", evidence={"cause": "a call was interrupted"})
            self.close()
            raise
        else:
            return reply, data, time.monotonic() - began
        self._destroy()
        return None


def _is_plain(path: str) -> bool:
    """Whether a path stays below a folder that it is laid over. Asked on the host: what answered may be the agent's."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def _json(data: bytes) -> Any:
    import json

    return json.loads(data)


def _call_limits(limits: Limits) -> dict[str, JSON]:
    names = ("wall_s", "cpu_s", "file_size", "nofile", "stdout_cap", "stdout_kill")
    return {name: getattr(limits, name) for name in names}


def _result(reply: dict[str, Any], data: bytes, round_trip_s: float) -> ExecResult:
    out = reply.pop("out", 0)
    evidence = {**reply.pop("evidence", {}), "round_trip_s": round_trip_s}
    return ExecResult(**reply, stdout=data[:out], stderr=data[out:], evidence=evidence)
