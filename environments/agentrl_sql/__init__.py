"""SQL tasks: generated databases, questions about them, and an environment where an agent answers by querying.

Importing the package imports nothing else: the SQL worker, which starts often, needs only some of its modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl_sql.env import SqlEnv

__all__ = ["SqlEnv"]


def __getattr__(name: str) -> Any:
    if name == "SqlEnv":
        from agentrl_sql.env import SqlEnv

        return SqlEnv
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has 'SqlEnv'.")
