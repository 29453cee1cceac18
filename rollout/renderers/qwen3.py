"""The Qwen3 tool format over a Hugging Face `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import BadInput
from agentgym.rollout.renderers.chatml import CONTROL_TOKENS, ChatMLRenderer, Thinking

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CACHED_CHARS = 4096
_CACHE_ENTRIES = 8192


class Qwen3Renderer(ChatMLRenderer):
    """ChatML for models with the Qwen3 tokens; ids equal those of Qwen3's own chat template on ordinary text.

    The tokenizer works as its file says; `tokenizers` is all that is needed. Lone surrogates are encoded as `?`.

    Args:
        source: a folder with `tokenizer.json`, that file, or a `tokenizers.Tokenizer`.
        thinking: see `ChatMLRenderer`.

    Raises:
        BadInput: no such file, or a control token that is not a single token.
    """

    name = "qwen3"

    def __init__(self, source: str | Path | Tokenizer, *, thinking: Thinking = "none") -> None:
        tokenizer = load_tokenizer(source)
        missing = [token for token in CONTROL_TOKENS if tokenizer.token_to_id(token) is None]
        if missing:
            raise BadInput(f"this tokenizer has no token {', '.join(missing)}; the Qwen3 format needs them")
        self.tokenizer = tokenizer
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self._plain = _without_control(tokenizer)
        self._cached = lru_cache(maxsize=_CACHE_ENTRIES)(self._encode_now)
        super().__init__({token: tokenizer.token_to_id(token) for token in CONTROL_TOKENS}, thinking=thinking)

    def _encode(self, text: str) -> list[int]:
        return self._cached(text) if len(text) <= _CACHED_CHARS else self._encode_now(text)

    def _encode_now(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
            return ids
        except TypeError:  # what tokenizers raises for lone surrogates
            return self._encode_now(text.encode("utf-8", "replace").decode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included; incomplete UTF-8 becomes U+FFFD."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text


def load_tokenizer(source: str | Path | Tokenizer) -> Tokenizer:
    """Return the tokenizer of a model folder or `tokenizer.json`. Raises `BadInput` when it cannot be read."""
    from tokenizers import Tokenizer

    if isinstance(source, Tokenizer):
        return source
    path = Path(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise BadInput(f"there is no tokenizer at {path}: a folder with tokenizer.json is expected")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise BadInput(f"{path} is not a tokenizer file: {error}") from error


def _without_control(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that encodes control tokens as ordinary text.

    `encode_special_tokens` does so for tokens declared special; Qwen's files declare only some of the nine so.
    """
    from tokenizers import Tokenizer

    spec = json.loads(tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["special"] = token["special"] or token["content"] in CONTROL_TOKENS
    plain = Tokenizer.from_str(json.dumps(spec))
    plain.encode_special_tokens = True
    return plain
