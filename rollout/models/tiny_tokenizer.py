"""The tokenizer of `tiny`: a byte-level BPE in which names, numbers and scaffolds of calls are single tokens.

Small models first learn to copy from the context. Whatever has to be copied is therefore one token, with the same
id wherever it stands: words and numbers without the space before them, which belongs to the text around them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentgym.rollout.models.traces import Trace
from agentgym.rollout.renderers.chatml import CONTROL_TOKENS, TOOLS_FOOTER, TOOLS_HEADER

# Qwen2's own split, as transformers rebuilds it for every model of type `qwen2`.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_NUMBER = 200
MERGED = 900
"""Size of the BPE vocabulary before whole words and phrases are added."""
_RARE = 3
_CALLS = (
    '\n{"name": "combine", "arguments": {"a": ',
    *(f', "op": "{op}", "b": ' for op in "+-*/"),
    '\n{"name": "submit", "arguments": {"number": ',
    '\n{"name": "move", "arguments": {"block": "',
    '", "to": "',
    '\n{"name": "search", "arguments": {"query": "',
    '\n{"name": "read", "arguments": {"result": ',
    '\n{"name": "answer", "arguments": {"text": "',
    "}}\n",
    '"}}\n',
)
_OBSERVATIONS = (
    "\nNumbers: ",
    ". Target: ",
    *(f" {sign} " for sign in "+-*/="),
    "\nQuestion: ",
    "\nLast search: ",
    *(f"\n{rank} " for rank in range(1, 5)),
    " of ",
    " is ",
    " ?",
    ". ",
    " is not named.",
    "People ask for ",
    "\nMoved.\n",
    " on ",
    " goal ",
    *(f" {access} {state}" for access in ("clear", "covered") for state in ("done", "todo")),
    "\nError: ",
)
_TOOLS = (
    TOOLS_HEADER,
    *re.split(r"</?tool_call>", TOOLS_FOOTER),
    '\n{"type": "function", "function": {"name": "',
    '", "description": "',
    '", "parameters": {"type": "object", "properties": {"',
    '": {"type": "integer"}',
    '": {"type": "string"}',
    '": {"description": "',
    '", "type": "integer"}',
    '", "type": "string"}',
    '}, "required": ["',
    '"]}}}',
    '", "',
    ', "',
)
PHRASES = tuple(dict.fromkeys(phrase for phrase in (*_CALLS, *_OBSERVATIONS, *_TOOLS) if phrase))


def build_tokenizer(traces: Iterable[Trace]) -> Tokenizer:
    """Train the tokenizer.

    Args:
        traces: episodes of every env. Each word that occurs often in turns without mistakes becomes a token.

    Returns:
        A tokenizer under exactly Qwen2's normaliser, split and byte level, so that transformers, which replaces
        these for models of type `qwen2`, gives equal ids. The nine control tokens are special.
    """
    traces = list(traces)
    words = _words(traces)
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=MERGED, initial_alphabet=alphabet, special_tokens=[], show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator(_fragments(traces, words), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in PHRASES])
    numbers = [str(n) for n in range(MAX_NUMBER + 1)]
    tokenizer.add_tokens([AddedToken(t, normalized=False, single_word=True) for t in [*numbers, *words]])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and the chat template as transformers reads them."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)


def _words(traces: Iterable[Trace]) -> list[str]:
    """Return the words that the env's messages without mistakes use, in alphabetical order."""
    counts: Counter[str] = Counter()
    for trace in traces:
        counts.update(re.findall("[A-Za-z]+", trace.opening[-1]["content"]))
        for turn in trace.turns:
            if not turn.mistake:
                for message in turn.answer:
                    counts.update(re.findall("[A-Za-z]+", message["content"]))
    common = (word for word, count in counts.items() if count >= _RARE and len(word) > 1)
    return sorted({*common, "system", "user", "assistant"})


def _fragments(traces: Iterable[Trace], words: Iterable[str]) -> Iterator[str]:
    """Yield what is left of all texts between control tokens, phrases, words and numbers."""
    whole = "|".join(map(re.escape, sorted([*CONTROL_TOKENS, *PHRASES], key=len, reverse=True)))
    cut = re.compile(rf"{whole}|\b(?:{'|'.join(words)})\b|\b\d{{1,3}}\b")
    for trace in traces:
        for text in trace.texts:
            yield from filter(None, cut.split(text))
        for tool in trace.tools:
            yield from filter(None, cut.split(json.dumps(tool.schema)))
