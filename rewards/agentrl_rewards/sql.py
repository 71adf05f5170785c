"""Components for agents that answer with a SQL query, and the evidence that they read."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl import Episode, Score, component, require_some

_RIGHT = ("match", "match_vacuous")
_DID_NOT_RUN = ("error", "rejected")


@dataclass(frozen=True, slots=True)
class ResultSets:
    """What executing an agent's queries came to.

    Attributes:
        submitted: The query that was submitted as the answer; None where none was.
        verdicts: For each database that the answer was run on, up to the first that settles it, the verdict (`match`,
            `match_vacuous`, `mismatch`, `error` or `rejected`) and its reason. The first is the database that the agent
            saw, the others were hidden from it. Empty where nothing was submitted.
        n_databases: Databases that a right answer holds on.
        n_queries: Queries that the agent sent, the submitted one included.
        refused: What was refused because it was not allowed: writing, or reading what is not the agent's to read.
        rules: Version of the rules by which results are compared.
    """

    submitted: str | None
    verdicts: tuple[tuple[str, str], ...]
    n_databases: int
    n_queries: int
    refused: tuple[str, ...]
    rules: int

    @property
    def right(self) -> bool:
        """Whether the answer holds on every database, and on one at least there was something to be right about."""
        codes = [code for code, _ in self.verdicts]
        return len(codes) == self.n_databases and "match" in codes and all(code in _RIGHT for code in codes)

    @property
    def runs(self) -> bool:
        """Whether the submitted query gave a result on the database that the agent saw."""
        return bool(self.verdicts) and self.verdicts[0][0] not in _DID_NOT_RUN


@component(name="sql/correct")
def correct(episode: Episode) -> Score:
    """1 where the submitted query gives the gold's result on every database, else 0. The objective."""
    found = episode.evidence(ResultSets)
    if found.submitted is None:
        return Score(0.0, {"verdict": "nothing submitted"})
    verdict, reason = found.verdicts[-1]
    shown = {"verdict": verdict, "reason": reason, "databases": f"{len(found.verdicts)} of {found.n_databases}"}
    return Score(float(found.right), {**shown, "rules": found.rules})


@component(name="sql/executes")
def executes(episode: Episode) -> Score:
    """1 where a query was submitted and runs, else 0. A gate and nothing to be paid for: any trivial query runs."""
    found = episode.evidence(ResultSets)
    if not found.verdicts:
        return Score(0.0, {"verdict": "nothing submitted"})
    return Score(float(found.runs), {"verdict": found.verdicts[0][0], "reason": found.verdicts[0][1]})


@component(name="sql/reads_allowed")
def reads_allowed(episode: Episode) -> Score:
    """1 where no query of the episode wanted what it may not have, else 0; 0 also where there was no query."""
    found = episode.evidence(ResultSets)
    if not found.refused:
        require_some(range(found.n_queries), "queries")
    return Score(float(not found.refused), {"refused": list(found.refused[:5])})


@component(name="sql/needless_calls")
def needless_calls(episode: Episode) -> Score:
    """The share of tool calls that were not made before with the same arguments: repeating one brings nothing new."""
    calls = [(call.name, repr(sorted(call.arguments.items()))) for turn in episode.turns for call in turn.calls]
    require_some(calls, "tool calls")
    return Score(len(set(calls)) / len(calls), {"calls": len(calls), "needless": len(calls) - len(set(calls))})
