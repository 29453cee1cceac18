"""Allocators by name, their options and their descriptions."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.allocators import allocator_class, allocator_names, describe, make_allocator
from agentgym.rollout.allocators.base import Watch
from agentgym.rollout.allocators.trace import Trace
from agentgym.rollout.allocators.uniform import Uniform
from agentgym.rollout.predictors import Beta


@dataclass(frozen=True, kw_only=True)
class FlipFailures:
    """Continue every failed leaf once.

    Attributes:
        rate: share of the leaves.
        odd: a type that pydantic does not know.
        must: has no default.
    """

    name: ClassVar[str] = "flip"
    family: ClassVar[str] = "control"
    source: ClassVar[str] = "ours"
    watches: ClassVar[Watch] = Watch.LEAF
    snapshots: ClassVar[bool] = True
    predictor: ClassVar[None] = None

    must: bool
    rate: float = 1.0
    odd: object = None

    def minimum(self, trees):
        return trees

    def propose(self, view, ledger, rng):
        return []


@dataclass(frozen=True)
class Halfway:
    name: ClassVar[str] = "halfway"


@pytest.fixture
def ours(monkeypatch):
    """This module under an importable name."""
    module = type(sys)("shop_allocators")
    module.FlipFailures, module.Halfway = FlipFailures, Halfway  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_allocators", module)
    return "shop_allocators"


def test_names():
    assert allocator_names() == ["random-tree", "trace", "uniform"]
    assert all(allocator_class(name).name == name for name in allocator_names())


def test_options_from_the_command_line_are_text():
    assert make_allocator("trace", continuations="3", cap="8", predictor="beta", target="descendant") == Trace(
        continuations=3, cap=8, predictor=Beta(target="descendant"), target="descendant"
    )
    assert make_allocator("uniform", n="none") == Uniform(n=None)
    assert make_allocator("uniform", n="4") == make_allocator("uniform", n=4) == Uniform(n=4)
    assert make_allocator("trace", target="none") == Trace()


def test_a_predictor_object_is_taken_as_it_is():
    spec = Beta(strength=7)
    assert make_allocator("trace", predictor=spec).predictor is spec


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("trce", {}, UnknownName, "unknown allocator 'trce': did you mean 'trace'"),
        ("no.such.module:Thing", {}, UnknownName, "No module named 'no'"),
        ("agentgym.errors:Nothing", {}, UnknownName, "no attribute 'Nothing'"),
        (":Thing", {}, UnknownName, "unknown allocator ':Thing'"),
        ("agentgym.errors:BadInput", {}, BadInput, "no allocator: expected a frozen dataclass"),
        (
            "trace",
            {"continuation": 2},
            UnknownName,
            "unknown option of trace 'continuation': did you mean 'continuations'",
        ),
        ("trace", {"name": "x"}, UnknownName, "unknown option of trace 'name'"),
        ("trace", {"cap": "many"}, BadInput, r"option cap of trace: expected int, got 'many' \(str\)"),
        ("trace", {"cap": "1"}, BadInput, "trace: cap must be >= 2"),
        ("trace", {"target": "o"}, BadInput, r"expected own \| descendant \| none"),
        ("trace", {"predictor": "oracle"}, UnknownName, "unknown predictor 'oracle'"),
        ("uniform", {"n": "2.5"}, BadInput, r"option n of uniform: expected int \| none"),
        ("uniform", {"n": True}, BadInput, r"option n of uniform: expected int \| none, got True"),
        ("random-tree", {"rounds": None}, BadInput, "option rounds of random-tree: expected int, got None"),
    ],
)
def test_bad_input_says_what_was_expected(name, options, error, message):
    with pytest.raises(error, match=message):
        make_allocator(name, **options)


def test_an_import_path_is_a_name(ours):
    made = make_allocator(f"{ours}:FlipFailures", must="true", rate="0.5", odd="x")
    assert made == FlipFailures(must=True, rate=0.5, odd="x")
    options = {o["name"]: (o["type"], o["default"], o["meaning"]) for o in describe(f"{ours}:FlipFailures")["options"]}
    assert options["rate"] == ("float", 1.0, "share of the leaves.")
    assert options["must"][1] == "(required)"


def test_a_missing_option_is_bad_input(ours):
    with pytest.raises(BadInput, match="option must of shop_allocators:FlipFailures has no default"):
        make_allocator(f"{ours}:FlipFailures")


def test_an_incomplete_class_is_told_what_it_lacks(ours):
    with pytest.raises(BadInput, match="it lacks family, source, watches, snapshots, predictor, minimum, propose"):
        make_allocator(f"{ours}:Halfway")


@pytest.mark.parametrize("name", allocator_names())
def test_descriptions_are_complete(name):
    found = describe(name)
    assert json.loads(json.dumps(found)) == found
    assert list(found) == ["name", "summary", "family", "source", "watches", "snapshots", "equations", "options"]
    assert found["name"] == name
    assert found["family"] in {"generate", "filter", "control", "replay"}
    assert "arXiv" in found["source"]
    assert found["summary"]
    assert found["equations"]
    assert found["options"]
    assert all(option["meaning"] and option["type"] for option in found["options"])


def test_describe_by_hand():
    found = describe("trace")
    assert found["watches"] == "tree"
    assert found["snapshots"] is True
    assert {o["name"]: o["default"] for o in found["options"]} == {
        "continuations": 2,
        "cap": 64,
        "predictor": "logistic",
        "target": None,
    }
    assert "q = r v + (1 - r)(1 - v)" in found["equations"]


def test_names_import_no_allocator():
    code = (
        "import sys; from agentgym.rollout.allocators import allocator_names; allocator_names(); "
        "print([m for m in sys.modules if m.startswith('agentgym.rollout.allocators.') or m in ('pydantic', 'torch')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert ran.stdout.strip() == "[]"
