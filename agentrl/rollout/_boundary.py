"""What becomes of an error that a policy raises."""

from __future__ import annotations

import traceback

from agentrl.errors import MissingError, PolicyError, RunError, UsageError


def policy_failure(error: Exception) -> str:
    """Tells an episode's failure from the run's: call it at the boundary to a policy.

    Args:
        error: What the policy raised.

    Returns:
        What goes into the episode's record.

    Raises:
        AgentRLError: The error itself, where no other episode would fare better: a mistake in the config, something
            missing, a broken invariant.
    """
    if isinstance(error, (UsageError, MissingError, RunError)):
        raise error
    if isinstance(error, PolicyError):
        return str(error)
    return "".join(traceback.format_exception(error))
