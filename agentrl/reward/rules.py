"""What a tree as a whole must keep to; checked once, when it is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from agentrl.errors import RewardError
from agentrl.reward.aggregators import Shaping, WeightedSum
from agentrl.reward.batch import BatchNode
from agentrl.reward.component import When
from agentrl.reward.nodes import Aggregator, Leaf, Node, is_diagnostic


def walk(node: Node) -> Iterator[Node]:
    """The node and everything below it."""
    yield node
    if isinstance(node, Aggregator):
        for edge in node.edges:
            yield from walk(edge.node)


def leaves(root: Node) -> list[Leaf]:
    """The leaves of a tree, in order."""
    return [node for node in walk(root) if isinstance(node, Leaf)]


def shapings(root: Node) -> list[Shaping]:
    """The shaping addends of a tree, in order."""
    return [node for node in walk(root) if isinstance(node, Shaping)]


def check_tree(root: Node) -> None:
    """Refuses trees that cannot mean what they say.

    Raises:
        RewardError: With the node, the reason and a way out.
    """
    if not any(leaf.role == "objective" for leaf in leaves(root)):
        raise RewardError(
            "the reward tree has no objective, so nothing could ever succeed: give at least one component the role"
            " 'objective' (the default)."
        )
    if is_diagnostic(root):
        raise RewardError("the reward tree is a lone diagnostic.")
    names = Counter(node.label for node in walk(root) if isinstance(node, Leaf | Shaping))
    for name, count in names.items():
        if count > 1:
            raise RewardError(
                f"{name!r} stands in the reward tree {count} times and the ledger could not tell them apart:"
                ' give each a `name` of its own, such as name = "correct_again".'
            )
    for node in walk(root):
        if isinstance(node, Aggregator):
            _check_children(node, root)
            _check_times(node)


def _check_children(node: Aggregator, root: Node) -> None:
    for edge in node.edges:
        child = edge.node
        if isinstance(child, BatchNode):
            raise RewardError(
                f"{child.label!r} ({child.kind}) stands under {node.label!r} ({node.kind}): expected it as the root,"
                " because it reads a whole collection of episodes, and every other node one step of one episode."
                f" Put {node.label!r} below it."
            )
        if is_diagnostic(child) and not isinstance(node, WeightedSum):
            raise RewardError(
                f"{child.label!r} is a diagnostic under {node.label!r} ({node.kind}), where it would change the reward:"
                " a diagnostic stands among the children of a weighted_sum."
            )
        if isinstance(child, Shaping):
            if node is not root or not isinstance(node, WeightedSum) or isinstance(node, BatchNode):
                raise RewardError(
                    f"{child.label!r} is shaping under {node.label!r} ({node.kind}): shaping is an addend of the root,"
                    " a weighted_sum, and stands nowhere else, or it would change what is optimal."
                )
            if edge.weight != 1.0:
                raise RewardError(
                    f"{child.label!r} is shaping with weight {edge.weight}: leave the weight out and set its `scale`."
                )


def _check_times(node: Aggregator) -> None:
    asked = [edge.node for edge in node.edges if edge.slot in node.conditions]
    others = [edge.node for edge in node.edges if edge.slot not in node.conditions]
    late = next((each for each in asked if "end" in each.due), None)
    early = next((each for each in others if "turn" in each.due), None)
    if late and early:
        raise RewardError(
            f"{node.label!r} ({node.kind}): its condition {late.label!r} is known only at the end, and"
            f" {_first(early, 'turn')!r} below it is due at each turn: no turn could be paid before the end."
            " Score it at the end (when='end'), or take a condition of each turn."
        )
    if not node.mixes and len(node.due) > 1:
        raise RewardError(
            f"{node.label!r} ({node.kind}) holds {_first(node, 'turn')!r}, due at each turn, beside"
            f" {_first(node, 'end')!r}, known only at the end: at a turn its value is not known."
            " Put them side by side in a weighted_sum, or score both at the same time."
        )


def _first(node: Node, when: When) -> str:
    return next(leaf.label for leaf in leaves(node) if leaf.component.when == when)
