"""What can go wrong with a sandbox that is not the agent's doing.

    AgentRLError
    ├── MissingError (ImportError)
    │   └── SandboxMissing                 exit 3: no engine, no image, or the kernel forbids what a backend needs
    ├── UsageError (ValueError)
    │   └── SandboxUsageError              limits, paths or arguments that cannot be used
    └── SandboxError (RuntimeError)        infrastructure failed: the episode ends as SANDBOX_ERROR
        ├── SandboxDied                    this sandbox is gone; a fresh one is needed
        ├── SandboxBusy                    no sandbox became free in the time that was given
        └── FileRefused                    a file cannot be had: absent, a link, no regular file, too large

What an agent's own program does is never an exception: `ExecResult.status` says it. `FileRefused` is the agent's doing,
and the one error here that a tool should turn into an answer for the model.
"""

from __future__ import annotations

from agentrl.errors import AgentRLError, MissingError, UsageError


class SandboxMissing(MissingError):
    """A sandbox's engine or image is missing, or the machine forbids it; the message says what to do."""


class SandboxUsageError(UsageError):
    """Limits, a path or an argument that no sandbox can take."""


class SandboxError(AgentRLError, RuntimeError):
    """The infrastructure of a sandbox failed; the agent did not cause it."""


class SandboxDied(SandboxError):
    """The sandbox ended and cannot be used any more."""


class SandboxBusy(SandboxError):
    """Too many sandboxes are in use, and none became free in time."""


class FileRefused(SandboxError):
    """A file in the sandbox cannot be read or written by the sandbox's rules."""
