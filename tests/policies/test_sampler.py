"""Drawing tokens and their log-probs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentgym.rollout.policies.base import Sampling
from agentgym.rollout.policies.sampler import sample, uniforms


def draw(logits: Tensor, how: Sampling, u: float, forced: int | None = None) -> tuple[int, float]:
    drawn = sample(logits.unsqueeze(0), [how], [u], [forced])
    return drawn.tokens[0], drawn.logprobs[0]


def expected(logits: Tensor, how: Sampling) -> np.ndarray:
    """The distribution by the textbook, in numpy."""
    p = np.exp((z := logits.double().numpy() / (how.temperature or 1.0)) - z.max())
    order = np.argsort(-p, kind="stable")
    keep = np.zeros(len(p), dtype=bool)
    head = order[: how.top_k or len(p)]
    mass = np.cumsum(p[head]) / p[head].sum()
    keep[head[: int(np.searchsorted(mass, how.top_p - 1e-12)) + 1] if how.top_p < 1 else head] = True
    q: np.ndarray = np.where(keep, p, 0)
    return q / q.sum()


HOWS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=3),
    Sampling(top_p=0.6),
    Sampling(temperature=1.3, top_k=5, top_p=0.8),
    Sampling(top_k=1),
]


@pytest.mark.parametrize("how", HOWS, ids=str)
def test_draws_follow_the_exact_distribution(how: Sampling) -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(3)) * 2
    p, n = expected(logits, how), 2000
    grid = [(i + 0.5) / n for i in range(n)]
    drawn = sample(logits.expand(n, -1), [how] * n, grid, [None] * n)
    counts = np.bincount(drawn.tokens, minlength=9)
    assert np.abs(counts / n - p).max() <= 1.5 / n
    for token, logprob in set(zip(drawn.tokens, drawn.logprobs, strict=True)):
        assert logprob == pytest.approx(math.log(p[token]), abs=1e-6)


def test_greedy_takes_the_mode_with_its_untempered_logprob() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0])
    token, logprob = draw(logits, Sampling(temperature=0, top_k=1), 0.999)
    assert token == 1
    assert logprob == pytest.approx(logits.log_softmax(-1)[1].item(), abs=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.sampled_from(HOWS),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, math.nextafter(1, 0)])),
)
def test_a_drawn_token_always_has_positive_probability(values: list[float], how: Sampling, u: float) -> None:
    token, logprob = draw(torch.tensor(values), how, u)
    assert expected(torch.tensor(values), how)[token] > 0
    assert math.isfinite(logprob)
    assert logprob <= 0


def test_a_row_does_not_depend_on_the_other_rows() -> None:
    logits = torch.randn(70, 501, generator=torch.Generator().manual_seed(0)) * 3
    hows = [HOWS[i % len(HOWS)] if i % 7 else Sampling(temperature=0, top_logprobs=4) for i in range(70)]
    u = uniforms(5, 70)
    forced = [3 if i % 11 == 0 else None for i in range(70)]
    whole = sample(logits, hows, u, forced)
    for i in range(70):
        alone = sample(logits[i : i + 1], hows[i : i + 1], u[i : i + 1], forced[i : i + 1])
        assert (alone.tokens[0], alone.logprobs[0], alone.tops[0]) == (
            whole.tokens[i],
            whole.logprobs[i],
            whole.tops[i],
        )


def test_forced_token_outside_the_nucleus_has_its_tempered_logprob() -> None:
    logits = torch.tensor([4.0, 0.0, -4.0])
    token, logprob = draw(logits, Sampling(temperature=2.0, top_k=1), 0.1, forced=2)
    assert token == 2
    assert logprob == pytest.approx((logits / 2).log_softmax(-1)[2].item(), abs=1e-6)


def test_top_logprobs_are_raw_and_sorted() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    tops = sample(logits, [Sampling(temperature=0.1, top_k=1, top_logprobs=3)], [0.5], [None]).tops[0]
    raw = logits[0].log_softmax(-1)
    assert [t for t, _ in tops] == [1, 2, 0]
    assert [v for _, v in tops] == pytest.approx([raw[t].item() for t, _ in tops], abs=1e-6)
    assert len(sample(logits, [Sampling(top_logprobs=9)], [0.5], [None]).tops[0]) == 4


def test_logprobs_are_float32_values() -> None:
    _, logprob = draw(torch.randn(50, generator=torch.Generator().manual_seed(1)), Sampling(), 0.4)
    assert logprob == float(np.float32(logprob))


def test_logits_that_are_not_finite_show_as_nan() -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = math.nan
    drawn = sample(logits, [Sampling()] * 2, [0.5, 0.5], [None, None])
    assert math.isfinite(drawn.logprobs[0])
    assert math.isnan(drawn.logprobs[1])


def test_uniforms_are_indexed_by_seed_and_position() -> None:
    assert uniforms(7, 5) == uniforms(7, 50)[:5]
    assert uniforms(7, 5) != uniforms(8, 5)
    assert all(0 <= u < 1 for u in uniforms(7, 1000))
