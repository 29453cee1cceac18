"""The renderer seam: messages to token ids and sampled token ids to messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from agentgym.messages import ChatMessage, Message
from agentgym.tools import ToolSpec


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into token ids and sampled token ids into messages.

    Everything that a renderer returns is context: the policy did not sample it, so its mask is 0. The sampled ids
    are never encoded again; a conversation is `prompt + sampled + reply + sampled + ...`.
    """

    name: str
    """Short name for manifests, e.g. `qwen3`."""
    stop_ids: tuple[int, ...]
    """Tokens that end a message. A sampled one is the last token of the message and is trained."""
    vocab_size: int
    """Number of token ids that the renderer knows."""
    is_extension: bool
    """Whether `reply` always returns ids. If not, it may return `None`, and the conversation is rendered anew."""

    def prompt(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Render a whole conversation up to and including the generation prompt.

        Args:
            messages: at least one; assistant messages hold the text that `decode` gave, calls included.
            tools: the tools that the policy may call.

        Returns:
            Token ids, `[P]`.

        Raises:
            BadInput: no messages, or an unknown role.
        """
        ...

    def reply(self, messages: Sequence[ChatMessage], *, last: int | None, truncated: bool = False) -> list[int] | None:
        """Render what follows a sampled message: its closer if it lacks one, the env's messages, generation prompt.

        Args:
            messages: the env's answer (tool, user or system messages).
            last: last sampled token id, or `None` when nothing was sampled.
            truncated: whether a token limit cut the sampled message.

        Returns:
            Token ids to append, `[R]`; `None` where the template changes earlier turns, so that the conversation
            has to be rendered anew with `prompt` (only if `is_extension` is false).

        Raises:
            BadInput: an assistant message or an unknown role.
        """
        ...

    def parse(self, ids: Sequence[int], *, truncated: bool = False) -> Message:
        """Read a sampled message. Raises nothing, whatever was sampled.

        Args:
            ids: the sampled tokens, with or without a stop token at the end, `[T]`.
            truncated: whether a token limit cut them.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        ...

    def decode_piece(self, token_id: int) -> str:
        """Return the text of one token, for display; a part of a character becomes U+FFFD."""
        ...
