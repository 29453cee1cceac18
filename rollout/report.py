"""What came out of a run, in numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Branch, Forest

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1e-6
"""Outcomes of a group that lie within this of each other are equal: the group has no signal."""


def summarise(run: Forest | str | Path) -> dict[str, Any]:
    """Count what a run made and spent.

    A leaf is scored if its outcome is known (see `Tree.scored`); only scored leaves enter shares.

    Args:
        run: a forest, or a run folder.

    Returns:
        JSON-safe numbers:

        - `trees`, `leaves` (failed attempts excluded), `nodes` (turns; neither roots nor failed attempts),
        - `distinct_leaves`: leaves whose tokens no other leaf of the same tree has,
        - `success`: share of successes among leaves of known success, `None` if there are none,
        - `effective_ratio`: share of trees that have both a success and a failure,
        - `zero_advantage_groups`: trees whose scored leaves number fewer than two or are all equal (by success, else
          by reward, within `TOLERANCE`), so that a group-relative advantage is 0 everywhere,
        - `sampled_tokens` (those of failed attempts included), `prefilled_tokens`, `saved_prefill_tokens` (those that
          came from a prefix cache),
        - `env_steps`: recorded turns and failed attempts, each of which stepped the env once (replayed steps are not
          among them), `restores`: continuations and retries, each of which restored an env once,
        - `unstarted`: continuations that the token or step budget left nothing for, and `wall_seconds`: from the
          journal's `step` records (what was spent in the unfinished step of a killed run is not in them),
        - `failures`: failed attempts by kind, `stop_reasons`: leaves by reason,
        - `levels`: the first seven for each difficulty level.
    """
    forest = run if isinstance(run, Forest) else Forest.load(run)
    trees, counters = forest.trees, forest.counters
    levels = sorted({tree.level for tree in trees})
    return {
        **_outcomes(trees),
        "sampled_tokens": sum(sum(tree.n_sampled) for tree in trees),
        "prefilled_tokens": sum(sum(tree.prefilled) for tree in trees),
        "saved_prefill_tokens": sum(sum(tree.cached) for tree in trees),
        "env_steps": sum(sum(1 for n in tree.n_sampled if n) for tree in trees),
        "restores": sum(_restores(tree) for tree in trees),
        "unstarted": int(counters.get("unstarted", 0)),
        "failures": _counts(str(kind) for tree in trees for kind in tree.failure.values()),
        "stop_reasons": _counts(str(tree.stop[leaf]) for tree in trees for leaf in tree.leaves),
        "wall_seconds": float(counters.get("seconds", 0.0)),
        "levels": {level: _outcomes([tree for tree in trees if tree.level == level]) for level in levels},
    }


def table(summary: Mapping[str, Any]) -> Table:
    """Lay a summary out for people: one column for all trees, one for each level."""
    from rich.table import Table

    found = Table(title="rollout")
    found.add_column("")
    parts: dict[str, Mapping[str, Any]] = {"all": summary, **summary["levels"]}
    for name in parts:
        found.add_column(name, justify="right")
    for key, value in summary.items():
        if key == "levels":
            continue
        if isinstance(value, dict):
            for name, count in value.items():
                found.add_row(f"{key}: {name}", _shown(count))
        else:
            found.add_row(key, *[_shown(part[key]) if key in part else "" for part in parts.values()])
    return found


def zero_advantage(tree: Tree) -> bool:
    """Whether a group-relative advantage is 0 on every leaf of a tree: see `summarise`."""
    leaves = [leaf for leaf in tree.leaves if tree.scored(leaf)]
    if len(leaves) < 2:
        return True
    known = all(tree.success[leaf] is not None for leaf in leaves)
    outcomes = [float(tree.success[leaf] or 0) if known else Branch(tree, leaf).reward or 0.0 for leaf in leaves]
    return max(outcomes) - min(outcomes) <= TOLERANCE


def distinct_leaves(tree: Tree) -> int:
    """Number of different token sequences among the leaves of a tree, in time linear in its tokens.

    Each node's digest continues that of its parent, so that shared prefixes are read once.
    """
    digests: dict[int, bytes] = {0: b""}
    for node in tree.walk():
        if node:
            parent = tree.parent[node]
            before = digests[parent] + tree.reply_ids(parent).tobytes() + tree.sampled_ids(node).tobytes()
            digests[node] = hashlib.blake2b(before, digest_size=16).digest()
    return len({digests[leaf] for leaf in tree.leaves})


def _outcomes(trees: Sequence[Tree]) -> dict[str, Any]:
    counts = [tree.success_counts() for tree in trees]
    good, bad = sum(count[0] for count in counts), sum(count[1] for count in counts)
    return {
        "trees": len(trees),
        "leaves": sum(len(tree.leaves) for tree in trees),
        "distinct_leaves": sum(map(distinct_leaves, trees)),
        "nodes": sum(tree.n_nodes - 1 - len(tree.failure) for tree in trees),
        "success": good / (good + bad) if good + bad else None,
        "effective_ratio": sum(g > 0 and b > 0 for g, b in counts) / len(trees) if trees else None,
        "zero_advantage_groups": sum(map(zero_advantage, trees)),
    }


def _restores(tree: Tree) -> int:
    """Number of times that an env was brought to an anchor: once for each continuation and once for each retry."""
    begun, tried, lost = set(), 0, set()
    for node in range(1, tree.n_nodes):
        place = tree.parent[node], tree.ordinal[node]
        if tree.parent[node] == tree.origin[node]:
            begun.add(place)
        if node in tree.failure:
            tried += 1
            lost.add(place)
        else:
            lost.discard(place)
    return len(begun) + tried - len(lost)


def _counts(names: Any) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else f"{value:,}"
