"""Memory and time of the tree arena and of the journal.

    python bench/tree.py [--json FILE] [--nodes 100000 1000000]

One tree of N nodes: episodes of 8 turns, half of them followed by a branch off one of their inner nodes; 50 sampled
and 50 reply tokens in each node on average. Reported for each N: bytes for each node and each token, seconds to build
it and to walk it reading every token. Both must be linear: ten times the nodes take at most 12 times as long. Then the
journal: events written (one system call each) and read back in a second.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentgym.rollout import journal, records
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import StopReason
from agentgym.seeding import rng

TURNS, LINEAR = 8, 12.0
JOURNAL_NODES = 20_000


def build(nodes: int) -> tuple[Tree, float]:
    """Grow a tree of about `nodes` nodes. Returns it and the seconds that `add` and `end` took."""
    stream = rng(0, "bench", "tree")
    ids = stream.integers(0, 2**17, 200).tolist()
    scores = stream.normal(-1, 0.3, 200).tolist()
    cuts = stream.integers(1, 100, 997).tolist()
    tree = Tree("bench", "default", "g0", 0, ids)
    origin = ordinal = depth = at = 0
    roots = 0
    seconds = -time.perf_counter()
    while tree.n_nodes < nodes:
        if depth == TURNS:
            tree.end(at, StopReason.TERMINATED, success=bool(at % 2))
            inner = tree.parent[tree.parent[tree.parent[at]]]
            branch = origin == 0 and roots % 2 == 0
            at = origin = inner if branch else 0
            depth = tree.depth[at]
            roots += not branch
            ordinal = 1 if branch else roots
        sampled = cuts[tree.n_nodes % 997]
        reply = cuts[(7 * tree.n_nodes) % 997]
        at = tree.add(
            at,
            ordinal=ordinal,
            origin=origin,
            token_ids=ids[:sampled],
            logprobs=scores[:sampled],
            reply_ids=ids[:reply],
            reward=0.5,
        )
        depth, ordinal = depth + 1, 0
    return tree, seconds + time.perf_counter()


def walk(tree: Tree) -> tuple[int, float]:
    """Walk the tree and read all its tokens. Returns their number and the seconds it took."""
    began = time.perf_counter()
    tokens = sum(len(tree.tokens(node)) for node in tree.walk())
    return tokens, time.perf_counter() - began


def measure(nodes: int) -> dict[str, float]:
    """Build and walk one tree."""
    tree, build_seconds = build(nodes)
    tokens, walk_seconds = walk(tree)
    size = tree.nbytes()
    token_bytes = 8 * sum(tree.n_sampled) + 4 * sum(tree.n_reply)
    return {
        "nodes": tree.n_nodes,
        "leaves": len(tree.leaves),
        "tokens": tokens,
        "megabytes": size / 1e6,
        "bytes_per_token": size / tokens,
        "bytes_per_node_without_tokens": (size - token_bytes) / tree.n_nodes,
        "build_seconds": build_seconds,
        "walk_seconds": walk_seconds,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def measure_journal(nodes: int) -> dict[str, float]:
    """Write one event for each node of a tree, one system call each, and read the tree back."""
    tree, _ = build(nodes)
    with tempfile.TemporaryDirectory() as folder:
        with journal.Journal(folder) as log:
            log.write(records.tree(tree))
            began = time.perf_counter()
            for node in range(1, tree.n_nodes):
                log.write(records.node(tree, node))
            written = time.perf_counter() - began
        size = log.path.stat().st_size
        began = time.perf_counter()
        journal.read(folder)
        read = time.perf_counter() - began
    return {
        "events": nodes,
        "bytes_per_event": size / nodes,
        "written_per_second": nodes / written,
        "read_per_second": nodes / read,
    }


def main() -> int:
    """Measure, print a table, and return 1 where growth is not linear."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100_000, 1_000_000])
    options = parser.parse_args()
    sizes = [measure(nodes) for nodes in sorted(options.nodes)]
    ratios = {
        key: sizes[-1][key] / sizes[0][key] / (sizes[-1]["nodes"] / sizes[0]["nodes"]) * 10
        for key in ("build_seconds", "walk_seconds", "megabytes")
    }
    log = measure_journal(JOURNAL_NODES)
    result = {"trees": sizes, "ratio_for_ten_times_the_nodes": ratios, "journal": log}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    shown = Table(title="tree arena")
    shown.add_column("")
    for size in sizes:
        shown.add_column(f"{size['nodes']:,.0f} nodes", justify="right")
    shown.add_column("x for 10x nodes", justify="right")
    for key in sizes[0]:
        shown.add_row(key, *[_shown(size[key]) for size in sizes], f"{ratios[key]:.2f}" if key in ratios else "")
    for key, value in log.items():
        shown.add_row(f"journal: {key}", *[""] * (len(sizes) - 1), f"{value:,.0f}")
    Console().print(shown)
    return int(any(ratio > LINEAR for ratio in ratios.values()))


def _shown(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:,.2f}"


if __name__ == "__main__":
    sys.exit(main())
