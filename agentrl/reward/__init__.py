"""Rewards: evidence, components, the tree that combines them, and the ledger that accounts for every step reward."""

from agentrl.reward.batch import BatchNode, BatchRecord, Trained, Transformed
from agentrl.reward.builders import (
    clip,
    constrained,
    gate,
    group_relative,
    leaf,
    lexicographic,
    minimum,
    normalised,
    product,
    shaping,
    weighted_sum,
)
from agentrl.reward.component import Component, component, require_some
from agentrl.reward.evidence import Episode, TurnView, evidence
from agentrl.reward.nodes import Aggregator, Combined, Node, Part, Span, Weighted
from agentrl.reward.tree import RewardTree, StepScore

__all__ = [
    "Aggregator",
    "BatchNode",
    "BatchRecord",
    "Combined",
    "Component",
    "Episode",
    "Node",
    "Part",
    "RewardTree",
    "Span",
    "StepScore",
    "Trained",
    "Transformed",
    "TurnView",
    "Weighted",
    "clip",
    "component",
    "constrained",
    "evidence",
    "gate",
    "group_relative",
    "leaf",
    "lexicographic",
    "minimum",
    "normalised",
    "product",
    "require_some",
    "shaping",
    "weighted_sum",
]
