"""A deny-list of system calls as a program for the kernel's packet filter, for bubblewrap.

bubblewrap takes a filter as raw instructions, and a whole allow-list would have to know the number of every call on
every machine. So this one forbids: it is weaker than Docker's list where the kernel gains calls that are not in the
table.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

from agentrl.sandbox.errors import SandboxMissing
from agentrl.sandbox.seccomp import NAMESPACE_FLAGS, SOCKET_FAMILIES

DENIED: tuple[tuple[str, str], ...] = (
    (
        "new namespaces, roots and mounts",
        (
            "unshare 272 97, setns 308 268, mount 165 40, umount2 166 39, pivot_root 155 41, chroot 161 51, "
            "move_mount 429 429, open_tree 428 428, fsopen 430 430, fsconfig 431 431, fsmount 432 432, fspick "
            "433 433, mount_setattr 442 442, open_tree_attr 467 467"
        ),
    ),
    (
        "another process's memory and descriptors: the runner has the agent's user here",
        (
            "ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, pidfd_getfd 438 438, kcmp 312 "
            "272, process_madvise 440 440, process_mrelease 448 448, migrate_pages 256 238, move_pages 279 239"
        ),
    ),
    (
        "large interfaces with a history of holes",
        (
            "io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, "
            "perf_event_open 298 241, userfaultfd 323 282, keyctl 250 219, add_key 248 217, request_key 249 "
            "218, fanotify_init 300 262, lookup_dcookie 212 18, open_by_handle_at 304 265, name_to_handle_at "
            "303 264"
        ),
    ),
    (
        "the machine as a whole",
        (
            "kexec_load 246 104, kexec_file_load 320 294, init_module 175 105, finit_module 313 273, "
            "delete_module 176 106, reboot 169 142, swapon 167 224, swapoff 168 225, acct 163 89, quotactl 179 "
            "60, quotactl_fd 443 443, syslog 103 116, vhangup 153 58, settimeofday 164 170, clock_settime 227 "
            "112, clock_adjtime 305 266, sethostname 170 161, setdomainname 171 162, nfsservctl 180 42"
        ),
    ),
    (
        "old calls of one kind of machine",
        "iopl 172 -, ioperm 173 -, modify_ldt 154 -, uselib 134 -, ustat 136 -, sysfs 139 -",
    ),
)
"""A reason, and names with their numbers on x86_64 and aarch64."""

OWN_PROCESS_ONLY = (
    "prlimit64 302 261, sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, "
    "sched_setattr 314 274"
)
"""Allowed where the process named first is 0, the caller: PID 1 has the agent's user, and may not be starved."""
OWN_PRIORITY_ONLY = "setpriority 141 140, ioprio_set 251 30"
"""Likewise, where the process is named second."""

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_SOCKET = (41, 198)
_IOCTL = (16, 29)
_TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX put words into a terminal's mouth
_X32 = 0x40000000

_LOAD, _JEQ, _JGE, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_PERM, _NOSYS = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS

_Step = tuple[int, int, int, int]


def deny_list(machine: str | None = None) -> bytes:
    """The filter as bubblewrap's `--seccomp` reads it.

    Args:
        machine: As `platform.machine()` names it; else this one.

    Returns:
        Instructions of 8 bytes.

    Raises:
        SandboxMissing: For a kind of machine whose numbers are not in the table.
    """
    name = machine or platform.machine()
    if name not in _MACHINES:
        raise SandboxMissing(f"bubblewrap's filter knows the system calls of {', '.join(_MACHINES)}; this is {name}.")
    return b"".join(struct.pack("=HBBI", *step) for step in _program(*_MACHINES[name]))


def _program(arch: int, column: int) -> Iterator[_Step]:
    yield _LOAD, 0, 0, _ARCH
    yield _JEQ, 1, 0, arch
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER
    if column == 0:
        yield _JGE, 0, 1, _X32
        yield _RETURN, 0, 0, _NOSYS
    for _, text in DENIED:
        for number in _numbers(text, column):
            yield _JEQ, 0, 1, number
            yield _RETURN, 0, 0, _PERM
    yield _JEQ, 0, 1, _CLONE3[column]
    yield _RETURN, 0, 0, _NOSYS  # its flags are behind a pointer: libraries fall back to clone
    yield from _on_argument(_CLONE[column], 0, [(_AND, 0, 0, NAMESPACE_FLAGS), (_JEQ, 1, 0, 0), (_RETURN, 0, 0, _PERM)])
    families = [(_JEQ, len(SOCKET_FAMILIES) - k, 0, family) for k, family in enumerate(SOCKET_FAMILIES.values())]
    yield from _on_argument(_SOCKET[column], 0, [*families, (_RETURN, 0, 0, _PERM)])
    for request in _TERMINAL_INPUT:
        yield from _on_argument(_IOCTL[column], 1, [(_JEQ, 0, 1, request), (_RETURN, 0, 0, _PERM)])
    for text, index in ((OWN_PROCESS_ONLY, 0), (OWN_PRIORITY_ONLY, 1)):
        for number in _numbers(text, column):
            yield from _on_argument(number, index, [(_JEQ, 1, 0, 0), (_RETURN, 0, 0, _PERM)])
    yield _RETURN, 0, 0, _ALLOW


def _on_argument(number: int, index: int, check: list[_Step]) -> Iterator[_Step]:
    """A check of the low half of one argument of one call; where it does not return, the number is loaded again."""
    yield _JEQ, 0, len(check) + 2, number
    yield _LOAD, 0, 0, _ARGUMENTS + 8 * index
    yield from check
    yield _LOAD, 0, 0, _NUMBER


def _numbers(text: str, column: int) -> list[int]:
    columns = [item.split()[1:] for item in text.split(",")]
    return [int(numbers[column]) for numbers in columns if numbers[column] != "-"]
