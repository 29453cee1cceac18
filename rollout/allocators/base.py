"""The allocator contract: which anchors get how many continuations, and how they start.

An allocator is a frozen, picklable dataclass whose `propose` is a pure function of what it sees: no I/O, no
clock, no randomness but the generator that it is handed. The runner executes, enforces the budget and decides
when to ask again, in an order that does not depend on what finished first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias, runtime_checkable

from agentgym.seeding import Rng

if TYPE_CHECKING:
    from agentgym.rollout.predictors import PredictorSpec
    from agentgym.rollout.tree import Tree


class Watch(StrEnum):
    """When an allocator is asked again, after the first call (`Event.START`) at the start of each step."""

    NOTHING = "nothing"
    """Never."""
    LEAF = "leaf"
    """After each leaf of a tree, in the order in which the tree's continuations were dispatched."""
    TREE = "tree"
    """Whenever everything that a tree waits for has ended."""
    STEP = "step"
    """Whenever everything that the whole step waits for has ended."""


class Event(StrEnum):
    """Why an allocator is asked."""

    START = "start"
    """The step begins: every tree consists of its root. The budget of the whole step may be spent."""
    LEAF = "leaf"
    """One leaf of one tree has ended (`Watch.LEAF`)."""
    TREE = "tree"
    """One tree is idle (`Watch.TREE`). What it may spend is its share of the step's budget."""
    STEP = "step"
    """All trees are idle; what they left unspent may be spent anywhere (all but `Watch.NOTHING`)."""


@dataclass(frozen=True, slots=True)
class Start:
    """How a continuation begins. `sample`: the policy samples the next message."""

    kind: str = "sample"


@dataclass(frozen=True, slots=True)
class Expansion:
    """A proposal: start `count` continuations at `anchor`.

    Attributes:
        tree: index of the tree within the step.
        anchor: node index in that tree; 0 is the root.
        count: number of continuations (>= 1).
        start: how they begin.
        propensity: probability with which the allocator's own randomness chose this anchor (1 for a
            deterministic choice), stored on the leaves so that selection can be corrected for.
    """

    tree: int
    anchor: int = 0
    count: int = 1
    start: Start = field(default_factory=Start)
    propensity: float = 1.0


@dataclass(frozen=True, slots=True)
class TreeView:
    """What an allocator sees of one tree.

    Attributes:
        index: position of the tree within the step (what `Expansion.tree` takes).
        tree: the arena. Read only.
        leaves: scored and unscored leaves that it may know of, in dispatch order; failed rollouts are not in it.
        new_leaves: those that ended since it was last asked about this tree.
        left: continuations that this tree may still get from its share of the budget.
    """

    index: int
    tree: Tree
    leaves: Sequence[int] = ()
    new_leaves: Sequence[int] = ()
    left: int = 0

    def bare(self) -> list[int]:
        """Leaves of continuations that started at the root."""
        return [leaf for leaf in self.leaves if self.tree.origin[leaf] == 0]

    def anchors(self, leaf: int) -> list[int]:
        """Inner nodes on the path to `leaf` at which a continuation can start: neither the root nor the leaf."""
        path = self.tree.path(leaf)
        return [node for node in path[1:-1] if self.tree.restorable(node)]


Predict: TypeAlias = Callable[[TreeView, int], float]


@dataclass(frozen=True, slots=True)
class ForestView:
    """What an allocator sees.

    Attributes:
        event: why it is asked.
        trees: the trees that the event is about: all of the step for `START` and `STEP`, one otherwise.
        predict: `(tree, node) -> probability` that an episode continued from the node succeeds, clipped to
            [0.02, 0.98], by a predictor that is frozen within the step.
    """

    event: Event
    trees: Sequence[TreeView]
    predict: Predict


class LedgerView(Protocol):
    """What an allocator may know of the budget."""

    def left(self, unit: str = "leaves") -> float:
        """Return what is left for this event, in `leaves`, `sampled_tokens` or `env_steps` (infinite: no limit)."""
        ...


@runtime_checkable
class Allocator(Protocol):
    """Decides where to branch. See the module's docstring."""

    name: ClassVar[str]
    """Name on the command line."""
    family: ClassVar[str]
    """`generate`, `filter`, `control` or `replay` (GFCR taxonomy, arXiv 2605.02913)."""
    source: ClassVar[str]
    """Paper and equation, and where this differs."""
    watches: ClassVar[Watch]
    snapshots: ClassVar[bool]
    """Whether continuations start at inner nodes, so that each turn must be restorable."""

    @property
    def predictor(self) -> PredictorSpec | None:
        """The predictor that it wants, or `None`."""
        ...

    def minimum(self, trees: int) -> int:
        """Return the smallest budget in leaves with which a step of `trees` tasks makes sense."""
        ...

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        """Return the continuations to start now; beyond the budget they are cut in the order given."""
        ...


Options: TypeAlias = Mapping[str, object]
