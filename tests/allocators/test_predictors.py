"""Targets, features and the ladder of predictors."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest

from agentgym import seeding
from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.allocators.base import TreeView
from agentgym.rollout.allocators.trace import Trace
from agentgym.rollout.allocators.uniform import Uniform
from agentgym.rollout.features import Prefix, outcomes, prefix_of, prefixes, targets
from agentgym.rollout.logistic import FEATURES, Logistic
from agentgym.rollout.predictors import Beta, Constant, Predictor, PredictorSpec, predictors, resolve_predictor
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason

LADDER = [Constant(), Beta(decay=0.9), Logistic(), Logistic(decay=0.5, target="descendant")]
each = pytest.mark.parametrize("spec", LADDER, ids=repr)


def group(*successes, task="t", level="l"):
    """A tree of one-turn rollouts."""
    tree = Tree(task, level, "0.0", 0, [7])
    for i, success in enumerate(successes):
        tree.end(turn(tree, 0, i, 0), StopReason.TERMINATED, success=success)
    return tree


def turn(tree, parent, ordinal, origin, ok=True, logprobs=(-1.0,)):
    calls = [{"name": "go", "ok": ok}]
    tokens = [1] * len(logprobs)
    return tree.add(
        parent, ordinal=ordinal, origin=origin, token_ids=tokens, logprobs=logprobs, tool_calls=calls, restorable=True
    )


def branched():
    """Root-a-b-leaf fails. From a: two succeed, one by way of `middle`. From b: one fails, one unscored, one breaks."""
    tree = Tree("t", "l", "0.0", 0, [7])
    a = turn(tree, 0, 0, 0)
    b = turn(tree, a, 0, 0)
    tree.end(turn(tree, b, 0, 0), StopReason.TERMINATED, success=False)
    middle = turn(tree, a, 1, a)
    tree.end(turn(tree, middle, 0, a), StopReason.TERMINATED, success=True)
    tree.end(turn(tree, a, 2, a), StopReason.TERMINATED, success=True)
    tree.end(turn(tree, b, 1, b), StopReason.TERMINATED, success=False)
    tree.end(turn(tree, b, 2, b), StopReason.BUDGET, success=None)
    tree.fail(b, ordinal=3, origin=b, failure=Failure.ENV_ERROR)
    return tree, a, b, middle


# --- targets --------------------------------------------------------------------------------------------------


def test_targets_by_hand():
    tree, a, b, middle = branched()
    assert outcomes(tree, "own") == {0: (0, 1), a: (2, 3), b: (0, 2), middle: (1, 1)}
    assert outcomes(tree, "descendant") == {0: (2, 4), a: (2, 4), b: (0, 2), middle: (1, 1)}
    assert sorted(targets(tree, "own")) == [(0, 0.0, 1), (a, 2 / 3, 3), (b, 0.0, 2), (middle, 1.0, 1)]


def test_trees_without_outcomes_have_no_targets():
    assert targets(group(), "own") == targets(group(None, None), "own") == []
    with pytest.raises(UnknownName, match="did you mean 'own'"):
        targets(group(), "owns")


def test_own_targets_are_unbiased_and_descendant_targets_are_not(fake):
    """specs/allocation.md 1.4: a walk with known V, 4 roots, 2 continuations each, the allocator given the true V.

    The standard errors are of sums per tree, since the leaves of one tree depend on each other.
    """
    sums: dict[tuple[str, int, str], list[tuple[float, int]]] = {}
    for start in (-1, 1):
        for seed in range(300):
            step = fake.play(Trace(), fake.World(starts=(start,)), trees=1, budget=12, seed=seed)
            tree = step.trees[0]
            for kind in ("own", "descendant"):
                off: dict[tuple[str, int, str], tuple[float, int]] = {}
                for node, mean, n in targets(tree, kind):
                    true = fake.value(step.at[0][node], 4 - tree.depth[node])
                    key = kind, tree.depth[node], "low" if true < 0.5 else "high"
                    before = off.get(key, (0.0, 0))
                    off[key] = before[0] + n * (mean - true), before[1] + n
                for key, pair in off.items():
                    sums.setdefault(key, []).append(pair)
    bias, error = {}, {}
    for key, pairs in sums.items():
        weight = sum(n for _, n in pairs)
        bias[key] = sum(s for s, _ in pairs) / weight
        error[key] = sum(s * s for s, _ in pairs) ** 0.5 / weight
    for depth in range(4):
        for side in ("low", "high"):
            assert abs(bias["own", depth, side]) < 4 * error["own", depth, side] + 1e-9
    assert error["own", 0, "low"] < 0.015
    assert bias["descendant", 0, "low"] > 0.04
    assert bias["descendant", 0, "high"] < -0.04
    assert bias["descendant", 1, "low"] > 0.02
    assert bias["descendant", 1, "high"] < -0.02


# --- features -------------------------------------------------------------------------------------------------


def test_prefix_by_hand():
    tree = Tree("t", "l", "0.0", 0, [7])
    a = turn(tree, 0, 0, 0, ok=False, logprobs=(-1.0, -3.0))
    b = turn(tree, a, 0, 0, ok=True, logprobs=(-0.5,))
    assert prefix_of(tree, 0) == Prefix()
    assert prefix_of(tree, a) == Prefix(1, 2, -4.0, 1, True, -2.0)
    assert prefix_of(tree, b) == Prefix(2, 3, -4.5, 1, False, -0.5)
    assert prefixes(tree) == [prefix_of(tree, node) for node in (0, a, b)]


def test_a_message_without_tokens_has_log_prob_0():
    tree = Tree("t", "l", "0.0", 0, [7])
    assert prefix_of(tree, turn(tree, 0, 0, 0, logprobs=())) == Prefix(1, 0, 0.0, 0, False, 0.0)


def test_features_of_a_row():
    """One row: the order is that of `FEATURES`, and the longest episode seen so far is the whole."""
    start = Logistic().initial()
    tree = Tree("t", "l", "0.0", 0, [7])
    node = turn(tree, turn(tree, 0, 0, 0, ok=False, logprobs=(-9.0,)), 0, 0)
    rows = start.updated([group(True, True)])
    seen = dict(zip(FEATURES, rows._features(tree, 0.5, prefix_of(tree, node)), strict=True))
    assert seen == pytest.approx(
        {
            "bias": 1.0,
            "task": 0.0,
            "inner": 1.0,
            "turn": 0.2,
            "remaining": 0.0,
            "errors": 1.0,
            "last_error": 0.0,
            "last_logprob": -1.0,
            "path_logprob": -3.0,
            "tokens": np.log(3) / 5,
        }
    )


# --- all predictors -------------------------------------------------------------------------------------------


@each
def test_contract(fake, spec):
    """Immutable, in [0.02, 0.98], picklable, JSON round trip, whatever the order of trees and nodes."""
    assert isinstance(spec, PredictorSpec)
    assert pickle.loads(pickle.dumps(spec)) == spec
    world = fake.World(turns=(4, 6, 1), unscored=0.1, failing=0.1)
    one = fake.play(Trace(), world, trees=6, budget=60)
    other = fake.play(Trace(), world, trees=6, budget=60, completion=seeding.rng(1))
    assert [t.parent.tolist() for t in one.trees] != [t.parent.tolist() for t in other.trees]
    start = spec.initial()
    assert isinstance(start, Predictor)
    before = start.to_json()
    learned = start.updated(one.trees)
    assert start.to_json() == before
    assert learned.updated(one.trees[::-1]) == learned.updated(other.trees) != start or isinstance(spec, Constant)
    for copy in (pickle.loads(pickle.dumps(learned)), spec.load(json.loads(json.dumps(learned.to_json())))):
        assert copy == learned
        assert copy.updated(one.trees) == learned.updated(one.trees)
    for view in one.view_all():
        for node in view.tree.walk():
            assert 0.02 <= learned.predict(view, node) <= 0.98


@each
@pytest.mark.parametrize("outcomes_seen", [(), (None, None), (True,) * 500, (False,) * 500])
def test_uniform_groups_and_missing_outcomes_survive(spec, outcomes_seen):
    tree = group(*outcomes_seen)
    learned = spec.initial()
    for _ in range(5):
        learned = learned.updated([tree])
    p = learned.predict(TreeView(0, tree), 0)
    assert 0.02 <= p <= 0.98
    if not isinstance(spec, Constant):
        assert p == 0.98 if True in outcomes_seen else p == 0.02 if False in outcomes_seen else p == 0.5


@each
def test_a_step_without_trees_changes_nothing(spec):
    assert spec.initial().updated([]) == spec.initial()


@pytest.mark.parametrize("spec", [Beta(), Logistic()], ids=repr)
@pytest.mark.parametrize("state", [{}, {"tasks": 3, "levels": {}}, {"features": ["bias"]}, {"tasks": {"a": 1}}])
def test_a_foreign_state_is_bad_input(spec, state):
    with pytest.raises(BadInput, match="no state of the predictor"):
        spec.load(state)


# --- constant and beta ----------------------------------------------------------------------------------------


def test_constant_is_clipped():
    view = TreeView(0, group())
    assert [Constant(value=v).predict(view, 0) for v in (0.0, 0.3, 1.0)] == [0.02, 0.3, 0.98]


def test_beta_by_hand():
    learned = Beta(strength=2).initial().updated([group(True, True, True, False, task="a"), group(False, task="b")])
    level = (2 * 0.5 + 3) / (2 + 5)
    assert learned.predict(TreeView(0, group(task="a")), 0) == pytest.approx((2 * level + 3) / (2 + 4))
    assert learned.predict(TreeView(0, group(task="b")), 0) == pytest.approx((2 * level + 0) / (2 + 1))
    assert learned.predict(TreeView(0, group(task="new")), 0) == pytest.approx(level)
    assert learned.predict(TreeView(0, group(task="new", level="other")), 0) == 0.5


def test_beta_is_the_same_at_every_prefix():
    tree, *nodes = branched()
    learned = Beta().initial().updated([tree])
    assert {learned.predict(TreeView(0, tree), node) for node in nodes} == {learned.predict(TreeView(0, tree), 0)}


def test_beta_forgets_only_what_was_played():
    first = Beta(decay=0.5).initial().updated([group(True, True, task="a"), group(True, True, task="b")])
    second = first.updated([group(False, task="a")])
    assert second.tasks == {"a": (1.0, 2.0), "b": (2.0, 2.0)}
    assert second.levels == {"l": (2.0, 3.0)}


# --- logistic -------------------------------------------------------------------------------------------------


def test_logistic_starts_as_beta():
    tree = group(True, True, False)
    beta, logistic = Beta().initial(), Logistic().initial()
    assert logistic.predict(TreeView(0, tree), 0) == beta.predict(TreeView(0, tree), 0)


def test_logistic_fit_is_the_optimum_and_adds_the_information(fake):
    """Gradient 0 at the weights; the precision grows by the Hessian of the cross-entropy there."""
    step = fake.play(Uniform(n=8), budget=32)
    start = Logistic(shrinkage=2.0).initial()
    rows = np.array([row for tree in step.trees for row in start._rows(tree)])
    learned = start.updated(step.trees)
    x, wins, n = rows[:, :-2], rows[:, -2], rows[:, -1]
    w, prior = np.array(learned.weights), 2.0 * np.eye(len(FEATURES))
    p = 1 / (1 + np.exp(-x @ w))
    gradient = x.T @ (n * p - wins) + prior @ (w - np.array(start.weights))
    assert np.abs(gradient).max() < 1e-6
    assert np.allclose(learned.precision, prior + (x.T * (n * p * (1 - p))) @ x)


def test_logistic_uses_rates_from_before_the_step():
    tree = group(*[True] * 20)
    start = Logistic().initial()
    assert all(row[FEATURES.index("task")] == 0.0 for row in start._rows(tree))
    assert start.updated([tree])._rows(tree)[0][FEATURES.index("task")] > 1


def test_logistic_beats_beta_where_prefixes_tell(fake):
    """In the walk a step down is a tool error, so that errors and turns say much of what will come."""
    world = fake.World(turns=(6,), starts=(-1, 1))
    beta, logistic = Beta().initial(), Logistic().initial()
    for seed in range(4):
        trees = fake.play(Uniform(n=8), world, trees=8, budget=64, seed=seed).trees
        beta, logistic = beta.updated(trees), logistic.updated(trees)
    test = fake.play(Uniform(n=8), world, trees=8, budget=64, seed=99)
    off = {"beta": 0.0, "logistic": 0.0}
    for view in test.view_all():
        for node in range(view.tree.n_nodes):
            if view.tree.restorable(node):
                true = test.oracle(view, node)
                off["beta"] += (beta.predict(view, node) - true) ** 2
                off["logistic"] += (logistic.predict(view, node) - true) ** 2
    assert off["logistic"] < 0.5 * off["beta"]


# --- by name --------------------------------------------------------------------------------------------------


def test_names():
    assert sorted(predictors()) == ["beta", "constant", "logistic"]
    assert resolve_predictor("beta") == Beta()
    assert resolve_predictor("logistic", target="descendant") == Logistic(target="descendant")
    assert resolve_predictor("constant", target="descendant") == Constant()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Beta(strength=0), "beta: strength must be > 0"),
        (lambda: Beta(decay=0), r"beta: decay must be in \(0, 1\]"),
        (lambda: Beta(target="all"), "unknown target of the predictor 'beta'"),
        (lambda: Logistic(decay=1.5), "logistic: decay"),
        (lambda: Logistic(shrinkage=0), "logistic: shrinkage must be > 0"),
        (lambda: Constant(value=2), r"constant: value must be in \[0, 1\]"),
        (lambda: resolve_predictor("bet"), "did you mean 'beta'"),
        (lambda: resolve_predictor(None), "predictor must be one of"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(BadInput, match=message):
        make()
