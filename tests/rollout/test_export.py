"""Data sets: rows, schemas, what is left out, and that files appear whole."""

from __future__ import annotations

import json
import math

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from agentgym.errors import BadInput, UnknownName
from agentgym.messages import call, format_message
from agentgym.rollout import export as exports
from agentgym.rollout import journal, manifest, records
from agentgym.rollout.export import export
from agentgym.rollout.journal import Journal
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, StopReason
from agentgym.rollout.views import Branch

PLANS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4), st.integers(0, 3), st.integers(0, 9)), max_size=20)
TOOLS = [{"type": "function", "function": {"name": "pay", "description": "Pay.", "parameters": {"type": "object"}}}]
OPENING = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Pay 7."}]


def save(folder, *trees):
    """Write a run folder that holds `trees`."""
    folder.mkdir(exist_ok=True)
    manifest.write(folder, {"format": 1, "config": {}})
    with Journal(folder) as log:
        for tree in trees:
            log.write(records.tree(tree))
            for node in tree.walk(failed=True):
                if node in tree.failure:
                    log.write(records.failed(tree, node))
                elif node:
                    log.write(records.node(tree, node))
                    if tree.is_leaf(node):
                        log.write(records.leaf(tree, node))
    return folder


def new_tree(group="g0"):
    return Tree("train/easy/0", "easy", group, 0, [1, 2], messages=OPENING, tools=TOOLS)


def turn(tree, parent=0, ordinal=0, text="hm", ids=(7, 8), reply=(9,), **more):
    origin = parent if ordinal else tree.origin[parent]
    answer = more.pop("answer", [{"role": "tool", "content": f"re {text}"}])
    return tree.add(
        parent, ordinal=ordinal, origin=origin, token_ids=list(ids), logprobs=[-0.25] * len(ids),
        reply_ids=list(reply), message=text, reply=answer, **more,
    )  # fmt: skip


def leaf(tree, parent=0, ordinal=0, success=True, stop=StopReason.TERMINATED, reward=1.0, **more):
    node = turn(tree, parent, ordinal, reward=reward, reward_terms={"success": reward}, **more)
    tree.end(node, stop, success=success, propensity=0.5)
    return node


def lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def two_success_one_failed():
    """Three rollouts from one anchor: two succeed, one fails."""
    tree = new_tree()
    anchor = turn(tree, text=format_message(call("pay", coin=5)))
    leaf(tree, anchor, text="done")
    leaf(tree, anchor, 1, text="also")
    tree.fail(anchor, ordinal=2, origin=anchor, failure=Failure.ENV_ERROR)
    return tree


# --- token rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_row_holds_what_the_engine_saw(tmp_path, format):
    tree = new_tree()
    first = turn(tree, policy_version=3)
    last = leaf(tree, first, ids=(5,), policy_version=4)
    counts = export(save(tmp_path / "run", tree), format, tmp_path / "out")
    [row] = lines(tmp_path / "out") if format == "jsonl" else parquet.read_table(tmp_path / "out").to_pylist()
    assert counts == {
        "rows": 1, "leaves": 1, "failed": 0, "empty": 0, "overlong_dropped": 0, "overlong_truncated": 0
    }  # fmt: skip
    assert json.loads(row.pop("sampling"))[0]["temperature"] == 1.0
    assert row == {
        "run": "run", "group": "g0", "task": "train/easy/0", "level": "easy", "step": 0, "tree": 0,
        "leaf": "0.0", "row": 0, "rows": 1,
        "prompt_ids": [1, 2], "response_ids": [7, 8, 9, 5], "response_mask": [1, 1, 0, 1],
        "logprobs": [-0.25, -0.25, 0.0, -0.25], "versions": [3, 3, -1, 4], "node_ids": [1, 1, 1, 2],
        "reward": 1.0, "reward_terms": '{"success":1.0}', "success": True, "stop_reason": "terminated",
        "propensity": 0.5, "n_turns": 2,
    }  # fmt: skip
    assert Branch(tree, last).n_total == 6


