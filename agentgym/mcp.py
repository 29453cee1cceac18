"""MCP servers as tool sources.

    async with McpTools.stdio([sys.executable, "server.py"]) as tools:
        env = MyEnv(tools=tools.specs)

The functions of the specs are coroutines, so they belong into an `AsyncToolEnv`. Needs the extra `mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Self

from agentgym.errors import BadInput, DeadlineExceeded, MissingExtra, ToolError
from agentgym.tools import ToolOptions, ToolSpec

try:
    from mcp import Client, MCPError, StdioServerParameters
    from mcp.client import Transport
    from mcp_types import INVALID_PARAMS, CallToolResult, TextContent, Tool
except ImportError as error:
    raise MissingExtra.of("mcp", "mcp") from error

_MAX_PAGES = 100


class McpTools:
    """The tools of one MCP server, for the time of one `async with` block.

    Enter and leave the block in the same task; the tools may be called from any task of the same event loop.
    What the server holds is no part of an env's snapshot: an env whose tools change it must not declare that its
    snapshots cover `external`.

    Args:
        server: what `mcp.Client` takes: a URL (streamable HTTP), `StdioServerParameters` or a transport.
        deadline_s: longest time in seconds for connecting, for listing and for each call.
        options: cost and output cap of every tool.

    Attributes:
        specs: the tools in the server's order; empty outside of the block.
    """

    def __init__(
        self,
        server: str | StdioServerParameters | Transport,
        *,
        deadline_s: float = 30.0,
        options: ToolOptions | None = None,
    ) -> None:
        if not deadline_s > 0:
            raise BadInput(f"deadline_s must be > 0, got {deadline_s}")
        self._server = server
        self._deadline_s = deadline_s
        self._options = options or ToolOptions()
        self._stack = contextlib.AsyncExitStack()
        self.specs: tuple[ToolSpec, ...] = ()

    @classmethod
    def stdio(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 30.0,
        options: ToolOptions | None = None,
    ) -> Self:
        """Start a server as a child process that talks over stdin and stdout.

        Args:
            command: program and arguments.
            env: environment variables beside the few that the child inherits (`PATH`, `HOME` ...).
            deadline_s: see the class.
            options: see the class.

        Raises:
            BadInput: an empty command, or one string where a list is expected.
        """
        if isinstance(command, str) or not command:
            raise BadInput(f"command must be a list of program and arguments, got {command!r}")
        server = StdioServerParameters(command=command[0], args=list(command[1:]), env=dict(env or {}))
        return cls(server, deadline_s=deadline_s, options=options)

    @classmethod
    def http(cls, url: str, *, deadline_s: float = 30.0, options: ToolOptions | None = None) -> Self:
        """Connect to a running server by streamable HTTP.

        Raises:
            BadInput: `url` is no http or https URL.
        """
        if not url.startswith(("http://", "https://")):
            raise BadInput(f"expected a URL such as http://localhost:8000/mcp, got {url!r}")
        return cls(url, deadline_s=deadline_s, options=options)

    async def __aenter__(self) -> Self:
        client = Client(self._server)
        async with contextlib.AsyncExitStack() as stack:
            async with self._deadline("connecting to the MCP server"):
                await stack.enter_async_context(client)
            tools = await self._list(client)
            self._stack = stack.pop_all()
        self.specs = tuple(self._spec(client, tool) for tool in tools)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self.specs = ()
        # Not told about an exception of the block: the client's task group would wrap it in an ExceptionGroup.
        await self._stack.aclose()

    async def _list(self, client: Client) -> list[Tool]:
        tools: list[Tool] = []
        cursor: str | None = None
        async with self._deadline("listing the MCP server's tools"):
            for _ in range(_MAX_PAGES):
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
        return tools

    def _spec(self, client: Client, tool: Tool) -> ToolSpec:
        async def function(**arguments: Any) -> str:
            return await self._call(client, tool.name, arguments)

        spec: ToolSpec = ToolSpec(
            name=tool.name,
            description=tool.description or tool.title or tool.name,
            parameters=tool.input_schema,
            function=function,
            validate=lambda arguments: _checked(spec, arguments),
            options=self._options,
        )
        return spec

    async def _call(self, client: Client, name: str, arguments: dict[str, Any]) -> str:
        try:
            async with self._deadline(f"the MCP tool {name!r}"):
                result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise ToolError(str(error)) from None
            raise
        text = _text(result)
        if result.is_error:
            raise ToolError(text or f"the tool {name!r} failed without saying why")
        return text

    @contextlib.asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self._deadline_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if timeout.expired():
                raise DeadlineExceeded(f"{what} took longer than {self._deadline_s:g} s") from error
            raise


def list_tools(tools: McpTools) -> list[dict[str, Any]]:
    """Connect, list and disconnect, outside of any event loop.

    Args:
        tools: e.g. `McpTools.stdio(["my-server"])`; not entered.

    Returns:
        The function schemas in the OpenAI form, in the server's order.
    """

    async def listed() -> list[dict[str, Any]]:
        async with tools:
            return [spec.schema for spec in tools.specs]

    return asyncio.run(listed())


def _checked(spec: ToolSpec, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse unknown and missing arguments here, in our words; types and values are checked by the server."""
    properties = spec.parameters.get("properties", {})
    extra = [] if spec.parameters.get("additionalProperties") else [key for key in arguments if key not in properties]
    missing = [key for key in spec.parameters.get("required", ()) if key not in arguments]
    faults = [f"{str(key)[:80]} is not a parameter" for key in extra] + [f"{key} is missing" for key in missing]
    if faults:
        raise ToolError(f"invalid arguments: {'; '.join(faults[:4])}. Expected {spec.signature}")
    return dict(arguments)


def _text(result: CallToolResult) -> str:
    """Join the text parts; name the parts that are no text; fall back to the structured content."""
    parts = [c.text if isinstance(c, TextContent) else f"[{c.type} content, not shown]" for c in result.content]
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)
