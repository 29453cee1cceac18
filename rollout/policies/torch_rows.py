"""Row-exact forward passes on CPU: a token's hidden state does not depend on what shares the batch with it.

BLAS picks its kernel by the number of rows, and kernels differ in the order of additions. On CPU three rules remove
the dependence, bit for bit, without changing the dtype:

1. matrix products see at least `MIN_ROWS` rows (short batches are padded);
2. the padded key/value length is a multiple of `KV_BLOCK` (a masked key contributes an exact zero);
3. attention is computed with ONE query per call row, in prefill as in decode: scaled-dot-product attention takes
   another kernel for one query than for several.

`row_exact` tests rule 1 on the weights at hand: MKL with several threads may split long inner products (from about
640 inputs on); one thread never did.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

MIN_ROWS = 16
KV_BLOCK = 64
ATTENTION = "agentgym_rows"
"""Name under which the row-exact attention is registered with transformers."""

_PROBE_BELOW = 20_000_000
_engine = threading.local()


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is >= `value`."""
    return -(-value // multiple) * multiple


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
        query: `[B, H, T, D]`.
        key: `[B, Hkv, L, D]`.
        value: `[B, Hkv, L, Dv]`.
        attention_mask: additive, `[B, 1, T, L]`.
        dropout: used by `sdpa` only.
        scaling: factor of the scores; `None` is `D ** -0.5`.
        is_causal: used by `sdpa` only.
        kwargs: passed on to `sdpa`.

    Returns:
        The output `[B, T, H, Dv]`, and no weights.
    """
    plan: Sequence[tuple[int, int]] | None = getattr(_engine, "plan", None)
    if attention_mask is None or plan is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return output, None
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    batch, heads, steps, _ = query.shape
    real = len(plan)
    result = query.new_zeros(batch, steps, heads, value.shape[-1])
    if steps == 1:
        seen = scaled_dot_product_attention(query[:real], key[:real], value[:real], attention_mask[:real], **options)
        result[:real] = seen.transpose(1, 2)
        return result, None
    for row, (pad, length) in enumerate(plan):
        queries = query[row, :, pad:].transpose(0, 1).unsqueeze(2)
        keys = key[row, :, :length].expand(steps - pad, -1, -1, -1)
        values = value[row, :, :length].expand(steps - pad, -1, -1, -1)
        mask = attention_mask[row, :, pad:, :length].transpose(0, 1).unsqueeze(1)
        result[row, pad:] = scaled_dot_product_attention(queries, keys, values, mask, **options).squeeze(2)
    return result, None


@contextmanager
def row_mode(plan: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Make `row_attention` active in this thread.

    Args:
        plan: `(leading padding tokens, visible length)` of each row that is no padding; attention skips the rest.
    """
    _engine.plan = plan
    try:
        yield
    finally:
        _engine.plan = None


def install_row_attention(model: PreTrainedModel) -> bool:
    """Switch a model that attends by `sdpa` to `row_attention`; return whether it was switched.

    Models with another attention (eager only, sinks, ALiBi) keep theirs and are not row-exact.
    """
    if model.config._attn_implementation != "sdpa":
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
    for weight in shapes.values():
        rows = torch.linspace(-1, 1, 256 * weight.shape[1], dtype=weight.dtype).sin().view(256, -1)
        whole = linear(rows, weight)
        if any(not torch.equal(linear(rows[:n], weight), whole[:n]) for n in (MIN_ROWS, 24, 48, 64, 100)):
            return False
    return True
