"""Tree-GRPO: a few chains, then continuations from random turns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from agentgym.rollout.allocators.base import Event, Expansion, ForestView, LedgerView, TreeView, Watch
from agentgym.rollout.allocators.checks import even_shares, leaves_left, require_whole
from agentgym.seeding import Rng


@dataclass(frozen=True, kw_only=True)
class RandomTree:
    """M chains per task, then L rounds in which each chain's tree is continued from N random turns.

    Equations:
        START: M rollouts from the root. Each is the first chain of a tree of its own (they share only the root).
        Round 1..L, per chain's tree: N draws a ~ Uniform(C), C = inner nodes on the paths of the leaves that the
        tree has by then, with replacement; one continuation from each. Propensity of a draw: 1 / |C|.
        Leaves of a task: M * (L * N + 1). Its cost is about M * (1 + L * N / 2) rollouts, because a random turn
        lies halfway on average.

    Attributes:
        chains: M, rollouts from the root of each task.
        nodes: N, continuations of each chain's tree in each round.
        rounds: L, rounds of expansion.
    """

    name: ClassVar[str] = "random-tree"
    family: ClassVar[str] = "generate"
    source: ClassVar[str] = (
        "Tree-GRPO (arXiv 2509.21240). Released code draws from the root too, which here would only be one more "
        "chain, and trains on 3 random leaves of each tree; here the root is never drawn and every leaf is kept. A "
        "chain without inner nodes (one turn, or a failed rollout) is not expanded and its share is left unspent. A "
        "continuation that failed is drawn again while the budget lasts."
    )
    watches: ClassVar[Watch] = Watch.TREE
    snapshots: ClassVar[bool] = True
    predictor: ClassVar[None] = None

    chains: int = 2
    nodes: int = 2
    rounds: int = 1

    def __post_init__(self) -> None:
        require_whole(self.name, "chains", self.chains, least=1)
        require_whole(self.name, "nodes", self.nodes, least=0)
        require_whole(self.name, "rounds", self.rounds, least=0)

    def minimum(self, trees: int) -> int:
        """Return `trees * chains`: every task gets its chains; expansions take what is left."""
        return trees * self.chains

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        """Return the chains at the start, a round of expansions when a tree is idle, nothing for the step."""
        left = leaves_left(self.name, ledger)
        if view.event is Event.START:
            shares = even_shares(left, len(view.trees))
            counts = [min(self.chains, share) for share in shares]
            return [Expansion(t.index, count=m) for t, m in zip(view.trees, counts, strict=True) if m]
        if view.event is Event.TREE:
            return [e for tree in view.trees for e in self._round(tree, rng)][:left]
        return []

    def _round(self, view: TreeView, rng: Rng) -> list[Expansion]:
        """Draw one round, in turn for each chain, so that a cut by the budget hits all chains alike."""
        inner: dict[int, dict[int, None]] = {}
        done: Counter[int] = Counter()
        for leaf in view.leaves:
            chain = view.tree.path(leaf)[1]
            inner.setdefault(chain, {}).update(dict.fromkeys(view.anchors(leaf)))
            done[chain] += view.tree.origin[leaf] != 0
        draws: list[list[Expansion]] = []
        for chain, nodes in inner.items():
            pool = list(nodes)
            wanted = min(self.nodes, self.rounds * self.nodes - done[chain])
            picked = rng.integers(len(pool), size=wanted).tolist() if pool and wanted > 0 else []
            draws.append([Expansion(view.index, pool[k], propensity=1 / len(pool)) for k in picked])
        return [e for draw in zip_longest(*draws) for e in draw if e is not None][: view.left]
