"""Tool envs: calls in order, one reply each, mistakes answered in words, coroutines awaited."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentgym import AsyncToolEnv, Outcome, TaskSet, ToolEnv, ToolSpec, tool
from agentgym.errors import BadInput, EpisodeOver, ReplayDivergence, ToolError
from agentgym.messages import Message, ToolCall, call

TASKS = TaskSet.from_rows({"train": [{}]})


class Notes(ToolEnv):
    """Write notes, in order."""

    tasks = TASKS

    def begin(self, task, rng):
        self.state = []
        return "Write."

    @tool(cost=0.25)
    def append(self, value: int) -> str:
        """Append a number."""
        self.state.append(value)
        return f"{self.state}"

    @tool(max_output_chars=40)
    def shout(self, text: str) -> str:
        """Say it loudly."""
        if text == "secret":
            raise ToolError("may not be said" + "!" * 100_000)
        if text == "crash":
            raise ConnectionError("the line is dead")
        return text.upper()

    @tool
    def stop(self) -> str:
        """End the episode."""
        self.finish()
        return "stopped"

    def judge(self):
        return Outcome(bool(self.state))


@pytest.fixture
def env():
    made = Notes()
    made.reset(seed=0)
    return made


def calls(*pairs):
    return Message(tool_calls=tuple(ToolCall(name, arguments) for name, arguments in pairs))


def test_tools_in_the_order_of_definition(env):
    assert [spec.name for spec in env.tools] == ["append", "shout", "stop"]


def test_calls_run_in_order_and_each_gets_one_reply(env):
    *_, info = env.step(
        calls(("append", {"value": 1}), ("nope", {}), ("append", {"value": "x"}), ("append", {"value": 2}))
    )
    assert [m["role"] for m in info["messages"]] == ["tool"] * 4
    assert [r["ok"] for r in info["tool_calls"]] == [True, False, False, True]
    assert env.state == [1, 2]
    assert info["cost"] == 0.5
    assert set(info["tool_calls"][0]) == {"name", "ok", "error"}


def test_cost_adds_up_over_the_episode_and_records_do_not(env):
    env.step(call("append", value=1))
    *_, info = env.step(call("append", value=2))
    assert info["cost"] == 0.5
    assert len(info["tool_calls"]) == 1


def test_calls_after_the_end_are_refused(env):
    _, _, terminated, _, info = env.step(calls(("append", {"value": 1}), ("stop", {}), ("append", {"value": 2})))
    assert terminated
    assert env.state == [1]
    assert "not executed" in info["messages"][2]["content"]
    assert [r["ok"] for r in info["tool_calls"]] == [True, True, False]


def test_a_tool_error_is_an_observation_cut_to_a_bound(env):
    observation, *_, info = env.step(call("shout", text="secret"))
    assert observation.startswith("Error: may not be said!!!")
    assert len(observation) < 20_000
    assert info["tool_calls"][0]["ok"] is False


def test_every_other_exception_leaves_step(env):
    with pytest.raises(ConnectionError, match="the line is dead"):
        env.step(call("shout", text="crash"))


def test_output_is_cut_in_characters(env):
    assert env.step(call("shout", text="a" * 100))[0] == "A" * 30 + "\n[... 60 characters cut ...]\n" + "A" * 10


def test_text_and_messages_act_alike(env):
    text = '<tool_call>\n{"name": "append", "arguments": {"value": 1}}\n</tool_call>'
    assert env.step(text)[0] == "[1]"
    assert env.step(call("append", value=2))[0] == "[1, 2]"


def test_a_message_without_calls_names_the_tools(env):
    observation, *_, info = env.step("I think.")
    assert "append(value: integer), shout(text: string), stop()" in observation
    assert info["messages"][0]["role"] == "user"
    assert info["tool_calls"] == []


def test_records_keep_only_the_head_of_a_long_name(env):
    assert len(env.step(calls(("x" * 1000, {})))[4]["tool_calls"][0]["name"]) == 80


def test_extra_tools_and_inherited_tools():
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    class More(Notes):
        extra_tools = (add, ToolSpec.of(add, name="plus"))

        @tool
        def stop(self, why: str) -> str:
            """End the episode, with a reason."""
            self.finish()
            return why

    env = More()
    env.reset()
    assert [spec.name for spec in env.tools] == ["append", "shout", "stop", "add", "plus"]
    assert env.step(call("plus", a=1, b=2))[0] == "3"
    assert env.step(call("stop", why="done"))[0] == "done"


def test_two_tools_of_one_name_are_refused():
    def stop() -> str:
        """Stop."""
        return ""

    class Twice(Notes):
        extra_tools = (stop,)

    with pytest.raises(BadInput, match="two tools of one name"):
        _ = Twice().tools


def test_a_coroutine_tool_needs_astep():
    class Wrong(Notes):
        @tool
        async def wait(self) -> str:
            """Wait."""
            return "waited"

    env = Wrong()
    env.reset()
    with pytest.raises(BadInput, match="tool 'wait' is a coroutine function: use AsyncToolEnv and its astep"):
        env.step(call("wait"))


# --- async --------------------------------------------------------------------------------------------------------


class AsyncNotes(AsyncToolEnv):
    """Some tools are coroutines, some are not."""

    tasks = TASKS
    max_turns = 9

    def begin(self, task, rng):
        self.state = []
        return "Write."

    @tool
    async def later(self, value: int) -> str:
        """Append a number, after a moment."""
        await asyncio.sleep(0)
        if value < 0:
            raise ToolError("must be positive")
        self.state.append(value + int(self.np_random.integers(100)))
        if value == 0:
            self.finish()
        return json.dumps(self.state)

    @tool
    def now(self, value: int) -> str:
        """Append a number."""
        self.state.append(value)
        return json.dumps(self.state)

    def judge(self):
        return Outcome(True)


class ReplayNotes(AsyncNotes):
    """The same, restored by re-execution."""

    snapshot_by = "replay"


def test_coroutines_are_awaited_in_order():
    async def episode():
        env = AsyncNotes()
        await env.areset(seed=0)
        first = await env.astep(
            calls(("later", {"value": 1}), ("now", {"value": 2}), ("later", {"value": -1}), ("x", {}))
        )
        last = await env.astep(calls(("later", {"value": 0}), ("now", {"value": 3})))
        with pytest.raises(EpisodeOver):
            await env.astep("x")
        await env.aclose()
        await env.aclose()
        return first, last

    first, last = asyncio.run(episode())
    assert [r["ok"] for r in first[4]["tool_calls"]] == [True, True, False, False]
    assert len(first[4]["messages"]) == 4
    assert last[2] is True
    assert "not executed" in last[4]["messages"][1]["content"]


@pytest.mark.parametrize("cls", [AsyncNotes, ReplayNotes])
def test_async_snapshots(cls):
    script = [call("later", value=5), Message("cut", call("now", value=1).tool_calls, truncated=True), "text"]

    async def play(env):
        return [await env.astep(action) for action in script]

    async def episode():
        env, other = cls(), cls()
        await env.areset(seed=4)
        await env.astep(call("later", value=1))
        here = await env.asnapshot()
        first = await play(env)
        await env.arestore(here)
        second = await play(env)
        await other.arestore(here, reseed=8)
        await other.astep(call("later", value=2))
        branch = await other.asnapshot()
        third = await play(other)
        await env.arestore(branch)
        return first, second, third, await play(env)

    first, second, third, fourth = asyncio.run(episode())
    assert first == second
    assert third == fourth
    assert first != third


def test_async_replay_divergence():
    class Hidden(ReplayNotes):
        count = 0

        @tool
        async def next(self) -> int:
            """Count."""
            Hidden.count += 1
            return Hidden.count

    async def episode():
        env = Hidden()
        await env.areset(seed=0)
        await env.astep(call("next"))
        await env.arestore(await env.asnapshot())

    with pytest.raises(ReplayDivergence, match="turn 1"):
        asyncio.run(episode())


def test_truncated_async_message_executes_nothing():
    async def episode():
        env = AsyncNotes()
        await env.areset(seed=0)
        result = await env.astep(Message("", call("later", value=1).tool_calls, truncated=True))
        return env.state, result

    state, result = asyncio.run(episode())
    assert state == []
    assert "cut off" in result[0]
