"""Random trees: a plan (plain numbers, from Hypothesis) becomes operations, which are played in any order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentgym.rollout import records
from agentgym.rollout.policies.base import FinishReason, Sampling
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason

sys.path.insert(0, str(Path(__file__).parent))  # for `lab`, what the tests of the runner share
STOPS = list(StopReason)


@dataclass(frozen=True)
class Op:
    """One turn of a scripted tree, named by path."""

    key: str
    above: str
    ordinal: int
    origin: str
    sampled: tuple[int, ...]
    reply: tuple[int, ...]
    act: int

    @property
    def kind(self) -> str:
        return {0: "leaf", 1: "leaf", 2: "leaf", 3: "failed", 4: "reset", 5: "late"}.get(self.act, "open")


def script(plan: Sequence[tuple[int, int, int, int]]) -> list[Op]:
    """Turn `(parent, sampled, reply, act)` numbers into operations, parents before children."""
    nodes = [["", "", 0]]
    ops: list[Op] = []
    for i, (pick, sampled, reply, act) in enumerate(plan):
        above = nodes[pick % len(nodes)]
        ordinal, above[2] = above[2], above[2] + 1
        key = f"{above[0]}.{ordinal}".lstrip(".")
        origin = above[0] if ordinal else above[1]
        ids = tuple(range(100 * i, 100 * i + sampled))
        op = Op(key, above[0], ordinal, origin, ids, tuple(range(100 * i + 50, 100 * i + 50 + reply)), act)
        ops.append(op)
        if op.kind not in ("leaf", "failed"):
            nodes.append([key, origin, 0])
    return ops


def _play_one(tree: Tree, index: dict[str, int], op: Op, sink: Callable[..., None]) -> None:
    common = {
        "ordinal": op.ordinal,
        "origin": index[op.origin],
        "token_ids": op.sampled,
        "logprobs": [-0.1 * (i + 1) for i in op.sampled],
        "policy_version": op.act,
        "cached": len(index),
    }
    if op.kind == "failed":
        node = tree.fail(index[op.above], failure=Failure.ENV_ERROR, attempt=op.act, message="boom", **common)
        sink(records.failed(tree, node))
        return
    late = op.kind == "late"
    node = index[op.key] = tree.add(
        index[op.above],
        reply_ids=() if late else op.reply,
        finish=FinishReason.LENGTH if op.act == 7 else FinishReason.STOP,
        reward=op.act / 8,
        reset=op.kind == "reset",
        restorable=op.act % 2 == 0,
        sampling=Sampling(max_tokens=7) if op.act == 8 else None,
        message=f"turn {op.key}",
        reply=None if late else [{"role": "user", "content": "é\n"}],
        tool_calls=[{"name": "pay", "ok": True, "error": None}] if op.act == 6 else None,
        reward_terms={"shaped": op.act / 8},
        cost=0.5 if op.act == 9 else 0.0,
        source=bytes(len(op.sampled)) if op.act == 9 else None,
        **common,
    )
    sink(records.node(tree, node))
    if late:
        tree.extend_reply(node, op.reply, messages=[{"role": "tool", "content": "late"}])
        sink(records.reply(tree, node))
    if op.kind == "leaf":
        stop = STOPS[len(op.key) % len(STOPS)]
        tree.end(node, stop, success=(None, True, False)[op.act], propensity=0.25 if op.act else 1.0)
        sink(records.leaf(tree, node))


def play(
    ops: Sequence[Op],
    order: Sequence[int] | None = None,
    sink: Callable[..., None] = lambda *_: None,
    group: str = "s0/g0",
) -> Tree:
    """Build the tree of `ops`, choosing among those whose parent is there by `order` (priorities)."""
    tree = Tree("train/easy/0", "easy", group, 0, [1, 2, 3], messages=[{"role": "user", "content": "hi"}])
    sink(records.tree(tree))
    index, waiting = {"": 0}, list(range(len(ops)))
    while waiting:
        ready = [i for i in waiting if ops[i].above in index and ops[i].origin in index]
        chosen = min(ready, key=lambda i: (order[i % len(order)] if order else i, i))
        waiting.remove(chosen)
        _play_one(tree, index, ops[chosen], sink)
    return tree


@pytest.fixture(scope="session", name="script")
def _script() -> Callable[..., list[Op]]:
    return script


@pytest.fixture(scope="session", name="play")
def _play() -> Callable[..., Tree]:
    return play
