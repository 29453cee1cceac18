"""The Qwen3 ChatML format with tool calls, independent of how text becomes token ids.

Control tokens are placed by id. Text that comes from outside (system prompt, tools, user messages, tool results) is
encoded with control tokens switched off, so that no tool result can forge a turn.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from agentgym.errors import BadInput
from agentgym.messages import CLOSE_CALL, OPEN_CALL, ChatMessage, Message, ToolCall, parse_call
from agentgym.tools import ToolSpec

Thinking: TypeAlias = Literal["none", "empty", "full"]
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CONTROL_TOKENS = (
    END_OF_TEXT,
    IM_START,
    IM_END,
    OPEN_CALL,
    CLOSE_CALL,
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_ASSISTANT_CONTROL = re.compile("(</?tool_call>|</?think>)")
_CALL_MARKS = re.compile("(</?tool_call>)")
_EMPTY_THINK = "<think>\n\n</think>\n\n"
_SHOWN = 120


class ChatMLRenderer(ABC):
    """Qwen3 ChatML over any encoding of text; see `Renderer` for the methods.

    Args:
        control: id of each of the nine control tokens.
        thinking: `none`: no think blocks (Qwen3-Instruct-2507). `empty`: an empty think block in the generation
            prompt and in every assistant turn (Qwen3 with thinking disabled). `full`: the policy thinks; think
            blocks before the last user message are dropped, so `is_extension` is false.
    """

    name = "chatml"

    def __init__(self, control: Mapping[str, int], *, thinking: Thinking = "none") -> None:
        if thinking not in ("none", "empty", "full"):
            raise BadInput(f"thinking must be 'none', 'empty' or 'full', got {thinking!r}")
        self.thinking = thinking
        self.is_extension = thinking != "full"
        self.stop_ids: tuple[int, ...] = (control[IM_END], control[END_OF_TEXT])
        self._control = dict(control)
        self._open_call, self._close_call = control[OPEN_CALL], control[CLOSE_CALL]
        self._end_think = control["</think>"]
        start, end, newline = control[IM_START], control[IM_END], self._encode("\n")
        self._start, self._end = [start], [end, *newline]
        self._closed, self._unclosed = newline, [end, *newline]
        self._generation = [start, *self._encode("assistant\n")]
        if thinking == "empty":
            self._generation += self._marked(_EMPTY_THINK, _ASSISTANT_CONTROL)
        self._first_result = [start, *self._encode("user\n"), control["<tool_response>"]]
        self._next_result = [*newline, control["<tool_response>"]]
        self._end_result = [control["</tool_response>"]]
        self._after_result = self._end_result + self._end + self._generation

    @abstractmethod
    def _encode(self, text: str) -> list[int]:
        """Encode text in which nothing is a control token. The result must not be modified."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; incomplete UTF-8 becomes U+FFFD."""

    def decode_piece(self, token_id: int) -> str:
        """Return the text of one token, for display; a part of a character becomes U+FFFD."""
        return self.decode([token_id])

    # --- messages to ids --------------------------------------------------------------------------------------

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a whole conversation up to and including the generation prompt; see `Renderer.prompt`."""
        if not messages:
            raise BadInput("a prompt needs at least one message")
        has_system = messages[0]["role"] == "system"
        system = messages[0]["content"] if has_system else None
        ids = self._system(system, tools)
        ids += self._turns(messages[1:] if has_system else messages)
        return ids + self._generation

    def reply(self, messages: Sequence[ChatMessage], *, last: int | None, truncated: bool = False) -> list[int] | None:
        """Render what follows a sampled message; see `Renderer.reply`.

        With `thinking="full"` it is `None` after a user message (earlier thinking is dropped) and after a truncated
        message (its think block may be open).
        """
        if not self.is_extension and (truncated or any(m["role"] == "user" for m in messages)):
            return None
        head = self._closed if last in self.stop_ids else self._unclosed
        if len(messages) == 1 and messages[0]["role"] == "tool":
            content = self._encode(f"\n{messages[0]['content']}\n")
            return head + self._first_result + content + self._after_result
        if any(m["role"] == "assistant" for m in messages):
            raise BadInput("reply renders the messages of the env; an assistant message is not one of them")
        return head + self._turns(messages) + self._generation

    def message(self, text: str) -> list[int]:
        """Encode `text` as a policy would sample it: calls and think blocks as control tokens, `<|im_end|>` last.

        For scripted policies, drafts and training traces; never for text that a policy already sampled as tokens.
        """
        return self._marked(text, _ASSISTANT_CONTROL) + self._end[:1]

    def _system(self, system: str | None, tools: Sequence[ToolSpec]) -> list[int]:
        if not tools:
            return [] if system is None else self._turn("system", system)
        head = "system\n" if system is None else f"system\n{system}\n\n"
        lines = "".join("\n" + json.dumps(tool.schema, ensure_ascii=False) for tool in tools)
        before, *after = _CALL_MARKS.split(TOOLS_FOOTER)
        # The footer's own `<tool_call></tool_call>` are control tokens, as in Qwen's template.
        ids = self._start + self._encode(head + TOOLS_HEADER + lines + before)
        return ids + self._marked("".join(after), _CALL_MARKS) + self._end

    def _turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        ids: list[int] = []
        query = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
        for i, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "tool":
                follows = i > 0 and messages[i - 1]["role"] == "tool"
                ids += self._next_result if follows else self._first_result
                ids += self._encode(f"\n{content}\n") + self._end_result
                if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                    ids += self._end
            elif role == "assistant":
                ids += self._assistant(content, keep=i > query, final=i + 1 == len(messages))
            elif role in ("user", "system"):
                ids += self._turn(role, content)
            else:
                raise BadInput(f"unknown role {role!r}; valid: system, user, assistant, tool")
        return ids

    def _turn(self, role: str, content: str) -> list[int]:
        return self._start + self._encode(f"{role}\n{content}") + self._end

    def _assistant(self, content: str, *, keep: bool, final: bool) -> list[int]:
        if self.thinking == "empty":
            content = _EMPTY_THINK + content
        elif self.thinking == "full":
            thought, found, rest = content.partition("</think>")
            thought = thought.rpartition("<think>")[2].strip("\n") if found else ""
            content = rest.lstrip("\n") if found else content
            if keep and (final or thought):
                content = f"<think>\n{thought}\n</think>\n\n{content.lstrip(chr(10))}"
        return self._start + self._encode("assistant\n") + self._marked(content, _ASSISTANT_CONTROL) + self._end

    def _marked(self, text: str, marks: re.Pattern[str]) -> list[int]:
        """Encode text in which the tokens matched by `marks` are control tokens."""
        ids: list[int] = []
        for i, part in enumerate(marks.split(text)):
            ids += [self._control[part]] if i % 2 else self._encode(part)
        return ids

    # --- ids to messages --------------------------------------------------------------------------------------

    def parse(self, ids: Sequence[int], *, truncated: bool = False) -> Message:
        """Read a sampled message; see `Renderer.parse`.

        Calls are delimited by the ids of `<tool_call>` and `</tool_call>`: text that merely spells them is content.
        With `thinking="full"` the think block is not part of the content.
        """
        ids = list(ids)
        for stop in self.stop_ids:
            if stop in ids:
                del ids[ids.index(stop) :]
        if self.thinking == "full" and self._end_think in ids:
            del ids[: ids.index(self._end_think) + 1]
        content: list[str] = []
        calls: list[ToolCall] = []
        while self._open_call in ids:
            opened = ids.index(self._open_call)
            closed = ids.index(self._close_call, opened) if self._close_call in ids[opened:] else len(ids)
            body = self.decode(ids[opened + 1 : closed])
            calls.append(parse_call(body) if closed < len(ids) else _unclosed(body))
            if opened:
                content.append(self.decode(ids[:opened]))
            ids = ids[closed + 1 :]
        if ids:
            content.append(self.decode(ids))
        return Message("".join(content).strip(), tuple(calls), truncated)


def _unclosed(body: str) -> ToolCall:
    shown = body.strip()
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return ToolCall("", problem=f"the call is not closed with {CLOSE_CALL}: {shown!r}")