@settings(max_examples=15)
@given(plan=PLANS, order=st.lists(st.integers(0, 99), min_size=1, max_size=20))
def test_exports_do_not_depend_on_the_order_of_completion(tmp_path_factory, script, play, plan, order):
    folder = tmp_path_factory.mktemp("orders")
    ops = script(plan)
    for name, by in (("run", None), ("other", order)):
        run = folder / name / "run"
        run.mkdir(parents=True)
        manifest.write(run, {"format": 1})
        with Journal(run) as log:
            play(ops, by, log.write)
        counts = export(run, "jsonl", folder / f"{name}.jsonl")
    assert (folder / "run.jsonl").read_bytes() == (folder / "other.jsonl").read_bytes()
    rows = lines(folder / "run.jsonl")
    assert len(rows) == counts["rows"]
    for row in rows:
        columns = ("response_ids", "response_mask", "logprobs", "versions", "node_ids")
        assert len({len(row[name]) for name in columns}) == 1
        assert row["response_mask"][-1] == 1


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_peer_39_failed_attempts_are_in_no_row(tmp_path, format):
    counts = export(save(tmp_path / "run", two_success_one_failed()), format, tmp_path / "out")
    assert (counts["rows"], counts["leaves"], counts["failed"]) == (2, 2, 1)


def test_complaint_30_groups_go_by_identity_not_by_prompt(tmp_path):
    trees = [new_tree("g0"), new_tree("g1")]
    for tree in trees:
        leaf(tree)
        leaf(tree, 0, 1, success=False)
    export(save(tmp_path / "run", *trees), "jsonl", tmp_path / "out")
    rows = lines(tmp_path / "out")
    assert [row["group"] for row in rows] == ["g0", "g0", "g1", "g1"]
    assert len({tuple(row["prompt_ids"]) for row in rows}) == 1


def test_complaint_26_no_row_without_a_sampled_token(tmp_path):
    tree = new_tree()
    leaf(tree, ids=(), success=False, stop=StopReason.CONTEXT_LIMIT, reward=0.0)
    leaf(tree, 0, 1)
    counts = export(save(tmp_path / "run", tree), "jsonl", tmp_path / "out")
    assert (counts["rows"], counts["empty"]) == (1, 1)
    assert [row["leaf"] for row in lines(tmp_path / "out")] == ["1"]


def test_complaint_65_nothing_scored_is_an_empty_file(tmp_path):
    tree = new_tree()
    tree.fail(0, ordinal=0, origin=0, failure=Failure.ENV_ERROR)
    for format in exports.FORMATS:
        assert export(save(tmp_path / "run", tree), format, tmp_path / format)["rows"] == 0
        (tmp_path / "run" / journal.FILE).unlink()
    assert (tmp_path / "jsonl").read_bytes() == b""
    assert parquet.read_table(tmp_path / "parquet").schema.equals(exports.schema())


def test_complaint_4_each_reset_gives_a_row_of_the_same_leaf(tmp_path):
    tree = new_tree()
    first = turn(tree, reply=())
    tree.extend_reply(first, [1, 2, 50], reset=True)
    leaf(tree, first, ids=(5,))
    export(save(tmp_path / "run", tree), "jsonl", tmp_path / "out")
    rows = lines(tmp_path / "out")
    assert [(row["leaf"], row["row"], row["rows"], row["reward"]) for row in rows] == [
        ("0.0", 0, 2, 1.0),
        ("0.0", 1, 2, 1.0),
    ]
    assert [row["prompt_ids"] + row["response_ids"] for row in rows] == [[1, 2, 7, 8], [1, 2, 50, 5]]


def test_complaint_84_an_all_null_column_can_be_read_with_another_shard(tmp_path):
    shards = tmp_path / "shards"
    for name, success, stop in (("a", None, StopReason.BUDGET), ("b", True, StopReason.TERMINATED)):
        tree = new_tree()
        leaf(tree, success=success, stop=stop)
        export(save(tmp_path / name, tree), "parquet", shards / f"{name}.parquet")
    table = parquet.read_table(shards)
    assert table.schema.field("reward").type == pa.float64()
    assert sorted(table.column("reward").to_pylist(), key=str) == [1.0, None]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_peer_36_free_form_content_is_a_json_string(tmp_path, format):
    tree = new_tree()
    for ordinal, terms in enumerate([{"x": 1.0}, {"y": 2.5}, {}]):
        node = turn(tree, 0, ordinal, reward_terms=terms)
        tree.end(node, StopReason.TERMINATED)
    export(save(tmp_path / "run", tree), format, tmp_path / "out")
    rows = lines(tmp_path / "out") if format == "jsonl" else parquet.read_table(tmp_path / "out").to_pylist()
    assert [json.loads(row["reward_terms"]) for row in rows] == [{"x": 1.0}, {"y": 2.5}, {}]


