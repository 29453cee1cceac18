"""The arena: what it stores, what it refuses, how it grows."""

from __future__ import annotations

import gc
import json
import math
import tracemalloc

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import AlignmentError, BadInput, InvalidReward, PolicyError
from agentgym.rollout.policies.base import FinishReason, Sampling
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, Status, StopReason

PLANS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4), st.integers(0, 3), st.integers(0, 9)), max_size=25)


def new_tree(prompt=(1, 2, 3)):
    return Tree("train/easy/0", "easy", "g0", 0, list(prompt))


def turn(tree, parent=0, ordinal=0, ids=(7, 8), origin=None, **more):
    return tree.add(
        parent,
        ordinal=ordinal,
        origin=tree.origin[parent] if origin is None else origin,
        token_ids=list(ids),
        logprobs=[-0.5] * len(ids),
        **more,
    )


def chain(turns, sampled=50, reply=50):
    tree, node = new_tree(), 0
    for _ in range(turns):
        node = turn(tree, node, ids=range(sampled), reply_ids=range(reply), message="x" * 20)
    return tree, node


# --- tokens on a path --------------------------------------------------------------------------------------------


@given(plan=PLANS)
def test_deltas_on_a_path_are_the_context(script, play, plan):
    tree = play(script(plan))
    for node in tree.walk():
        path = tree.path(node)
        start = max(i for i, n in enumerate(path) if tree.reset[n])
        expected = tree.reply_ids(path[start]).tolist()
        for part in path[start + 1 :]:
            expected += tree.sampled_ids(part).tolist() + tree.reply_ids(part).tolist()
        assert tree.context(node) == expected
        assert tree.context_length(node) == len(expected)


@given(plan=PLANS)
def test_stored_tokens_are_the_given_ones(script, play, plan):
    ops = script(plan)
    tree = play(ops)
    by_key = {tree.path_key(node): node for node in tree.walk(failed=True)}
    for op in ops:
        node = by_key[op.key + ("~3" if op.kind == "failed" else "")]
        reply = () if op.kind == "failed" else op.reply
        assert tuple(tree.sampled_ids(node)) == op.sampled
        assert tuple(tree.reply_ids(node)) == reply
        assert tuple(tree.tokens(node)) == op.sampled + reply
        assert np.array_equal(tree.logprobs(node), np.array([-0.1 * (i + 1) for i in op.sampled], np.float32))


def test_complaint_1_tokens_stay_as_the_engine_sampled_them():
    tree = new_tree()  # toy vocabulary {"a": 1, "b": 2, "ab": 3}: "ab" would be encoded as [3]
    node = turn(tree, ids=[1, 2], message="ab")
    assert tree.sampled_ids(node).tolist() == [1, 2]


def test_complaint_10_the_prefix_is_the_whole_path():
    tree, node = new_tree([1]), 0
    for token in (2, 4, 6):
        node = turn(tree, node, ids=[token], reply_ids=[token + 1])
    assert tree.context(node) == [1, 2, 3, 4, 5, 6, 7]


def test_a_reply_that_comes_late_moves_to_the_end_of_the_arena():
    tree = new_tree()
    first = turn(tree, reply_ids=[20])
    turn(tree, ordinal=1, reply_ids=[30])
    tree.extend_reply(first, [21, 22], messages=[{"role": "user", "content": "more"}])
    assert tree.reply_ids(first).tolist() == [20, 21, 22]
    assert tree.context(first) == [1, 2, 3, 7, 8, 20, 21, 22]
    assert tree.replies(first) == [{"role": "user", "content": "more"}]


def test_a_reset_starts_a_new_context():
    tree = new_tree()
    first = turn(tree)
    tree.extend_reply(first, [90, 91], reset=True)
    second = turn(tree, first, ids=[5], reply_ids=[6])
    assert tree.context(second) == [90, 91, 5, 6]
    assert tree.sampled_on_path(second) == 3


def test_token_arrays_survive_growth():
    tree = new_tree()
    first = turn(tree)
    held = tree.sampled_ids(first)
    for ordinal in range(1, 100):
        turn(tree, ordinal=ordinal)
    assert held.tolist() == [7, 8]


