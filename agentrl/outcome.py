"""Why episodes end, and what each end means to the learner, the evaluation and the reports."""

from __future__ import annotations

from enum import StrEnum


class EndReason(StrEnum):
    """Why an episode ended. The predicates are the one table of what an end means."""

    SUBMITTED = "submitted"
    ANSWERED = "answered"
    GAVE_UP = "gave_up"
    FORBIDDEN = "forbidden"
    AGENT_FAULT = "agent_fault"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    TOO_MANY_MALFORMED = "too_many_malformed"
    CUT = "cut"
    SANDBOX_ERROR = "sandbox_error"
    VERIFIER_ERROR = "verifier_error"
    POLICY_ERROR = "policy_error"
    ENV_ERROR = "env_error"

    @property
    def is_terminated(self) -> bool:
        """The environment says that the task is over."""
        return self in _TERMINATED

    @property
    def is_error(self) -> bool:
        """Not the agent's doing: counted, retried, never trained on, never a reward of 0."""
        return self in _ERRORS

    @property
    def is_truncated(self) -> bool:
        """A budget ended it, declared to the agent (all but CUT) or the trainer's own (CUT)."""
        return not self.is_terminated and not self.is_error

    @property
    def bootstraps(self) -> bool:
        """Whether the critic's value of the final state stands for what would have come: CUT alone by default."""
        return self is EndReason.CUT

    @property
    def in_loss(self) -> bool:
        """Whether its tokens are trained on."""
        return not self.is_error

    @property
    def in_baseline(self) -> bool:
        """Whether its reward may stand in a group's baseline."""
        return not self.is_error and self is not EndReason.CUT

    @property
    def in_metrics(self) -> bool:
        """Whether its reward counts in reported means."""
        return self.in_baseline


_TERMINATED = frozenset(
    {EndReason.SUBMITTED, EndReason.ANSWERED, EndReason.GAVE_UP, EndReason.FORBIDDEN, EndReason.AGENT_FAULT}
)
_ERRORS = frozenset({EndReason.SANDBOX_ERROR, EndReason.VERIFIER_ERROR, EndReason.POLICY_ERROR, EndReason.ENV_ERROR})
