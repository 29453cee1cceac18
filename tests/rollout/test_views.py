"""Branches as aligned arrays, sibling groups, forests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.errors import AlignmentError, BadInput
from agentgym.rollout import journal, manifest, records
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason
from agentgym.rollout.views import Branch, Forest, Row, SiblingGroup

PLANS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4), st.integers(0, 3), st.integers(0, 9)), max_size=25)


def grow(*turns, prompt=(1, 2)):
    """Build a chain of `(sampled, reply)` turns and return its tree and last node."""
    tree, node = Tree("t", "easy", "g0", 0, list(prompt)), 0
    for sampled, reply in turns:
        node = tree.add(
            node, ordinal=0, origin=0, token_ids=sampled, logprobs=[-0.5] * len(sampled), reply_ids=reply,
            policy_version=tree.depth[node] + 2, reward=0.25, reward_terms={"a": 0.25},
        )  # fmt: skip
    return tree, node


@given(plan=PLANS)
def test_columns_of_a_branch_are_aligned(script, play, plan):
    tree = play(script(plan))
    for node in tree.walk():
        branch = Branch(tree, node)
        assert {len(c) for c in (branch.sampled_mask, branch.logprobs, branch.versions, branch.node_ids)} == {
            branch.n_total
        }
        assert branch.sampled_mask.sum() == branch.n_sampled == tree.sampled_on_path(node)
        assert (branch.logprobs[~branch.sampled_mask] == 0).all()
        assert (branch.versions[~branch.sampled_mask] == -1).all()
        prompts = sum(row.n_prompt for row in branch.rows)
        assert branch.n_sampled + branch.n_observation + prompts == branch.n_total
        assert [*branch.prompt_ids, *branch.response_ids] == branch.token_ids.tolist()


@given(plan=PLANS)
def test_rows_are_what_the_engine_saw_and_produced(script, play, plan):
    tree = play(script(plan))
    for node in tree.walk():
        rows = Branch(tree, node).rows
        path = tree.path(node)
        ends = [i - 1 for i, n in enumerate(path) if tree.reset[n] and 0 < i < len(path) - 1]
        assert len(rows) == len(ends) + 1
        seen = path[1:]
        for row in rows:
            if row.n_total > row.n_prompt:
                last = int(row.node_ids[-1])
                assert row.sampled_mask[-1]
                request = tree.context(tree.parent[last])
                assert row.token_ids.tolist() == request + tree.sampled_ids(last).tolist()
        assert [t for row in rows for t in row.token_ids[row.sampled_mask]] == [
            t for n in seen for t in tree.sampled_ids(n)
        ]


def test_complaint_10_three_turns_are_one_row():
    tree, leaf = grow(([11], [2]), ([12], [3]), ([13], [4]), prompt=[1])
    [row] = Branch(tree, leaf).rows
    assert row.token_ids.tolist() == [1, 11, 2, 12, 3, 13]
    assert row.sampled_mask.tolist() == [False, True] * 3


def test_complaint_15_the_mask_is_on_what_was_sampled():
    tree, leaf = grow(([21, 22, 23], [31, 32]), ([24], []))
    branch = Branch(tree, leaf)
    assert branch.sampled_mask.sum() == 4
    assert branch.token_ids[branch.sampled_mask].tolist() == [21, 22, 23, 24]


def test_complaint_16_the_scaffold_is_not_trained_and_complaint_17_the_end_token_is():
    header, body, eos, separator = [5, 6], [7, 8, 9], 99, 10
    tree, leaf = grow(([*body, eos], [separator]), ([eos], []), prompt=header)
    branch = Branch(tree, leaf)
    assert branch.token_ids.tolist() == [*header, *body, eos, separator, eos]
    assert branch.sampled_mask.tolist() == [False, False, True, True, True, True, False, True]


def test_complaint_20_three_lengths_are_three_numbers():
    tree, leaf = grow(([0] * 4, [0] * 3), ([0] * 5, []), prompt=[0] * 3)
    [row] = Branch(tree, leaf).rows
    assert (row.n_sampled, row.n_observation, row.n_total - row.n_prompt) == (9, 3, 12)


def test_complaint_4_a_reset_forks_a_row():
    tree, first = grow(([11, 12], []), prompt=[1])
    tree.extend_reply(first, [1, 50, 60], reset=True)
    leaf = tree.add(first, ordinal=0, origin=0, token_ids=[13], logprobs=[-1.0])
    rows = Branch(tree, leaf).rows
    assert [row.token_ids.tolist() for row in rows] == [[1, 11, 12], [1, 50, 60, 13]]
    assert [row.n_prompt for row in rows] == [1, 3]
    assert rows[1].node_ids.tolist() == [first, first, first, leaf]
    assert Branch(tree, first).rows[0].token_ids.tolist() == [1, 11, 12]


def test_the_last_reply_is_in_no_row():
    tree, leaf = grow(([11], [2]), ([12], [90, 91, 92]))
    assert Branch(tree, leaf).response_ids.tolist() == [11, 2, 12]


def test_a_turn_without_room_for_a_token_adds_nothing():
    tree, node = grow(([11], [2]), ([12], [3, 4]))
    leaf = tree.add(node, ordinal=0, origin=0, token_ids=[], logprobs=[])
    tree.end(leaf, StopReason.CONTEXT_LIMIT)
    branch = Branch(tree, leaf)
    assert branch.response_ids.tolist() == [11, 2, 12]
    assert branch.n_turns == 2


def test_complaint_59_versions_are_those_of_each_turn():
    tree, leaf = grow(([11], [2]), ([12, 13], []))
    assert Branch(tree, leaf).versions.tolist() == [-1, -1, 2, -1, 3, 3]


def test_rewards_are_raw_by_turn_and_summed():
    tree, leaf = grow(([1], [2]), ([3], []))
    assert Branch(tree, leaf).reward is None
    tree.end(leaf, StopReason.MAX_TURNS, success=False)
    branch = Branch(tree, leaf)
    assert (branch.rewards, branch.reward, branch.reward_terms) == ([0.25, 0.25], 0.5, {"a": 0.5})
    assert (branch.success, branch.stop, branch.n_turns) == (False, "max_turns", 2)


def test_complaint_40_a_reward_reaches_its_own_branch_only():
    tree = Tree("t", "easy", "g0", 0, [1])
    leaves = [
        tree.add(0, ordinal=i, origin=0, token_ids=[i], logprobs=[-1.0], reward=reward)
        for i, reward in enumerate([0.0, 1.0])
    ]
    for leaf in leaves:
        tree.end(leaf, StopReason.TERMINATED)
    assert [Branch(tree, leaf).reward for leaf in leaves] == [0.0, 1.0]


def test_a_failed_attempt_has_no_branch():
    tree, _ = grow()
    failed = tree.fail(0, ordinal=0, origin=0, failure=Failure.ENV_ERROR)
    with pytest.raises(BadInput, match="failed attempt"):
        Branch(tree, failed)


def test_complaint_14_a_row_checks_its_columns():
    ids, mask = np.zeros(3, np.int32), np.zeros(4, np.bool_)
    with pytest.raises(AlignmentError, match=r"\[3, 4, 3, 3, 3\]"):
        Row(ids, mask, np.zeros(3, np.float32), ids, ids, 1)
    with pytest.raises(AlignmentError, match="prompt has sampled"):
        Row(ids, ~mask[:3], np.zeros(3, np.float32), ids, ids, 1)


def branching():
    """A success with two turns; from its first turn, a failure and a rollout that failed."""
    tree = Tree("t", "easy", "g0", 0, [1])
    first = tree.add(0, ordinal=0, origin=0, token_ids=[1], logprobs=[-1.0], message="a")
    own = tree.add(first, ordinal=0, origin=0, token_ids=[2], logprobs=[-1.0])
    tree.end(own, StopReason.TERMINATED, success=True)
    other = tree.add(first, ordinal=1, origin=first, token_ids=[3], logprobs=[-1.0])
    last = tree.add(other, ordinal=0, origin=first, token_ids=[4], logprobs=[-1.0])
    tree.end(last, StopReason.TERMINATED, success=False)
    cut = tree.add(first, ordinal=2, origin=first, token_ids=[5], logprobs=[-1.0])
    tree.fail(cut, ordinal=0, origin=first, failure=Failure.ENV_ERROR)
    return tree, first, [own, other, cut], last


def test_siblings_know_the_leaf_of_their_own_continuation():
    tree, first, children, last = branching()
    group = SiblingGroup(tree, first)
    assert group.children == children
    assert [group.own_leaf(child) for child in children] == [children[0], last, None]
    assert group.outcomes == [True, False, None]
    assert SiblingGroup(tree, 0).outcomes == [True]


def test_a_forest_counts_and_iterates_by_path():
    tree, _, children, last = branching()
    forest = Forest([tree, grow(([1], []))[0]])
    assert [branch.leaf for branch in forest.leaves] == [children[0], last]
    assert (forest.n_leaves, forest.n_failed) == (2, 1)


def test_a_forest_becomes_a_graph():
    tree, *_ = branching()
    graph = Forest([tree]).to_networkx()
    assert graph.number_of_nodes() == tree.n_nodes
    assert sorted(path for _, path in graph.successors(("g0", "0"))) == ["0.0", "0.1", "0.2"]
    assert graph.nodes["g0", "0"]["text"] == "a"
    assert graph.nodes["g0", "0.2.0~0"]["status"] == "failed"


def test_a_forest_is_loaded_from_its_folder(tmp_path):
    tree, *_ = branching()
    manifest.write(tmp_path, {"format": 1, "config": {"seed": 3}})
    with journal.Journal(tmp_path) as log:
        log.write(records.tree(tree))
        log.write(records.step(0, seconds=0.5, env_steps=4, restores=2))
        log.write(records.step(1, seconds=0.25, env_steps=1))
    forest = Forest.load(tmp_path)
    assert [tree.group for tree in forest.trees] == ["g0"]
    assert forest.manifest["config"] == {"seed": 3}
    assert forest.counters == {"seconds": 0.75, "env_steps": 5, "restores": 2}
