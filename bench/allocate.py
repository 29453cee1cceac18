"""What an allocator gets out of equal sampled tokens: groups with both outcomes, by env and difficulty level.

    python bench/allocate.py --env agentgym/Blocksworld-v0 --levels b4 b6 [--seeds 5] [--tasks 16] [--oracle]

For each level and seed, `uniform` plays 8 rollouts of each task; the tokens that it samples are the budget of every
other allocator on the same tasks. Trees get 12 leaves of each task to spend them on, since a continuation from a
random turn costs about half a rollout. The predictor of `trace` has seen a warm-up run on training tasks of the level.

`--oracle` adds `trace` with success probabilities that are measured beforehand: 64 extra rollouts of each task, and
at each turn of the root rollouts `PROBES` extra continuations (of which the first two are left out, since they are
those that the measured run itself will make). What is measured so is not charged to the budget.

`--levels mix` plays the env's default mix of levels.

Columns: `effective`: share of all tasks whose scored leaves have both outcomes. `played`: the same share of the tasks
that got any leaf (TRACE filters tasks out). `mixed/10k`: groups with both outcomes for each 10,000 sampled tokens.
`zero`: share of the played tasks with a zero advantage. `distinct`: share of distinct leaves.
Each cell is the mean over seeds and the standard deviation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import agentgym as ag
from agentgym.rollout.allocators import make_allocator
from agentgym.rollout.allocators.base import Allocator, Event, Expansion, ForestView, LedgerView, TreeView, Watch
from agentgym.rollout.allocators.trace import Trace
from agentgym.rollout.logistic import Logistic
from agentgym.rollout.policies import make_policy
from agentgym.rollout.predictors import Predictor, clip
from agentgym.rollout.report import distinct_leaves, zero_advantage
from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Forest
from agentgym.seeding import Rng

ROLLOUTS, TREE_LEAVES = 8, 12
ROOT_PROBES, PROBES, LEFT_OUT = 64, 10, 2
MIX = "mix"
METRICS = ("effective", "played", "mixed/10k", "zero", "distinct", "tokens", "success")


@dataclass(frozen=True)
class Warmed:
    """A predictor specification that starts from what a warm-up run taught."""

    predictor: Predictor

    def initial(self) -> Predictor:
        """Return the warmed predictor."""
        return self.predictor

    def load(self, state: Mapping[str, Any]) -> Predictor:
        """Return the warmed predictor."""
        return self.predictor


@dataclass(frozen=True)
class Oracle:
    """Measured success probabilities by `(task, path)`. Specification and predictor in one."""

    table: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def initial(self) -> Oracle:
        """Return itself."""
        return self

    def load(self, state: Mapping[str, Any]) -> Oracle:
        """Return itself."""
        return self

    def predict(self, view: TreeView, node: int) -> float:
        """Look the node up."""
        return clip(self.table.get((view.tree.task_id, view.tree.path_key(node)), 0.5))

    def updated(self, trees: Sequence[Tree]) -> Oracle:
        """Learn nothing."""
        return self

    def to_json(self) -> dict[str, Any]:
        """Hold nothing that a checkpoint needs."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Plays the root rollouts of `trace`, then `PROBES` continuations at each of their inner turns."""

    name: ClassVar[str] = "probe"
    family: ClassVar[str] = "control"
    source: ClassVar[str] = "bench"
    watches: ClassVar[Watch] = Watch.TREE
    snapshots: ClassVar[bool] = True
    trace: Trace
    budget: int

    @property
    def predictor(self) -> Any:
        """Use that of `trace`."""
        return self.trace.predictor

    def minimum(self, trees: int) -> int:
        """Return one leaf."""
        return 1

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        """Return the roots that `trace` would, then probes everywhere."""
        if view.event is Event.START:
            return self.trace.propose(view, _Fixed(self.budget), rng)
        return [
            Expansion(tree.index, anchor, PROBES)
            for tree in view.trees
            if len(tree.bare()) == len(tree.leaves)
            for leaf in tree.bare()
            for anchor in tree.anchors(leaf)
        ]


@dataclass(frozen=True)
class _Fixed:
    leaves: int

    def left(self, unit: str = "leaves") -> float:
        return float(self.leaves)


