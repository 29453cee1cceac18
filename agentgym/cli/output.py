"""Where things are written: data to stdout, progress and messages to stderr."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

_PIPE_WIDTH = 160

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
"""The `--json` option of a command."""


def emit(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout."""
    import orjson

    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())


def show(table: RenderableType) -> None:
    """Write a table to stdout, as wide as the terminal or, into a pipe, as wide as it wants to be."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def note(message: str) -> None:
    """Write a message for people to stderr."""
    print(message, file=sys.stderr)
