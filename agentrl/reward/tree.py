"""The reward tree of one environment: loads it, scores each step, and keeps the episode's ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from agentrl.errors import CheckpointError, RewardError
from agentrl.reward.aggregators import Shaping
from agentrl.reward.batch import BatchNode
from agentrl.reward.builders import as_node
from agentrl.reward.component import Component
from agentrl.reward.evaluation import Moment, evaluate, score
from agentrl.reward.evidence import Episode
from agentrl.reward.ledger import build_ledger, scored_leaves, success_of
from agentrl.reward.loading import node_from_dict, read_toml
from agentrl.reward.nodes import AT_BOUND, Node
from agentrl.reward.rules import check_tree, leaves, shapings
from agentrl.reward.transform import TrainedBatch, transform_batch
from agentrl.reward.writing import node_as_dict, to_toml
from agentrl.types import JSON, EndReason, Trajectory, Unscored, canonical_json

Source = str | Path | Mapping[str, JSON] | Node | Component
"""A TOML file, its content as a mapping, or a tree (or a lone component) made in Python."""


@dataclass(frozen=True, slots=True)
class StepScore:
    """What a step earned.

    Attributes:
        value: The step reward; 0.0 where nothing was due; None where the root is unscored (VERIFIER_ERROR).
        unscored: Why there is no value.
        ledger: The root's entry; None where nothing was due.
        success: At the end, whether the episode succeeded; None before it and where that cannot be told.
        catastrophe: A catastrophic safeguard that fired at this step, in words: the environment may end as FORBIDDEN.
        durations: Seconds per leaf, by name; never part of a ledger.
    """

    value: float | None
    unscored: str | None = None
    ledger: JSON = None
    success: bool | None = None
    catastrophe: str | None = None
    durations: Mapping[str, float] = field(default_factory=dict)


class RewardTree:
    """One environment's reward. It holds the state of one episode at a time: `begin`, `step`, ..., `final`.

    Attributes:
        root: The tree.
        objectives: Names of its objective leaves.
        shapings: Its shaping addends, so that the learner can check their discount against its own.
        batch_node: The root where it is a batch node, else None: then `transform` changes nothing.
    """

    def __init__(self, root: Node | Component) -> None:
        """Takes a tree.

        Args:
            root: The root, or a lone component as the one objective.

        Raises:
            RewardError: If the tree cannot mean what it says (rules.py).
        """
        self.root = as_node(root)
        check_tree(self.root)
        self.objectives = tuple(leaf.label for leaf in leaves(self.root) if leaf.role == "objective")
        self.shapings: tuple[Shaping, ...] = tuple(shapings(self.root))
        self.batch_node = self.root if isinstance(self.root, BatchNode) else None
        self._potentials: dict[str, float | Unscored] = {}
        self._scored_turn = -1
        self._steps: list[JSON] = []

    @classmethod
    def load(cls, source: Source, base_dir: Path | None = None) -> Self:
        """A tree from wherever it is written.

        Args:
            source: A TOML file, its content, or a tree or component made in Python.
            base_dir: Where relative paths start; the current folder where not given. Paths inside a TOML file start at
                its own folder.

        Raises:
            RewardError: If it cannot be read or used; the message names the place in it.
            RegistryError: If a component or a kind is not known or does not load.
        """
        base = base_dir or Path()
        if isinstance(source, Mapping):
            return cls(node_from_dict(source, base))
        if not isinstance(source, str | Path):
            return cls(source)
        path = base / Path(source).expanduser()
        try:
            return cls(node_from_dict(read_toml(path), path.parent))
        except RewardError as error:
            raise RewardError(f"{path}: {error}") from error

    def as_dict(self) -> dict[str, JSON]:
        """The tree as data: `load` reads it back, and equal trees give equal dicts."""
        return node_as_dict(self.root)

    def as_toml(self) -> str:
        """The same as TOML text."""
        return to_toml(self.as_dict())

    @property
    def digest(self) -> str:
        """SHA-256 of the tree as data, in hex."""
        return hashlib.sha256(canonical_json(self.as_dict()).encode()).hexdigest()

    def begin(self, episode: Episode) -> None:
        """Starts an episode: after setup, before the first message. Reads Phi(s_0) of every shaping."""
        self._scored_turn = -1
        self._steps = []
        self._potentials = {}
        for node in self.shapings:
            result = score(node.potential, episode)
            self._potentials[node.label] = (
                Unscored(f"its potential {node.potential.name}, after setup: {result.reason}")
                if isinstance(result, Unscored)
                else result.value
            )

    def step(self, episode: Episode, *, ended: bool, bootstraps: bool = False) -> StepScore:
        """Scores what is due: after each turn, and once more with `ended` where the end comes without a turn.

        Components of each turn are scored once a turn, so the second call in a turn scores those of the end alone; both
        values are rewards of that turn. Where the critic stands for the future, components of the end are not due and
        potentials are kept.

        Args:
            episode: What components see; `episode.end` is set where it has ended.
            ended: Whether the episode has ended, other than by an error.
            bootstraps: Whether the critic's value of the final state stands for what would have come (CUT).

        Raises:
            RewardError: If the episode was not begun.
        """
        if set(self._potentials) != {node.label for node in self.shapings}:
            raise RewardError("the reward tree was not begun: call begin(episode) after setup.")
        turn_due = episode.turn > self._scored_turn
        self._scored_turn = episode.turn
        moment = Moment(episode, turn_due, ended and not bootstraps, self._potentials)
        outcome = evaluate(self.root, moment)
        if outcome is not None:
            self._steps.append({"turn": episode.turn, "reward": outcome.value, "entry": outcome.entry})
        success = success_of(self._steps, self.objectives) if moment.end_due else None
        if outcome is None:
            return StepScore(0.0, success=success, durations=moment.durations)
        return StepScore(
            outcome.value, outcome.unscored, outcome.entry, success, _catastrophe(outcome.entry), moment.durations
        )

    def final(self, end: EndReason, evidence: JSON = None) -> dict[str, JSON]:
        """The ledger of the episode (ledger.py), from the steps so far.

        Args:
            end: Why it ended.
            evidence: The record of what components read (recorded.py), kept in the ledger for replay.
        """
        ledger = build_ledger(end, self._steps, self.objectives)
        return ledger if evidence is None else ledger | {"evidence": evidence}

    def start_state(self) -> JSON:
        """What `transform` takes before the first collection: JSON-able; None where there is no batch node."""
        node = self.batch_node
        return None if node is None else {"tree": self.digest, "node": node.start_state()}

    def check_state(self, state: JSON) -> None:
        """Refuses a state that another tree wrote.

        Raises:
            CheckpointError: If `transform` cannot take it.
        """
        if self.batch_node is None and state is None:
            return
        found = state.get("tree") if isinstance(state, Mapping) else None
        if self.batch_node is None or found != self.digest:
            raise CheckpointError(
                f"the state of the reward belongs to another tree: this one has digest {self.digest[:12]} and"
                f" {'a' if self.batch_node else 'no'} batch node, the state is"
                f" {f'of {found[:12]}' if isinstance(found, str) else repr(state)[:100]}. Go on with the reward that"
                " the run was started with, or start a new run."
            )
        self.batch_node.check_state(state.get("node"))

    def transform(self, trajectories: Sequence[Trajectory], state: JSON) -> TrainedBatch:
        """What a collection is trained on. Pure; without a batch node it is what it earned.

        Args:
            trajectories: One iteration's, in any order, scored by this tree.
            state: From before them: `start_state`, or `state` of the last result.

        Raises:
            CheckpointError: If the state belongs to another tree.
            InvariantError: If an episode has no ledger, or a reward that is not finite.
        """
        self.check_state(state)
        if self.batch_node is None:
            return TrainedBatch(tuple(sorted(trajectories, key=lambda trajectory: trajectory.id)), None, {})
        batch = transform_batch(self.batch_node, trajectories, state["node"])
        return replace(batch, state={"tree": self.digest, "node": batch.state})


def _catastrophe(entry: JSON) -> str | None:
    for leaf, _ in scored_leaves(entry):
        if leaf.get("severity") == "catastrophic" and leaf["value"] is not None:
            top = leaf["bounds"][1]
            if leaf["value"] < top - AT_BOUND:
                return f"{leaf['node']} = {leaf['value']:g}, below {top:g}"
    return None
