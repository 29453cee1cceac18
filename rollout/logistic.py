"""Online logistic regression on features of a prefix: the default predictor of TRACE."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentgym.errors import BadInput
from agentgym.rollout.features import Prefix, TargetKind, outcomes, prefix_of, prefixes
from agentgym.rollout.predictors import Beta, BetaPredictor, State, check_learning, clip

if TYPE_CHECKING:
    from agentgym.rollout.allocators.base import TreeView
    from agentgym.rollout.tree import Tree

Matrix: TypeAlias = npt.NDArray[np.float64]
Weights: TypeAlias = tuple[float, ...]
Precision: TypeAlias = tuple[tuple[float, ...], ...]

FEATURES = (
    "bias",
    "task",  # logit of the task's rate (`Beta`)
    "inner",  # 1 except at the root
    "turn",  # turns / 10
    "remaining",  # share of turns left, the longest episode of the level seen so far being the whole
    "errors",  # turns with a refused tool call
    "last_error",  # whether the last turn is one
    "last_logprob",  # mean log-prob of the last message, nats per token, at least -3
    "path_logprob",  # the same over the whole path
    "tokens",  # log(1 + sampled tokens) / 5
)
"""Columns of the design matrix."""
_PRIOR = np.array([float(name == "task") for name in FEATURES])
_USUAL_TURNS = 20


@dataclass(frozen=True, kw_only=True)
class Logistic:
    """Online logistic regression on features of the prefix, shrunk to the rate of the task.

    Equations:
        predict: sigmoid(w . x), x as in `FEATURES`. Prior of w: normal, mean 1 for the logit of the task's rate
        and 0 for the rest, precision `shrinkage` each, so that it starts as `Beta` does.
        update (Laplace): w minimises 1/2 (w - w_old)' P (w - w_old) + sum_y n_y * crossentropy(value_y, p_y) over all
        nodes y of the step's trees, n_y leaves, by Newton's method; P gains the Hessian. Features use the rates
        from before the step, so a tree's own outcomes are not among its features.
        Each step first takes the precision gained earlier times `decay`.

    Attributes:
        shrinkage: precision of the prior of each weight.
        strength: prior leaves of the rates, see `Beta`.
        decay: weight of evidence of earlier steps, in (0, 1].
        target: `own` (unbiased) or `descendant` (as in the TRACE paper).
    """

    shrinkage: float = 4.0
    strength: float = 2.0
    decay: float = 1.0
    target: TargetKind = "own"

    def __post_init__(self) -> None:
        check_learning("logistic", self.strength, self.decay, self.target)
        if not self.shrinkage > 0:
            raise BadInput(f"logistic: shrinkage must be > 0, got {self.shrinkage}")

    def initial(self) -> LogisticPredictor:
        """Return the predictor that equals `Beta`'s."""
        rates = Beta(strength=self.strength, decay=self.decay, target=self.target).initial()
        return LogisticPredictor(self, rates, tuple(_PRIOR.tolist()), _nested(self.shrinkage * np.eye(len(FEATURES))))

    def load(self, state: Mapping[str, Any]) -> LogisticPredictor:
        """Return the predictor with the state of `to_json`."""
        rates = self.initial().rates.spec
        try:
            if state["features"] != list(FEATURES):
                raise ValueError(f"it has the features {state['features']}, this version {list(FEATURES)}")
            return LogisticPredictor(
                self,
                rates.load(state["rates"]),
                tuple(np.array(state["weights"], float).reshape(len(FEATURES)).tolist()),
                _nested(np.array(state["precision"], float).reshape(len(FEATURES), len(FEATURES))),
                {str(level): int(turns) for level, turns in state["horizons"].items()},
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"this is no state of the predictor 'logistic': {error!r}") from error


