"""Who predicts whether an episode continued from a node succeeds. Only allocators use it, never the advantage.

A `PredictorSpec` is configuration; the `Predictor` that it makes is what has been learned so far. Both are immutable:
a predictor is frozen within a step, and `updated` returns the next one, which depends on trees of earlier steps only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.features import TARGETS, TargetKind, outcomes

if TYPE_CHECKING:
    from agentgym.rollout.allocators.base import TreeView
    from agentgym.rollout.tree import Tree

State: TypeAlias = dict[str, Any]
CLIP = (0.02, 0.98)
"""Predictions are clipped to this range, so that no anchor is ever given up for good."""


@runtime_checkable
class Predictor(Protocol):
    """What has been learned so far. Immutable and picklable."""

    def predict(self, view: TreeView, node: int) -> float:
        """Return the probability, in [0.02, 0.98], that an episode continued from `node` succeeds."""
        ...

    def updated(self, trees: Sequence[Tree]) -> Predictor:
        """Return the predictor that has also seen the trees of one step. Their order does not matter."""
        ...

    def to_json(self) -> State:
        """Return what was learned, as JSON values; `PredictorSpec.load` takes it."""
        ...


@runtime_checkable
class PredictorSpec(Protocol):
    """Configuration of a predictor. Immutable and picklable."""

    def initial(self) -> Predictor:
        """Return the predictor that has seen nothing."""
        ...

    def load(self, state: Mapping[str, Any]) -> Predictor:
        """Return the predictor with this state. Raises `BadInput` when it is not one of this kind."""
        ...


def clip(p: float) -> float:
    """Clip a probability to [0.02, 0.98]."""
    return min(max(p, CLIP[0]), CLIP[1])


# --- constant -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The same probability everywhere; learns nothing. Specification and predictor in one.

    Attributes:
        value: the probability.
    """

    value: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.value <= 1:
            raise BadInput(f"constant: value must be in [0, 1], got {self.value}")

    def initial(self) -> Constant:
        """Return itself."""
        return self

    def load(self, state: Mapping[str, Any]) -> Constant:
        """Return itself."""
        return self

    def predict(self, view: TreeView, node: int) -> float:
        """Return the value, clipped."""
        return clip(self.value)

    def updated(self, trees: Sequence[Tree]) -> Constant:
        """Return itself."""
        return self

    def to_json(self) -> State:
        """Return nothing."""
        return {}


