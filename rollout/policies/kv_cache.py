"""A radix trie of key/value spans: one KV cache per tree path, shared by siblings and continued after a branch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentgym.errors import BadInput

_EXTEND_BELOW = 64
"""A leaf shorter than this grows instead of getting an only child: fewer spans to copy per lookup."""


def common_prefix(left: Sequence[int], right: Sequence[int], start: int = 0) -> int:
    """Return the length of the longest common prefix, given that the first `start` tokens are equal."""
    at, end = start, min(len(left), len(right))
    while at < end:
        stop = min(at + 64, end)
        if left[at:stop] != right[at:stop]:
            while left[at] == right[at]:
                at += 1
            return at
        at = stop
    return end


@dataclass(slots=True, eq=False)
class _Node:
    """One edge of the trie. `span` is `[C, n, W]` for the `n` tokens; the root has no span."""

    tokens: list[int]
    span: Tensor | None
    parent: _Node | None
    children: dict[int, _Node] = field(default_factory=dict)

    def path(self) -> Iterator[_Node]:
        node: _Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def nbytes(self) -> int:
        return 0 if self.span is None else self.span.numel() * self.span.element_size()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a token sequence.

    Attributes:
        length: number of tokens that are cached.
        spans: their key/value tensors in order, each `[C, n_i, W]`; the `n_i` add up to `length`.
    """

    length: int
    spans: tuple[Tensor, ...]


class PrefixTrie:
    """Key/value spans by token path, with least-recently-used eviction bound in bytes.

    A span is a tensor `[C, n, W]`: `C` key and value channels (two a layer), `n` tokens, `W` values. Spans are owned
    by the trie and never aliased, so an evicted node gives its memory back.

    The recency list keeps every node after all of its descendants (a touched path is appended deepest first), hence
    its first node is always a leaf and eviction never orphans a path.
    """

    def __init__(self, max_bytes: int) -> None:
        """Make an empty trie.

        Args:
            max_bytes: most bytes of spans kept; 0 keeps nothing.

        Raises:
            BadInput: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise BadInput(f"cache_bytes must be >= 0, got {max_bytes}")
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.evictions = 0
        self._root = _Node([], None, None)
        self._recency: OrderedDict[_Node, None] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self._recency)

    def clear(self) -> None:
        """Forget everything (the weights changed)."""
        self._root = _Node([], None, None)
        self._recency.clear()
        self.nbytes = 0

    def lookup(self, tokens: Sequence[int]) -> Match:
        """Return the longest cached prefix of `tokens` and mark it as used."""
        node, length, inside = self._descend(tokens)
        self._touch(node)
        spans = [step.span for step in node.path() if step.span is not None]
        spans.reverse()
        if spans and inside < len(node.tokens):
            spans[-1] = spans[-1][:, :inside]
        return Match(length, tuple(spans))

    def insert(self, tokens: Sequence[int], read: Callable[[int, int], Tensor]) -> None:
        """Cache the path `tokens`, copying only what is not cached yet; evicts until the bound holds again.

        Args:
            tokens: the path from the first token on.
            read: gives an owned copy `[C, stop - start, W]` of the spans of positions `start..stop`.
        """
        if self.max_bytes == 0:
            return
        node, length, inside = self._descend(tokens)
        if inside < len(node.tokens) and length < len(tokens):
            node = self._split(node, inside)
        if length < len(tokens):
            node = self._append(node, list(tokens[length:]), read(length, len(tokens)))
        self._touch(node)
        while self.nbytes > self.max_bytes:
            self._evict()

    def _descend(self, tokens: Sequence[int]) -> tuple[_Node, int, int]:
        """Follow `tokens`: the last node reached, the matched length, and how much of that node's edge matched."""
        node, length, inside = self._root, 0, 0
        while inside == len(node.tokens) and length < len(tokens):
            child = node.children.get(tokens[length])
            if child is None:
                break
            node = child
            inside = common_prefix(node.tokens, list(tokens[length : length + len(node.tokens)]), 1)
            length += inside
        return node, length, inside

    def _split(self, lower: _Node, at: int) -> _Node:
        """Cut the edge of `lower` after `at` tokens; return the new upper node."""
        span, parent = lower.span, lower.parent
        if span is None or parent is None:
            raise BadInput("the root of a prefix trie has no edge to split")
        upper = _Node(lower.tokens[:at], span[:, :at].clone(), parent, {lower.tokens[at]: lower})
        parent.children[upper.tokens[0]] = upper
        lower.tokens, lower.span, lower.parent = lower.tokens[at:], span[:, at:].clone(), upper
        self._recency[upper] = None
        return upper

    def _append(self, node: _Node, tokens: list[int], span: Tensor) -> _Node:
        self.nbytes += span.numel() * span.element_size()
        if node.span is not None and not node.children and len(node.tokens) < _EXTEND_BELOW:
            node.tokens = node.tokens + tokens
            node.span = torch.cat((node.span, span), dim=1)
            return node
        child = _Node(tokens, span, node)
        node.children[tokens[0]] = child
        self._recency[child] = None
        return child

    def _touch(self, node: _Node) -> None:
        for step in node.path():
            self._recency.move_to_end(step)

    def _evict(self) -> None:
        node, _ = self._recency.popitem(last=False)
        if node.parent is not None:
            del node.parent.children[node.tokens[0]]
        self.nbytes -= node.nbytes()
        self.evictions += 1
