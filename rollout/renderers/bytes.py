"""ChatML over bytes: no tokenizer file, no dependency, fast. For scripted policies, tests and benches."""

from __future__ import annotations

from collections.abc import Sequence

from agentgym.rollout.renderers.chatml import CONTROL_TOKENS, ChatMLRenderer, Thinking

_FIRST_CONTROL = 256


class BytesRenderer(ChatMLRenderer):
    """One token per UTF-8 byte (0..255) and the nine control tokens (256..264).

    Lone surrogates are encoded as `?`.
    """

    name = "bytes"
    vocab_size = _FIRST_CONTROL + len(CONTROL_TOKENS)

    def __init__(self, *, thinking: Thinking = "none") -> None:
        super().__init__({token: _FIRST_CONTROL + i for i, token in enumerate(CONTROL_TOKENS)}, thinking=thinking)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:
            pieces = "".join(map(_PIECES.__getitem__, ids))
            return pieces.encode("latin-1").decode("utf-8", "replace")


class _Pieces(dict[int, str]):
    """Each token as Latin-1 text, in which one character is one byte; nothing for ids that do not exist."""

    def __missing__(self, token_id: int) -> str:
        return ""


_PIECES = _Pieces({i: chr(i) for i in range(_FIRST_CONTROL)} | dict(enumerate(CONTROL_TOKENS, _FIRST_CONTROL)))
