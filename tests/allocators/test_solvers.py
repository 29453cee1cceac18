"""The solvers against dynamic programming and brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import BadInput
from agentgym.rollout.allocators.solvers import expected_mixed, solve_prefixes, solve_roots

probability = st.one_of(st.floats(0, 1), st.sampled_from([0.02, 0.1, 0.5, 0.9, 0.98]))


def best_roots(v, total, cap):
    """Largest value with at most `total` rollouts, by dynamic programming over the prompts."""
    best = [0.0] * (total + 1)
    for p in v:
        best = [
            max([best[t]] + [best[t - m] + expected_mixed(p, m) for m in range(2, min(cap, t) + 1)])
            for t in range(total + 1)
        ]
    return best[total]


def roots_value(v, counts):
    return sum(expected_mixed(p, m) for p, m in zip(v, counts, strict=True))


@given(st.lists(probability, max_size=6), st.integers(0, 20), st.integers(2, 9))
@settings(max_examples=300)
def test_roots_are_optimal(v, total, cap):
    counts = solve_roots(v, total, cap)
    assert all(m == 0 or 2 <= m <= cap for m in counts)
    assert sum(counts) <= total
    assert roots_value(v, counts) == pytest.approx(best_roots(v, total, cap), abs=1e-9)


@given(st.lists(st.floats(0.02, 0.98), min_size=1, max_size=6), st.integers(2, 40))
def test_roots_spend_everything_when_the_cap_allows(v, total):
    assert sum(solve_roots(v, total, cap=64)) == total


def test_plain_greedy_on_pairs_would_lose_where_the_swap_wins():
    # Third rollout of the even prompt: worth 0.25. Instead: a pair for the second one, worth 0.48.
    v, total = [0.5, 0.4], 4
    assert solve_roots(v, total, cap=3) == [2, 2]
    assert roots_value(v, [3, 0]) < roots_value(v, [2, 2])


@pytest.mark.parametrize(
    ("v", "total", "cap", "counts"),
    [
        ([0.5], 1, 64, [0]),
        ([0.5], 3, 64, [3]),
        ([0.5], 9, 4, [4]),
        ([0.5, 0.5], 5, 64, [3, 2]),
        ([0.02, 0.5, 0.98], 4, 64, [0, 4, 0]),
        ([], 5, 64, []),
        ([0.5], 0, 64, [0]),
    ],
)
def test_roots_by_hand(v, total, cap, counts):
    assert solve_roots(v, total, cap) == counts


def test_among_equals_breadth_comes_first():
    assert solve_roots([0.3] * 4, 8, 64) == [2, 2, 2, 2]
    assert solve_roots([0.5] * 3, 10, 64) == [4, 3, 3]


def test_a_decided_prompt_is_filtered():
    assert solve_roots([0.02, 0.5, 0.5, 0.98], 12, 64)[0] == 0


@given(st.lists(probability, min_size=1, max_size=4), st.integers(0, 7))
def test_prefixes_are_optimal(q, total):
    counts = solve_prefixes(q, total)
    assert sum(counts) == total
    splits = (k for k in product(range(total + 1), repeat=len(q)) if sum(k) == total)
    best = max(sum(1 - p**k for p, k in zip(q, split, strict=True)) for split in splits)
    assert sum(1 - p**k for p, k in zip(q, counts, strict=True)) == pytest.approx(best, abs=1e-9)


def test_prefixes_by_hand():
    assert solve_prefixes([], 3) == []
    assert solve_prefixes([0.9, 0.1], 1) == [0, 1]
    assert solve_prefixes([0.5, 0.5], 3) == [2, 1]
    assert sum(solve_prefixes([1.0, 1.0], 2)) == 2


def test_expected_mixed():
    assert [expected_mixed(0.5, m) for m in range(4)] == [0.0, 0.0, 0.5, 0.75]
    assert expected_mixed(0.0, 5) == expected_mixed(1.0, 5) == 0.0


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_no_probability_is_bad_input(bad):
    with pytest.raises(BadInput, match=r"\[1\] must be a probability"):
        solve_roots([0.5, bad], 4, 64)
    with pytest.raises(BadInput, match=r"\[0\] must be a probability"):
        solve_prefixes([bad], 4)


def test_cap_of_one_is_bad_input():
    with pytest.raises(BadInput, match="cap must be >= 2"):
        solve_roots([0.5], 4, 1)
