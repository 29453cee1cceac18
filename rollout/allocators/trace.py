"""TRACE: roots where a task is undecided, continuations where a rollout could have gone the other way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from agentgym.rollout.allocators.base import Event, Expansion, ForestView, LedgerView, Predict, TreeView, Watch
from agentgym.rollout.allocators.checks import leaves_left, require_whole
from agentgym.rollout.allocators.solvers import solve_prefixes, solve_roots
from agentgym.rollout.logistic import Logistic
from agentgym.rollout.predictors import PredictorSpec, resolve_predictor
from agentgym.seeding import Rng


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Spends where the leaves below an anchor most probably hold both a success and a failure.

    Equations:
        START: M = floor(budget / (1 + N)) rollouts over all tasks. With v_i = predict(root of task i), integers
        m_i in {0, 2, ..., cap} that maximise sum_i [1 - v_i^m_i - (1 - v_i)^m_i], sum_i m_i = M. m_i = 0 filters
        task i out of this step.
        TREE, once the m_i rollouts of a task have ended: for inner node t of rollout j with outcome r (0 or 1),
        v = predict(t) and q = r v + (1 - r)(1 - v), the chance that a continuation ends as the rollout did.
        Integers K_jt that maximise sum_jt [1 - q_jt^K_jt], sum_jt K_jt = the task's share of the budget that is
        left (m_i * N).
        Propensity: 1, but where equally good continuations compete for the last places: then places / candidates.
        STEP: what tasks without inner nodes left over, by the rule of TREE over all inner nodes that were not
        tried. Leaves: at most the budget.

    Attributes:
        continuations: N, continuations for each root rollout.
        cap: most root rollouts of one task.
        predictor: who predicts success: `constant`, `beta`, `logistic`, or a `PredictorSpec`.
        target: what the predictor learns from, `own` (unbiased) or `descendant` (as in the paper); `none`: as the
            predictor says (`own` for those named above).
    """

    name: ClassVar[str] = "trace"
    family: ClassVar[str] = "control"
    source: ClassVar[str] = (
        "TRACE (arXiv 2606.11119); full text and code were not available, so details follow published digests. "
        "Ours: exact solvers, one expansion per task, no continuation from the root (that is a root rollout), "
        "unscored rollouts are not expanded, ties broken at random, the spill at the end of a step."
    )
    watches: ClassVar[Watch] = Watch.TREE
    snapshots: ClassVar[bool] = True

    continuations: int = 2
    cap: int = 64
    predictor: PredictorSpec = field(default_factory=Logistic)
    target: Literal["own", "descendant"] | None = None

    def __post_init__(self) -> None:
        require_whole(self.name, "continuations", self.continuations, least=0)
        require_whole(self.name, "cap", self.cap, least=2)
        object.__setattr__(self, "predictor", resolve_predictor(self.predictor, target=self.target))

    def minimum(self, trees: int) -> int:
        """Return `2 * (1 + continuations)`: two roots and their continuations on one task, whatever `trees` is."""
        return 2 * (1 + self.continuations)

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        """Return roots at the start, continuations when a tree is idle, the spill when the step is."""
        left = leaves_left(self.name, ledger)
        if view.event is Event.START:
            return self._roots(view, left // (1 + self.continuations), rng)
        if self.continuations == 0:
            return []
        if view.event is Event.TREE:
            fresh = [tree for tree in view.trees if len(tree.bare()) == len(tree.leaves)]
            return [e for tree in fresh for e in _expand([tree], min(left, tree.left), view.predict, rng)]
        return _expand(view.trees, left, view.predict, rng)

    def _roots(self, view: ForestView, total: int, rng: Rng) -> list[Expansion]:
        order = rng.permutation(len(view.trees)).tolist()
        trees = [view.trees[i] for i in order]
        counts = solve_roots([view.predict(tree, 0) for tree in trees], total, self.cap)
        found = [Expansion(tree.index, count=m) for tree, m in zip(trees, counts, strict=True) if m]
        return sorted(found, key=lambda e: e.tree)


def _expand(trees: Iterable[TreeView], total: int, predict: Predict, rng: Rng) -> list[Expansion]:
    """Distribute `total` continuations over the untried inner nodes of the scored bare rollouts of `trees`."""
    if total < 1:
        return []
    places: list[tuple[TreeView, int, bool]] = []
    for view in trees:
        tried = {view.tree.origin[leaf] for leaf in view.leaves}
        for leaf in view.bare():
            success = view.tree.success[leaf]
            if success is not None:
                places += [(view, node, success) for node in view.anchors(leaf) if node not in tried]
    order = rng.permutation(len(places)).tolist()
    values = [(predict(view, node), success) for view, node, success in (places[i] for i in order)]
    agreement = [v if success else 1.0 - v for v, success in values]
    counts = solve_prefixes(agreement, total)
    last = _last_propensity(agreement, counts)
    chosen = sorted((i, k, p) for i, k, p in zip(order, counts, last, strict=True) if k)
    return [e for i, k, p in chosen for e in _split(places[i][0].index, places[i][1], k, p)]


def _last_propensity(q: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Return, for the last continuation at each prefix, the probability that the shuffled ties gave it one.

    It is 1 but for prefixes whose last continuation was worth no more than what others went without: of `a` equally
    good ones, `c` got one.
    """
    worth = [(1.0 - p) * p ** (k - 1) if k else 0.0 for p, k in zip(q, counts, strict=True)]
    missed = [(1.0 - p) * p**k for p, k in zip(q, counts, strict=True)]
    least = min((w for w, k in zip(worth, counts, strict=True) if k), default=0.0)
    got = sum(1 for w, k in zip(worth, counts, strict=True) if k and math.isclose(w, least))
    without = sum(1 for w in missed if math.isclose(w, least))
    return [got / (got + without) if math.isclose(w, least) else 1.0 for w in worth]


def _split(tree: int, anchor: int, count: int, last: float) -> list[Expansion]:
    """Propose `count` continuations, the last of which was chosen with probability `last`."""
    if last == 1.0:
        return [Expansion(tree, anchor, count)]
    sure = [Expansion(tree, anchor, count - 1)] if count > 1 else []
    return [*sure, Expansion(tree, anchor, 1, propensity=last)]
