"""The prefix trie of key/value spans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentgym.errors import BadInput
from agentgym.rollout.policies.kv_cache import PrefixTrie, common_prefix

TOKEN_BYTES = 2 * 3 * 8
"""Spans in these tests are `[2, n, 3]` int64."""


def kv(tokens: list[int]) -> Tensor:
    """Return spans in which a position's values depend on the whole path up to it, as real keys do."""
    column = torch.tensor([hash(tuple(tokens[: i + 1])) % (1 << 40) for i in range(len(tokens))])
    return column.view(1, -1, 1).expand(2, -1, 3).clone()


def put(trie: PrefixTrie, tokens: list[int]) -> None:
    trie.insert(tokens, lambda start, stop: kv(tokens)[:, start:stop].clone())


def found(trie: PrefixTrie, tokens: list[int]) -> int:
    """Look `tokens` up, check the spans' content, return the matched length."""
    match = trie.lookup(tokens)
    joined = torch.cat(match.spans, 1) if match.spans else kv([])
    assert torch.equal(joined, kv(tokens)[:, : match.length])
    return match.length


paths = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), paths), min_size=1, max_size=30))
def test_finds_the_longest_inserted_prefix(steps: list[tuple[bool, list[int]]]) -> None:
    trie, inserted = PrefixTrie(1 << 20), []
    for insert, tokens in steps:
        if insert:
            put(trie, tokens)
            inserted.append(tokens)
        assert found(trie, tokens) == max((common_prefix(tokens, other) for other in inserted), default=0)
    prefixes = {tuple(tokens[: i + 1]) for tokens in inserted for i in range(len(tokens))}
    assert trie.nbytes == len(prefixes) * TOKEN_BYTES
    assert trie.evictions == 0


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.booleans(), paths), min_size=1, max_size=30), st.integers(0, 20))
def test_eviction_keeps_the_bound_and_never_returns_wrong_values(
    steps: list[tuple[bool, list[int]]], tokens_kept: int
) -> None:
    trie = PrefixTrie(tokens_kept * TOKEN_BYTES)
    for insert, tokens in steps:
        if insert:
            put(trie, tokens)
        found(trie, tokens)
        assert trie.nbytes <= trie.max_bytes


def test_least_recently_used_leaf_goes_first_and_shared_prefix_stays() -> None:
    trie = PrefixTrie(210 * TOKEN_BYTES)
    trunk = [9] * 70
    for branch in (1, 2):
        put(trie, trunk + [branch] * 70)
    assert found(trie, trunk + [1] * 70) == 140
    put(trie, trunk + [3] * 70)
    assert trie.evictions == 1
    assert found(trie, trunk + [2] * 70) == 70
    assert found(trie, trunk + [1] * 70) == 140
    assert found(trie, trunk + [3] * 70) == 140


def test_only_the_missing_suffix_is_read() -> None:
    trie, reads = PrefixTrie(1 << 20), []

    def read(start: int, stop: int) -> Tensor:
        reads.append((start, stop))
        return kv([1, 2, 3, 4])[:, start:stop].clone()

    trie.insert([1, 2], read)
    trie.insert([1, 2, 3, 4], read)
    trie.insert([1, 2, 3], read)
    assert reads == [(0, 2), (2, 4)]


def test_short_leaf_grows_instead_of_getting_an_only_child() -> None:
    trie = PrefixTrie(1 << 20)
    put(trie, [1, 2, 3])
    put(trie, [1, 2, 3, 4, 5])
    assert len(trie) == 1
    assert found(trie, [1, 2, 3, 4, 5, 6]) == 5


def test_evicted_half_of_a_split_edge_frees_its_memory() -> None:
    trie = PrefixTrie(1 << 20)
    put(trie, [1, 2, 3, 4])
    put(trie, [1, 2, 7])
    spans = [*trie.lookup([1, 2, 3, 4]).spans, *trie.lookup([1, 2, 7]).spans[1:]]
    assert [span.shape[1] for span in spans] == [2, 2, 1]
    assert all(s.untyped_storage().nbytes() == s.numel() * s.element_size() for s in spans)


def test_clear_forgets_everything() -> None:
    trie = PrefixTrie(1 << 20)
    put(trie, [1, 2, 3])
    trie.clear()
    assert (found(trie, [1, 2, 3]), trie.nbytes, len(trie)) == (0, 0, 0)


def test_zero_bytes_turns_it_off_and_negative_is_refused() -> None:
    trie = PrefixTrie(0)
    put(trie, [1, 2])
    assert (len(trie), trie.evictions) == (0, 0)
    with pytest.raises(BadInput, match="cache_bytes must be >= 0, got -1"):
        PrefixTrie(-1)


@given(st.lists(st.integers(0, 1), max_size=200), st.lists(st.integers(0, 1), max_size=200), st.integers(0, 150))
def test_common_prefix_equals_counting(left: list[int], right: list[int], shared: int) -> None:
    left, right = [5] * shared + left, [5] * shared + right
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    assert common_prefix(left, right) == common_prefix(left, right, shared) == count
