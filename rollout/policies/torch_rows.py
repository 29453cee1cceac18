"""Row-exact forward passes on CPU: a token's hidden state does not depend on what shares the batch with it.

Kernels differ in the order of additions, and they are picked by the shape of the whole batch. Four rules remove the
dependence, bit for bit, without changing the dtype:

1. matrix products see at least `MIN_ROWS` rows (BLAS has other kernels for few rows);
2. larger passes have a multiple of `PASS_STEP` rows, at most `PASS_ROWS`: torch splits elementwise functions evenly
   over threads and computes what does not fill a vector at a share's end by another routine;
3. the padded key/value length is a multiple of `KV_BLOCK` (a masked key contributes an exact zero);
4. attention is computed with ONE query per call row, in prefill as in decode: scaled-dot-product attention takes
   another kernel for one query than for several.

`row_exact` tests rules 1 and 2 on the weights at hand: MKL with several threads may split long inner products (from
about 640 inputs on); one thread never did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MIN_ROWS = 16
PASS_STEP = 48
PASS_ROWS = 5 * PASS_STEP
KV_BLOCK = 64
ATTENTION = "agentgym_rows"
"""Name under which the row-exact attention is registered with transformers."""

_PROBE_BELOW = 20_000_000
_engine = threading.local()


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


def pad_rows(count: int) -> int:
    """Return the number of rows that a pass of `count` tokens is padded to."""
    return round_up(count, MIN_ROWS if count <= 4 * MIN_ROWS else PASS_STEP)


class Segment(NamedTuple):
    """Queries that attend together.

    Attributes:
        at: the first query.
        size: number of queries.
        row: the first key/value row.
        rows: 1 if all queries see the same row, `size` if each sees its own.
        length: number of keys seen (padding included).
    """

    at: int
    size: int
    row: int
    rows: int
    length: int


def row_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend with one query per kernel row; outside `row_mode`, exactly transformers' own `sdpa`.

    Args:
        module: the attention module (transformers' calling convention).
        query: `[1, H, N, D]`.
        key: `[R, Hkv, L, D]`.
        value: `[R, Hkv, L, Dv]`.
        attention_mask: additive, `[1, 1, N, L]`.
        dropout: used by `sdpa` only.
        scaling: factor of the scores; `None` is `D ** -0.5`.
        is_causal: used by `sdpa` only.
        kwargs: passed on to `sdpa`.

    Returns:
        The output `[1, N, H, Dv]`, and no weights.
    """
    plan: Sequence[Segment] | None = getattr(_engine, "plan", None)
    if attention_mask is None or plan is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output, None
    gqa = query.shape[1] != key.shape[1]
    queries, masks = query[0].transpose(0, 1).unsqueeze(2), attention_mask[0, 0, :, None, None]
    result = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for at, size, row, rows, length in plan:
        keys = key[row : row + rows, :, :length].expand(size, -1, -1, -1)
        values = value[row : row + rows, :, :length].expand(size, -1, -1, -1)
        mask = masks[at : at + size, ..., :length]
        seen = scaled_dot_product_attention(queries[at : at + size], keys, values, mask, scale=scaling, enable_gqa=gqa)
        result[0, at : at + size] = seen.squeeze(2)
    return result, None


@contextmanager
def row_mode(plan: Sequence[Segment]) -> Iterator[None]:
    """Make `row_attention` active in this thread.

    Args:
        plan: which queries see which keys; queries in no segment (padding) get zeros.
    """
    _engine.plan = plan
    try:
        yield
    finally:
        _engine.plan = None


def install_row_attention(model: PreTrainedModel) -> bool:
    """Switch a model that attends by `sdpa` to `row_attention`; return whether it uses that now.

    Models with another attention (eager only, sinks, ALiBi) keep theirs and are not row-exact.
    """
    if model.config._attn_implementation not in ("sdpa", ATTENTION):
        return False
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, row_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(ATTENTION)
    return bool(model.config._attn_implementation == ATTENTION)


def row_exact(model: nn.Module) -> bool | None:
    """Test whether the model's matrix products give a row the same bits at every batch size from `MIN_ROWS` on.

    Returns:
        `None` (untested) for models above 20 million parameters, where the test would take seconds.
    """
    if sum(p.numel() for p in model.parameters()) > _PROBE_BELOW:
        return None
    shapes = {m.weight.shape: m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    inner = {inputs for _, inputs in shapes}
    sizes = {pad_rows(n) for n in range(1, PASS_ROWS)}
    for (outputs, inputs), weight in shapes.items():
        rows = torch.linspace(-9, 9, PASS_ROWS * inputs, dtype=weight.dtype).sin().view(PASS_ROWS, inputs)
        act = silu if outputs in inner else nn.Identity()
        whole = act(linear(rows, weight))
        if any(not torch.equal(act(linear(rows[:n], weight)), whole[:n]) for n in sizes):
            return False
    return True
