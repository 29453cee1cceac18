"""A stand-in for the runner: executes proposals with a fake world in which every success probability is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

import pytest

from agentgym import seeding
from agentgym.rollout.allocators.base import Allocator, Event, Expansion, ForestView, TreeView, Watch
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason


@dataclass(frozen=True)
class World:
    """A walk: each turn goes up or down by 1 with equal odds; success is to end above 0.

    `start` and `turns` depend on the task; `unscored` and `failing` are probabilities of a continuation.
    """

    starts: Sequence[int] = (-3, -1, 1, 3)
    turns: Sequence[int] = (4,)
    unscored: float = 0.0
    failing: float = 0.0
    outcome: bool | None = None
    """Fixed outcome of every leaf."""
    restorable: Callable[[int], bool] = lambda depth: True

    def start(self, index: int) -> int:
        return self.starts[index % len(self.starts)]

    def length(self, index: int) -> int:
        return self.turns[index % len(self.turns)]


def value(x: int, left: int) -> float:
    """Probability that a walk at `x` with `left` turns to go ends above 0."""
    return sum(comb(left, ups) for ups in range(left + 1) if x + 2 * ups - left > 0) / 2**left


@dataclass
class Left:
    leaves: int

    def left(self, unit: str = "leaves") -> float:
        return float(self.leaves) if unit == "leaves" else float("inf")


@dataclass
class Step:
    """One step, played. `log` has what was proposed: (event, tree, path of the anchor, count, propensity)."""

    world: World
    trees: list[Tree]
    seed: int
    completion: seeding.Rng | None = None
    """Shuffles the order in which continuations that run together are added to the arena."""
    at: list[dict[int, int]] = field(default_factory=list)
    delivered: list[list[int]] = field(default_factory=list)
    log: list[tuple[str, int, str, int, float]] = field(default_factory=list)
    spent: int = 0

    def __post_init__(self) -> None:
        self.at = [{0: self.world.start(tree.index)} for tree in self.trees]
        self.delivered = [[] for _ in self.trees]
        self._taken: dict[tuple[int, int], int] = {}

    def oracle(self, view: TreeView, node: int) -> float:
        left = self.world.length(view.index) - view.tree.depth[node]
        return min(max(value(self.at[view.index][node], left), 0.02), 0.98)

    def view(self, index: int, left: int = 0) -> TreeView:
        return TreeView(index, self.trees[index], tuple(self.delivered[index]), (), left)

    def view_all(self) -> list[TreeView]:
        return [self.view(i) for i in range(len(self.trees))]

    def ask(
        self, allocator: Allocator, event: Event, views: list[TreeView], left: int, predict: Any
    ) -> list[Expansion]:
        names = [v.index for v in views] if event is not Event.STEP else []
        rng = seeding.rng(self.seed, "allocator", event, *names, sum(map(len, self.delivered)))
        wanted = list(allocator.propose(ForestView(event, views, predict or self.oracle), Left(left), rng))
        for e in wanted:
            key = self.trees[e.tree].path_key(e.anchor)
            self.log.append((str(event), e.tree, key, e.count, e.propensity))
        return wanted

    def run(self, expansions: Sequence[Expansion]) -> int:
        jobs = []
        for e in expansions:
            for _ in range(e.count):
                ordinal = self._taken.get((e.tree, e.anchor), 0)
                self._taken[e.tree, e.anchor] = ordinal + 1
                jobs.append((e, ordinal if e.anchor == 0 else ordinal + 1))
        order = range(len(jobs)) if self.completion is None else self.completion.permutation(len(jobs)).tolist()
        ends = {k: self.episode(*jobs[k]) for k in order}
        for k, (e, _) in enumerate(jobs):
            if ends[k] is not None:
                self.delivered[e.tree].append(ends[k])
        self.spent += len(jobs)
        return len(jobs)

    def episode(self, e: Expansion, ordinal: int) -> int | None:
        tree, node, world = self.trees[e.tree], e.anchor, self.world
        rng = seeding.rng(self.seed, tree.task_id, tree.path_key(e.anchor), ordinal)
        last, x = world.length(e.tree), self.at[e.tree][node]
        failing, unscored = rng.random(2) < (world.failing, world.unscored)
        while tree.depth[node] < last:
            place = {"ordinal": ordinal if node == e.anchor else 0, "origin": e.anchor}
            if failing and tree.depth[node] == last - 1:
                tree.fail(node, failure=Failure.ENV_ERROR, **place)
                return None
            up, logprob = rng.random() < 0.5, -float(rng.random())
            x += 1 if up else -1
            node = tree.add(
                node,
                token_ids=[int(up)],
                logprobs=[logprob],
                tool_calls=[{"name": "go", "ok": up}],
                restorable=world.restorable(tree.depth[node] + 1),
                **place,
            )
            self.at[e.tree][node] = x
        outcome = x > 0 if world.outcome is None else world.outcome
        tree.end(node, StopReason.TERMINATED, success=None if unscored else outcome, propensity=e.propensity)
        return node


def play(
    allocator: Allocator,
    world: World | None = None,
    *,
    trees: int = 4,
    budget: int = 32,
    seed: int = 0,
    predict: Any = None,
    completion: seeding.Rng | None = None,
) -> Step:
    """Play one step the way the runner does: shares in proportion to roots, trees on their own, then the spill."""
    world = world or World()
    grown = [Tree(f"t{i}", f"l{world.length(i)}", f"0.{i}", i, [7]) for i in range(trees)]
    step = Step(world, grown, seed, completion)
    first = step.ask(allocator, Event.START, step.view_all(), budget, predict)
    roots = [sum(e.count for e in first if e.tree == i) for i in range(trees)]
    assert sum(roots) <= budget, "more than the budget proposed at the start"
    rest = budget - sum(roots)
    shares = [rest * m // sum(roots) for m in roots] if sum(roots) else roots
    step.run(first)
    if allocator.watches is Watch.NOTHING:
        return step
    for i in range(trees):
        while shares[i]:
            wanted = step.ask(allocator, Event.TREE, [step.view(i, shares[i])], shares[i], predict)
            assert sum(e.count for e in wanted) <= shares[i], "more than the share proposed"
            if not wanted:
                break
            shares[i] -= step.run(wanted)
    left = budget - step.spent
    wanted = step.ask(allocator, Event.STEP, step.view_all(), left, predict) if left else []
    assert sum(e.count for e in wanted) <= left, "more than what was left proposed"
    step.run(wanted)
    return step


@dataclass(frozen=True)
class Bench:
    """What the tests of this folder share."""

    World = World
    Step = Step
    Left = Left
    play = staticmethod(play)
    value = staticmethod(value)


@pytest.fixture(scope="session")
def fake() -> Bench:
    return Bench()
