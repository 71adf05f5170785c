"""The bubblewrap backend: namespaces, a deny-list of system calls and limits, without an engine.

One sandbox is one set of namespaces whose PID 1 is the runner, made non-dumpable before any program of the agent
starts: PID 1 cannot be killed from inside its namespace, and when it ends, so does everything in it. The folders that
an agent may write are tmpfs in a mount namespace of the sandbox's own, so that nothing is left on the host whatever
happens.

Started by root, each sandbox gets a user id of its own and a control group, and promises what Docker's does but for the
allow-list of system calls. Started by another user there is no control group: no bound holds for all processes
together, neither of memory nor of processor time, and `Guarantees` says so. Where the kernel forbids namespaces it
refuses; it never runs anything without them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import subprocess
import threading
import uuid
from functools import cache
from pathlib import Path

from agentrl.sandbox import cgroups
from agentrl.sandbox.bpf import deny_list
from agentrl.sandbox.contract import SHM_BYTES, TMP, WORKSPACE, ExecResult, Guarantees, Limits
from agentrl.sandbox.docker import AGENT_ID, LIFETIME_S, START_S
from agentrl.sandbox.errors import SandboxError, SandboxMissing
from agentrl.sandbox.images import tree_digest
from agentrl.sandbox.launcher import launch
from agentrl.sandbox.remote import RunnerSandbox
from agentrl.sandbox.wire import BOOT, Channel, PipeStream

HOST_IMAGE = "host"
"""The image that is this machine's own /usr, read-only, with nothing else of it."""
_SHM = "/dev/shm"  # noqa: S108 (the sandbox's own)
_FIRST_UID = 1 << 20
_REMEDY = (
    "install it (apt install bubblewrap), and allow unprivileged user namespaces (sysctl"
    " kernel.unprivileged_userns_clone=1, or kernel.apparmor_restrict_unprivileged_userns=0), or use Docker"
)
_SEARCHED = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_END_S = 3.0

# Mounts that only this sandbox sees. `$1` is the image, or empty; `$2`, `$3` the options of the two tmpfs; then bwrap.
_SCRIPT = """
set -e
image=$1 room=$2 shm=$3
shift 3
mount -t tmpfs -o size=64k,mode=0755 none /mnt
mkdir /mnt/workspace /mnt/tmp /mnt/shm /mnt/image
mount -t tmpfs -o "$room,mode=0755" none /mnt/workspace
mount -t tmpfs -o "$room,mode=1777" none /mnt/tmp
mount -t tmpfs -o "$shm,mode=1777" none /mnt/shm
[ -z "$image" ] || mount --rbind "$image" /mnt/image
exec "$@"
"""