def test_numpy_columns_are_accepted():
    tree = new_tree(np.array([1, 2], np.int64))
    node = tree.add(
        0, ordinal=0, origin=0, token_ids=np.array([5], np.int32), logprobs=np.array([-1.0]), reply_ids=np.array([6])
    )
    assert tree.context(node) == [1, 2, 5, 6]


# --- structure ---------------------------------------------------------------------------------------------------


@given(plan=PLANS, order=st.lists(st.integers(0, 99), min_size=1, max_size=25))
def test_canonical_does_not_depend_on_the_order_of_additions(script, play, plan, order):
    ops = script(plan)
    assert orjson.dumps(play(ops, order).canonical()) == orjson.dumps(play(ops).canonical())


@given(plan=PLANS.filter(bool), field=st.sampled_from(["token", "reward", "path"]))
def test_canonical_shows_every_difference(script, play, plan, field):
    tree, other = play(script(plan)), play(script(plan))
    open_node = next(n for n in other.walk() if other.status[n] is Status.OPEN)
    changes = {"token": {"ids": [1]}, "reward": {"reward": 0.125}, "path": {}}
    for each, more in ((tree, {"ids": [0]}), (other, {"ids": [0]} | changes[field])):
        turn(each, open_node, ordinal=99 if field == "path" and each is other else 98, origin=open_node, **more)
    assert json.dumps(tree.canonical()) != json.dumps(other.canonical())


@given(plan=PLANS, order=st.lists(st.integers(0, 99), min_size=1, max_size=25))
def test_walk_children_and_paths_agree(script, play, plan, order):
    tree = play(script(plan), order)
    nodes = list(tree.walk(failed=True))
    assert sorted(nodes) == list(range(tree.n_nodes))
    keys = [tuple(map(int, filter(None, tree.path_key(n).partition("~")[0].split(".")))) for n in nodes]
    assert keys == sorted(keys)
    for node in nodes:
        below = tree.children(node, failed=True)
        assert all(tree.parent[child] == node and tree.depth[child] == tree.depth[node] + 1 for child in below)
        assert tree.children(node) == [child for child in below if child not in tree.failure]
        assert [tree.child(node, tree.ordinal[child]) for child in tree.children(node)] == tree.children(node)
        assert tree.child(node, len(below)) is None
    assert [n for n in nodes if tree.is_leaf(n)] == list(tree.leaves)
    assert [n for n in nodes if n in tree.failure] == tree.failed
    assert tree.tips == [n for n in tree.walk() if tree.status[n] is Status.OPEN and not tree.children(n)]


def test_children_are_in_order_of_ordinals_whatever_came_first():
    tree = new_tree()
    for ordinal in (4, 0, 5, 2, 1, 3):
        turn(tree, ordinal=ordinal)
    assert [tree.ordinal[c] for c in tree.children(0)] == [0, 1, 2, 3, 4, 5]


def test_path_keys():
    tree = new_tree()
    first = turn(tree, ordinal=2)
    second = turn(tree, first, ordinal=1)
    failed = tree.fail(second, ordinal=0, origin=0, failure=Failure.ENV_TIMEOUT, attempt=1, message="slow")
    assert [tree.path_key(n) for n in (0, first, second, failed)] == ["", "2", "2.1", "2.1.0~1"]
    assert tree.path(second) == [0, first, second]


def test_outcomes_are_counted_below_any_node():
    tree = new_tree()
    first = turn(tree)
    for ordinal, success in enumerate([True, False, None, True]):
        tree.end(turn(tree, first, ordinal, origin=first), StopReason.TERMINATED, success=success)
    tree.end(turn(tree, ordinal=1), StopReason.MAX_TURNS, success=False)
    assert tree.success_counts() == (2, 2)
    assert tree.success_counts(first) == (2, 1)
    assert tree.success_counts(tree.leaves[1]) == (0, 1)


