"""Token batches of expert traces, made by a background process."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Full
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentgym import seeding
from agentgym.errors import BadInput
from agentgym.rollout.models.traces import Trace, TraceMaker
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

CONTEXT_WEIGHT = 0.1
_POOL = 24
_RENAMED = 0.5
_NAME = re.compile("[A-Z][a-z]{5}")
_QUEUED = 24
_Row: TypeAlias = tuple[list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one env, padded on the right, without the prefix that all of them share.

    Attributes:
        prefix: `[P]` int64 ids of the system block, equal for all rows of an env.
        ids: `[B, T]` int64 ids after the prefix, padded with 0.
        weights: `[B, T]` float32 loss weight of each token AS A TARGET: 1 for the expert's tokens, `CONTEXT_WEIGHT`
            for context, 0 for mistakes and padding.
    """

    prefix: NDArray[np.int64]
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from.

    Attributes:
        env_id: the env.
        share: its share of the loss.
        levels: shares of its levels.
        few: words of a small set that the policy has to copy. In half of the rows each is replaced by a random name
            (a capitalised word of the tokenizer): among ten words, guessing is too good for copying to be discovered.
    """

    env_id: str
    share: float
    levels: Mapping[str, float]
    few: tuple[str, ...] = ()


def encode_trace(trace: Trace, renderer: Qwen3Renderer, limit: int) -> _Row:
    """Return ids and target weights of a trace, cut after the last turn that fits into `limit` tokens."""
    ids = renderer.prompt(trace.opening, trace.tools)
    weights = [CONTEXT_WEIGHT] * len(ids)
    for i, turn in enumerate(trace.turns):
        said = renderer.message(turn.text)
        answer = renderer.reply(turn.answer, last=said[-1]) or [] if i + 1 < len(trace.turns) else []
        if len(ids) + len(said) + len(answer) > limit:
            break
        ids = ids + said + answer
        weights += [0.0 if turn.mistake else 1.0] * len(said) + [CONTEXT_WEIGHT] * len(answer)
    return ids, weights


class BatchMaker:
    """Makes batches of one env; the `i`-th pool of rows depends on `seed` and `i` only.

    Args:
        source: what to draw from.
        folder: where the tokenizer is.
        tokens: most padded tokens of a batch.
        seed: of all draws.
        split: of the tasks.
        mistakes: see `TraceMaker`.
    """

    def __init__(
        self, source: Source, folder: Path, *, tokens: int, seed: int, split: str = "train", mistakes: float = 0.12
    ) -> None:
        self._maker = TraceMaker(source.env_id, levels=source.levels, split=split, mistakes=mistakes)
        self._renderer = Qwen3Renderer(folder)
        self._env_id, self._tokens, self._seed = source.env_id, tokens, seed
        ids, _ = encode_trace(self._maker.draw(seeding.rng(seed, "prefix")), self._renderer, tokens)
        self._prefix = ids[: ids.index(self._renderer.stop_ids[0]) + 1]
        words = self._renderer.tokenizer.get_vocab(with_added_tokens=True)
        self._few = [words[word] for word in source.few]
        self._names = sorted(i for word, i in words.items() if _NAME.fullmatch(word))

    def pool(self, index: int) -> list[Batch]:
        """Return the batches of one pool: rows of similar length together, the batches in random order."""
        rng = seeding.rng(self._seed, "pool", self._env_id, index)
        rows = sorted((self._row(rng) for _ in range(_POOL)), key=lambda row: len(row[0]))
        groups: list[list[_Row]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > self._tokens:
                groups.append([])
            groups[-1].append(row)
        return [self._padded(groups[i]) for i in rng.permutation(len(groups))]

    def stream(self, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield `(pool index, batch)` for ever."""
        index = start
        while True:
            for batch in self.pool(index):
                yield index, batch
            index += 1

    def _row(self, rng: seeding.Rng) -> _Row:
        ids, weights = encode_trace(self._maker.draw(rng), self._renderer, self._tokens + len(self._prefix))
        size = len(self._prefix)
        if ids[:size] != self._prefix:
            raise BadInput(f"the traces of {self._env_id} do not all begin with the same system block")
        ids, weights = ids[size:], weights[size:]
        if self._few and rng.random() < _RENAMED:
            names = rng.choice(self._names, size=len(self._few), replace=False).tolist()
            new = dict(zip(self._few, names, strict=True))
            ids = [new.get(i, i) for i in ids]
        return ids, weights

    def _padded(self, rows: Sequence[_Row]) -> Batch:
        width = max(len(ids) for ids, _ in rows)
        batch_ids = np.zeros((len(rows), width), dtype=np.int64)
        batch_weights = np.zeros((len(rows), width), dtype=np.float32)
        for r, (ids, weights) in enumerate(rows):
            batch_ids[r, : len(ids)] = ids
            batch_weights[r, : len(weights)] = weights
        return Batch(np.array(self._prefix), batch_ids, batch_weights)


def background(
    makers: Sequence[BatchMaker], starts: Sequence[int]
) -> Generator[tuple[list[int], list[Batch]], None, None]:
    """Yield `(pool indices, batches)`, one batch of each maker, made by another process.

    That process ends when this generator is closed.
    """
    context = multiprocessing.get_context("fork")
    queue = context.Queue(maxsize=_QUEUED)
    process = context.Process(target=_produce, args=(makers, starts, queue), daemon=True)
    process.start()
    try:
        while True:
            yield queue.get(timeout=120)
    finally:
        process.terminate()
        process.join()
        queue.close()


def _produce(makers: Sequence[BatchMaker], starts: Sequence[int], queue: Queue[tuple[list[int], list[Batch]]]) -> None:
    parent = os.getppid()
    for items in zip(*(maker.stream(start) for maker, start in zip(makers, starts, strict=True)), strict=True):
        step = [index for index, _ in items], [batch for _, batch in items]
        while True:
            try:
                queue.put(step, timeout=5)
                break
            except Full:
                if os.getppid() != parent:  # the trainer was killed
                    return
