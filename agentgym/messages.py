r"""Chat messages and tool calls: the text side of an episode.

The call format is the one of Qwen3 and Hermes: `<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>`.
A call that cannot be parsed is still a call: it carries the `problem`, and the env answers it with an
observation. Nothing that a model writes raises here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_CLOSED = f"the call is not closed with {CLOSE_CALL}"
_SHOWN = 120
_MAX_CALL_CHARS = 100_000
_MAX_DEPTH = 64


class ChatMessage(TypedDict):
    """One message of a conversation as templates take it."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a policy message.

    Attributes:
        name: the tool's name; empty when it could not be read.
        arguments: the decoded JSON object; empty when `problem` is set.
        problem: why this call cannot be executed, in words for the policy; `None` for a well-formed call.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """A parsed assistant message.

    Attributes:
        content: the text outside of tool calls, stripped.
        tool_calls: the calls in the order in which they were written.
        truncated: the message was cut by a token limit. No call of a truncated message is executed.
    """

    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    truncated: bool = False


def call(name: str, /, **arguments: Any) -> Message:
    """Return a message with one tool call: `call("pay", coin=50)`."""
    return Message(tool_calls=(ToolCall(name, arguments),))


def format_call(tool_call: ToolCall) -> str:
    """Render one call as a model is expected to write it."""
    body = json.dumps({"name": tool_call.name, "arguments": dict(tool_call.arguments)}, ensure_ascii=False)
    body = body.replace("_call>", "_call\\u003e")  # a marker inside of an argument would end the call
    return f"{OPEN_CALL}\n{body}\n{CLOSE_CALL}"


def format_message(message: Message) -> str:
    """Render a message as a model is expected to write it (content first, then the calls)."""
    return "\n".join([*filter(None, [message.content]), *map(format_call, message.tool_calls)])


def parse_message(text: str, *, truncated: bool = False) -> Message:
    """Parse the text of an assistant message.

    Args:
        text: what the policy wrote, without end-of-turn token.
        truncated: whether a token limit cut it.

    Returns:
        The message. Malformed calls carry a `problem`; this function raises nothing for any text.
    """
    if not text.isascii():
        text = _SURROGATE.sub("\ufffd", text)
    if OPEN_CALL not in text:
        return Message(text.strip(), truncated=truncated)
    calls = tuple(parse_call(m[1]) if m[2] else _bad(_NOT_CLOSED, m[1]) for m in _CALL.finditer(text))
    return Message(_CALL.sub("", text).strip(), calls, truncated)


def parse_call(body: str) -> ToolCall:
    """Parse what stands between the two call markers into a `ToolCall`, never raising."""
    if len(body) > _MAX_CALL_CHARS:
        return _bad(f"the call has {len(body)} characters; the limit is {_MAX_CALL_CHARS}", body)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return _bad("the call is not valid JSON", body)
    if not isinstance(value, dict):
        return _bad(f"the call must be a JSON object, not {_kind(value)}", body)
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return _bad('the call has no "name"', body)
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _undouble(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f'"arguments" must be a JSON object, not {_kind(arguments)}')
    tame = "\\" not in body and body.isascii() and body.count("{") + body.count("[") < _MAX_DEPTH
    fault = None if tame else _unsafe(name, arguments)
    return ToolCall(name, arguments) if fault is None else _bad(fault, body)


def _unsafe(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Say why decoded JSON can be neither stored nor shown: half of a surrogate pair, or too deep a nesting."""
    level: list[Any] = [name, arguments]
    for _ in range(_MAX_DEPTH):
        if any(isinstance(value, str) and _SURROGATE.search(value) for value in level):
            return "the call has an unpaired surrogate"
        level = [
            part
            for value in level
            if isinstance(value, dict | list)
            for part in ((*value, *value.values()) if isinstance(value, dict) else value)
        ]
        if not level:
            return None
    return f"the call is nested more than {_MAX_DEPTH} levels deep"


def _undouble(text: str) -> Any:
    """Recover arguments that were JSON-encoded twice; return the text itself when they were not."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _bad(problem: str, body: str) -> ToolCall:
    shown = body.strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return ToolCall("", problem=f'{problem}: {shown!r}. Expected {{"name": <tool>, "arguments": {{...}}}}')


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return "null" if value is None else names[type(value)]