@pytest.mark.parametrize(
    ("stop", "success", "scored"),
    [
        (StopReason.TERMINATED, None, True),
        (StopReason.MAX_TURNS, None, True),
        (StopReason.CONTEXT_LIMIT, None, False),
        (StopReason.CONTEXT_LIMIT, False, True),
        (StopReason.BUDGET, None, False),
    ],
)
def test_a_leaf_is_scored_by_its_outcome_or_by_the_env(stop, success, scored):
    tree = new_tree()
    leaf = turn(tree)
    tree.end(leaf, stop, success=success)
    assert tree.scored(leaf) is scored


def test_restorable_is_what_was_captured_and_is_open():
    tree = new_tree()
    snapped, plain, marked = (
        turn(tree, snapshot=object()),
        turn(tree, ordinal=1),
        turn(tree, ordinal=2, restorable=True),
    )
    assert [tree.restorable(n) for n in (0, snapped, plain, marked)] == [True, True, False, True]
    tree.snapshots[plain] = object()
    tree.release()
    assert tree.snapshots == {}
    assert [tree.restorable(n) for n in (snapped, plain)] == [True, True]
    tree.end(snapped, StopReason.TERMINATED)
    assert not tree.restorable(snapped)


def test_equal_samplings_are_stored_once():
    tree = new_tree()
    nodes = [turn(tree, ordinal=i, sampling=Sampling(max_tokens=5 + i // 2)) for i in range(4)]
    assert len(tree.samplings) == 3
    assert [tree.samplings[tree.sampling[n]].max_tokens for n in nodes] == [5, 5, 6, 6]


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("logprobs", [[-1.0] * 4, [-1.0] * 2, []])
def test_complaint_14_columns_of_different_length_are_refused(logprobs):
    tree = new_tree()
    first = turn(tree)
    with pytest.raises(AlignmentError, match=rf"node 0\.0 of g0: 3 token ids but {len(logprobs)} log-probs"):
        tree.add(first, ordinal=0, origin=0, token_ids=[1, 2, 3], logprobs=logprobs)
    assert tree.n_nodes == 2


def test_complaint_14_source_marks_must_match_too():
    with pytest.raises(AlignmentError, match="and 1 source marks"):
        turn(new_tree(), source=b"\x01")


def test_peer_5_a_missing_logprob_names_the_turn():
    tree = new_tree()
    with pytest.raises(AlignmentError, match="node 3 of g0"):
        tree.add(0, ordinal=3, origin=0, token_ids=[1, 2], logprobs=[-1.0])


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_complaint_35_no_nan_reward_enters(reward):
    tree = new_tree()
    with pytest.raises(InvalidReward, match="node 0 of g0"):
        turn(tree, reward=reward)
    assert tree.n_nodes == 1


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_no_nan_logprob_enters(value):
    with pytest.raises(PolicyError, match="node 0 of g0"):
        new_tree().add(0, ordinal=0, origin=0, token_ids=[1, 2], logprobs=[-1.0, value])


@pytest.mark.parametrize("ids", [["a"], [1.5], [2**31], [None]])
def test_what_is_no_token_id_is_refused(ids):
    tree = new_tree()
    with pytest.raises(BadInput, match="token ids must be integers"):
        turn(tree, ids=ids)
    assert turn(tree) == 1
    assert tree.context(1) == [1, 2, 3, 7, 8]


@pytest.mark.parametrize("parent", [-1, 1, 99])
def test_a_parent_that_does_not_exist_is_refused(parent):
    with pytest.raises(BadInput, match="has no node"):
        new_tree().add(parent, ordinal=0, origin=0, token_ids=[1], logprobs=[-1.0])


def test_nothing_grows_below_a_leaf_or_a_failure():
    tree = new_tree()
    leaf = turn(tree)
    tree.end(leaf, StopReason.TERMINATED)
    failed = tree.fail(0, ordinal=1, origin=0, failure=Failure.ENV_ERROR)
    for node, word in ((leaf, "leaf"), (failed, "failed")):
        with pytest.raises(BadInput, match=f"is {word}: nothing can be added below it"):
            turn(tree, node)
        with pytest.raises(BadInput, match=f"it is {word}"):
            tree.end(node, StopReason.TERMINATED)
    with pytest.raises(BadInput, match="it failed or has children"):
        tree.extend_reply(failed, [1])


@pytest.mark.parametrize("others", [[0], [0, 1, 2], [2, 0, 1]])
def test_an_ordinal_is_given_once(others):
    tree = new_tree()
    for ordinal in others:
        turn(tree, ordinal=ordinal)
    with pytest.raises(BadInput, match="child 0 of node root of g0 exists already"):
        turn(tree, ordinal=0)


def test_a_retry_takes_the_ordinal_of_the_failed_attempt():
    tree = new_tree()
    tree.fail(0, ordinal=0, origin=0, failure=Failure.ENV_ERROR, attempt=0)
    with pytest.raises(BadInput, match="attempt 0"):
        tree.fail(0, ordinal=0, origin=0, failure=Failure.ENV_ERROR, attempt=0)
    tree.fail(0, ordinal=0, origin=0, failure=Failure.ENV_ERROR, attempt=1)
    good = turn(tree, ordinal=0, attempt=2)
    assert tree.children(0) == [good]
    assert [tree.path_key(n) for n in tree.children(0, failed=True)] == ["0~0", "0~1", "0"]


def test_the_origin_is_the_parent_or_that_of_the_parent():
    tree = new_tree()
    first = turn(tree)
    second = turn(tree, first)
    branch = turn(tree, second, ordinal=1, origin=second)
    assert turn(tree, branch) == 4
    assert tree.origin[4] == second
    with pytest.raises(BadInput, match="its origin must be"):
        turn(tree, branch, ordinal=1, origin=first)


def test_a_node_with_children_can_neither_end_nor_get_more_reply():
    tree = new_tree()
    first = turn(tree)
    turn(tree, first)
    with pytest.raises(BadInput, match="it has children"):
        tree.end(first, StopReason.BUDGET)
    with pytest.raises(BadInput, match="it failed or has children"):
        tree.extend_reply(first, [1])
    with pytest.raises(BadInput, match="cannot reset"):
        tree.extend_reply(turn(tree, ordinal=1, reply_ids=[4]), [1], reset=True)


@pytest.mark.parametrize("propensity", [0.0, -0.5, 1.5, math.nan])
def test_a_propensity_is_a_probability(propensity):
    tree = new_tree()
    with pytest.raises(BadInput, match="propensity"):
        tree.end(turn(tree), StopReason.TERMINATED, propensity=propensity)


def test_failed_attempts_keep_what_they_spent_and_are_no_leaves():
    tree = new_tree()
    node = tree.fail(
        0, ordinal=0, origin=0, failure=Failure.ENV_ERROR, message="boom", token_ids=[4, 5], logprobs=[-1, -2]
    )
    assert tree.leaves == []
    assert tree.failed == [node]
    assert (tree.n_sampled[node], tree.failure[node], tree.error[node]) == (2, "env_error", "boom")
    assert tree.finish[node] is None
    assert tree.finish[turn(tree, ordinal=1)] is FinishReason.STOP


# --- memory ------------------------------------------------------------------------------------------------------


def test_complaint_74_bytes_grow_linearly_with_turns():
    assert chain(200)[0].nbytes() <= 2.2 * chain(100)[0].nbytes()


def test_complaint_74_trees_are_freed():
    chain(50)
    gc.collect()
    tracemalloc.start()
    try:
        chain(50)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            chain(50)
        after = tracemalloc.get_traced_memory()[0]
        one = chain(50)[0].nbytes()
    finally:
        tracemalloc.stop()
    assert after - before < one


def test_nbytes_counts_snapshots_until_release():
    class Handle:
        nbytes = 10_000

    tree = new_tree()
    bare = tree.nbytes()
    turn(tree, snapshot=Handle())
    assert tree.nbytes() > bare + 10_000
    tree.release()
    assert tree.nbytes() < bare + 10_000


@settings(max_examples=20)
@given(width=st.integers(2, 60))
def test_siblings_share_their_parents_observation(width):
    tree = new_tree()
    anchor = turn(tree, reply_ids=range(1000))
    for ordinal in range(width):
        turn(tree, anchor, ordinal, origin=anchor)
    assert sum(tree.n_reply[n] for n in tree.walk()) == 3 + 1000
    assert tree.context(anchor) == [*tree.context(tree.children(anchor)[0])][:-2]
