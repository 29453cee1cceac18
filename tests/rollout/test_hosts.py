"""How envs are called: inline, in a thread of their own, natively async; deadlines; what is left behind."""

from __future__ import annotations

import asyncio
import pickle
import sqlite3
import subprocess
import sys
import threading
import time

import gymnasium
import lab
import pytest

import agentgym as ag
from agentgym.env import Outcome
from agentgym.errors import DeadlineExceeded, UnsupportedSnapshot
from agentgym.rollout.deadlines import Watchdog
from agentgym.rollout.hosts import AsyncHost, HostPool, InlineHost, ThreadHost


class Ledger(ag.ToolEnv):
    """Keeps its state in a SQLite connection made by the thread that made the env."""

    tasks = lab.lengths(4, 6)
    calls = "affine"
    snapshot_by = "layers"

    def __init__(self, **keys):
        super().__init__(**keys)
        self.thread = threading.get_ident()
        self.db = sqlite3.connect(":memory:")
        self.db.execute("create table said (number integer)")

    def begin(self, task, rng):
        self.db.execute("delete from said")
        self.state = task.data["turns"]
        return "Say numbers."

    @ag.tool
    def say(self, number: int) -> str:
        """Say a number. Args: number: which."""
        self.db.execute("insert into said values (?)", (number,))
        if self._rows() and len(self._rows()) >= self.state:
            self.finish()
        return f'{{"said": {self._rows()}}}'

    def _rows(self):
        return [row[0] for row in self.db.execute("select number from said order by rowid")]

    def judge(self):
        return Outcome(sum(self._rows()) % 2 == 0)

    def capture(self):
        return pickle.dumps((self._rows(), self.state, self._episode))

    def reinstate(self, payload):
        rows, self.state, self._episode = pickle.loads(payload)
        self.db.execute("delete from said")
        self.db.executemany("insert into said values (?)", [(row,) for row in rows])

    def close(self):
        self.db.close()
        super().close()


class Threaded(lab.Chatter):
    calls = "thread"
    tasks = lab.lengths(4, 6)

    def hook(self, turn):
        assert threading.current_thread().name == "agentgym-env"
        time.sleep(0.0005)


class Awaited(ag.AsyncToolEnv):
    tasks = lab.lengths(4, 6)
    now = most = 0

    def begin(self, task, rng):
        self.state = {"turns": task.data["turns"], "said": []}
        return "Say numbers."

    @ag.tool
    async def say(self, number: int) -> str:
        """Say a number. Args: number: which."""
        cls = type(self)
        cls.now += 1
        cls.most = max(cls.most, cls.now)
        await asyncio.sleep(0.001)
        cls.now -= 1
        self.state["said"].append(number)
        if len(self.state["said"]) >= self.state["turns"]:
            self.finish()
        return f'{{"said": {self.state["said"]}}}'

    def judge(self):
        return Outcome(sum(self.state["said"]) % 2 == 0)


def threads():
    return [t for t in threading.enumerate() if t.name == "agentgym-env"]


def settled():
    """Wait for the threads that were told to end."""
    for thread in threads():
        thread.join(5)
    return threads()


@pytest.mark.parametrize("env", [Ledger, Threaded, Awaited])
@pytest.mark.parametrize("allocator", ["uniform", "random-tree"])
def test_complaint_73_each_way_of_calling_runs_under_eight_concurrent_rollouts(env, allocator):
    forests = [
        lab.run(env, policy=lab.Around(lab.dawdle), allocator=allocator, concurrency=n, retries=0) for n in (8, 1)
    ]
    assert forests[0].n_failed == 0
    assert forests[0].n_leaves > 16
    assert lab.canonical(forests[0]) == lab.canonical(forests[1])
    for tree in forests[0].trees:
        for node in range(1, tree.n_nodes):
            assert lab.known(tree, node)["said"] == lab.said(tree, node)
    assert settled() == []


def test_complaint_73_a_slow_tool_does_not_stall_the_others():
    Awaited.now = Awaited.most = 0
    lab.run(Awaited, concurrency=8)
    assert Awaited.most == 8


def test_an_affine_env_is_made_stepped_and_closed_by_one_thread():
    async def play():
        host = ThreadHost(lambda: Ledger(), deadline=5)
        task = Ledger.tasks.task("train", 0)
        await host.reset(task, 1)
        await host.step(ag.call("say", number=1))
        saved = await host.snapshot()
        await host.step(ag.call("say", number=2))
        await host.restore(saved)
        result = await host.step(ag.call("say", number=3))
        await host.close()
        return result[0]

    assert asyncio.run(play()) == '{"said": [1, 3]}'
    assert settled() == []


def gated(gate, closed):
    """An env whose step waits for `gate`."""

    class Env(lab.Chatter):
        calls = "thread"

        def hook(self, turn):
            gate.wait(20)

        def close(self):
            closed.set()
            super().close()

    return Env


def test_complaint_25_a_call_past_its_deadline_is_abandoned_and_its_env_closed_once_it_returns():
    gate, closed = threading.Event(), threading.Event()
    env = gated(gate, closed)

    async def play():
        host = ThreadHost(lambda: env(), deadline=0.05)
        await host.reset(env.tasks.task("train", 0), 1)
        with pytest.raises(DeadlineExceeded, match=r"env step took longer than 0\.05 s"):
            await host.step(ag.call("say", number=1))
        with pytest.raises(DeadlineExceeded, match="abandoned"):
            await host.snapshot()
        await host.close()

    asyncio.run(play())
    assert not closed.is_set()
    gate.set()
    assert closed.wait(5)
    assert settled() == []


