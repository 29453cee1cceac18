"""A small MCP server, for test_mcp.py: `python mcp_server.py [slow | http PORT]`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import CallToolResult, ImageContent, TextContent

server = MCPServer("shop")
STOCK = {"apple": 3}


@server.tool()
def take(item: str, count: int = 1) -> str:
    """Take items from the shop.

    Args:
        item: what to take.
        count: how many.
    """
    if STOCK.get(item, 0) < count:
        raise ToolError(f"there are only {STOCK.get(item, 0)} {item}")
    STOCK[item] -= count
    return f"{STOCK[item]} {item} left"


@server.tool()
def mode(kind: Literal["a", "b"]) -> dict[str, Any]:
    """Return structured content."""
    return {"kind": kind, "umlaut": "ä"}


@server.tool()
def parts() -> CallToolResult:
    """Return several parts."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="one"), image, TextContent(type="text", text="two")])


@server.tool()
async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "awake"


@server.tool()
def crash() -> str:
    """Fail in a way that the server's author did not foresee."""
    raise ZeroDivisionError("no bricks")


@server.tool()
def die() -> str:
    """End the server in the middle of a call."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:] == ["slow"]:
        time.sleep(30)
    if sys.argv[1:2] == ["http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
