"""Which system calls a program in a sandbox may make: an allow-list for Docker, a table with a reason for each group.

Docker's own list is written for servers; of what it lets through this one closes io_uring, AF_VSOCK and other uncommon
socket families, ptrace, process_vm_*, pidfd_getfd, keyrings, new namespaces, mounts, and whatever is not in the table.
Only the machine's own 64-bit calls exist: 32-bit ones would be a second table with other holes.
"""

from __future__ import annotations

import errno
import json
from functools import cache

from agentrl.sandbox.errors import SandboxMissing
from agentrl.types import JSON

ALLOWED: tuple[tuple[str, str], ...] = (
    (
        "read, write and map files that the permissions of the file system allow",
        (
            "read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat openat2 creat "
            "close close_range lseek dup dup2 dup3 fcntl flock ftruncate truncate fallocate fadvise64 readahead "
            "sendfile splice tee vmsplice copy_file_range fsync fdatasync sync syncfs sync_file_range pipe "
            "pipe2 cachestat"
        ),
    ),
    (
        "look at and change names, folders and attributes",
        (
            "stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 getdents getdents64 "
            "getcwd chdir fchdir mkdir mkdirat rmdir rename renameat renameat2 link linkat unlink unlinkat "
            "symlink symlinkat readlink readlinkat chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat "
            "umask utime utimes utimensat futimesat getxattr lgetxattr fgetxattr listxattr llistxattr "
            "flistxattr setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr inotify_init "
            "inotify_init1 inotify_add_watch inotify_rm_watch"
        ),
    ),
    (
        "make a FIFO; devices need a capability that no agent has",
        "mknod mknodat",
    ),
    (
        "memory of the process itself",
        (
            "brk mmap munmap mprotect mremap madvise mincore msync mlock mlock2 munlock mlockall munlockall "
            "membarrier memfd_create pkey_alloc pkey_free pkey_mprotect get_mempolicy set_mempolicy mbind mseal "
            "map_shadow_stack"
        ),
    ),
    (
        "start, wait for and end processes and threads",
        (
            "fork vfork execve execveat exit exit_group wait4 waitid waitpid set_tid_address gettid getpid "
            "getppid getpgid getpgrp setpgid getsid setsid arch_prctl prctl set_robust_list get_robust_list "
            "rseq pidfd_open pidfd_send_signal futex futex_waitv futex_wait futex_wake futex_requeue"
        ),
    ),
    (
        "signals, of which the kernel delivers only those to the same user",
        (
            "kill tkill tgkill rt_sigaction rt_sigprocmask rt_sigpending rt_sigqueueinfo rt_sigreturn "
            "rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sigaltstack signalfd signalfd4 pause "
            "restart_syscall"
        ),
    ),
    (
        "time",
        (
            "nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times alarm getitimer "
            "setitimer timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create "
            "timerfd_settime timerfd_gettime"
        ),
    ),
    (
        "wait for descriptors",
        (
            "poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait "
            "epoll_pwait2 eventfd eventfd2 ioctl"
        ),
    ),
    (
        "who one is; the runner needs to change it, an agent has no capability to",
        (
            "getuid geteuid getgid getegid getresuid getresgid getgroups setuid setgid setreuid setregid "
            "setresuid setresgid setgroups setfsuid setfsgid capget capset"
        ),
    ),
    (
        "limits and scheduling, which can only be lowered",
        (
            "getrlimit setrlimit prlimit64 getrusage getpriority setpriority ioprio_get ioprio_set sched_yield "
            "sched_getaffinity sched_setaffinity sched_getparam sched_setparam sched_getscheduler "
            "sched_setscheduler sched_get_priority_max sched_get_priority_min sched_rr_get_interval "
            "sched_getattr sched_setattr getcpu"
        ),
    ),
    (
        "sockets of the families below: loopback and local ones",
        (
            "socketpair bind listen accept accept4 connect getsockname getpeername getsockopt setsockopt sendto "
            "recvfrom sendmsg recvmsg sendmmsg recvmmsg shutdown"
        ),
    ),
    (
        "System V and POSIX communication inside the container's own IPC namespace",
        (
            "shmget shmat shmctl shmdt semget semop semtimedop semctl msgget msgsnd msgrcv msgctl mq_open "
            "mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr"
        ),
    ),
    (
        "facts about the machine, and Landlock and seccomp, with which a program restricts itself",
        "uname sysinfo getrandom landlock_create_ruleset landlock_add_rule landlock_restrict_self seccomp",
    ),
)

SOCKET_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
"""Without netlink, packet, vsock, alg, bluetooth and the rest: the kernel's least looked-at code."""

NAMESPACE_FLAGS = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

_PERSONALITIES = (0x0, 0x40000, 0xFFFFFFFF)
"""Linux; the same without randomised addresses (debuggers and some builds); asking which it is."""

_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "amd64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}


@cache
def docker_profile(architecture: str) -> str:
    """The profile as Docker reads it.

    Args:
        architecture: The engine's, as it names it: `x86_64`.

    Returns:
        JSON text.

    Raises:
        SandboxMissing: For a kind of machine that the table was never tried on.
    """
    if architecture not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise SandboxMissing(f"the Docker sandbox knows the calls of {known}; this engine runs on {architecture}.")
    calls: list[JSON] = [_rule(names.split()) for _, names in ALLOWED]
    calls += [_rule(["socket"], [_argument(0, family)]) for family in SOCKET_FAMILIES.values()]
    calls += [_rule(["personality"], [_argument(0, value)]) for value in _PERSONALITIES]
    calls.append(_rule(["clone"], [_argument(0, NAMESPACE_FLAGS, "SCMP_CMP_MASKED_EQ", 0)]))
    # clone3 keeps its flags behind a pointer, where no filter can look: libraries fall back to clone.
    calls.append({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS, "args": []})
    profile = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.EPERM,
        "architectures": [_ARCHITECTURES[architecture]],
        "syscalls": calls,
    }
    return json.dumps(profile)


def _rule(names: list[str], arguments: list[JSON] | None = None) -> dict[str, JSON]:
    return {"names": names, "action": "SCMP_ACT_ALLOW", "args": arguments or []}


def _argument(index: int, value: int, operator: str = "SCMP_CMP_EQ", value_two: int = 0) -> dict[str, JSON]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": operator}
