"""A Qwen2 forward pass that computes a prefix common to all rows once. For training only.

The system prompt and the tools are a quarter of a short trace and equal in all traces of an env. Keys, values and
gradients are those of the plain forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def hidden_states(model: Any, prefix: Tensor, rows: Tensor) -> Tensor:
    """Return the last hidden states of `rows` after `prefix`.

    Args:
        model: a `Qwen2ForCausalLM` without sliding windows, one key/value head for each query head.
        prefix: `[P]` token ids, P >= 1.
        rows: `[B, T]` token ids, padded on the right.

    Returns:
        `[B, T, C]` float32; the first position of a row is the token right after the prefix.
    """
    config = model.config
    count, length = rows.shape
    head = config.hidden_size // config.num_attention_heads
    positions = torch.cat([torch.arange(len(prefix)), torch.arange(length).repeat(count) + len(prefix)])
    cos, sin = _angles(positions, head, config.rope_parameters["rope_theta"])
    shape = (len(prefix), count, length, config.num_attention_heads, head)
    x = F.embedding(torch.cat([prefix, rows.flatten()]), model.model.embed_tokens.weight)
    for layer in model.model.layers:
        h = _norm(x, layer.input_layernorm)
        a = layer.self_attn
        q, k, v = (part(h).view(len(x), -1, head) for part in (a.q_proj, a.k_proj, a.v_proj))
        mixed = _attend(_turned(q, cos, sin), _turned(k, cos, sin), v, shape)
        x = x + a.o_proj(mixed)
        h = _norm(x, layer.post_attention_layernorm)
        m = layer.mlp
        x = x + m.down_proj(F.silu(m.gate_proj(h)) * m.up_proj(h))
    return _norm(x[len(prefix) :], model.model.norm).view(count, length, -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int, int, int, int]) -> Tensor:
    """Causal attention of `[P + B * T, H, D]` tensors, the first P positions being before every row."""
    size, count, length, heads, head = shape
    full = [
        torch.cat([t[:size].expand(count, size, heads, head), t[size:].view(count, length, heads, head)], 1)
        for t in (q, k, v)
    ]
    q, k, v = (t.transpose(1, 2) for t in full)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return torch.cat([mixed[0, :size], mixed[:, size:].reshape(count * length, heads, head)]).flatten(1)


def _norm(x: Tensor, layer: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), layer.weight, layer.variance_epsilon)


def _angles(positions: Tensor, head: int, theta: float) -> tuple[Tensor, Tensor]:
    rates = theta ** -(torch.arange(0, head, 2).float() / head)
    angles = (positions[:, None] * rates).repeat(1, 2)[:, None]
    return angles.cos(), angles.sin()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin
