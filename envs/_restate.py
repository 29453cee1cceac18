"""Observations that end with the whole state.

Small models learn to copy from the context first, so what the next decision needs stands right before it, after
errors and malformed calls too.
"""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.messages import ChatMessage


def restate(reply: str | Sequence[ChatMessage], state: str) -> str | Sequence[ChatMessage]:
    """Append `state` on a line of its own to the last message of a turn's `reply`."""
    if isinstance(reply, str):
        return f"{reply}\n{state}"
    *earlier, last = reply
    return [*earlier, {"role": last["role"], "content": f"{last['content']}\n{state}"}]
