"""No sandbox at all: programs run as the user who started this one, with all that he may do. For tests, by name only.

Nothing is isolated: the files, processes and network of this machine are open to whatever runs, processes that call
setsid outlive their deadline, and memory, disk and processor time are not bounded together. `--sandbox unsafe-local` is
the only way to get it, and every start says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
import warnings
from pathlib import Path

from agentrl.sandbox.contract import TMP, WORKSPACE, ExecResult, Guarantees, Limits
from agentrl.sandbox.docker import LIFETIME_S, START_S
from agentrl.sandbox.launcher import launch
from agentrl.sandbox.owner import owner_state, owner_token
from agentrl.sandbox.remote import RunnerSandbox
from agentrl.sandbox.wire import BOOT, Channel, PipeStream

_END_S = 3.0
_PREFIX = "agentrl-unsafe-"


class UnsafeLocalWarning(UserWarning):
    """Untrusted programs run on this machine without a sandbox."""


class LocalBackend:
    """Runs programs in a temporary folder of this machine, unprotected."""

    name = "unsafe-local"

    def guarantees(self) -> Guarantees:
        """Nearly nothing."""
        return Guarantees(
            backend=self.name,
            files_hidden=False,
            processes_hidden=False,
            network_off=False,
            deadline_kills_all=False,
            nothing_survives=False,
            background=True,
            memory_bound=False,
            oom_attributed=False,
            cpu_bound=False,
            pids_bound=False,
            disk_bound=False,
            output_bound=True,
            exit_unforgeable=False,
            unprivileged=False,
            kernel="full",
            files_confined=True,
            secrets_hidden=False,
        )

    def identify(self, image: str) -> str:
        """There is no image: the interpreter that runs this one."""
        del image
        return f"unsafe-local:{sys.version.split()[0]}"

    def start(self, image: str, limits: Limits) -> LocalSandbox:
        """As Backend.start, with a warning each time."""
        warnings.warn(
            "unsafe-local: programs of the agent run on this machine as this user, with no isolation. Use it for tests "
            "of trusted programs only; --sandbox docker or bubblewrap isolate.",
            UnsafeLocalWarning,
            stacklevel=2,
        )
        folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{owner_token()}_")
        errors = os.memfd_create("agentrl-stderr")
        process = launch(
            [sys.executable, "-I", "-B", "-c", BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
        )
        sandbox = LocalSandbox(self.identify(image), limits, process, (folder, errors))
        roots = {name: folder + name for name in (WORKSPACE, TMP)}
        for path in roots.values():
            Path(path).mkdir()
        sandbox.start({"kill": "group", "lifetime_s": LIFETIME_S, "uid": None, "roots": roots}, START_S)
        return sandbox

    def reap(self) -> int:
        """As Backend.reap: folders."""
        removed = 0
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            if owner_state(folder.name.removeprefix(_PREFIX).partition("_")[0]) == "dead":
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
        return removed

    def close(self) -> None:
        """Nothing is held."""


class LocalSandbox(RunnerSandbox):
    """A folder and a process. `/workspace` in `cwd` and in file operations is below it; programs see the real path.

    Args:
        image: See `LocalBackend.identify`.
        limits: Those of a call are kept, for each process; those of the sandbox are not.
        process: The runner.
        place: Its folder, and the descriptor of the file that its standard error goes to.
    """

    def __init__(self, image: str, limits: Limits, process: subprocess.Popen[bytes], place: tuple[str, int]) -> None:
        super().__init__(f"agentrl-{uuid.uuid4().hex[:16]}", image, limits, Channel(PipeStream(process, place[1])))
        self.process = process
        self._folder = place[0]

    def capabilities(self) -> Guarantees:
        """As Sandbox.capabilities."""
        return LocalBackend().guarantees()

    def _destroy(self) -> None:
        # The runner sees the end of its input and kills the groups that it started; only then may it be killed itself.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _cause_of_death(self) -> ExecResult:
        said = self._channel.stream.diagnostics()
        return ExecResult("sandbox_error", evidence={"cause": "the runner ended", "stderr": said[-1000:]})
