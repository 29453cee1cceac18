"""What the journal says about a tree: one JSON object for each thing that happened, and back.

Every record has the key `e` (what happened) and, but for `step` and `end`, `tree` (the group) and `path` (the node).
Everything that depends on timing (clocks, cache hits) is under the key `t`, so that two runs can be compared without
it. Absent keys mean the default (0, `null`, empty).

| `e` | other keys |
|---|---|
| `tree` | `task level index step prompt messages tools sampling` |
| `node` | `from ids lp v attempt`, `reply finish reward sampling reset anchor text answer cost calls terms src` |
| `reply` | `ids answer reset`: reply tokens that came after their node |
| `leaf` | `stop success propensity` |
| `failed` | `from ids lp v attempt`, `failure error` |
| `step` | `step`, counters |
| `end` | totals |

`from` is the path of the origin, `ids` and `lp` are the sampled tokens and their log-probs, `v` is the policy version;
`t` of `node` and `failed` has `pre` and `hit`, the prompt tokens that were computed and cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import orjson

from agentgym.rollout.policies.base import FinishReason, Sampling
from agentgym.rollout.types import Failure, StopReason

if TYPE_CHECKING:
    from agentgym.rollout.tree import Tree

Record: TypeAlias = dict[str, Any]


def dumps(record: Mapping[str, Any]) -> bytes:
    """Write a record as one line of JSON, newline included.

    NumPy arrays become lists, float32 in the shortest form that reads back to the same float32. Half of a surrogate
    pair, which is no text, becomes U+FFFD: nothing that a policy or a tool writes can stop a run.
    """
    option = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
    try:
        return orjson.dumps(record, option=option)
    except TypeError:
        return orjson.dumps(_scrub(record), option=option)


def tree(tree: Tree) -> Record:
    """Record that a tree was started."""
    record: Record = {
        "e": "tree",
        "tree": tree.group,
        "task": tree.task_id,
        "level": tree.level,
        "index": tree.index,
        "step": tree.step,
        "prompt": tree.reply_ids(0),
    }
    if tree.messages:
        record["messages"] = tree.messages
    if tree.tools:
        record["tools"] = tree.tools
    if tree.samplings[0] != Sampling():
        record["sampling"] = tree.samplings[0]
    return record


def node(tree: Tree, node: int) -> Record:
    """Record a turn, with the reply that it has by now."""
    record = _sampled("node", tree, node)
    if tree.n_reply[node]:
        record["reply"] = tree.reply_ids(node)
    if (finish := tree.finish[node]) is not FinishReason.STOP:
        record["finish"] = finish
    if reward := tree.reward[node]:
        record["reward"] = reward
    if sampling := tree.sampling[node]:
        record["sampling"] = tree.samplings[sampling]
    if tree.reset[node]:
        record["reset"] = True
    if tree.captured(node):
        record["anchor"] = True
    for key, column in (("text", tree.texts), ("answer", tree.answers), ("cost", tree.cost)):
        if node in column:
            record[key] = column[node]
    if node in tree.tool_calls:
        record["calls"] = tree.tool_calls[node]
    if node in tree.reward_terms:
        record["terms"] = dict(sorted(tree.reward_terms[node].items()))
    if node in tree.source:
        record["src"] = list(tree.source[node])
    return record


def reply(tree: Tree, node: int, *, ids_from: int = 0, answers_from: int = 0) -> Record:
    """Record reply tokens (and messages) that came after their node was recorded, from these positions on."""
    record: Record = {
        "e": "reply",
        "tree": tree.group,
        "path": tree.path_key(node),
        "ids": tree.reply_ids(node)[ids_from:],
    }
    if answer := tree.replies(node)[answers_from:]:
        record["answer"] = answer
    if not ids_from and tree.reset[node]:
        record["reset"] = True
    return record


def leaf(tree: Tree, node: int) -> Record:
    """Record that the episode ended at a node."""
    record: Record = {"e": "leaf", "tree": tree.group, "path": tree.path_key(node), "stop": tree.stop[node]}
    if (success := tree.success[node]) is not None:
        record["success"] = success
    if (propensity := tree.propensity[node]) != 1.0:
        record["propensity"] = propensity
    return record


def failed(tree: Tree, node: int) -> Record:
    """Record a failed attempt."""
    record = _sampled("failed", tree, node)
    record["failure"] = tree.failure[node]
    if tree.error[node]:
        record["error"] = tree.error[node]
    return record


def step(index: int, *, seconds: float, **counters: float) -> Record:
    """Record that a step is finished, with what it spent: `env_steps`, `restores`, `replayed_steps` ..."""
    return {"e": "step", "step": index, **counters, "t": {"seconds": seconds}}


def end(**totals: Any) -> Record:
    """Record that the run is finished."""
    return {"e": "end", **totals}


def timeless(record: Mapping[str, Any]) -> Any:
    """Return a record as plain JSON values, without what depends on timing."""
    return orjson.loads(dumps({key: value for key, value in record.items() if key != "t"}))


def start(record: Mapping[str, Any]) -> Tree:
    """Build the tree that a `tree` record starts."""
    from agentgym.rollout.tree import Tree

    return Tree(
        record["task"],
        record["level"],
        record["tree"],
        record["index"],
        record["prompt"],
        step=record["step"],
        messages=record.get("messages", ()),
        tools=record.get("tools", ()),
        sampling=sampling(record.get("sampling")),
    )


def replay(tree: Tree, nodes: dict[str, int], record: Mapping[str, Any]) -> None:
    """Apply a record about a node to its tree.

    Args:
        tree: the tree.
        nodes: path -> index of what the tree has so far (`{"": 0}` at first); kept up to date.
        record: a `node`, `reply`, `leaf` or `failed` record.

    Raises:
        KeyError: a path that the tree does not have, or a missing key.
        ValueError: an unknown record.
        BadInput, AlignmentError, PolicyError, InvalidReward: what the tree refuses.
    """
    path, kind = record["path"], record["e"]
    if kind == "node":
        nodes[path] = _add(tree, nodes, record)
    elif kind == "failed":
        _fail(tree, nodes, record)
    elif kind == "leaf":
        tree.end(
            nodes[path],
            StopReason(record["stop"]),
            success=record.get("success"),
            propensity=record.get("propensity", 1.0),
        )
    elif kind == "reply":
        tree.extend_reply(
            nodes[path], record["ids"], messages=record.get("answer", ()), reset=record.get("reset", False)
        )
    else:
        raise ValueError(f"unknown record {kind!r}")


def sampling(fields: Mapping[str, Any] | None) -> Sampling | None:
    """Read a `Sampling` back."""
    return None if fields is None else Sampling(**fields)


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, Mapping):
        return {_scrub(key): _scrub(part) for key, part in value.items()}
    return [_scrub(part) for part in value] if isinstance(value, list | tuple) else value


def _sampled(kind: str, tree: Tree, node: int) -> Record:
    record: Record = {
        "e": kind,
        "tree": tree.group,
        "path": tree.path_key(node),
        "ids": tree.sampled_ids(node),
        "lp": tree.logprobs(node),
    }
    if origin := tree.origin[node]:
        record["from"] = tree.path_key(origin)
    if version := tree.policy_version[node]:
        record["v"] = version
    if attempt := tree.attempt[node]:
        record["attempt"] = attempt
    record["t"] = {"pre": tree.prefilled[node], "hit": tree.cached[node]}
    return record


def _place(nodes: Mapping[str, int], record: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the parent and the arguments that `Tree.add` and `Tree.fail` share."""
    above, _, last = record["path"].partition("~")[0].rpartition(".")
    timing = record.get("t", {})
    return nodes[above], {
        "ordinal": int(last),
        "origin": nodes[record.get("from", "")],
        "token_ids": record["ids"],
        "logprobs": record["lp"],
        "policy_version": record.get("v", 0),
        "attempt": record.get("attempt", 0),
        "prefilled": timing.get("pre", 0),
        "cached": timing.get("hit", 0),
    }


def _add(tree: Tree, nodes: Mapping[str, int], record: Mapping[str, Any]) -> int:
    parent, shared = _place(nodes, record)
    return tree.add(
        parent,
        **shared,
        reply_ids=record.get("reply", ()),
        finish=FinishReason(record.get("finish", "stop")),
        reward=record.get("reward", 0.0),
        sampling=sampling(record.get("sampling")),
        reset=record.get("reset", False),
        restorable=record.get("anchor", False),
        message=record.get("text"),
        reply=record.get("answer"),
        tool_calls=record.get("calls"),
        reward_terms=record.get("terms"),
        cost=record.get("cost", 0.0),
        source=bytes(record["src"]) if "src" in record else None,
    )


def _fail(tree: Tree, nodes: Mapping[str, int], record: Mapping[str, Any]) -> None:
    parent, shared = _place(nodes, record)
    tree.fail(parent, **shared, failure=Failure(record["failure"]), message=record.get("error", ""))
