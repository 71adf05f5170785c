"""agentrl: train and evaluate tool-using language-model agents on tasks whose outcome is executed and checked.

Importing it registers a Gymnasium id for each installed environment (`agentrl/Sql-v0`), and imports neither the
environments nor torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from agentrl.config import RunConfig
from agentrl.env import ToolEnv
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    EvidenceError,
    TaskError,
    ToolError,
    WorkerCallError,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
    did_you_mean,
)
from agentrl.policy import MessagePolicy, ScriptedPolicy
from agentrl.registry import make_env, register_environments
from agentrl.reward import (
    Aggregator,
    BatchNode,
    BatchRecord,
    Combined,
    Component,
    Episode,
    Node,
    Part,
    RewardTree,
    Span,
    Trained,
    Transformed,
    TurnView,
    Weighted,
    clip,
    component,
    constrained,
    evidence,
    gate,
    group_relative,
    leaf,
    lexicographic,
    minimum,
    normalised,
    product,
    require_some,
    shaping,
    weighted_sum,
)
from agentrl.tools import tool
from agentrl.types import (
    JSON,
    EndReason,
    Message,
    Reply,
    Sampling,
    Score,
    Task,
    ToolCall,
    ToolResult,
    ToolSchema,
    Trajectory,
    Unscored,
)
from agentrl.worker import Worker, WorkerLimits, WorkerPool

if TYPE_CHECKING:
    from agentrl.evaluate import evaluate
    from agentrl.replay.episode import replay_episode
    from agentrl.replay.iteration import replay_iteration
    from agentrl.train import train

__all__ = [
    "JSON",
    "AgentRLError",
    "Aggregator",
    "BatchNode",
    "BatchRecord",
    "Combined",
    "Component",
    "ConfigError",
    "EndReason",
    "Episode",
    "EvidenceError",
    "Message",
    "MessagePolicy",
    "Node",
    "Part",
    "Reply",
    "RewardTree",
    "RunConfig",
    "Sampling",
    "Score",
    "ScriptedPolicy",
    "Span",
    "Task",
    "TaskError",
    "ToolCall",
    "ToolEnv",
    "ToolError",
    "ToolResult",
    "ToolSchema",
    "Trained",
    "Trajectory",
    "Transformed",
    "TurnView",
    "Unscored",
    "Weighted",
    "Worker",
    "WorkerCallError",
    "WorkerDied",
    "WorkerError",
    "WorkerLimits",
    "WorkerPool",
    "WorkerTimeout",
    "clip",
    "component",
    "constrained",
    "did_you_mean",
    "evaluate",
    "evidence",
    "gate",
    "group_relative",
    "leaf",
    "lexicographic",
    "make_env",
    "minimum",
    "normalised",
    "product",
    "replay_episode",
    "replay_iteration",
    "require_some",
    "shaping",
    "tool",
    "train",
    "weighted_sum",
]


_FUNCTIONS = ("evaluate", "train")
_ELSEWHERE = {"replay_episode": "agentrl.replay.episode", "replay_iteration": "agentrl.replay.iteration"}
"""Functions that are imported when they are asked for, by their module."""


class _FunctionModule(ModuleType):
    """A module that can be called as the function of its own name, `agentrl.evaluate.evaluate`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(ModuleType):
    """The package. `agentrl.evaluate(...)` works whether or not the module of that name was imported before."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _FUNCTIONS and isinstance(value, ModuleType):
            value.__class__ = _FunctionModule
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name in _FUNCTIONS:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{did_you_mean(name, __all__)}")


sys.modules[__name__].__class__ = _Package
register_environments()