class Bench:
    """Runs of one env and level with one policy."""

    def __init__(self, env: str, level: str, tasks: int, policy: Any, renderer: Any) -> None:
        self.env, self.level, self.tasks = env, level, tasks
        self._given = {"policy": policy, "renderer": renderer}

    def run(self, allocator: Allocator, leaves: int, seed: int, split: str = "validation", **keys: Any) -> Forest:
        """Run one step over the level's first tasks."""
        return ag.rollout(
            self.env,
            allocator=allocator,
            level=None if self.level == MIX else self.level,
            split=split,
            tasks=self.tasks,
            budget=leaves,
            seed=seed,
            **self._given,
            **keys,
        )

    def warm(self) -> Warmed:
        """Return a predictor that has seen a run on training tasks."""
        forest = self.run(make_allocator("uniform", n=4), 4 * self.tasks, 10_000, split="train")
        return Warmed(Logistic().initial().updated(forest.trees))

    def root_table(self) -> dict[tuple[str, str], float]:
        """Measure the success probability of each task."""
        forest = self.run(make_allocator("uniform", n=ROOT_PROBES), ROOT_PROBES * self.tasks, 20_000)
        return {(tree.task_id, ""): rate(tree, tree.leaves) for tree in forest.trees}

    def oracle(self, roots: dict[tuple[str, str], float], seed: int) -> Oracle:
        """Measure the success probability at each inner turn of the root rollouts that `seed` will give."""
        probe = Probe(trace=Trace(predictor=Oracle(roots)), budget=TREE_LEAVES * self.tasks)
        forest = self.run(probe, 10**6, seed)
        table = dict(roots)
        for tree in forest.trees:
            anchors = {tree.origin[leaf] for leaf in tree.leaves} - {0}
            for anchor in anchors:
                probes = [n for n in tree.leaves if tree.origin[n] == anchor]
                kept = [n for n in probes if tree.ordinal[first(tree, n)] > LEFT_OUT]
                table[tree.task_id, tree.path_key(anchor)] = rate(tree, kept)
        return Oracle(table)

    def compare(
        self, seed: int, warm: Warmed, roots: dict[tuple[str, str], float] | None
    ) -> dict[str, dict[str, float]]:
        """Run every allocator on the tokens that `uniform` needs."""
        flat = self.run(make_allocator("uniform", n=ROLLOUTS), ROLLOUTS * self.tasks, seed)
        tokens = sum(sum(tree.n_sampled) for tree in flat.trees)
        trees: dict[str, Allocator] = {
            "random-tree": make_allocator("random-tree", chains=4, nodes=2, rounds=1),
            "trace": Trace(predictor=warm),
        }
        if roots is not None:
            trees["trace, oracle"] = Trace(predictor=self.oracle(roots, seed))
        forests = {
            name: self.run(allocator, TREE_LEAVES * self.tasks, seed, budget_tokens=tokens)
            for name, allocator in trees.items()
        }
        return {name: metrics(forest) for name, forest in {"uniform": flat, **forests}.items()}


def first(tree: Tree, leaf: int) -> int:
    """Return the first node of the continuation that made `leaf`."""
    path = tree.path(leaf)
    return path[path.index(tree.origin[leaf]) + 1]


def rate(tree: Tree, leaves: Sequence[int]) -> float:
    """Return the share of successes among scored leaves (0.5 without any)."""
    outcomes = [tree.success[leaf] for leaf in leaves if tree.success[leaf] is not None]
    return sum(outcomes) / len(outcomes) if outcomes else 0.5


def metrics(forest: Forest) -> dict[str, float]:
    """Measure one run."""
    trees = forest.trees
    played = [tree for tree in trees if tree.leaves]
    mixed = sum(min(tree.success_counts()) > 0 for tree in trees)
    tokens = sum(sum(tree.n_sampled) for tree in trees)
    scored = [tree.success[leaf] for tree in trees for leaf in tree.leaves if tree.success[leaf] is not None]
    return {
        "effective": mixed / len(trees),
        "played": mixed / max(1, len(played)),
        "mixed/10k": mixed / tokens * 10_000,
        "zero": sum(zero_advantage(tree) for tree in played) / max(1, len(played)),
        "distinct": sum(distinct_leaves(tree) for tree in trees) / max(1, forest.n_leaves),
        "tokens": tokens,
        "success": statistics.fmean(scored) if scored else 0.0,
    }


def table(rows: dict[str, dict[str, list[float]]]) -> str:
    """Format mean and standard deviation of each cell."""
    lines = [f"{'allocator':16}" + "".join(f"{name:>18}" for name in METRICS)]
    for allocator, cells in rows.items():
        line = f"{allocator:16}"
        for name in METRICS:
            digits = 0 if name == "tokens" else 3
            spread = statistics.stdev(cells[name]) if len(cells[name]) > 1 else 0.0
            line += f"{statistics.fmean(cells[name]):>10.{digits}f} ±{spread:<6.{digits}f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="agentgym/Blocksworld-v0")
    parser.add_argument("--levels", nargs="+", default=["b3", "b5"])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", type=int, default=16)
    parser.add_argument("--policy", default="tiny")
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    policy, renderer = make_policy(args.policy)
    results = {}
    for level in args.levels:
        began = time.monotonic()
        bench = Bench(args.env, level, args.tasks, policy, renderer)
        warm, roots = bench.warm(), bench.root_table() if args.oracle else None
        runs = [bench.compare(seed, warm, roots) for seed in range(args.seeds)]
        rows = {name: {metric: [run[name][metric] for run in runs] for metric in METRICS} for name in runs[0]}
        results[level] = rows
        print(f"\n{args.env} {level}: {args.tasks} tasks, {args.seeds} seeds, {time.monotonic() - began:.0f} s")
        print(table(rows), flush=True)
    out = args.json or Path("bench/results") / f"allocate-{args.env.split('/')[1].lower()}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**vars(args), "json": str(out), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
