"""The contract of a sandbox: what goes in, what comes out, and what is guaranteed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Literal, Protocol, Self

from agentrl.sandbox.errors import SandboxUsageError
from agentrl.types import JSON

MIB = 1 << 20
WORKSPACE = "/workspace"
"""Where an agent works; commands start here, and relative paths are below it."""
TMP = "/tmp"  # noqa: S108 (a tmpfs of the sandbox's own)
MAX_KEPT = 16 * MIB
"""Most that may be kept of one output: it is held in the sandbox's memory and in the host's."""
SHM_BYTES = 8 * MIB
"""Size of /dev/shm, which locks between processes need."""

Status = Literal["ok", "nonzero", "signal", "timeout", "oom", "output_limit", "exec_error", "sandbox_error"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox and each call in it may take.

    Those of the sandbox as a whole are fixed when it is made; those of a call may differ from call to call.

    Attributes:
        wall_s: Of a call: wall time, seconds.
        cpu_s: Of a call: CPU time of each process, seconds.
        cpu_cores: Of the sandbox: processors' worth of time that all its processes share.
        memory: Of the sandbox: bytes, tmpfs and page cache included.
        pids: Of the sandbox: processes and threads of the agent at once.
        tmp_bytes: Of the sandbox: size of /workspace, and of /tmp, each.
        tmp_inodes: Of the sandbox: files and folders in each of the two.
        file_size: Of a call: largest file that may be written, bytes.
        nofile: Of a call: open files of a process.
        stdout_cap: Of a call: bytes kept of each of the two outputs, half of them the head, half the tail.
        stdout_kill: Of a call: bytes of output after which it is killed.
    """

    wall_s: float = 30.0
    cpu_s: float = 30.0
    cpu_cores: float = 1.0
    memory: int = 512 * MIB
    pids: int = 64
    tmp_bytes: int = 64 * MIB
    tmp_inodes: int = 8192
    file_size: int = 64 * MIB
    nofile: int = 256
    stdout_cap: int = MIB
    stdout_kill: int = 64 * MIB

    def __post_init__(self) -> None:
        """Refuses what cannot work.

        Raises:
            SandboxUsageError: A limit is not above 0, too much output is kept, or the tmpfs exceed half of memory.
        """
        for item in fields(self):
            if not getattr(self, item.name) > 0:
                raise SandboxUsageError(f"limit {item.name}: expected above 0, found {getattr(self, item.name)}.")
        if self.stdout_cap > MAX_KEPT:
            raise SandboxUsageError(f"limit stdout_cap: expected at most {MAX_KEPT}, found {self.stdout_cap}.")
        if self.tmpfs_bytes > self.memory // 2:
            # Pages of a tmpfs are charged to the sandbox and no kill frees them: an agent could shut itself out.
            raise SandboxUsageError(
                f"limits: /workspace, /tmp and /dev/shm together may hold {self.tmpfs_bytes} bytes, expected at most "
                f"half of memory ({self.memory // 2}): lower tmp_bytes or raise memory."
            )

    @property
    def tmpfs_bytes(self) -> int:
        """Bytes that all tmpfs of the sandbox hold when they are full."""
        return 2 * self.tmp_bytes + SHM_BYTES

    def check_call(self, call: Limits) -> None:
        """Refuses a call's limits that differ where only the sandbox's count.

        Raises:
            SandboxUsageError: They do.
        """
        for name in ("cpu_cores", "memory", "pids", "tmp_bytes", "tmp_inodes"):
            if getattr(self, name) != getattr(call, name):
                raise SandboxUsageError(
                    f"limit {name} is the sandbox's ({getattr(self, name)}) and cannot be {getattr(call, name)} for "
                    f"one call: use dataclasses.replace(sandbox.limits, wall_s=...)."
                )


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a call in a sandbox ended.

    Attributes:
        status: `ok`: exit code 0. `nonzero`, `signal`: how the program ended by itself. `timeout`: it ran past its wall
            or CPU time and no process of the agent is left. `oom`: the memory bound killed it. `output_limit`: it wrote
            more than `stdout_kill`. `exec_error`: the program could not be started. `sandbox_error`: the
            infrastructure failed and nothing is known of the program; the only status that is not the agent's doing.
        exit_code: None where the program did not exit by itself.
        signal: The signal that ended it, or None.
        stdout: What was kept of the output: its head and its tail.
        stderr: Likewise.
        truncated: Bytes of both that were left out.
        bytes_total: Bytes of both that were written.
        wall_s: Wall time inside the sandbox, seconds.
        cpu_s: CPU time, seconds.
        oom_kills: Processes that the memory bound killed.
        evidence: What the verdict rests on, JSON-able. `problem`: why a program could not be started. `cause`: why the
            sandbox is gone. `cpu_s`: the limit that was reached. `refused_forks`. Where output was left out:
            `stdout_left_out` and `stderr_left_out`, bytes of each, and `head_bytes`, after how many they are missing.
    """

    status: Status
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: int = 0
    bytes_total: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    oom_kills: int = 0
    evidence: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the program ended with exit code 0."""
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class Guarantees:
    """What a backend promises on this machine; each field is held to by probes of the test suite.

    Attributes:
        backend: Its name.
        files_hidden: No file of the host can be read that the image does not hold.
        processes_hidden: No process of the host can be seen or signalled.
        network_off: No interface but an own loopback, no abstract socket of the host.
        deadline_kills_all: After a timeout no process of the agent is left.
        nothing_survives: Nor after a normal end, unless the call said `keep_background`.
        background: `keep_background` works.
        memory_bound: All processes together stay within `memory`.
        oom_attributed: A death by the memory bound is reported as `oom`.
        cpu_bound: All processes together stay within `cpu_cores`.
        pids_bound: Forks and threads stay within `pids`, whatever other sandboxes do.
        disk_bound: Bytes and files written stay within `tmp_bytes` and `tmp_inodes`; the image is read-only.
        output_bound: Output is bounded where it is made, never gathered on the host.
        exit_unforgeable: No program in the sandbox can alter the status that is reported.
        unprivileged: The agent has no capability, cannot gain one, and is not root.
        kernel: `allow-list` or `deny-list` of system calls, or `full`.
        files_confined: Files go in and out with the agent's rights; links and special files are refused.
        secrets_hidden: No variable of the host's environment reaches the sandbox.
    """

    backend: str
    files_hidden: bool
    processes_hidden: bool
    network_off: bool
    deadline_kills_all: bool
    nothing_survives: bool
    background: bool
    memory_bound: bool
    oom_attributed: bool
    cpu_bound: bool
    pids_bound: bool
    disk_bound: bool
    output_bound: bool
    exit_unforgeable: bool
    unprivileged: bool
    kernel: Literal["allow-list", "deny-list", "full"]
    files_confined: bool
    secrets_hidden: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """One item of a folder in a sandbox.

    Attributes:
        path: From the folder that was listed, with `/`.
        kind: Of what kind; links are never followed.
        size: Bytes of a file.
    """

    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int


