"""Sandboxes: where an agent's programs run. See `Sandbox` for the contract and `Guarantees` for what each promises.

What they are for: accidents and reward hacking, not adversaries. A program in a sandbox cannot read the host's files,
see or signal its processes, reach a network, outlive its deadline, exceed its bounds, alter the status that is
reported, or make the infrastructure look broken where it is at fault itself. Each of these is a field of `Guarantees`
and is held to by probes against the real engine and kernel; a backend that cannot promise one on a machine says so,
and an environment can require it.

What no backend here promises: to hold a determined attacker with an exploit for the kernel, the container runtime or
bubblewrap, to close side channels, or fair timing on a shared machine. Use a virtual machine around the trainer for
that.

    docker         a container each: all guarantees; needs an engine, whose socket is as good as root
    bubblewrap     namespaces each: the same for root, with a deny-list of system calls instead of an allow-list; for
    other
                   users no bound of memory or processor time over all processes together
    unsafe-local   no isolation at all; by that name only, and every start warns
"""

from agentrl.sandbox.backends import Reaped, SandboxSpec, check_requirements, get_backend, reap
from agentrl.sandbox.contract import (
    WORKSPACE,
    Artefact,
    Backend,
    Entry,
    ExecResult,
    Guarantees,
    Limits,
    Pool,
    Sandbox,
    Status,
)
from agentrl.sandbox.errors import (
    FileRefused,
    SandboxBusy,
    SandboxDied,
    SandboxError,
    SandboxMissing,
    SandboxUsageError,
)
from agentrl.sandbox.pool import WarmPool

__all__ = [
    "WORKSPACE",
    "Artefact",
    "Backend",
    "Entry",
    "ExecResult",
    "FileRefused",
    "Guarantees",
    "Limits",
    "Pool",
    "Reaped",
    "Sandbox",
    "SandboxBusy",
    "SandboxDied",
    "SandboxError",
    "SandboxMissing",
    "SandboxSpec",
    "SandboxUsageError",
    "Status",
    "WarmPool",
    "check_requirements",
    "get_backend",
    "reap",
]
