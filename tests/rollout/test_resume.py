"""A run that was killed at any byte is completed: the trees are those of the run that was never killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter

import lab
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentgym as ag
from agentgym.errors import BadInput, ConfigMismatch, JournalError
from agentgym.rollout import journal
from agentgym.rollout.types import Failure
from agentgym.rollout.views import Forest


class Talk(lab.Chatter):
    """Some rollouts fail for ever, some once (in this process), one task cannot be reset."""

    tasks = lab.lengths(1, 3, 5, 4)

    def begin(self, task, rng):
        if task.id.endswith("/3"):
            raise ConnectionError("this task is lost")
        return super().begin(task, rng)

    def hook(self, turn):
        if sum(self.state["deep"]["said"]) % 11 == 0:
            raise ConnectionError("lost the line")


OPTIONS = {"step_tasks": 2, "max_turns": 6, "budget": 44, "tasks": 4, "seed": 3}


@pytest.fixture(scope="module", params=[*lab.ALLOCATORS, "trace-budget"])
def finished(request, tmp_path_factory):
    """A finished run: options, folder, canonical trees."""
    keys = {"allocator": request.param}
    if request.param == "trace-budget":
        keys = {"allocator": "trace", "budget_tokens": 6000, "budget_env_steps": 110}
    folder = tmp_path_factory.mktemp(request.param)
    forest = lab.run(Talk, out=folder / "run", **OPTIONS, **keys)
    assert forest.n_leaves > 8
    assert {Failure.ENV_ERROR} == set(lab.kinds(forest))
    return keys, folder, lab.canonical(forest)


def cut(folder, size):
    """Copy a run as it would be if it had been killed after `size` bytes."""
    target = folder / "cut"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(folder / "run", target)
    os.truncate(target / journal.FILE, size)
    return target


def leaves(folder):
    """How often each leaf is recorded."""
    return Counter((r["tree"], r["path"]) for _, r in journal.scan(folder) if r["e"] == "leaf")


@settings(max_examples=10)  # for each of four runs
@given(where=st.floats(0, 1), concurrency=st.sampled_from([1, 5, 64]))
def test_peer_33_a_run_cut_at_any_byte_is_completed_as_if_it_had_not_been(finished, where, concurrency):
    keys, folder, whole = finished
    target = cut(folder, int(where * (folder / "run" / journal.FILE).stat().st_size))
    forest = lab.run(
        Talk, policy=lab.Around(lab.dawdle), out=target, resume=True, concurrency=concurrency, **OPTIONS, **keys
    )
    assert lab.canonical(forest) == whole
    assert sorted(lab.canonical(Forest.load(target)), key=str) == sorted(whole, key=str)
    assert leaves(target) == leaves(folder / "run")
    assert set(leaves(target).values()) == {1}


def test_every_line_of_a_run_is_a_place_where_it_can_be_cut(finished):
    """In particular between the last turn of an episode and its leaf."""
    keys, folder, whole = finished
    lines = (folder / "run" / journal.FILE).read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if b'"e":"leaf"' in line]
    for count in [0, 1, len(lines) - 1, *ends[:: max(1, len(ends) // 4)]]:
        target = cut(folder, sum(map(len, lines[:count])))
        assert lab.canonical(lab.run(Talk, out=target, resume=True, **OPTIONS, **keys)) == whole


def test_a_finished_run_is_not_played_again(finished):
    keys, folder, whole = finished
    target = cut(folder, (folder / "run" / journal.FILE).stat().st_size)
    before = (target / journal.FILE).read_bytes()
    policy = lab.Around()
    forest = lab.run(Talk, policy=policy, out=target, resume=True, **OPTIONS, **keys)
    assert policy.prompts == []
    assert lab.canonical(forest) == whole
    assert (target / journal.FILE).read_bytes() == before


def test_what_a_journal_has_is_not_generated_again(finished):
    keys, folder, _ = finished
    lines = (folder / "run" / journal.FILE).read_bytes().splitlines(keepends=True)
    kept = lines[: len(lines) // 2]
    target = cut(folder, sum(map(len, kept)))
    policy = lab.Around()
    lab.run(Talk, policy=policy, out=target, resume=True, **OPTIONS, **keys)
    turns = sum(bool(orjson.loads(line).get("ids")) for line in lines)
    known = sum(bool(orjson.loads(line).get("ids")) for line in kept)
    assert len(policy.prompts) == turns - known


def small(tmp_path, env=Talk, *, keep=0.5, **keys):
    """Make a run and cut its journal in the middle."""
    lab.run(env, out=tmp_path / "run", **OPTIONS, **keys)
    path = tmp_path / "run" / journal.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: int(keep * len(lines))]))
    return tmp_path / "run"


def test_a_changed_configuration_is_refused_by_name(tmp_path):
    out = small(tmp_path)
    with pytest.raises(ConfigMismatch, match=r"config\.budget: 44 in the folder, 60 now; config\.seed: 3 in .*, 4 now"):
        lab.run(Talk, out=out, resume=True, **{**OPTIONS, "budget": 60, "seed": 4})
    with pytest.raises(ConfigMismatch, match=r"config\.allocator: 'uniform' in the folder, 'random-tree' now"):
        lab.run(Talk, out=out, resume=True, allocator="random-tree", **OPTIONS)


def test_what_cannot_change_a_tree_may_change(tmp_path):
    out = small(tmp_path)
    free = {"concurrency": 2, "env_deadline": 5.0, "policy_deadline": 7.0, "allow_failed": 1.0}
    assert lab.run(Talk, out=out, resume=True, **free, **OPTIONS).n_leaves > 8


def test_a_changed_task_set_is_refused(tmp_path):
    out = small(tmp_path)

    class Talk(lab.Chatter):
        tasks = lab.lengths(2, 2)

    with pytest.raises(ConfigMismatch, match=r"env\.tasks"):
        lab.run(Talk, out=out, resume=True, **OPTIONS)


def test_an_env_whose_prompt_has_changed_is_refused(tmp_path):
    out = small(tmp_path)

    class Changed(Talk):
        def begin(self, task, rng):
            return super().begin(task, rng) + " Please."

    Changed.__name__ = "Talk"
    with pytest.raises(BadInput, match="no longer starts as it did in this run"):
        lab.run(Changed, out=out, resume=True, **OPTIONS)


def test_an_env_that_answers_otherwise_than_recorded_is_a_divergence(tmp_path):
    """Nothing is appended to an episode that is not the recorded one."""

    class Steady(lab.Chatter):
        tasks = lab.lengths(6)

    lab.run(Steady, out=tmp_path / "run", **{**OPTIONS, "tasks": 1, "budget": 8, "max_turns": None})
    path = tmp_path / "run" / journal.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(line for line in lines if b'"path":"0.0.0.0' not in line and b'"e":"step"' not in line))

    class Other(Steady):
        def hook(self, turn):
            self.state["deep"]["thrown"][-1] += 1

    Other.__name__ = "Steady"
    keys = {**OPTIONS, "tasks": 1, "budget": 8, "max_turns": None}
    forest = lab.run(Other, out=tmp_path / "run", resume=True, **keys)
    assert lab.kinds(forest) == [Failure.REPLAY_DIVERGENCE] * 3
    assert forest.n_leaves == 7


def test_an_answer_that_json_cannot_hold_is_no_divergence(tmp_path):
    """Half of a surrogate pair (a file name of another encoding, say) is written as U+FFFD."""

    class Odd(lab.Chatter):
        tasks = lab.lengths(3)

        def begin(self, task, rng):
            return super().begin(task, rng) + " \ud800"

        @ag.tool
        def say(self, number: int) -> str:
            """Say a number. Args: number: which."""
            return super().say(number) + " \udcff"

    out = small(tmp_path, Odd, keep=0.7)
    forest = lab.run(Odd, out=out, resume=True, **OPTIONS)
    assert forest.n_failed == 0
    assert forest.counters["replayed_steps"] > 0
    assert lab.canonical(forest) == lab.canonical(lab.run(Odd, **OPTIONS))


def test_a_resumed_run_needs_a_folder_with_a_run(tmp_path):
    with pytest.raises(BadInput, match="resume needs the run folder"):
        lab.run(Talk, resume=True, **OPTIONS)
    with pytest.raises(BadInput, match=r"no manifest\.json"):
        lab.run(Talk, resume=True, out=tmp_path / "none", **OPTIONS)


def test_a_new_run_does_not_write_over_another(tmp_path):
    out = small(tmp_path)
    before = (out / journal.FILE).read_bytes()
    with pytest.raises(BadInput, match="has a run already"):
        lab.run(Talk, out=out, **OPTIONS)
    assert (out / journal.FILE).read_bytes() == before


def test_damage_in_the_middle_is_not_repaired_silently(tmp_path):
    out = small(tmp_path)
    lines = (out / journal.FILE).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:20] + b"\n"
    (out / journal.FILE).write_bytes(b"".join(lines))
    with pytest.raises(JournalError, match="line 3"):
        lab.run(Talk, out=out, resume=True, **OPTIONS)


def test_a_task_that_could_not_be_reset_stays_failed_however_often_the_run_is_resumed(tmp_path):
    """Even if it could be reset by now: its tree was recorded without a prompt."""
    out = small(tmp_path, keep=0.95)

    class Healed(Talk):
        def begin(self, task, rng):
            return lab.Chatter.begin(self, task, rng)

    Healed.__name__ = "Talk"
    for _ in range(2):
        forest = lab.run(Healed, out=out, resume=True, **OPTIONS)
        assert [tree.failed for tree in forest.trees if not tree.n_reply[0]] == [[1]]


KILLED = """
import sys
sys.path.insert(0, {lab!r})
import asyncio, lab

