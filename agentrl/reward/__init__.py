"""Rewards: evidence, components, the tree that combines them, and the ledger that accounts for every step reward."""

from agentrl.reward.builders import clip, gate, leaf, lexicographic, minimum, product, shaping, weighted_sum
from agentrl.reward.component import Component, component, require_some
from agentrl.reward.evidence import Episode, TurnView, evidence
from agentrl.reward.nodes import Aggregator, Combined, Node, Part, Span, Weighted
from agentrl.reward.tree import RewardTree, StepScore

__all__ = [
    "Aggregator",
    "Combined",
    "Component",
    "Episode",
    "Node",
    "Part",
    "RewardTree",
    "Span",
    "StepScore",
    "TurnView",
    "Weighted",
    "clip",
    "component",
    "evidence",
    "gate",
    "leaf",
    "lexicographic",
    "minimum",
    "product",
    "require_some",
    "shaping",
    "weighted_sum",
]