def test_an_env_whose_rollout_is_cancelled_is_closed_too():
    gate, closed = threading.Event(), threading.Event()
    env = gated(gate, closed)

    async def play():
        host = ThreadHost(lambda: env(), deadline=5)
        await host.reset(env.tasks.task("train", 0), 1)
        step = asyncio.create_task(host.step(ag.call("say", number=1)))
        await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step

    asyncio.run(play())
    gate.set()
    assert closed.wait(5)
    assert settled() == []


def test_a_time_out_of_the_envs_own_is_not_the_deadline():
    class Own(lab.Chatter):
        def hook(self, turn):
            raise TimeoutError("the database")

    async def play():
        host = ThreadHost(lambda: Own(), deadline=5)
        await host.reset(Own.tasks.task("train", 0), 1)
        with pytest.raises(TimeoutError, match="the database") as caught:
            await host.step(ag.call("say", number=1))
        assert not isinstance(caught.value, DeadlineExceeded)
        await host.snapshot()
        await host.close()

    asyncio.run(play())
    assert settled() == []


def test_an_async_call_past_its_deadline_is_cancelled():
    class Forever(Awaited):
        cancelled = 0

        async def arespond(self, message):
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                type(self).cancelled += 1
                raise

    forest_error = None
    try:
        lab.run(Forever, tasks=1, budget=8, env_deadline=0.05, retries=0)
    except ag.errors.SystemicFailure as error:
        forest_error = str(error)
    assert "8 x env_timeout" in forest_error
    assert "env step took longer than 0.05 s" in forest_error
    assert Forever.cancelled == 8


def test_a_hung_env_does_not_keep_the_process_alive(tmp_path):
    """The whole of a program with an env that never returns: it ends by itself, and the run is complete."""
    script = tmp_path / "hang.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(lab.__file__)!r}.rpartition('/')[0])\n"
        "import threading, lab\n"
        "class Hangs(lab.Chatter):\n"
        "    calls = 'thread'\n"
        "    tasks = lab.lengths(2, 3)\n"
        "    def hook(self, turn):\n"
        "        if turn == 3: threading.Event().wait()\n"
        "forest = lab.run(Hangs, tasks=2, budget=16, env_deadline=1.5, retries=0, allow_failed=1.0)\n"
        "print(forest.n_leaves, forest.n_failed)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8 8\n", "")


def test_envs_are_used_again_and_all_are_closed():
    class Counted(lab.Chatter):
        pass

    forest = lab.run(Counted, concurrency=3)
    assert forest.n_leaves == 32
    assert Counted.made <= 2 + 3
    assert Counted.closed == Counted.made


def test_a_pool_makes_hosts_as_the_env_declares():
    def pool(env):
        return HostPool(env, 5.0)

    async def kinds():
        found = []
        for env in (lab.Chatter, Threaded, Ledger, Awaited):
            hosts = pool(env)
            found.append(type(hosts.acquire()))
            await hosts.close()
            await hosts.close()
        return found

    assert asyncio.run(kinds()) == [InlineHost, ThreadHost, ThreadHost, AsyncHost]
    assert settled() == []


def test_what_is_not_ours_or_cannot_be_wrapped_is_refused():
    with pytest.raises(UnsupportedSnapshot, match="CartPole"):
        HostPool(lambda: gymnasium.make("CartPole-v1"), 1.0)
    with pytest.raises(UnsupportedSnapshot, match="without wrappers, not TimeLimit"):
        AsyncHost(gymnasium.wrappers.TimeLimit(Awaited(), 3), 1.0)


@pytest.mark.parametrize("by", ["state", "replay"])
def test_reseeding_is_part_of_a_later_snapshot(by):
    class Env(lab.Chatter):
        snapshot_by = by
        tasks = lab.lengths(4)

    async def play(seed):
        host = InlineHost(Env())
        await host.reset(Env.tasks.task("train", 0), 1)
        await host.reseed(seed)
        await host.step(ag.call("say", number=1))
        saved = await host.snapshot()
        first = (await host.step(ag.call("say", number=2)))[0]
        await host.restore(saved)
        assert (await host.step(ag.call("say", number=2)))[0] == first
        return first

    assert asyncio.run(play(1)) == asyncio.run(play(1)) != asyncio.run(play(2))


# --- the watchdog of engine calls ---------------------------------------------------------------------------------


def watch(call, *, seconds=0.1, cancel_after=None):
    async def inner():
        dog = Watchdog("a message", seconds)
        task = asyncio.create_task(dog.run(call()))
        if cancel_after is not None:
            await asyncio.sleep(cancel_after)
            task.cancel()
        try:
            return await task, task.cancelling()
        finally:
            assert not dog._running
            assert not dog._late

    return asyncio.run(inner())


async def quick():
    return 7


async def slow():
    await asyncio.sleep(60)


async def sly():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        raise RuntimeError("aborted") from None


async def stubborn():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        return 8


def test_a_watchdog_returns_what_the_call_returns():
    assert watch(quick) == (7, 0)
    assert watch(stubborn) == (8, 0)


@pytest.mark.parametrize("call", [slow, sly])
def test_a_watchdog_ends_a_late_call(call):
    with pytest.raises(DeadlineExceeded, match=r"a message took longer than 0\.1 s"):
        watch(call)


def test_a_late_call_that_somebody_else_cancels_too_is_cancelled():
    async def inner():
        dog, loop = Watchdog("a message", 60), asyncio.get_running_loop()
        task = asyncio.create_task(dog.run(slow()))
        await asyncio.sleep(0)
        dog._running[task] -= 61
        dog._check(loop)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(inner())


def test_a_watchdog_lets_others_cancel():
    with pytest.raises(asyncio.CancelledError):
        watch(slow, seconds=60, cancel_after=0.01)
    with pytest.raises(RuntimeError, match="aborted"):
        watch(sly, seconds=60, cancel_after=0.01)