async def slowly(count, prompt_ids, sampling):
    await asyncio.sleep(0.002)

class Steady(lab.Chatter):
    tasks = lab.lengths(3, 5, 4)

forest = lab.run(Steady, policy=lab.Around(slowly), allocator="trace", tasks=6, budget=120, step_tasks=3, concurrency=4,
                 out={out!r}, resume={resume})
print(len(lab.canonical(forest)))
"""


def test_peer_33_kill_9_and_resume(tmp_path):
    """A real process, killed while it writes, three times; then completed."""

    class Steady(lab.Chatter):
        tasks = lab.lengths(3, 5, 4)

    whole = lab.run(Steady, allocator="trace", tasks=6, budget=120, step_tasks=3)
    out = tmp_path / "run"
    for attempt in range(4):
        code = KILLED.format(lab=lab.__file__.rpartition("/")[0], out=str(out), resume=attempt > 0)
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
        if attempt < 3:
            path, size = out / journal.FILE, 0 if attempt == 0 else (out / journal.FILE).stat().st_size
            while process.poll() is None and not (path.exists() and path.stat().st_size > size + 20_000):
                time.sleep(0.002)
            process.send_signal(signal.SIGKILL)
        _, error = process.communicate(timeout=40)
    assert process.returncode == 0, error.decode()
    assert lab.canonical(Forest.load(out)) == lab.canonical(whole)
    assert set(leaves(out).values()) == {1}
    assert sum(leaves(out).values()) == whole.n_leaves


def test_a_run_of_several_steps_learns_the_same_after_a_resume(tmp_path):
    """The predictor of `trace` learns between steps: what it learned from recorded steps is the same."""
    keys = {"allocator": "trace", "tasks": 6, "budget": 90, "step_tasks": 2}

    class Steady(lab.Chatter):
        tasks = lab.lengths(3, 5, 4)

    whole = lab.run(Steady, out=tmp_path / "run", **keys)
    path = tmp_path / "run" / journal.FILE
    lines = path.read_bytes().splitlines(keepends=True)
    second = [i for i, line in enumerate(lines) if b'"e":"step"' in line][1]
    path.write_bytes(b"".join(lines[: second + 2]))
    assert lab.canonical(lab.run(Steady, out=tmp_path / "run", resume=True, **keys)) == lab.canonical(whole)
