"""The storage under a tree: parallel columns, two token arenas, and the links between siblings."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from agentgym.errors import BadInput
from agentgym.messages import ChatMessage
from agentgym.rollout.policies.base import FinishReason
from agentgym.rollout.types import Failure, Status, StopReason

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
TokenIds: TypeAlias = Sequence[int] | Ints

NONE = -1
"""Index that stands for "no node"."""


class Columns:
    """Columns indexed by node, and what the nodes' tokens are. `agentgym.rollout.tree.Tree` is the public class.

    Sampled tokens share one arena with their log-probs, reply tokens have another; a node owns one slice of each.
    """

    def __init__(self) -> None:
        self.parent, self.ordinal, self.depth, self.origin = (array("i") for _ in range(4))
        self.n_sampled, self.n_reply, self.policy_version = array("i"), array("i"), array("i")
        self.prefilled, self.cached = array("i"), array("i")
        self.reward, self.propensity = array("d"), array("d")
        self.attempt, self.sampling = array("H"), array("H")
        self.reset, self._anchor = bytearray(), bytearray()
        self.status: list[Status] = []
        self.stop: list[StopReason | None] = []
        self.success: list[bool | None] = []
        self.finish: list[FinishReason | None] = []
        self.failure: dict[int, Failure] = {}
        self.error: dict[int, str] = {}
        self.texts: dict[int, str] = {}
        self.answers: dict[int, list[ChatMessage]] = {}
        self.tool_calls: dict[int, list[dict[str, Any]]] = {}
        self.reward_terms: dict[int, dict[str, float]] = {}
        self.cost: dict[int, float] = {}
        self.source: dict[int, bytes] = {}
        self.snapshots: dict[int, Any] = {}
        # Children are linked backwards: the last child, and from each child the sibling before it.
        self._last_child, self._prev_sibling = array("i"), array("i")
        self._sampled_at, self._reply_at = array("q"), array("q")
        self._sampled_ids, self._logprobs, self._reply_ids = array("i"), array("f"), array("i")

    @property
    def n_nodes(self) -> int:
        """Number of nodes, the root and failed attempts included."""
        return len(self.parent)

    def children(self, node: int, *, failed: bool = False) -> list[int]:
        """Children in the order of their ordinals; failed attempts only if asked for."""
        found, child = [], self._last_child[node]
        while child != NONE:
            if failed or self.status[child] is not Status.FAILED:
                found.append(child)
            child = self._prev_sibling[child]
        found.reverse()
        return found

    def child(self, node: int, ordinal: int) -> int | None:
        """The child with this ordinal, or `None`. Failed attempts do not count."""
        child = self._last_child[node]
        while child != NONE and self.ordinal[child] >= ordinal:
            if self.ordinal[child] == ordinal and self.status[child] is not Status.FAILED:
                return child
            child = self._prev_sibling[child]
        return None

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        nodes = [node]
        while (node := self.parent[node]) != NONE:
            nodes.append(node)
        nodes.reverse()
        return nodes

    def path_key(self, node: int) -> str:
        """Name of a node that does not depend on the order of additions.

        `0.0.2`; empty for the root; `0.0.2~1` for the failed attempt 1 at that node.
        """
        parts = []
        above = node
        while above:
            parts.append(str(self.ordinal[above]))
            above = self.parent[above]
        key = ".".join(reversed(parts))
        return f"{key}~{self.attempt[node]}" if self.status[node] is Status.FAILED else key

    def walk(self, start: int = 0, *, failed: bool = False) -> Iterator[int]:
        """Yield the subtree of `start` in pre-order, children by ordinal (path order); failed attempts on request."""
        last, before, status = self._last_child, self._prev_sibling, self.status
        stack = [start]
        while stack:
            node = stack.pop()
            if failed or status[node] is not Status.FAILED:
                yield node
            child = last[node]
            while child != NONE:
                stack.append(child)
                child = before[child]

    def sampled_ids(self, node: int) -> Ints:
        """Sampled tokens of a node, `[T]` int32 (a copy, as all token arrays)."""
        at = self._sampled_at[node]
        return np.frombuffer(self._sampled_ids[at : at + self.n_sampled[node]], np.int32)

    def logprobs(self, node: int) -> Floats:
        """Behaviour log-probs of the sampled tokens, `[T]` float32."""
        at = self._sampled_at[node]
        return np.frombuffer(self._logprobs[at : at + self.n_sampled[node]], np.float32)

    def reply_ids(self, node: int) -> Ints:
        """Tokens appended after the sampled ones, `[O]` int32."""
        at = self._reply_at[node]
        return np.frombuffer(self._reply_ids[at : at + self.n_reply[node]], np.int32)

    def tokens(self, node: int) -> Ints:
        """The node's delta: sampled tokens, then reply tokens, `[T + O]` int32."""
        return np.concatenate((self.sampled_ids(node), self.reply_ids(node)))

    def nbytes(self) -> int:
        """Bytes kept in memory: columns, tokens, texts, and snapshots that know their `nbytes`."""
        columns = [value for value in vars(self).values() if isinstance(value, array | bytearray | list | dict)]
        objects = [*self.texts.values(), *self.error.values(), *self.source.values()]
        nested = [part for column in (self.answers, self.tool_calls) for part in column.values()]
        held = sum(getattr(snapshot, "nbytes", 0) for snapshot in self.snapshots.values())
        return sum(map(sys.getsizeof, [*columns, *objects])) + sum(len(repr(part)) for part in nested) + held

    def _append(
        self,
        parent: int,
        ordinal: int,
        origin: int,
        *,
        status: Status = Status.OPEN,
        finish: FinishReason | None = None,
        sampled: array[int],
        logprobs: array[float],
        reply: array[int],
        reward: float = 0.0,
        version: int = 0,
        prefilled: int = 0,
        cached: int = 0,
        attempt: int = 0,
        sampling: int = 0,
    ) -> int:
        """Append one row to every column and return its index."""
        node = len(self.parent)
        self.ordinal.append(ordinal)
        self.depth.append(self.depth[parent] + 1 if node else 0)
        self.origin.append(origin)
        self.n_sampled.append(len(sampled))
        self.n_reply.append(len(reply))
        self.policy_version.append(version)
        self.prefilled.append(prefilled)
        self.cached.append(cached)
        self.reward.append(reward)
        self.propensity.append(1.0)
        self.attempt.append(attempt)
        self.sampling.append(sampling)
        self.reset.append(0)
        self._anchor.append(0)
        self.status.append(status)
        self.stop.append(None)
        self.success.append(None)
        self.finish.append(finish)
        self._last_child.append(NONE)
        self._prev_sibling.append(NONE)
        self._sampled_at.append(len(self._sampled_ids))
        self._reply_at.append(len(self._reply_ids))
        self._sampled_ids.extend(sampled)
        self._logprobs.extend(logprobs)
        self._reply_ids.extend(reply)
        self.parent.append(parent)
        return node

    def _sibling_after(self, parent: int, ordinal: int, attempt: int, *, failed: bool) -> int:
        """Return the child of `parent` that a new child comes before (`NONE`: it is the last), refusing a duplicate.

        Siblings are in order of (ordinal, attempt). The search starts at the last one: continuations end nearly in
        the order in which they started, so it takes time in proportion to the concurrency at most.

        Raises:
            BadInput: the ordinal is taken by a node that did not fail, or this attempt at it is recorded already.
        """
        after, sibling = NONE, self._last_child[parent]
        while sibling != NONE and self.ordinal[sibling] >= ordinal:
            if self.ordinal[sibling] == ordinal:
                if not failed and self.status[sibling] is not Status.FAILED:
                    raise BadInput(f"child {ordinal} of node {self._name(parent)} exists already")
                if self.attempt[sibling] == attempt:
                    raise BadInput(
                        f"attempt {attempt} at child {ordinal} of node {self._name(parent)} is recorded already"
                    )
            if (self.ordinal[sibling], self.attempt[sibling]) > (ordinal, attempt):
                after = sibling
            sibling = self._prev_sibling[sibling]
        return after

    def _link(self, parent: int, node: int, after: int) -> None:
        """Insert `node` among its parent's children, before the sibling `after`."""
        if after == NONE:
            self._prev_sibling[node], self._last_child[parent] = self._last_child[parent], node
        else:
            self._prev_sibling[node], self._prev_sibling[after] = self._prev_sibling[after], node

    def _extend_reply(self, node: int, ids: array[int]) -> None:
        """Append to a node's reply; a reply that is not at the end of the arena moves there."""
        start, count = self._reply_at[node], self.n_reply[node]
        if start + count != len(self._reply_ids):
            self._reply_at[node] = len(self._reply_ids)
            self._reply_ids.extend(self._reply_ids[start : start + count])
        self._reply_ids.extend(ids)
        self.n_reply[node] += len(ids)

    def _name(self, node: int) -> str:
        return str(node)


def pack_ids(ids: TokenIds) -> array[int]:
    """Copy token ids into an int32 array. Raises `BadInput` for what is no token id."""
    if isinstance(ids, np.ndarray):
        if ids.dtype == np.int32:
            return array("i", ids.tobytes())
        ids = ids.tolist()
    try:
        return array("i", ids)
    except (TypeError, OverflowError) as error:
        raise BadInput(f"token ids must be integers below 2**31: {error}") from None


def pack_logprobs(logprobs: Sequence[float] | Floats) -> array[float]:
    """Copy log-probs into a float32 array."""
    return array("f", np.asarray(logprobs, np.float32).tobytes() if isinstance(logprobs, np.ndarray) else logprobs)
