"""The numbers of a run."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from agentgym.errors import BadInput
from agentgym.rollout import manifest, records, report
from agentgym.rollout.journal import Journal
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason
from agentgym.rollout.views import Forest

KEYS = {
    "trees", "leaves", "nodes", "success", "effective_ratio", "zero_advantage_groups", "sampled_tokens",
    "prefilled_tokens", "saved_prefill_tokens", "env_steps", "restores", "failures", "stop_reasons", "wall_seconds",
}  # fmt: skip


def group(outcomes, rewards=None, level="easy", stop=StopReason.TERMINATED):
    """A tree with one leaf for each outcome; leaf `i` samples the token `i`."""
    tree = Tree("t", level, "g0", 0, [1, 2])
    for i, success in enumerate(outcomes):
        reward = float(bool(success)) if rewards is None else float(rewards[i])
        node = tree.add(
            0, ordinal=i, origin=0, token_ids=[i], logprobs=[-1.0], reward=reward, prefilled=2 if i == 0 else 0,
            cached=0 if i == 0 else 2,
        )  # fmt: skip
        tree.end(node, stop, success=success)
    return tree


def test_exactly_the_promised_keys():
    summary = report.summarise(Forest([group([True])]))
    assert set(summary) == KEYS | {"levels", "distinct_leaves", "unstarted"}
    assert json.loads(json.dumps(summary)) == summary


def test_counts_of_a_small_forest():
    mixed, solved, long = group([True, False, True]), group([True, True]), group([False, None], level="hard")
    mixed.fail(0, ordinal=3, origin=0, failure=Failure.ENV_ERROR, token_ids=[5, 6], logprobs=[-1, -1])
    mixed.fail(0, ordinal=3, origin=0, failure=Failure.ENV_ERROR, attempt=1)
    counters = {"replayed_steps": 1, "unstarted": 3, "seconds": 1.5}
    summary = report.summarise(Forest([mixed, solved, long], counters=counters))
    levels = summary.pop("levels")
    assert summary == {
        "trees": 3, "leaves": 7, "distinct_leaves": 7, "nodes": 7, "success": 4 / 6, "effective_ratio": 1 / 3,
        "zero_advantage_groups": 2, "sampled_tokens": 9, "prefilled_tokens": 6, "saved_prefill_tokens": 8,
        "env_steps": 8, "restores": 9, "unstarted": 3, "failures": {"env_error": 2},
        "stop_reasons": {"terminated": 7}, "wall_seconds": 1.5,
    }  # fmt: skip
    assert levels["easy"] == {
        "trees": 2, "leaves": 5, "distinct_leaves": 5, "nodes": 5, "success": 4 / 5, "effective_ratio": 1 / 2,
        "zero_advantage_groups": 1,
    }  # fmt: skip
    assert levels["hard"]["success"] == 0.0


def test_nothing_is_no_share():
    summary = report.summarise(Forest([]))
    assert (summary["success"], summary["effective_ratio"], summary["trees"]) == (None, None, 0)


@pytest.mark.parametrize(
    ("tree", "zero"),
    [
        (group([True]), True),
        (group([]), True),
        (group([True, False]), False),
        (group([False, False], rewards=[0.1, 0.9]), True),
        (group([None, None], rewards=[0.1, 0.9]), False),
        (group([None, None], rewards=[0.1, 0.1]), True),
        (group([True, None], stop=StopReason.BUDGET), True),
    ],
)
def test_complaint_28_groups_without_signal_are_counted(tree, zero):
    assert report.zero_advantage(tree) is zero


def test_complaint_33_equal_float32_rewards_are_equal():
    near = [0.98] * 14 + [float(np.float32(0.98))]
    assert report.zero_advantage(group([None] * 15, rewards=near))
    assert not report.zero_advantage(group([None] * 2, rewards=[1.0, 1.00001]))


def test_peer_53_unscored_members_are_in_no_statistic():
    tree = group([True, None, False, True], stop=StopReason.CONTEXT_LIMIT)
    summary = report.summarise(Forest([tree]))
    assert (summary["leaves"], summary["success"], summary["effective_ratio"]) == (4, 2 / 3, 1.0)


def test_leaves_with_equal_tokens_are_not_distinct():
    tree = Tree("t", "easy", "g0", 0, [1])
    for first, (token, tail) in enumerate([(5, 6), (5, 6), (5, 7), (4, 6)]):
        node = tree.add(0, ordinal=first, origin=0, token_ids=[token], logprobs=[-1.0], reply_ids=[9])
        last = tree.add(node, ordinal=0, origin=0, token_ids=[tail], logprobs=[-1.0])
        tree.extend_reply(last, [first])  # nobody saw it
        tree.end(last, StopReason.TERMINATED)
    assert report.distinct_leaves(tree) == 3


def test_a_run_folder_is_summed_up_from_its_journal(tmp_path):
    tree = group([True, False])
    manifest.write(tmp_path, {"format": 1})
    with Journal(tmp_path) as log:
        log.write(records.tree(tree))
        for leaf in tree.leaves:
            log.write(records.node(tree, leaf), records.leaf(tree, leaf))
        log.write(records.step(0, seconds=1.25, unstarted=2))
        log.write(records.step(1, seconds=0.25, unstarted=1), records.end(leaves=2))
    summary = report.summarise(tmp_path)
    assert (summary["env_steps"], summary["restores"], summary["wall_seconds"]) == (2, 2, 1.5)
    assert summary["unstarted"] == 3
    assert summary["stop_reasons"] == {"terminated": 2}
    assert (summary["prefilled_tokens"], summary["saved_prefill_tokens"]) == (2, 2)


def test_what_is_no_run_has_no_summary(tmp_path):
    with pytest.raises(BadInput, match="is no run folder"):
        report.summarise(tmp_path)


def test_the_table_shows_every_number():
    trees = [group([True, False]), group([False], level="hard")]
    trees[0].fail(0, ordinal=2, origin=0, failure=Failure.ENV_TIMEOUT)
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(report.table(report.summarise(Forest(trees))))
    text = console.export_text()
    for word in ("trees", "hard", "failures: env_timeout", "stop_reasons: terminated", "0.333", "wall_seconds"):
        assert word in text
