"""The journal: round trips, torn tails, damage, duplicates."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import BadInput, JournalError
from agentgym.rollout import journal, records
from agentgym.rollout.journal import Journal
from agentgym.rollout.policies.base import Sampling
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import StopReason

PLANS = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4), st.integers(0, 3), st.integers(0, 9)), max_size=25)
FLOATS = st.lists(st.floats(-(2.0**99), 0, width=32), max_size=6)


def write(folder, script, play, plan, *, trees=1, order=None):
    """Write the trees of a plan, one event in each `write`, and return them."""
    with Journal(folder) as log:
        return [play(script(plan), order, log.write, group=f"s0/g{i}") for i in range(trees)]


def contents(trees):
    return orjson.dumps([tree.canonical() for tree in trees])


def small(folder, turns=3):
    """A journal with one tree of `turns` turns."""
    tree, node = Tree("t", "easy", "g0", 0, [1, 2]), 0
    with Journal(folder) as log:
        log.write(records.tree(tree))
        for _ in range(turns):
            node = tree.add(node, ordinal=0, origin=0, token_ids=[3, 4], logprobs=[-0.1, -0.2], message="m\n")
            log.write(records.node(tree, node))
    return tree


@settings(max_examples=40)
@given(plan=PLANS, order=st.lists(st.integers(0, 99), min_size=1, max_size=25), trees=st.integers(0, 3))
def test_trees_round_trip(script, play, plan, order, trees):
    with tempfile.TemporaryDirectory() as folder:
        written = write(folder, script, play, plan, trees=trees, order=order)
        assert contents(journal.read(folder)) == contents(written)


@settings(max_examples=60)
@given(plan=PLANS, where=st.floats(0, 1), trees=st.integers(1, 2))
def test_peer_33_a_cut_at_any_byte_loses_the_event_that_it_hit_and_nothing_else(script, play, plan, where, trees):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as prefix:
        write(folder, script, play, plan, trees=trees)
        path = Path(folder, journal.FILE)
        data = path.read_bytes()
        cut = round(where * len(data))
        whole = data[:cut].rfind(b"\n") + 1
        os.truncate(path, cut)
        Path(prefix, journal.FILE).write_bytes(data[:whole])
        expected = contents(journal.read(prefix))
        assert contents(journal.read(folder)) == expected
        with Journal(folder) as log:
            assert log.dropped == cut - whole
        assert path.read_bytes() == data[:whole]
        assert contents(journal.read(folder)) == expected


def test_a_cut_at_every_byte_of_a_small_journal(tmp_path):
    small(tmp_path, turns=2)
    path = tmp_path / journal.FILE
    data = path.read_bytes()
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        with Journal(tmp_path) as log:
            assert log.dropped == cut - (data[:cut].rfind(b"\n") + 1)
        assert len(journal.read(tmp_path)) == (cut > data.find(b"\n"))


def test_peer_34_a_torn_tail_is_repaired_before_the_next_append(tmp_path):
    path = tmp_path / journal.FILE
    tree = small(tmp_path, turns=1)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"e": 1')
    with Journal(tmp_path) as log:
        assert log.dropped == 7
        node = tree.add(1, ordinal=0, origin=0, token_ids=[5], logprobs=[-1.0])
        log.write(records.node(tree, node))
    assert path.read_bytes().startswith(whole + b'{"e":"node"')
    assert contents(journal.read(tmp_path)) == contents([tree])


@pytest.mark.parametrize("junk", [b'{"e": "tree", "tr', b"\0" * 200_000, b"no json\n", b"[1]\n", b"null\n", b"\n\n"])
@pytest.mark.parametrize("turns", [None, 2])
def test_whatever_follows_the_last_valid_line_is_dropped(tmp_path, junk, turns):
    path = tmp_path / journal.FILE
    if turns is not None:
        small(tmp_path, turns)
    whole = path.read_bytes() if turns else b""
    path.write_bytes(whole + junk)
    assert len(journal.read(tmp_path)) == (turns is not None)
    with Journal(tmp_path) as log:
        assert log.dropped == len(junk)
    assert path.read_bytes() == whole


def test_lines_longer_than_a_block_are_found(tmp_path):
    tree = Tree("t", "easy", "g0", 0, list(range(100_000)))
    with Journal(tmp_path) as log:
        log.write(records.tree(tree))
    with (tmp_path / journal.FILE).open("ab") as file:
        file.write(b"x" * 100_000)
    with Journal(tmp_path) as log:
        assert log.dropped == 100_000
    assert contents(journal.read(tmp_path)) == contents([tree])


@pytest.mark.parametrize("junk", [b"{}}", b"\xff\xfe", b"[]", b'{"e":"node"'])
def test_damage_elsewhere_names_the_line(tmp_path, junk):
    small(tmp_path)
    path = tmp_path / journal.FILE
    lines = path.read_bytes().splitlines()
    lines[2] = junk
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(JournalError, match="line 3: not a JSON object"):
        journal.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "exists already"),
        ({"path": "5.0"}, "'5' is missing"),
        ({"path": "zero"}, "invalid literal"),
        ({"path": "7", "from": "9"}, "'9' is missing"),
        ({"path": "7", "ids": [1]}, "1 token ids but 2 log-probs"),
        ({"path": "7", "lp": [None, None]}, "must be real number"),
        ({"path": "7", "finish": "perhaps"}, "perhaps"),
        ({"tree": "g9"}, "tree g9 was never started"),
        ({"e": "nodes"}, "unknown record 'nodes'"),
    ],
)
def test_a_record_that_does_not_fit_names_its_line(tmp_path, change, message):
    small(tmp_path)
    with Journal(tmp_path) as log:
        log.write({"e": "node", "tree": "g0", "path": "0", "ids": [1, 2], "lp": [-1, -1], **change})
    with pytest.raises(JournalError, match=f"line 5: .*{message}"):
        journal.read(tmp_path)


def test_peer_33_a_leaf_or_a_tree_is_recorded_once(tmp_path):
    tree = small(tmp_path)
    tree.end(3, StopReason.TERMINATED, success=True)
    with Journal(tmp_path) as log:
        log.write(records.leaf(tree, 3), records.leaf(tree, 3))
    with pytest.raises(JournalError, match=r"line 6: .*cannot become a leaf: it is leaf"):
        journal.read(tmp_path)
    with Journal(tmp_path) as log:
        log.write(records.tree(tree))
    lines = (tmp_path / journal.FILE).read_bytes().splitlines(keepends=True)
    (tmp_path / journal.FILE).write_bytes(b"".join([*lines[:4], lines[-1]]))
    with pytest.raises(JournalError, match="tree g0 is recorded twice"):
        journal.read(tmp_path)


@given(logprobs=FLOATS)
def test_logprobs_are_exact_float32(logprobs):
    tree = Tree("t", "easy", "g0", 0, [1])
    tree.add(0, ordinal=0, origin=0, token_ids=[1] * len(logprobs), logprobs=logprobs)
    line = records.dumps(records.node(tree, 1))
    again = Tree("t", "easy", "g0", 0, [1])
    records.replay(again, {"": 0}, orjson.loads(line))
    assert np.array_equal(again.logprobs(1), np.array(logprobs, np.float32))


def test_what_depends_on_timing_is_left_out_of_comparisons(tmp_path):
    for name, cached in (("a", 0), ("b", 5)):
        (tmp_path / name).mkdir()
        tree = Tree("t", "easy", "g0", 0, [1], sampling=Sampling(temperature=0.5))
        tree.add(0, ordinal=0, origin=0, token_ids=[1], logprobs=[-1.0], prefilled=9 - cached, cached=cached)
        with Journal(tmp_path / name) as log:
            events = [records.node(tree, 1), records.step(0, seconds=cached, env_steps=1)]
            log.write(records.tree(tree), *(events if cached else events[::-1]))
    assert journal.timeless(tmp_path / "a") == journal.timeless(tmp_path / "b")
    [read] = journal.read(tmp_path / "b")
    assert (read.prefilled[1], read.cached[1], read.samplings[0].temperature) == (4, 5, 0.5)


def test_each_write_is_one_system_call_of_whole_lines(tmp_path, monkeypatch):
    calls = []
    real = os.write
    with Journal(tmp_path) as log:
        monkeypatch.setattr(os, "write", lambda file, data: calls.append(data) or real(file, data))
        log.write(records.end(leaves=1), records.end(leaves=2))
        log.write()
    assert [call.count(b"\n") for call in calls] == [2]


def test_a_short_write_is_completed(tmp_path, monkeypatch):
    real = os.write
    with Journal(tmp_path) as log:
        monkeypatch.setattr(os, "write", lambda file, data: real(file, data[:3]))
        log.write(records.end(leaves=1))
    assert [record["leaves"] for _, record in journal.scan(tmp_path)] == [1]


def test_a_closed_journal_is_not_written(tmp_path):
    log = Journal(tmp_path)
    log.close()
    log.close()
    with pytest.raises(JournalError, match="is closed"):
        log.write(records.end())


def test_text_that_is_no_unicode_does_not_stop_a_run(tmp_path):
    tree = small(tmp_path)
    answer = [{"role": "tool", "content": "caf\udce9 \ud83d\ude00 \ud83d"}]
    node = tree.add(3, ordinal=0, origin=0, token_ids=[1], logprobs=[-1.0], message="ok \ud800", reply=answer)
    with Journal(tmp_path) as log:
        log.write(records.node(tree, node))
    [read] = journal.read(tmp_path)
    assert read.text(node) == "ok \ufffd"
    assert read.replies(node) == [{"role": "tool", "content": "caf\ufffd \U0001f600 \ufffd"}]
    assert contents([read]) == contents([tree])


def test_a_reply_that_comes_in_parts_is_recorded_in_parts(tmp_path):
    first, second = ({"role": "tool", "content": text} for text in "ab")
    tree = Tree("t", "easy", "g0", 0, [1])
    with Journal(tmp_path) as log:
        log.write(records.tree(tree))
        node = tree.add(0, ordinal=0, origin=0, token_ids=[1], logprobs=[-1.0], reply=[first])
        log.write(records.node(tree, node))
        tree.extend_reply(node, [5, 6], reset=True)
        log.write(records.reply(tree, node, answers_from=1))
        tree.extend_reply(node, [7], messages=[second])
        log.write(records.reply(tree, node, ids_from=2, answers_from=1))
    [read] = journal.read(tmp_path)
    assert contents([read]) == contents([tree])
    assert read.context(node) == [5, 6, 7]
    assert read.replies(node) == [first, second]


KILLED = """
import sys
from agentgym.rollout import records
from agentgym.rollout.journal import Journal
from agentgym.rollout.tree import Tree
tree = Tree("t", "easy", "g0", 0, [1])
log = Journal(sys.argv[1])
log.write(records.tree(tree))
while True:
    node = tree.add(0, ordinal=tree.n_nodes - 1, origin=0, token_ids=[tree.n_nodes] * 50, logprobs=[-0.5] * 50)
    log.write(records.node(tree, node))
"""


def test_peer_33_kill_at_any_moment_loses_at_most_what_was_in_flight(tmp_path):
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)]) as child:
        path = tmp_path / journal.FILE
        while not path.exists() or path.stat().st_size < 100_000:
            assert child.poll() is None
            time.sleep(0.01)
        child.kill()
    with Journal(tmp_path):  # the lock went with the process
        [tree] = journal.read(tmp_path)
    assert [tree.ordinal[node] for node in tree.children(0)] == list(range(tree.n_nodes - 1))
    assert all(tree.sampled_ids(node).tolist() == [node] * 50 for node in tree.children(0))


def test_one_process_at_a_time_writes(tmp_path):
    code = "import sys; from agentgym.rollout.journal import Journal; Journal(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    with Journal(tmp_path) as log:
        journal.read(tmp_path)  # reading must not give up the lock
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "BadInput: another process is writing" in done.stderr
    log.close()
    assert subprocess.run(command, check=False).returncode == 0


def test_a_folder_without_journal_is_no_run_folder(tmp_path):
    with pytest.raises(BadInput, match="is no run folder"):
        journal.read(tmp_path)
