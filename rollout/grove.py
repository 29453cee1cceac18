"""One tree while it grows: the arena, the conversation that it started with, and who continues where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from agentgym.messages import ChatMessage
from agentgym.rollout.ledger import Amount, Purse
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Status
from agentgym.stack import StackSnapshot
from agentgym.tasks import Task


@dataclass(frozen=True, slots=True)
class ByReset:
    """The start of an env whose state no snapshot covers: it is reset for each continuation.

    Attributes:
        seed: the seed of the reset.
    """

    seed: int


@dataclass(slots=True)
class Grove:
    """A tree and its run-time state.

    Attributes:
        tree: the arena.
        task: what the tree is about.
        dispatch: how often this task was dispatched before in this run; part of every seed.
        start: how to come to the state right after `reset`; `None` when the env could not be reset.
        purse: the tree's share of the budget.
        started: continuations started at each anchor.
        delivered: leaves that the allocator was told of, in dispatch order.
    """

    tree: Tree
    task: Task
    dispatch: int
    start: StackSnapshot | ByReset | None
    purse: Purse = field(default_factory=lambda: Purse(Amount(leaves=0)))
    started: Counter[int] = field(default_factory=Counter)
    delivered: list[int] = field(default_factory=list)

    def path(self, *names: int | str) -> tuple[int | str, ...]:
        """Return the seed path of a stream of this tree."""
        return (self.task.id, self.dispatch, *names)

    def next_ordinal(self, anchor: int) -> int:
        """Count one more continuation at `anchor` and return its child number.

        Below the root, child 0 is the turn with which the anchor's own continuation went on.
        """
        taken = self.started[anchor]
        self.started[anchor] += 1
        return taken if anchor == 0 else taken + 1

    def conversation(self, node: int) -> list[ChatMessage]:
        """Return all messages up to and including the env's answer at `node`."""
        tree = self.tree
        messages = list(tree.messages)
        for step in tree.path(node)[1:]:
            messages += [{"role": "assistant", "content": tree.texts[step]}, *tree.answers[step]]
        return messages


@dataclass(slots=True)
class Job:
    """One continuation: where it starts, where it is, and what it has spent.

    Attributes:
        grove: the tree that it grows.
        anchor: node at which it starts.
        ordinal: child number of its first node.
        propensity: stored on its leaf.
        at: the last node that it reached (the anchor at first).
        key: path of the next node, e.g. `0.0.2`.
        tokens: engine context at `at`: every token that the next request sends.
        attempt: failures so far at the next node.
        failures: failures so far in this continuation.
        sampled: tokens sampled in this continuation, those of failed attempts included.
        steps: env steps made by this continuation, those of failed attempts included.
        empty: consecutive empty messages.
        end: its last node, once it has ended.
    """

    grove: Grove
    anchor: int
    ordinal: int
    propensity: float
    at: int
    key: str
    tokens: list[int] = field(default_factory=list)
    attempt: int = 0
    failures: int = 0
    sampled: int = 0
    steps: int = 0
    empty: int = 0
    end: int | None = None

    @classmethod
    def dispatch(cls, grove: Grove, anchor: int, propensity: float, retries: int) -> Job:
        """Dispatch a continuation at `anchor`, taking up what a journal already has of it."""
        tree, ordinal = grove.tree, grove.next_ordinal(anchor)
        above = tree.path_key(anchor)
        job = cls(grove, anchor, ordinal, propensity, anchor, f"{above}.{ordinal}" if anchor else str(ordinal))
        job._take_up(retries)
        return job

    def _take_up(self, retries: int) -> None:
        tree = self.grove.tree
        while self.end is None:
            wanted = self.next_ordinal
            found = [n for n in tree.children(self.at, failed=True) if tree.ordinal[n] == wanted]
            failed = [n for n in found if tree.status[n] is Status.FAILED]
            for node in failed:
                self.fail(node)
            good = [n for n in found if tree.status[n] is not Status.FAILED]
            if good:
                self.advance(good[0])
                self.end = good[0] if tree.is_leaf(good[0]) else None
            else:
                self.end = failed[-1] if failed and self.failures > retries else None
                break
        if self.end is None:
            self.tokens = tree.context(self.at)

    @property
    def next_ordinal(self) -> int:
        """Child number of the next node."""
        return self.ordinal if self.at == self.anchor else 0

    def advance(self, node: int) -> None:
        """Move on to a node that was just added (or that a journal had)."""
        tree = self.grove.tree
        self.at = node
        self.key += ".0"
        self.attempt = 0
        self._spend(node)
        self.empty = 0 if tree.texts.get(node) else self.empty + 1

    def fail(self, node: int) -> None:
        """Count a failed attempt that was just recorded (or that a journal had)."""
        self.attempt += 1
        self.failures += 1
        self._spend(node)

    def _spend(self, node: int) -> None:
        """Count what a turn cost: the env was stepped if anything was sampled."""
        sampled = self.grove.tree.n_sampled[node]
        self.sampled += sampled
        self.steps += sampled > 0
