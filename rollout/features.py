"""What a predictor sees of a prefix, and what it learns from: pure functions of a tree."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

from agentgym.errors import UnknownName
from agentgym.rollout.tree import Tree

TargetKind: TypeAlias = Literal["own", "descendant"]
TARGETS = ("own", "descendant")


class Prefix(NamedTuple):
    """The turns from the root to a node.

    Attributes:
        turns: number of turns.
        tokens: sampled tokens.
        logprob: sum of their behaviour log-probs, in nats.
        errors: turns with a tool call that was refused.
        last_error: whether the last turn is one of those.
        last_logprob: mean log-prob of the last message, 0 where it has no tokens.
    """

    turns: int = 0
    tokens: int = 0
    logprob: float = 0.0
    errors: int = 0
    last_error: bool = False
    last_logprob: float = 0.0

    def then(self, tree: Tree, node: int) -> Prefix:
        """Return the prefix one turn longer."""
        count = tree.n_sampled[node]
        logprob = float(tree.logprobs(node).sum(dtype=float)) if count else 0.0
        error = any(not call.get("ok", True) for call in tree.tool_calls.get(node, ()))
        return Prefix(
            self.turns + 1,
            self.tokens + count,
            self.logprob + logprob,
            self.errors + error,
            error,
            logprob / count if count else 0.0,
        )


def prefix_of(tree: Tree, node: int) -> Prefix:
    """Return the prefix that ends at `node`."""
    prefix = Prefix()
    for step in tree.path(node)[1:]:
        prefix = prefix.then(tree, step)
    return prefix


def prefixes(tree: Tree) -> list[Prefix]:
    """Return the prefix of every node, by node index, in one pass."""
    found = [Prefix()]
    for node in range(1, tree.n_nodes):
        found.append(found[tree.parent[node]].then(tree, node))
    return found


def outcomes(tree: Tree, kind: TargetKind) -> dict[int, tuple[int, int]]:
    """Count the scored leaves that say something of each inner node.

    `own`: the leaf of the continuation that made the node, and those of continuations started at it. How many there
    are depends on outcomes that were known before, never on these leaves themselves, so their mean is an unbiased
    estimate of the success probability (Wald's identity).

    `descendant`: all leaves below the node, the recursive target of TRACE (arXiv 2606.11119). Continuations start
    more often below prefixes whose rollout is doubted, so the mean is biased: towards 0.5 at roots and early turns,
    by up to 0.09 on the four-turn walk of the tests (4 roots, 2 continuations for each).

    Leaves without a known success and failed attempts do not count. A node is no outcome of itself: leaves have no row.

    Returns:
        node -> (successes, leaves), for nodes with at least one leaf, the root being 0.

    Raises:
        UnknownName: another kind.
    """
    if kind not in TARGETS:
        raise UnknownName.of("target", kind, TARGETS)
    counts: dict[int, tuple[int, int]] = {}
    for leaf in tree.leaves:
        success = tree.success[leaf]
        if success is None:
            continue
        top = tree.origin[leaf] if kind == "own" else 0
        node = leaf
        while node != top:
            node = tree.parent[node]
            wins, n = counts.get(node, (0, 0))
            counts[node] = wins + success, n + 1
    return counts


def targets(tree: Tree, kind: TargetKind) -> list[tuple[int, float, int]]:
    """Return regression targets: (node, mean success, number of leaves as weight). See `outcomes`."""
    return [(node, wins / n, n) for node, (wins, n) in outcomes(tree, kind).items()]
