"""Every error that agentrl raises, in one tree.

    AgentRLError
    ├── UsageError (ValueError)            exit 2: what was asked for is wrong
    │   ├── ConfigError                    a config key, type or combination
    │   ├── RegistryError                  unknown environment, reward, format; broken plugin
    │   ├── TaskError                      a task that cannot be used
    │   ├── RewardError                    a reward tree that cannot be used
    │   └── TemplateError                  a chat template or tokenizer that cannot be trained on
    ├── MissingError (ImportError)         exit 3: something has to be installed or provided
    ├── RunError (RuntimeError)            exit 1: a run that must not go on
    │   ├── InvariantError                 a runtime invariant broke (ratio, ledger, tokens, non-finite)
    │   ├── CheckpointError                a checkpoint that cannot be read or does not fit
    │   ├── TooManyErrors                  the share of failed episodes is above `max_error_rate`
    │   └── AbandonedError                 exit 3: environments hang beyond their deadlines
    ├── ToolError                          raised by a tool: its text is shown to the model
    ├── PolicyError (RuntimeError)         the policy could not answer: the episode ends as POLICY_ERROR
    ├── EvidenceError (RuntimeError)       evidence could not be had: what reads it is Unscored
    └── WorkerError (RuntimeError)         work in a Worker failed
        ├── WorkerTimeout (TimeoutError)   it ran past its deadline and was killed with all it started
        ├── WorkerDied                     its process ended (crash, memory limit)
        └── WorkerCallError                the function in it raised; carries the type's name and text

Each class says which exit code the command ends with (`exit_code`). Every error can be pickled: they take one message.
Messages say what was expected, what was found, and what to do; `did_you_mean` adds the nearest name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class AgentRLError(Exception):
    """The root: catch this to catch everything that agentrl raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(AgentRLError, ValueError):
    """What was asked for is wrong; nothing was started or lost."""

    exit_code = 2


class ConfigError(UsageError):
    """A config key is unknown, has the wrong type, or does not go with another."""


class RegistryError(UsageError):
    """No environment, reward or format has this name, or its plugin does not load."""


class TaskError(UsageError):
    """A task, or a file of tasks, cannot be used."""


class RewardError(UsageError):
    """A reward tree cannot be used as it is written."""


class TemplateError(UsageError):
    """A tokenizer or chat template would train on other tokens than the model sees."""


class MissingError(AgentRLError, ImportError):
    """Something has to be installed or provided first; the message says how."""

    exit_code = 3


class RunError(AgentRLError, RuntimeError):
    """A run that must not go on."""


class InvariantError(RunError):
    """A runtime invariant broke: the numbers that follow would be wrong."""


class CheckpointError(RunError):
    """A checkpoint is missing, damaged, or belongs to another config."""


class TooManyErrors(RunError):
    """More episodes failed for reasons that are not the agent's than the config allows."""


class AbandonedError(RunError):
    """Too many environments hang beyond their deadlines; the machine has to be looked at."""

    exit_code = 3


class ToolError(AgentRLError):
    """Raised by a tool for a mistake that the model can mend: the model reads the text."""


class PolicyError(AgentRLError, RuntimeError):
    """The policy could not answer (engine dead, endpoint gone)."""


class EvidenceError(AgentRLError, RuntimeError):
    """Evidence could not be had; components that read it are Unscored."""


class WorkerError(AgentRLError, RuntimeError):
    """Work in a Worker failed."""


class WorkerTimeout(WorkerError, TimeoutError):
    """The work ran past its deadline and was killed with everything it started."""


class WorkerDied(WorkerError):
    """The worker's process ended by itself: a crash or a memory limit."""


class WorkerCallError(WorkerError):
    """The function in the worker raised. The message starts with the exception's type name."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Says which known name is nearest, or lists them all.

    Args:
        name: What was written.
        known: The names that exist.

    Returns:
        A sentence that starts with a space, ready to be appended to a message; empty if nothing is known.
    """
    names = sorted(set(known))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Known: {', '.join(names[:30])}." if names else ""