# --- success rates of tasks and levels ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Beta:
    """Success rate of the task, shrunk to that of its level; the same at every prefix.

    Equations:
        level: mean_l = (s * 0.5 + wins_l) / (s + leaves_l), the mean of a Beta posterior.
        task: mean_i = (s * mean_l + wins_i) / (s + leaves_i).
        A step first multiplies the old counts of the tasks and levels that it played by `decay` (as MoPPS,
        arXiv 2507.04632, which has no levels).

    Attributes:
        strength: s, number of leaves that a prior counts as.
        decay: weight of counts of earlier steps, in (0, 1].
        target: which leaves count at the root, `own` or `descendant`.
    """

    strength: float = 2.0
    decay: float = 1.0
    target: TargetKind = "own"

    def __post_init__(self) -> None:
        check_learning("beta", self.strength, self.decay, self.target)

    def initial(self) -> BetaPredictor:
        """Return the predictor without counts: 0.5 everywhere."""
        return BetaPredictor(self)

    def load(self, state: Mapping[str, Any]) -> BetaPredictor:
        """Return the predictor with the counts of `to_json`."""
        try:
            return BetaPredictor(self, _load_counts(state["tasks"]), _load_counts(state["levels"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"this is no state of the predictor 'beta': {error!r}") from error


Counts: TypeAlias = Mapping[str, tuple[float, float]]
"""Name -> (successes, leaves)."""


@dataclass(frozen=True)
class BetaPredictor:
    """Counts of successes. See `Beta`."""

    spec: Beta
    tasks: Counts = field(default_factory=dict)
    levels: Counts = field(default_factory=dict)

    def rate(self, tree: Tree) -> float:
        """Return the posterior mean of the tree's task."""
        strength, mean = self.spec.strength, 0.5
        for wins, leaves in (self.levels.get(tree.level, (0, 0)), self.tasks.get(tree.task_id, (0, 0))):
            mean = (strength * mean + wins) / (strength + leaves)
        return mean

    def predict(self, view: TreeView, node: int) -> float:
        """Return the task's rate, clipped."""
        return clip(self.rate(view.tree))

    def updated(self, trees: Sequence[Tree]) -> BetaPredictor:
        """Return the predictor with the outcomes at the roots of `trees` counted in."""
        tasks: dict[str, tuple[int, int]] = {}
        levels: dict[str, tuple[int, int]] = {}
        for tree in trees:
            wins, leaves = outcomes(tree, self.spec.target).get(0, (0, 0))
            if leaves:
                _add(tasks, tree.task_id, wins, leaves)
                _add(levels, tree.level, wins, leaves)
        decay = self.spec.decay
        return BetaPredictor(self.spec, _learned(self.tasks, tasks, decay), _learned(self.levels, levels, decay))

    def to_json(self) -> State:
        """Return the counts, sorted by name."""
        return {
            "tasks": {name: list(self.tasks[name]) for name in sorted(self.tasks)},
            "levels": {name: list(self.levels[name]) for name in sorted(self.levels)},
        }


def _add(counts: dict[str, tuple[int, int]], name: str, wins: int, leaves: int) -> None:
    old = counts.get(name, (0, 0))
    counts[name] = old[0] + wins, old[1] + leaves


def _learned(old: Counts, new: Mapping[str, tuple[int, int]], decay: float) -> Counts:
    learned = dict(old)
    for name, (wins, leaves) in new.items():
        before = old.get(name, (0.0, 0.0))
        learned[name] = decay * before[0] + wins, decay * before[1] + leaves
    return learned


def _load_counts(state: Mapping[str, Any]) -> Counts:
    return {str(name): (float(wins), float(leaves)) for name, (wins, leaves) in state.items()}


def check_learning(owner: str, strength: float, decay: float, target: str) -> None:
    """Raise `BadInput` unless the options that `Beta` and `Logistic` share are valid."""
    if not strength > 0:
        raise BadInput(f"{owner}: strength must be > 0, got {strength}")
    if not 0 < decay <= 1:
        raise BadInput(f"{owner}: decay must be in (0, 1], got {decay}")
    if target not in TARGETS:
        raise UnknownName.of(f"target of the predictor {owner!r}", target, TARGETS)


# --- by name --------------------------------------------------------------------------------------------------


def predictors() -> dict[str, type[PredictorSpec]]:
    """Return the shipped predictors by name."""
    from agentgym.rollout.logistic import Logistic

    return {"constant": Constant, "beta": Beta, "logistic": Logistic}


def resolve_predictor(given: object, *, target: str | None = None) -> PredictorSpec:
    """Return the predictor that a name or a specification stands for, with its target replaced if one is given.

    Raises:
        UnknownName: an unknown predictor or target.
        BadInput: neither a name nor a specification.
    """
    known = predictors()
    if isinstance(given, str):
        if given not in known:
            raise UnknownName.of("predictor", given, known)
        given = known[given]()
    if not isinstance(given, PredictorSpec):
        raise BadInput(f"predictor must be one of {', '.join(known)} or a PredictorSpec, got {given!r}")
    if target is not None and target not in TARGETS:
        raise UnknownName.of("target", target, TARGETS)
    if target is None or "target" not in getattr(given, "__dataclass_fields__", {}):
        return given
    spec: Any = given
    changed: PredictorSpec = dataclasses.replace(spec, target=target)
    return changed