@dataclass(frozen=True)
class LogisticPredictor:
    """Weights and their precision. See `Logistic`.

    Attributes:
        spec: the configuration.
        rates: rates of tasks and levels.
        weights: `[F]`.
        precision: `[F, F]`.
        horizons: level -> turns of its longest episode so far.
    """

    spec: Logistic
    rates: BetaPredictor
    weights: Weights
    precision: Precision
    horizons: Mapping[str, int] = field(default_factory=dict)

    def predict(self, view: TreeView, node: int) -> float:
        """Return the regression's probability, clipped."""
        x = self._features(view.tree, self.rates.rate(view.tree), prefix_of(view.tree, node))
        return clip(_sigmoid(sum(w * f for w, f in zip(self.weights, x, strict=True))))

    def updated(self, trees: Sequence[Tree]) -> LogisticPredictor:
        """Return the predictor fitted to `trees`, and its rates and horizons with them counted in."""
        rows = sorted(row for tree in trees for row in self._rows(tree))
        weights, precision = self._fit(np.array(rows)) if rows else (self.weights, self.precision)
        horizons = dict(self.horizons)
        for tree in trees:
            longest = max((tree.depth[leaf] for leaf in tree.leaves), default=0)
            horizons[tree.level] = max(longest, horizons.get(tree.level, 0))
        return LogisticPredictor(self.spec, self.rates.updated(trees), weights, precision, horizons)

    def to_json(self) -> State:
        """Return the state. Floats survive JSON exactly."""
        return {
            "features": list(FEATURES),
            "weights": list(self.weights),
            "precision": [list(row) for row in self.precision],
            "horizons": dict(sorted(self.horizons.items())),
            "rates": self.rates.to_json(),
        }

    def _features(self, tree: Tree, rate: float, prefix: Prefix) -> list[float]:
        """Return `x`, `[F]`."""
        horizon = self.horizons.get(tree.level) or _USUAL_TURNS
        return [
            1.0,
            math.log(clip(rate) / (1.0 - clip(rate))),
            float(prefix.turns > 0),
            prefix.turns / 10,
            max(0.0, 1.0 - prefix.turns / horizon),
            float(prefix.errors),
            float(prefix.last_error),
            max(-3.0, prefix.last_logprob),
            max(-3.0, prefix.logprob / prefix.tokens) if prefix.tokens else 0.0,
            math.log1p(prefix.tokens) / 5,
        ]

    def _rows(self, tree: Tree) -> list[list[float]]:
        """Return `[x..., successes, leaves]` for each node with outcomes."""
        found, rate = prefixes(tree), self.rates.rate(tree)
        counts = outcomes(tree, self.spec.target)
        return [[*self._features(tree, rate, found[node]), wins, n] for node, (wins, n) in counts.items()]

    def _fit(self, rows: Matrix) -> tuple[Weights, Precision]:
        """Fit to rows `[R, F + 2]`; sorted, so that the result does not depend on the order of trees and nodes."""
        x, wins, n = rows[:, :-2], rows[:, -2], rows[:, -1]
        base = self.spec.shrinkage * np.eye(len(FEATURES))
        kept = self.spec.decay * (np.array(self.precision) - base)
        prior = base + kept
        mean = np.linalg.solve(prior, kept @ np.array(self.weights) + base @ _PRIOR)
        return _laplace(x, wins, n, mean, prior)


def _laplace(
    x: Matrix, wins: Matrix, n: Matrix, mean: Matrix, prior: Matrix, steps: int = 20
) -> tuple[Weights, Precision]:
    """Minimise the penalised cross-entropy by damped Newton steps; return the weights and the Hessian there."""

    def loss(w: Matrix) -> float:
        z = x @ w
        return float(n @ np.logaddexp(0.0, z) - wins @ z + 0.5 * (w - mean) @ prior @ (w - mean))

    def hessian(w: Matrix) -> tuple[Matrix, Matrix]:
        p = 1.0 / (1.0 + np.exp(-np.clip(x @ w, -500, 500)))
        return x.T @ (n * p - wins) + prior @ (w - mean), prior + (x.T * (n * p * (1.0 - p))) @ x

    w = mean
    for _ in range(steps):
        gradient, curvature = hessian(w)
        step = np.linalg.solve(curvature, gradient)
        now = loss(w)
        while loss(w - step) > now and np.abs(step).max() > 1e-9:
            step = step / 2
        w = w - step
        if np.abs(step).max() <= 1e-9:
            break
    return tuple(w.tolist()), _nested(hessian(w)[1])


def _sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-min(max(z, -500.0), 500.0)))


def _nested(matrix: Matrix) -> Precision:
    return tuple(tuple(row) for row in matrix.tolist())
