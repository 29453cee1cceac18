"""Ctrl-C and `kill -9` in mid-run: what is finished is saved, `--resume` completes it, nothing is lost or doubled."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from agentgym.rollout import journal
from agentgym.rollout.views import Forest

COUNTDOWN = "agentgym/Countdown-v0"
LEAVES = 2160
RUN = ("--allocator", "trace", "--tasks", 360, "--step-tasks", 40, "--budget", LEAVES, "--seed", 3)
ARGS = (*RUN, "--level", "n4", "--concurrency", 16)


def run_args(scripted, out: str) -> list[object]:
    return ["rollout", COUNTDOWN, *scripted, *ARGS, "--out", out]


def stop_in_mid_run(child, folder: str, size: int, how: signal.Signals) -> None:
    """Send a signal once the journal has `size` bytes."""
    path = Path(folder, journal.FILE)
    for _ in range(4000):
        if path.exists() and path.stat().st_size > size:
            child.send_signal(how)
            return
        assert child.poll() is None, "it ended before it could be stopped"
        time.sleep(0.01)
    raise AssertionError("the journal did not grow")


def canonical(folder: str) -> list[object]:
    return [tree.canonical() for tree in sorted(Forest.load(folder).trees, key=lambda tree: (tree.step, tree.index))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[object]:
    """The trees of the same run, uninterrupted."""
    from agentgym.cli.main import run

    folder = str(tmp_path_factory.mktemp("whole") / "run")
    scripted = ("--policy", "scripted", "--max-tokens", "400")
    assert run([str(arg) for arg in run_args(scripted, folder)]) == 0
    return canonical(folder)


def test_interrupt_saves_and_resume_completes(spawn, finish, cli, scripted, whole):
    child = spawn(*run_args(scripted, "x"))
    stop_in_mid_run(child, "x", 400_000, signal.SIGINT)
    done = finish(child)
    assert (done.code, done.out) == (130, "")
    assert done.err == "saved: x; continue with --resume\n"
    partial = Forest.load("x")
    assert 0 < partial.n_leaves < LEAVES
    assert cli(*run_args(scripted, "x"), "--resume").code == 0
    assert canonical("x") == whole


@pytest.mark.parametrize("size", [30_000, 900_000])
def test_kill_loses_and_doubles_nothing(spawn, finish, cli, scripted, whole, size):
    child = spawn(*run_args(scripted, "x"))
    stop_in_mid_run(child, "x", size, signal.SIGKILL)
    assert finish(child).code == -signal.SIGKILL
    done = cli(*run_args(scripted, "x"), "--resume", "--json")
    assert done.code == 0, done.err
    assert done.json["leaves"] == LEAVES
    assert canonical("x") == whole