class BubblewrapBackend:
    """Makes sandboxes of namespaces.

    Args:
        python: The interpreter in the image, at least 3.9, that the runner is started with; else the first of
            /usr/bin/python3 and /usr/local/bin/python3 that is there.
        lifetime_s: After how long a sandbox ends by itself.
        control_groups: Whether to use them where they can be had.
    """

    name = "bubblewrap"

    def __init__(
        self, *, python: str | None = None, lifetime_s: float = LIFETIME_S, control_groups: bool = True
    ) -> None:
        self._python = python
        self._lifetime_s = lifetime_s
        self._root = os.geteuid() == 0
        self._layout = cgroups.layout() if control_groups else None
        self._works = False
        self._images: dict[str, str] = {}
        self._lock = threading.Lock()

    def guarantees(self) -> Guarantees:
        """What a sandbox promises on this machine, for this user."""
        bounded = self._layout is not None
        return Guarantees(
            backend=self.name,
            files_hidden=True,
            processes_hidden=True,
            network_off=True,
            deadline_kills_all=True,
            nothing_survives=True,
            background=True,
            memory_bound=bounded,
            oom_attributed=bounded,
            cpu_bound=bounded,
            pids_bound=bounded or _counts_processes_by_namespace(),
            disk_bound=True,
            output_bound=True,
            exit_unforgeable=True,
            unprivileged=True,
            kernel="deny-list",
            files_confined=True,
            secrets_hidden=True,
        )

    def identify(self, image: str) -> str:
        """The digest of a tree, read once; for `host` the release, since /usr is as large as it is changing."""
        with self._lock:
            if image not in self._images:
                if image == HOST_IMAGE:
                    self._images[image] = f"host:{platform.platform()}"
                elif not (Path(image) / "usr").is_dir():
                    raise SandboxMissing(
                        f"there is no tree at {image!r}: make one (agentrl.sandbox.images.make_tree), "
                        f"or use {HOST_IMAGE!r}."
                    )
                else:
                    self._images[image] = f"tree:{tree_digest(Path(image))}"
            return self._images[image]

    def start(self, image: str, limits: Limits) -> BubblewrapSandbox:
        """As Backend.start."""
        digest = self.identify(image)
        name = f"agentrl-{uuid.uuid4().hex[:16]}"
        errors = os.memfd_create("agentrl-stderr")
        rules = os.memfd_create("agentrl-rules")
        try:
            os.write(rules, deny_list())
            os.lseek(rules, 0, os.SEEK_SET)
            process = launch(
                self._command(image, limits, rules),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd="/",
                env={"PATH": _SEARCHED},
                pass_fds=(rules,),
                start_new_session=True,
            )
        except OSError as error:
            os.close(errors)
            raise SandboxMissing(f"bubblewrap cannot be started: {error}. {_REMEDY}.") from error
        finally:
            os.close(rules)
        return self._serve(name, digest, limits, process, errors)

    def reap(self) -> int:
        """As Backend.reap: control groups, since everything else of a sandbox ends with its owner."""
        return cgroups.remove_left_behind()

    def close(self) -> None:
        """Nothing is held."""

    def _serve(
        self, name: str, digest: str, limits: Limits, process: subprocess.Popen[bytes], errors: int
    ) -> BubblewrapSandbox:
        sandbox = BubblewrapSandbox(name, digest, limits, process, errors)
        sandbox.promises = self.guarantees()
        config = {"kill": "namespace", "lifetime_s": self._lifetime_s, "uid": None}
        config |= {"roots": {WORKSPACE: WORKSPACE, TMP: TMP}}
        if self._layout is None:
            # Of each process: what can be had without a control group.
            config |= {"data": limits.memory, "nproc": limits.pids + 2}
        try:
            sandbox.start(config, START_S)
        except SandboxError as error:
            if self._works:
                raise
            raise SandboxMissing(f"bubblewrap does not work on this machine: {error}. {_REMEDY}.") from error
        try:
            if self._layout is not None:
                # The runner serves and has started nothing yet: whatever it starts from now on is in its group.
                sandbox.group = cgroups.ControlGroup(name, limits, self._layout)
                for pid in _with_children(process.pid):
                    sandbox.group.add(pid)
        except OSError as error:
            sandbox.close()
            raise SandboxError(f"the control group of {name} cannot be made: {error}") from error
        self._works = True
        return sandbox

    def _command(self, image: str, limits: Limits, rules: int) -> list[str]:
        programs = {name: shutil.which(name, path=_SEARCHED) for name in ("bwrap", "unshare", "setpriv")}
        for name, path in programs.items():
            if path is None:
                raise SandboxMissing(f"bubblewrap's sandbox needs the program {name!r}. {_REMEDY}.")
        uid = str(_FIRST_UID + secrets.randbelow(1 << 30))
        owner = f",uid={uid},gid={uid}" if self._root else ""
        room = f"size={limits.tmp_bytes},nr_inodes={limits.tmp_inodes},nosuid,nodev{owner}"
        shm = f"size={SHM_BYTES},nr_inodes=1024,nosuid,nodev{owner}"
        outer = [str(programs["unshare"]), "--mount", "--propagation", "private"]
        inner = []
        if self._root:
            # A user of its own: what the kernel counts or checks by user is shared with no other sandbox.
            inner = [str(programs["setpriv"]), f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
        else:
            outer += ["--user", "--map-root-user"]
        folder = "" if image == HOST_IMAGE else str(Path(image).absolute())
        bwrap = [
            str(programs["bwrap"]),
            *_arguments(image, rules),
            "--",
            self._interpreter(folder),
            "-I",
            "-B",
            "-c",
            BOOT,
        ]
        return [*outer, "sh", "-c", _SCRIPT, "sh", folder, room, shm, *inner, *bwrap]

    def _interpreter(self, tree: str) -> str:
        if self._python is not None:
            return self._python
        for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
            if os.path.lexists(tree + path):
                return path
        raise SandboxMissing(f"there is no python3 in {tree or '/'}usr: install it there, or name another interpreter.")


def _arguments(image: str, rules: int) -> list[str]:
    """What bubblewrap is told."""
    if image == HOST_IMAGE:
        tree = ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            path = Path("/", name)
            tree += ["--symlink", f"usr/{name}", str(path)] if path.is_symlink() else []
            tree += ["--ro-bind", str(path), str(path)] if path.is_dir() and not path.is_symlink() else []
        for name in ("/etc/ld.so.cache", "/etc/alternatives"):
            tree += ["--ro-bind-try", name, name]
    else:
        tree = ["--ro-bind", "/mnt/image", "/"]
    return [
        *("--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"),
        *("--clearenv", "--cap-drop", "ALL", "--uid", str(AGENT_ID), "--gid", str(AGENT_ID), "--hostname", "sandbox"),
        *tree,
        # The settings of the sandbox's own IPC namespace would be the agent's to write.
        *(
            "--proc",
            "/proc",
            "--ro-bind",
            "/proc/sys",
            "/proc/sys",
            "--dev",
            "/dev",
            "--bind",
            "/mnt/shm",
            _SHM,
            "--remount-ro",
            "/dev",
        ),
        *("--bind", "/mnt/tmp", TMP, "--bind", "/mnt/workspace", WORKSPACE),
        *("--remount-ro", "/", "--chdir", WORKSPACE, "--seccomp", str(rules)),
    ]


@cache
def _counts_processes_by_namespace() -> bool:
    """Whether RLIMIT_NPROC counts inside a user namespace (Linux 5.14) and not over all sandboxes of one user."""
    try:
        release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    except ValueError:
        return False
    return release >= (5, 14)


def _with_children(pid: int) -> list[int]:
    """A process and what it has started."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            found += [int(child) for child in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    return found


class BubblewrapSandbox(RunnerSandbox):
    """One set of namespaces. Made by `BubblewrapBackend.start`.

    Args:
        name: Unique on this machine.
        image: By digest.
        limits: Of the sandbox.
        process: bubblewrap, whose child is the runner.
        errors: Descriptor of the file that its standard error goes to.
    """

    promises: Guarantees

    def __init__(self, name: str, image: str, limits: Limits, process: subprocess.Popen[bytes], errors: int) -> None:
        super().__init__(name, image, limits, Channel(PipeStream(process, errors)))
        self.process = process
        self.group: cgroups.ControlGroup | None = None

    def capabilities(self) -> Guarantees:
        """As Sandbox.capabilities."""
        return self.promises

    def _count(self) -> dict[str, float]:
        try:
            return self.group.read() if self.group else {}
        except OSError:
            return {}

    def _destroy(self) -> None:
        # The death of bubblewrap is PID 1's (--die-with-parent), and that is everybody's.
        for pid in reversed(_with_children(self.process.pid)) if self.process.poll() is None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        if self.group is not None:
            self.group.remove()

    def _cause_of_death(self) -> ExecResult:
        said = self._channel.stream.diagnostics()
        if self._count().get("oom"):
            return ExecResult("oom", oom_kills=1, evidence={"cause": "memory ran out and took the sandbox along"})
        return ExecResult("sandbox_error", evidence={"cause": "the runner ended", "stderr": said[-1000:]})
