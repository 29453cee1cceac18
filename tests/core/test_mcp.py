"""MCP servers as tool sources, against real servers over stdio and HTTP."""

from __future__ import annotations

import asyncio
import importlib
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mcp")

import mcp
import mcp_types
from mcp import StdioServerParameters

from agentgym import AsyncToolEnv, Outcome, TaskSet
from agentgym.errors import BadInput, DeadlineExceeded, MissingExtra, ToolError
from agentgym.mcp import McpTools, list_tools
from agentgym.messages import Message, ToolCall, call
from agentgym.tools import ToolOptions

SCRIPT = str(Path(__file__).with_name("mcp_server.py"))
SERVER = [sys.executable, SCRIPT]
SHOP = runpy.run_path(SCRIPT)["server"]
NAMES = ["take", "mode", "parts", "sleep", "crash", "die"]


class Shop(AsyncToolEnv):
    """An env whose tools are those of an MCP server."""

    tasks = TaskSet.from_rows({"train": [{}]})

    def __init__(self, tools, **kwargs):
        super().__init__(**kwargs)
        self.extra_tools = tools

    def begin(self, task, rng):
        self.state = {}
        return "Take two apples."

    def judge(self):
        return Outcome(None)


def play(tools, *messages):
    """Play messages with the tools of a server and return the results."""

    async def episode():
        async with tools:
            env = Shop(tools.specs)
            await env.areset(seed=0)
            return [await env.astep(message) for message in messages]

    return asyncio.run(episode())


def in_process(**options):
    return McpTools(SHOP, **options)


def test_an_episode():
    results = play(
        McpTools.stdio(SERVER),
        call("take", item="apple", count=2),
        '<tool_call>\n{"name": "take", "arguments": {"item": "apple"}}\n</tool_call>',
        call("take", item="apple"),
        Message(tool_calls=(ToolCall("take", {}), ToolCall("mode", {"kind": "a"}), ToolCall("nope", {}))),
        call("take", item="apple", cuont=2),
        call("mode", kind="z"),
        call("parts"),
    )
    observations = [r[0] for r in results]
    assert observations[:2] == ["1 apple left", "0 apple left"]
    assert "there are only 0 apple" in observations[2]
    assert observations[2].startswith("Error: ")
    replies = [m["content"] for m in results[3][4]["messages"]]
    assert replies[0] == (
        "Error: invalid arguments: item is missing. Expected take(item: string, count: integer (optional))"
    )
    assert "ä" in replies[1]
    assert "Valid: crash, die, mode, parts, sleep, take" in replies[2]
    assert "cuont is not a parameter" in observations[4]
    assert observations[5].startswith("Error: ")
    assert observations[6] == "one\n[image content, not shown]\ntwo"
    assert [r["ok"] for r in results[3][4]["tool_calls"]] == [False, True, False]


def test_specs_are_there_only_inside_of_the_block():
    async def main():
        tools = in_process()
        assert tools.specs == ()
        async with tools:
            assert [spec.name for spec in tools.specs] == NAMES
            assert tools.specs[0].description.startswith("Take items from the shop.")
            assert tools.specs[0].parameters["required"] == ["item"]
            assert tools.specs[0].parameters["properties"]["count"]["default"] == 1
            with pytest.raises(ToolError, match="item is missing"):
                tools.specs[0].arguments({})
        assert tools.specs == ()

    asyncio.run(main())


def test_costs_and_caps_are_those_of_the_options():
    [result] = play(in_process(options=ToolOptions(cost=0.5, max_output_chars=8)), call("mode", kind="a"))
    assert result[4]["cost"] == 0.5
    assert "characters cut" in result[0]


def test_a_call_has_a_deadline():
    with pytest.raises(DeadlineExceeded, match=r"the MCP tool 'sleep' took longer than 0\.2 s"):
        play(in_process(deadline_s=0.2), call("sleep", seconds=60))


def test_a_crash_of_a_tool_is_an_answer():
    [result] = play(in_process(), call("crash"))
    assert result[0] == "Error: Error executing tool crash"


def test_an_exception_of_the_block_is_not_wrapped():
    async def main():
        async with in_process():
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        asyncio.run(main())


def test_open_schemas_take_what_they_do_not_name():
    def spec(schema):
        tool = mcp_types.Tool(name="f", input_schema=schema)
        return McpTools(SHOP)._spec(mcp.Client(SHOP), tool)

    closed = {"type": "object", "properties": {"a": {"type": "string"}}}
    with pytest.raises(ToolError, match="b is not a parameter"):
        spec(closed).arguments({"b": 1})
    assert spec(closed | {"additionalProperties": True}).arguments({"b": 1}) == {"b": 1}
    assert spec(closed).description == "f"


def test_connecting_has_a_deadline():
    with pytest.raises(DeadlineExceeded, match=r"connecting to the MCP server took longer than 0\.2 s"):
        list_tools(McpTools.stdio([*SERVER, "slow"], deadline_s=0.2))


def test_a_dead_server_is_an_infrastructure_failure():
    with pytest.raises(mcp.MCPError, match=r"[Cc]losed"):
        play(McpTools.stdio(SERVER), call("die"))


@pytest.fixture
def url():
    """The URL of a server that listens on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([*SERVER, "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if server.poll() is not None or probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        server.kill()
        server.wait()


def test_streamable_http(url):
    results = play(McpTools.http(url), call("take", item="apple"), call("take", item="pear"))
    assert [r[0] for r in results] == ["2 apple left", "Error: Error executing tool take: there are only 0 pear"]


def test_listing_needs_no_event_loop():
    assert [schema["function"]["name"] for schema in list_tools(in_process())] == NAMES


def test_a_program_that_does_not_exist_is_named():
    with pytest.raises(OSError, match="no-such-program"):
        list_tools(McpTools.stdio(["no-such-program"]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: McpTools.stdio([]),
        lambda: McpTools.stdio("server --flag"),
        lambda: McpTools.http("localhost:8000"),
        lambda: McpTools(StdioServerParameters(command="x"), deadline_s=0),
    ],
)
def test_bad_input(make):
    with pytest.raises(BadInput):
        make()


def test_without_the_extra_the_error_names_it(monkeypatch):
    module = sys.modules["agentgym.mcp"]
    monkeypatch.delitem(sys.modules, "agentgym.mcp")
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"pip install 'agentgym-trees\[mcp\]'"):
        importlib.import_module("agentgym.mcp")
    monkeypatch.setitem(sys.modules, "agentgym.mcp", module)
