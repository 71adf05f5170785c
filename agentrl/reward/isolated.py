"""Components that run in a Worker, where they can be killed."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os

from agentrl.errors import EvidenceError, RewardError
from agentrl.plugins import load_object
from agentrl.reward.component import Component, FunctionComponent, VacuousError
from agentrl.reward.evidence import Episode
from agentrl.reward.recorded import RecordedEpisode
from agentrl.types import JSON, Score, Unscored
from agentrl.worker import WorkerPool


@functools.cache
def _pool() -> WorkerPool:
    return WorkerPool("agentrl.reward.isolated:score_view", size=min(4, os.cpu_count() or 1))


def call_isolated(component: Component, episode: Episode) -> Score | Unscored:
    """Sends a JSON view of the episode to a Worker, with the evidence that the component says it reads.

    Raises:
        WorkerError: If the component hangs, dies or raises there.
        RewardError: If it is not a decorated function.
        VacuousError: If it had nothing to check.
    """
    if not isinstance(component, FunctionComponent):
        raise RewardError(f"component {component.name!r} is isolated, which only a decorated function can be.")
    function = component.function
    payload = {
        "module": function.__module__,
        "file": inspect.getsourcefile(function),
        "attribute": function.__qualname__,
        "episode": RecordedEpisode.of(episode, component.reads).as_json(),
    }
    answer = _pool().call(payload, component.deadline_s)
    if "vacuous" in answer:
        raise VacuousError(answer["vacuous"])
    if "unscored" in answer:
        return Unscored(answer["unscored"])
    return Score(answer["value"], answer["evidence"])


def score_view(payload: JSON) -> JSON:
    """What the Worker runs: finds the component and scores the view."""
    where = payload["module"] if _importable(payload["module"]) else payload["file"]
    component: FunctionComponent = load_object(f"{where}:{payload['attribute']}", "isolated component")
    try:
        result = component.function(RecordedEpisode.from_json(payload["episode"]))
    except VacuousError as error:
        return {"vacuous": str(error)}
    except EvidenceError as error:
        return {"unscored": str(error)}
    if isinstance(result, Unscored):
        return {"unscored": result.reason}
    return {"value": result.value, "evidence": result.evidence}


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False