@dataclass(frozen=True, slots=True)
class Artefact:
    """Files that left a sandbox: the only thing that a grader ever receives.

    Attributes:
        files: Content by path below /workspace; regular files with plain names only.
        skipped: What matched but was not taken, as (path, why).
    """

    files: Mapping[str, bytes]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 over paths and contents, in hex."""
        whole = hashlib.sha256()
        for path in sorted(self.files):
            for part in (path.encode(), self.files[path]):
                whole.update(len(part).to_bytes(8, "big"))
                whole.update(part)
        return whole.hexdigest()


class Sandbox(ABC):
    """A place for one episode's untrusted programs. Used by any thread, one call at a time, and never for two episodes.

    Attributes:
        id: Unique on this machine.
        image: What it was made from, by digest.
        limits: What was fixed when it was made.
    """

    id: str
    image: str
    limits: Limits

    @abstractmethod
    def capabilities(self) -> Guarantees:
        """What this sandbox promises; the same for every sandbox of its backend on this machine."""

    @abstractmethod
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
        """Runs a program, without a shell, as the agent.

        Args:
            argv: The program and its arguments.
            stdin: What it reads.
            cwd: Folder that it starts in.
            env: Variables besides the few that are always set. Nothing of the host's environment is passed on.
            limits: Of this call; else the sandbox's.
            keep_background: Whether processes that it leaves behind go on; else none is left when the call returns.

        Returns:
            How it ended. Nothing that the agent does raises.

        Raises:
            SandboxUsageError: An argument cannot be used at all.
        """

    @abstractmethod
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
        """Runs Python text as `__main__` in a fork of a warm interpreter: as `exec`, but a call costs milliseconds.

        The process starts as a copy of the one that talks to the host, so what earlier calls were given may be found in
        its memory. Nothing that the agent must not know may be sent into its sandbox by any call.
        """

    @abstractmethod
    def write(self, path: str, data: bytes, mode: int = 0o644) -> None:
        """Writes a file below /workspace or /tmp with the agent's rights, making folders as needed.

        Raises:
            FileRefused: A folder on the way is a link, or the sandbox's disk is full.
            SandboxDied: The sandbox is gone.
        """

    @abstractmethod
    def read(self, path: str, max_bytes: int = MIB) -> bytes:
        """Reads a regular file below /workspace or /tmp with the agent's rights.

        Raises:
            FileRefused: It is absent, larger than `max_bytes`, no regular file, or reached through a link.
            SandboxDied: The sandbox is gone.
        """

    @abstractmethod
    def list(self, root: str = WORKSPACE, max_entries: int = 1000) -> tuple[Entry, ...]:
        """What is below a folder, sorted by path, at most `max_entries` and 64 levels of it.

        Raises:
            FileRefused: The folder is absent or reached through a link.
            SandboxDied: The sandbox is gone.
        """

    @abstractmethod
    def export(self, allow: Sequence[str], max_bytes: int = 4 * MIB) -> Artefact:
        """Takes the regular files below /workspace whose paths match a pattern.

        Args:
            allow: Patterns such as `src/**/*.py`; `*` stays inside a folder, `**` does not.
            max_bytes: Of all files together.

        Raises:
            FileRefused: They are larger together.
            SandboxDied: The sandbox is gone.
        """

    @abstractmethod
    def ping(self, deadline_s: float = 5.0) -> bool:
        """Whether the sandbox answers."""

    @abstractmethod
    def on_close(self, hook: Callable[[], None]) -> None:
        """Has a function called once when the sandbox is closed."""

    @abstractmethod
    def close(self) -> None:
        """Ends it and all that runs in it. May be called again, takes seconds at most, never raises."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Backend(Protocol):
    """What makes sandboxes of one kind. Safe to use from threads.

    Attributes:
        name: As in `--sandbox NAME`.
    """

    name: str

    def guarantees(self) -> Guarantees:
        """What its sandboxes promise on this machine."""

    def identify(self, image: str) -> str:
        """The digest of an image, for the run's manifest.

        Raises:
            SandboxMissing: There is no such image.
        """

    def start(self, image: str, limits: Limits) -> Sandbox:
        """A fresh sandbox.

        Raises:
            SandboxMissing: The engine or the image is missing.
            SandboxError: It could not be made.
        """

    def reap(self) -> int:
        """Removes what dead owners left behind: how many sandboxes.

        Raises:
            SandboxMissing, SandboxError: The engine cannot be asked.
        """

    def close(self) -> None:
        """Lets go of the engine. May be called again."""


class Pool(Protocol):
    """Where episodes get their sandboxes from."""

    def acquire(self, timeout_s: float = 60.0) -> Sandbox:
        """A fresh sandbox, for one use; closing it gives its place back.

        Raises:
            SandboxBusy: None became free in time.
            SandboxError: None could be made.
        """

    def close(self) -> None:
        """Ends every sandbox of the pool."""
