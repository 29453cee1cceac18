"""Flat groups: what GRPO does today."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from agentgym.rollout.allocators.base import Expansion, ForestView, LedgerView, Watch
from agentgym.rollout.allocators.checks import even_shares, leaves_left, require_whole
from agentgym.seeding import Rng


@dataclass(frozen=True, kw_only=True)
class Uniform:
    """The same number of independent rollouts for every task.

    Equations:
        m_i = n for every task i; no continuations. Leaves: tasks * n.

    Attributes:
        n: rollouts of each task, or `none`: the whole budget in equal parts, remainders to the first tasks.
    """

    name: ClassVar[str] = "uniform"
    family: ClassVar[str] = "generate"
    source: ClassVar[str] = (
        "GRPO (arXiv 2402.03300): a group of independent rollouts per prompt. What the budget has above "
        "tasks * n is left unspent."
    )
    watches: ClassVar[Watch] = Watch.NOTHING
    snapshots: ClassVar[bool] = False
    predictor: ClassVar[None] = None

    n: int | None = 8

    def __post_init__(self) -> None:
        if self.n is not None:
            require_whole(self.name, "n", self.n, least=1)

    def minimum(self, trees: int) -> int:
        """Return `trees * n`, or one leaf per tree when `n` is `None`."""
        return trees * (self.n or 1)

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        """Return one expansion of the root per tree. `rng` is not used."""
        if self.n is not None and math.isinf(ledger.left("leaves")):
            counts = [self.n] * len(view.trees)
        else:
            shares = even_shares(leaves_left(self.name, ledger), len(view.trees))
            counts = shares if self.n is None else [min(self.n, share) for share in shares]
        return [Expansion(t.index, count=m) for t, m in zip(view.trees, counts, strict=True) if m]