def test_peer_38_unknown_is_null_and_nan_is_never_written(tmp_path):
    tree = new_tree()
    leaf(tree, success=None, stop=StopReason.TOKEN_LIMIT)
    export(save(tmp_path / "run", tree), "jsonl", tmp_path / "out")
    [row] = lines(tmp_path / "out")
    assert row["reward"] is None
    assert row["success"] is None
    assert b"NaN" not in (tmp_path / "out").read_bytes()
    with pytest.raises(ValueError, match="reward nan"):
        leaf(tree, 0, 1, reward=math.nan)


@pytest.mark.parametrize(
    ("overlong", "rows", "counts"),
    [("drop", [[7, 8]], (1, 0)), ("truncate", [[7, 8], [7, 8]], (0, 1))],
)
def test_peer_41_overlong_rows_are_dropped_or_truncated_and_counted(tmp_path, overlong, rows, counts):
    tree = new_tree()
    leaf(tree)
    long = turn(tree, 0, 1, reply=(9, 9, 9))
    leaf(tree, long)
    made = export(save(tmp_path / "run", tree), "jsonl", tmp_path / "out", max_tokens=6, overlong=overlong)
    assert [row["response_ids"] for row in lines(tmp_path / "out")] == rows
    assert (made["overlong_dropped"], made["overlong_truncated"]) == counts


def test_a_prompt_that_fills_the_limit_leaves_no_row(tmp_path):
    tree = new_tree()
    leaf(tree)
    made = export(save(tmp_path / "run", tree), "jsonl", tmp_path / "out", max_tokens=2, overlong="truncate")
    assert (made["rows"], made["overlong_dropped"]) == (0, 1)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_rows_are_written_in_batches(tmp_path, monkeypatch, format):
    monkeypatch.setattr(exports, "BATCH_ROWS", 2)
    tree = new_tree()
    for ordinal in range(5):
        leaf(tree, 0, ordinal)
    export(save(tmp_path / "run", tree), format, tmp_path / "out")
    if format == "jsonl":
        assert len(lines(tmp_path / "out")) == 5
    else:
        file = parquet.ParquetFile(tmp_path / "out")
        assert (file.metadata.num_rows, file.num_row_groups) == (5, 3)
        assert file.schema_arrow.equals(exports.schema())


def test_logprobs_are_exact_in_both_formats(tmp_path):
    tree = new_tree()
    values = [-0.1, -1 / 3, -1e-30, -87.33654]
    node = tree.add(0, ordinal=0, origin=0, token_ids=[1] * 4, logprobs=values, message="x")
    tree.end(node, StopReason.TERMINATED, success=True)
    run = save(tmp_path / "run", tree)
    export(run, "jsonl", tmp_path / "a")
    export(run, "parquet", tmp_path / "b")
    [row], table = lines(tmp_path / "a"), parquet.read_table(tmp_path / "b")
    for found in (row["logprobs"], table.column("logprobs").to_pylist()[0]):
        assert np.array_equal(np.array(found, np.float32), np.array(values, np.float32))


# --- texts -------------------------------------------------------------------------------------------------------


def test_peer_39_sft_rows_keep_messages_and_tools(tmp_path):
    counts = export(save(tmp_path / "run", two_success_one_failed()), "sft", tmp_path / "out")
    first, second = lines(tmp_path / "out")
    assert (counts["rows"], counts["failed"], counts["unsuccessful"]) == (2, 1, 0)
    assert first["tools"] == TOOLS
    assert first["messages"] == [
        *OPENING,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "pay", "arguments": '{"coin": 5}'}}],
        },
        {"role": "tool", "content": 're <tool_call>\n{"name": "pay", "arguments": {"coin": 5}}\n</tool_call>'},
        {"role": "assistant", "content": "done"},
    ]
    assert second["messages"][-1] == {"role": "assistant", "content": "also"}


