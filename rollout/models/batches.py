"""Token batches of expert traces, made by a background process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentgym import seeding
from agentgym.rollout.models.traces import Trace, TraceMaker
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

CONTEXT_WEIGHT = 0.1
_POOL = 48
_QUEUED = 24


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows padded on the right.

    Attributes:
        ids: `[B, T]` int64 token ids, padded with 0.
        weights: `[B, T]` float32 loss weight of each token AS A TARGET: 1 for the expert's tokens, `CONTEXT_WEIGHT`
            for context, 0 for mistakes and padding.
        envs: `[B]` index of each row's env in the mix.
    """

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    envs: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Source:
    """Where rows come from: env, share of the rows, and shares of the levels."""

    env_id: str
    share: float
    levels: Mapping[str, float]


def encode_trace(trace: Trace, renderer: Qwen3Renderer, limit: int) -> tuple[list[int], list[float]]:
    """Return ids and target weights of a trace, cut after the last turn that fits into `limit` tokens."""
    ids = renderer.prompt(trace.opening, trace.tools)
    weights = [CONTEXT_WEIGHT] * len(ids)
    for i, turn in enumerate(trace.turns):
        said = renderer.message(turn.text)
        answer = renderer.reply(turn.answer, last=said[-1]) or []
        if i + 1 == len(trace.turns):
            answer = []
        if len(ids) + len(said) + len(answer) > limit:
            break
        ids = ids + said + answer
        weights += [0.0 if turn.mistake else 1.0] * len(said) + [CONTEXT_WEIGHT] * len(answer)
    return ids, weights


class BatchMaker:
    """Makes batches; the `i`-th pool of rows depends on `seed` and `i` only.

    Args:
        sources: what to draw from.
        folder: where the tokenizer is.
        tokens: most padded tokens of a batch.
        seed: of all draws.
        split: of the tasks.
        mistakes: see `TraceMaker`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        folder: Path,
        *,
        tokens: int,
        seed: int,
        split: str = "train",
        mistakes: float = 0.12,
    ) -> None:
        self._makers = [TraceMaker(s.env_id, levels=s.levels, split=split, mistakes=mistakes) for s in sources]
        self._shares = [s.share for s in sources]
        self._renderer = Qwen3Renderer(folder)
        self._tokens, self._seed = tokens, seed

    def pool(self, index: int) -> list[Batch]:
        """Return the batches of one pool: rows of similar length together, the batches in random order."""
        rng = seeding.rng(self._seed, "pool", index)
        rows: list[tuple[list[int], list[float], int]] = []
        for _ in range(_POOL):
            env = int(rng.choice(len(self._makers), p=self._shares))
            ids, weights = encode_trace(self._makers[env].draw(rng), self._renderer, self._tokens)
            rows.append((ids, weights, env))
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[float], int]]] = [[]]
        for row in rows:
            if groups[-1] and len(row[0]) * (len(groups[-1]) + 1) > self._tokens:
                groups.append([])
            groups[-1].append(row)
        return [_padded(groups[i]) for i in rng.permutation(len(groups))]

    def stream(self, start: int = 0) -> Iterator[tuple[int, Batch]]:
        """Yield `(pool index, batch)` for ever."""
        index = start
        while True:
            for batch in self.pool(index):
                yield index, batch
            index += 1


def background(maker: BatchMaker, start: int = 0) -> Iterator[tuple[int, Batch]]:
    """Yield what `maker.stream(start)` yields, made by a process that ends when this generator is closed."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue(maxsize=_QUEUED)
    process = context.Process(target=_produce, args=(maker, start, queue), daemon=True)
    process.start()
    try:
        while True:
            yield queue.get(timeout=120)
    finally:
        process.terminate()
        process.join()
        queue.close()


def _produce(maker: BatchMaker, start: int, queue: multiprocessing.Queue[tuple[int, Batch]]) -> None:
    for item in maker.stream(start):
        queue.put(item)


def _padded(rows: Sequence[tuple[list[int], list[float], int]]) -> Batch:
    width = max(len(ids) for ids, _, _ in rows)
    batch_ids = np.zeros((len(rows), width), dtype=np.int64)
    batch_weights = np.zeros((len(rows), width), dtype=np.float32)
    for r, (ids, weights, _) in enumerate(rows):
        batch_ids[r, : len(ids)] = ids
        batch_weights[r, : len(weights)] = weights
    return Batch(batch_ids, batch_weights, np.array([env for _, _, env in rows]))
