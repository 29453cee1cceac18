"""Golden trees: whole steps of each allocator in the fake world, as nested JSON.

`REGENERATE_GOLDEN=1 pytest tests/allocators/test_golden.py` writes them anew; read the diff before you keep it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentgym import seeding
from agentgym.rollout.allocators.random_tree import RandomTree
from agentgym.rollout.allocators.trace import Trace
from agentgym.rollout.allocators.uniform import Uniform

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "uniform": Uniform(n=3),
    "uniform-divided": Uniform(n=None),
    "random-tree": RandomTree(),
    "random-tree-deep": RandomTree(chains=1, nodes=2, rounds=2),
    "trace-oracle": Trace(),
    "trace-constant": Trace(predictor="constant"),
    "trace-beta": Trace(predictor="beta"),
    "trace-logistic": Trace(predictor="logistic"),
    "trace-logistic-descendant": Trace(predictor="logistic", target="descendant"),
}


def nested(tree, node=0):
    """`starts_at`, the anchor's path, where a continuation starts, outcome and propensity at a leaf."""
    made = {}
    if node and tree.parent[node] == tree.origin[node]:
        made["starts_at"] = tree.path_key(tree.origin[node]) or "root"
    if tree.is_leaf(node):
        made |= {"success": tree.success[node], "propensity": tree.propensity[node]}
    elif node in tree.failure:
        made["failure"] = str(tree.failure[node])
    children = [nested(tree, child) for child in tree.children(node, failed=True)]
    return made | ({"turns": children} if children else {})


def steps(fake, name, completion=None):
    """Two steps, so that a predictor has learned in the second."""
    allocator, played = CASES[name], []
    spec = allocator.predictor
    predictor = spec.initial() if spec is not None and name != "trace-oracle" else None
    for number in range(2):
        world = fake.World(turns=(5, 3, 4, 1), unscored=0.1, failing=0.05)
        predict = predictor.predict if predictor else None
        step = fake.play(allocator, world, budget=26, seed=number, predict=predict, completion=completion)
        predictor = predictor.updated(step.trees) if predictor else None
        played.append({"proposals": [list(p) for p in step.log], "trees": [nested(tree) for tree in step.trees]})
    return played


@pytest.mark.parametrize("name", CASES)
def test_golden(fake, name):
    path = GOLDEN / f"{name}.json"
    found = steps(fake, name)
    if os.environ.get("REGENERATE_GOLDEN"):
        path.write_text(json.dumps(found, indent=1) + "\n")
        pytest.skip(f"wrote {path.name}")
    assert found == json.loads(path.read_text())


@pytest.mark.parametrize("name", CASES)
def test_golden_whatever_finishes_first(fake, name):
    """complaints.md row 57, with the predictor in the loop: what it learns does not depend on completion either."""
    expected = json.loads((GOLDEN / f"{name}.json").read_text())
    assert steps(fake, name, completion=seeding.rng(5)) == expected


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.glob("*.json")} == set(CASES)