def test_a_call_that_cannot_be_read_stays_text(tmp_path):
    tree = new_tree()
    text = '<tool_call>\n{"name": "pay", "argu'
    leaf(tree, text=text)
    export(save(tmp_path / "run", tree), "sft", tmp_path / "out")
    [row] = lines(tmp_path / "out")
    assert row["messages"][-1] == {"role": "assistant", "content": text}


def test_sft_leaves_out_what_did_not_succeed_or_is_too_long(tmp_path):
    tree = new_tree()
    leaf(tree)
    leaf(tree, 0, 1, success=False)
    leaf(tree, 0, 2, success=None, stop=StopReason.BUDGET)
    leaf(tree, 0, 3, ids=range(50))
    counts = export(save(tmp_path / "run", tree), "sft", tmp_path / "out", max_tokens=20)
    assert [row["leaf"] for row in lines(tmp_path / "out")] == ["0"]
    assert (counts["unsuccessful"], counts["overlong_dropped"]) == (2, 1)


def test_pairs_are_made_where_continuations_differ(tmp_path):
    tree = new_tree()
    anchor = turn(tree, text="think")
    leaf(tree, anchor, 0, success=False, text="wrong")
    detour = turn(tree, anchor, 1, text="look")
    leaf(tree, detour, text="right")
    leaf(tree, anchor, 2, success=True, text="also right")
    leaf(tree, 0, 1, success=False, text="early")
    counts = export(save(tmp_path / "run", tree), "pairs", tmp_path / "out")
    [pair] = lines(tmp_path / "out")  # at the root both own continuations are unsuccessful
    assert counts["rows"] == 1
    assert pair["node"] == "0"
    assert pair["prompt"] == [
        *OPENING,
        {"role": "assistant", "content": "think"},
        {"role": "tool", "content": "re think"},
    ]
    assert [m["content"] for m in pair["chosen"]] == ["look", "re look", "right"]
    assert [m["content"] for m in pair["rejected"]] == ["wrong"]
    assert (pair["chosen_leaf"], pair["rejected_leaf"]) == ("0.1.0", "0.0")


def test_pairs_that_are_too_long_are_counted(tmp_path):
    tree = new_tree()
    leaf(tree, ids=range(30))
    leaf(tree, 0, 1, success=False)
    counts = export(save(tmp_path / "run", tree), "pairs", tmp_path / "out", max_tokens=20)
    assert (counts["rows"], counts["overlong_dropped"]) == (0, 1)


@pytest.mark.parametrize("format", ["sft", "pairs"])
def test_texts_are_needed_where_texts_are_exported(tmp_path, format):
    tree = new_tree()
    for ordinal, success in enumerate([True, False]):
        node = tree.add(0, ordinal=ordinal, origin=0, token_ids=[1], logprobs=[-1.0])
        tree.end(node, StopReason.TERMINATED, success=success)
    with pytest.raises(BadInput, match="without its text"):
        export(save(tmp_path / "run", tree), format, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"format": "parket"}, UnknownName, "did you mean 'parquet'"),
        ({"format": "jsonl", "overlong": "cut"}, UnknownName, "Valid: drop, truncate"),
        ({"format": "jsonl", "max_tokens": 0}, BadInput, "max_tokens must be >= 1"),
        ({"format": "sft", "overlong": "truncate"}, BadInput, "cannot truncate"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        export(tmp_path / "none", out=tmp_path / "out", **arguments)


def test_a_folder_cannot_be_the_target(tmp_path):
    with pytest.raises(BadInput, match="is a folder"):
        export(save(tmp_path / "run", new_tree()), "jsonl", tmp_path)


def test_what_is_no_run_cannot_be_exported(tmp_path):
    with pytest.raises(BadInput, match="is no run folder"):
        export(tmp_path, "jsonl", tmp_path / "out")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_file_appears_whole_or_not_at_all(tmp_path, monkeypatch, format):
    tree = new_tree()
    for ordinal in range(3):
        leaf(tree, 0, ordinal)
    run = save(tmp_path / "run", tree)
    (tmp_path / "out").write_text("before")

    def fails(*_):
        raise RuntimeError("disk")

    monkeypatch.setattr(exports, "BATCH_ROWS", 1)
    monkeypatch.setattr(exports, "_json", fails)
    with pytest.raises(RuntimeError, match="disk"):
        export(run, format, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert (tmp_path / "out").read_text() == "before"
