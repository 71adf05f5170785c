"""One call in a sandbox: part of the program that `_runner.py` describes."""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

CHUNK = 1 << 16
KILL_S = 5.0
LIBC = ctypes.CDLL(None)
PR_SET_DUMPABLE = 4


def prctl(option: int, value: int) -> None:
    """Sets a property of this process."""
    LIBC.prctl(option, value, 0, 0, 0)


class Kept:
    """Head and tail of an output."""

    def __init__(self, cap: int) -> None:
        self.total = 0
        self._head, self._tail = bytearray(), bytearray()
        self.head_cap, self._tail_cap = cap - cap // 2, cap // 2

    def add(self, data: bytes) -> None:
        """Takes what was written next."""
        self.total += len(data)
        room = self.head_cap - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        if len(self._tail) > 2 * self._tail_cap + CHUNK:
            del self._tail[: len(self._tail) - self._tail_cap]

    def left_out(self) -> int:
        """Bytes between the two."""
        return max(0, self.total - self.head_cap - self._tail_cap)

    def kept(self) -> bytes:
        """What was kept."""
        return bytes(self._head + self._tail[max(0, len(self._tail) - self._tail_cap) :])


class Call:
    """One program, Python text or file operation, in a child with the agent's rights."""

    def __init__(self, runner: Any, head: dict[str, Any], body: bytes) -> None:
        self.runner, self.head, self.body = runner, head, body
        self.limits = head["limits"]
        self.out, self.err = Kept(self.limits["stdout_cap"]), Kept(self.limits["stdout_cap"])
        self.stop: str | None = None
        self.survivors = False

    def run(self) -> tuple[dict[str, Any], bytes]:
        """Starts it, follows it to its end, and says how it ended."""
        before = self.runner.counters.read()
        began = time.monotonic()
        stdin, out, err, failed = os.pipe(), os.pipe(), os.pipe(), os.pipe()
        try:
            pid = self.runner.fork()
        except OSError as error:
            for pair in (stdin, out, err, failed):
                os.close(pair[0])
                os.close(pair[1])
            return {"status": "exec_error", "evidence": {"fork": str(error)}, "out": 0}, b""
        if pid == 0:
            self.child(stdin[0], out[1], err[1], failed[1])
        self.runner.groups.add(pid)
        for fd in (stdin[0], out[1], err[1], failed[1]):
            os.close(fd)
        self.follow(pid, stdin[1], out[0], err[0], began + self.limits["wall_s"])
        os.set_blocking(failed[0], False)
        try:
            problem = os.read(failed[0], 4096).decode(errors="replace")
        except BlockingIOError:
            problem = ""
        os.close(failed[0])
        return self.report(pid, problem, before, time.monotonic() - began)

    # -- the child --------------------------------------------------------------------------------------------------

    def child(self, stdin: int, out: int, err: int, failed: int) -> NoReturn:
        """Becomes the agent and does the work. Never returns."""
        try:
            self.become_agent(stdin, out, err, failed)
            if self.head["op"] == "exec":
                for number in (signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                os.execvpe(self.head["argv"][0], self.head["argv"], self.head["env"])  # noqa: S606
            elif self.head["op"] == "python":
                source = self.body[: self.head["source"]].decode()
                os.close(3)
                run_python(source, self.head)
            else:
                self.runner.files.work(self.runner.config["roots"], self.head, self.body)
        except BaseException as error:  # noqa: BLE001
            os.write(3, f"{type(error).__name__}: {error}"[:2000].encode(errors="replace"))
        finally:
            os._exit(127)

    def become_agent(self, stdin: int, out: int, err: int, failed: int) -> None:
        """Lets go of everything that is the runner's: descriptors, signals, group, user."""
        config, limits = self.runner.config, self.limits
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        high = os.dup(failed) if failed == 3 else failed
        os.dup2(high, 3, inheritable=False)
        os.closerange(4, 65536)
        for name, value in (
            ("CORE", 0),
            ("FSIZE", limits["file_size"]),
            ("NOFILE", limits["nofile"]),
            ("DATA", config.get("data")),
            ("NPROC", config.get("nproc")),
        ):
            if value is not None:
                resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
        cpu_s = math.ceil(limits["cpu_s"])
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # a signal that says why, then one that kills
        if self.head["op"] != "file":
            self.prefer_for_oom()
        if config.get("uid") is not None:
            os.setgroups([])
            os.setresgid(config["gid"], config["gid"], config["gid"])
            os.setresuid(config["uid"], config["uid"], config["uid"])
        os.umask(0o022)
        if self.head["op"] == "python":
            # As after an exec. File operations stay out of reach of what the agent left running.
            prctl(PR_SET_DUMPABLE, 1)
        if self.head["op"] != "file":
            os.chdir(self.runner.files.real(config["roots"], self.head["cwd"]))

    def prefer_for_oom(self) -> None:
        """Where memory runs out, the agent's processes go before the runner."""
        if os.getuid() != 0:
            prctl(PR_SET_DUMPABLE, 1)
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            os.write(fd, b"1000")
            os.close(fd)
        except OSError:
            pass
        prctl(PR_SET_DUMPABLE, 0)

    # -- the parent -------------------------------------------------------------------------------------------------

    def follow(self, pid: int, stdin: int, out: int, err: int, deadline: float) -> None:
        """Feeds and drains the child until it ends or has to be ended."""
        runner, pending = self.runner, memoryview(self.stdin())
        streams = {out: self.out, err: self.err}
        poll = select.poll()
        poll.register(runner.host.requests, 0)  # only the hang-up
        poll.register(runner.wake, select.POLLIN)
        for fd in (stdin, out, err):
            os.set_blocking(fd, False)
        for fd in streams:
            poll.register(fd, select.POLLIN)
        if pending:
            poll.register(stdin, select.POLLOUT)
        else:
            os.close(stdin)
            stdin = -1
        while pid not in runner.ended and self.stop is None:
            left = min(deadline, runner.ends_at) - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000 + 1)) if left > 0 else {}
            if left <= 0:
                self.stop = "timeout"
            if ready.get(runner.host.requests, 0) & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
                runner.kill_all()
                runner.host.gone()
            if runner.wake in ready:
                runner.reap()
            if stdin in ready:
                pending = feed(stdin, pending)
                if not pending:
                    poll.unregister(stdin)
                    os.close(stdin)
                    stdin = -1
            for fd in [fd for fd in ready if fd in streams]:
                if not self.drain(fd, streams[fd]):
                    poll.unregister(fd)
                    del streams[fd]
                    os.close(fd)
        self.settle(pid, streams)
        if stdin >= 0:
            os.close(stdin)

    def stdin(self) -> bytes:
        """What the program reads: the body, behind the text where that is what runs."""
        return b"" if self.head["op"] == "file" else self.body[self.head.get("source", 0) :]

    def settle(self, pid: int, streams: Mapping[int, Kept]) -> None:
        """Kills what is left, where nothing may be, and takes what is still in the pipes."""
        if self.stop is not None or not (self.head.get("keep") or self.head["op"] == "file"):
            self.survivors = self.runner.kill_all()
            give_up = time.monotonic() + KILL_S
            while pid not in self.runner.ended and time.monotonic() < give_up:
                self.runner.reap()
                time.sleep(0.0005)
        for fd, kept in streams.items():
            for _ in range(64):
                if not self.drain(fd, kept):
                    break
            os.close(fd)

    def drain(self, fd: int, kept: Kept) -> bool:
        """Takes one chunk; False at the end, or where nothing is there."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return False
        kept.add(data)
        if kept.total > self.limits["stdout_kill"]:
            self.stop = self.stop or "output_limit"
        return bool(data)

    def report(
        self, pid: int, problem: str, before: Mapping[str, float], wall_s: float
    ) -> tuple[dict[str, Any], bytes]:
        """JSON and bytes of the reply."""
        runner = self.runner
        after = runner.counters.read()
        gone = {name: after[name] - before.get(name, 0.0) for name in after}
        status, usage = runner.ended.get(pid, (None, None))
        runner.groups.discard(pid)
        code = None if status is None else os.waitstatus_to_exitcode(status)
        number = -code if code is not None and code < 0 else None
        spent = (usage.ru_utime + usage.ru_stime) if usage else 0.0
        evidence: dict[str, Any] = {"refused_forks": int(gone.get("pids", 0))}
        verdict = self.stop or judge(code, number, problem, gone.get("oom", 0))
        if number == signal.SIGXCPU or (number == signal.SIGKILL and spent >= self.limits["cpu_s"]):
            verdict, evidence["cpu_s"] = "timeout", self.limits["cpu_s"]
        if problem:
            evidence["problem"] = problem
        if self.survivors:
            evidence["survivors"] = True
        for name, kept in (("stdout", self.out), ("stderr", self.err)):
            if kept.left_out():
                evidence[name + "_left_out"] = kept.left_out()
                evidence["head_bytes"] = kept.head_cap
        out, err = self.out.kept(), self.err.kept()
        total = self.out.total + self.err.total
        reply = {
            "status": verdict,
            "exit_code": code if number is None and verdict in ("ok", "nonzero", "oom") else None,
            "signal": number,
            "truncated": total - len(out) - len(err),
            "bytes_total": total,
            "wall_s": wall_s,
            "cpu_s": max(spent, gone.get("cpu_s", 0.0)),
            "oom_kills": int(gone.get("oom", 0)),
            "evidence": evidence,
            "out": len(out),
        }
        return reply, out + err


def judge(code: int | None, number: int | None, problem: str, oom: float) -> str:
    """The status of a program that ended by itself."""
    if problem:
        return "exec_error"
    if code == 0:
        return "ok"
    if oom:
        return "oom"
    return "nonzero" if number is None else "signal"


def feed(fd: int, pending: memoryview) -> memoryview:
    """Writes what fits; what is left, nothing where the other end is closed."""
    try:
        return pending[os.write(fd, pending[:CHUNK]) :]
    except BlockingIOError:
        return pending
    except OSError:
        return pending[:0]


def run_python(source: str, head: Mapping[str, Any]) -> NoReturn:
    """Runs text as `python3 -c` would, and ends the process with its exit code."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv, sys.path[0:0] = ["-c"], [""]
    os.environ.clear()
    os.environ.update(head["env"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        try:
            exec(compile(source, "<python>", "exec", dont_inherit=True), module.__dict__)  # noqa: S102
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
    except SystemExit as error:
        code = exit_code(error)
    except BaseException as error:  # noqa: BLE001
        code = 1
        traceback.print_exception(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    os._exit(code)


def exit_code(error: SystemExit) -> int:
    """The exit code of a SystemExit; its text goes where Python prints it."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1
