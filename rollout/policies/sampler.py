"""Drawing tokens: batched, in float64, each row by its own uniform number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentgym.rollout.policies.base import Sampling
from agentgym.seeding import rng


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token per row.

    Attributes:
        tokens: token ids, `[B]`.
        logprobs: log-probs of those tokens, `[B]`, Python floats with float32 values; NaN where a row's logits were
            not finite.
        tops: per row the `top_logprobs` most probable `(token_id, raw log-prob)`, `[B]`; empty where none were asked.
    """

    tokens: list[int]
    logprobs: list[float]
    tops: list[list[tuple[int, float]]]


def uniforms(seed: int, count: int) -> list[float]:
    """Return the numbers in `[0, 1)` that draw the first `count` tokens of a request.

    The i-th number depends on `(seed, i)` only: neither on the batch nor on whether earlier tokens were forced.
    """
    values: list[float] = rng(seed, "tokens").random(count).tolist()
    return values


def sample(
    logits: Tensor, sampling: Sequence[Sampling], uniform: Sequence[float], forced: Sequence[int | None]
) -> Drawn:
    """Draw one token per row by the inverse of the cumulative distribution over token ids.

    A row's result depends on that row alone, bit for bit. Log-probs are those of the distribution that was drawn from
    (after temperature, top-k, top-p); at temperature 0, of the untempered softmax. A forced token gets its log-prob
    under the tempered distribution WITHOUT truncation, so that it is finite even outside the nucleus.

    Args:
        logits: `[B, V]`, any float dtype and device.
        sampling: how to draw each row, `[B]`.
        uniform: a number in `[0, 1)` for each row, `[B]`.
        forced: a token id to take instead of drawing, or `None`, `[B]`.
    """
    raw = logits.to(torch.float64)
    scaled = _tempered(raw, sampling)
    weights = scaled.softmax(-1)
    kept = [0.0] * len(sampling)
    for i, s in enumerate(sampling):
        if (s.top_k or s.top_p < 1) and s.temperature > 0 and forced[i] is None:
            kept[i] = _truncate(weights[i], s)
    cdf = weights.cumsum(-1)
    total = cdf[:, -1:]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(_column(uniform, raw) * total, below_total)
    drawn = torch.searchsorted(cdf, target, right=True).clamp_(max=raw.shape[-1] - 1)
    _override(drawn, raw, sampling, forced)
    chosen = scaled.log_softmax(-1).gather(-1, drawn) - _column(kept, raw)
    chosen.clamp_(max=0.0)
    return Drawn(drawn[:, 0].tolist(), chosen[:, 0].to(torch.float32).tolist(), _tops(raw, sampling))


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)


def _tempered(raw: Tensor, sampling: Sequence[Sampling]) -> Tensor:
    temperatures = [s.temperature if s.temperature > 0 else 1.0 for s in sampling]
    return raw if all(t == 1.0 for t in temperatures) else raw / _column(temperatures, raw)


def _truncate(weights: Tensor, how: Sampling) -> float:
    """Set the probabilities `[V]` outside top-k, then outside the nucleus, to 0 in place; ties fall to the lower id.

    Returns:
        The log of the mass that is left.
    """
    ordered, ids = weights.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if how.top_k:
        keep[how.top_k :] = False
    if how.top_p < 1:
        mass = (ordered * keep).cumsum(-1)
        keep &= (mass - ordered) < how.top_p * mass[-1]
        keep[0] = True
    weights[ids[~keep]] = 0.0
    left = float((ordered * keep).sum())
    return math.log(left) if left > 0 else math.nan


def _override(drawn: Tensor, raw: Tensor, sampling: Sequence[Sampling], forced: Sequence[int | None]) -> None:
    """Put greedy and forced tokens into `drawn`, `[B, 1]`."""
    greedy = [i for i, s in enumerate(sampling) if s.temperature == 0]
    if greedy:
        drawn[greedy] = raw[greedy].argmax(-1, keepdim=True)
    given = [i for i, token in enumerate(forced) if token is not None]
    if given:
        drawn[given, 0] = torch.tensor([t for t in forced if t is not None], device=drawn.device)


def _tops(raw: Tensor, sampling: Sequence[Sampling]) -> list[list[tuple[int, float]]]:
    tops: list[list[tuple[int, float]]] = [[] for _ in sampling]
    rows = [i for i, s in enumerate(sampling) if s.top_logprobs]
    if not rows:
        return tops
    most = min(max(sampling[i].top_logprobs for i in rows), raw.shape[-1])
    values, ids = raw[rows].log_softmax(-1).topk(most, dim=-1)
    for row, row_values, row_ids in zip(rows, values.tolist(), ids.tolist(), strict=True):
        m = sampling[row].top_logprobs
        tops[row] = [(i, float(np.float32(v))) for i, v in zip(row_ids[:m], row_values[:m], strict=True)]
    return tops
