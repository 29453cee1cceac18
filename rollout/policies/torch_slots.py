"""Slot-based key/value storage behind the `transformers.Cache` interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from agentgym.rollout.policies.torch_rows import KV_BLOCK


class SlotCache(Cache):
    """Keys and values of up to `S` sequences in one tensor `[S, C, P, W]`.

    `C` counts channels (key and value of each layer), `P` positions, `W` values of a token (heads x head size). The
    last position of a slot is scratch: padding tokens write there and nothing ever attends to it.

    A forward pass runs on consecutive slots: `aim` says on which, and where its tokens go; the model's calls of
    `update` then write them and get views (no copies) of everything up to the padded length.
    """

    def __init__(self, shapes: Sequence[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty store.

        Args:
            shapes: `(kv heads, key head size, value head size)` of each layer.
            dtype: of keys and values.
            device: where they live.
        """
        super().__init__(layers=[])
        width = max(heads * max(key, value) for heads, key, value in shapes)
        self.channels = 2 * len(shapes)
        self._store = torch.zeros(8, self.channels, 4 * KV_BLOCK, width, dtype=dtype, device=device)
        self._views: dict[tuple[int, int, int, int], tuple[Tensor, Tensor]] = {}
        self._write = torch.empty(self.channels, 0, dtype=torch.long, device=device)
        self._aim = (0, 0, 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return self.channels * self._store.shape[3] * self._store.element_size()

    def reserve(self, slots: int, length: int) -> None:
        """Grow so that `slots` sequences of `length` tokens fit; contents are kept."""
        have_slots, channels, have, width = self._store.shape
        if slots <= have_slots and length < have:
            return
        while have_slots < slots:
            have_slots *= 2
        while have <= length:
            have *= 2
        grown = self._store.new_zeros(have_slots, channels, have, width)
        old = self._store
        grown[: old.shape[0], :, : old.shape[2]] = old
        self._store = grown
        self._views.clear()

    def load(self, slot: int, spans: Sequence[Tensor]) -> None:
        """Copy spans, each `[C, n, W]`, to the front of a slot."""
        at = 0
        for span in spans:
            self._store[slot, :, at : at + span.shape[1]] = span
            at += span.shape[1]

    def read(self, slot: int, start: int, stop: int) -> Tensor:
        """Return an owned copy `[C, stop - start, W]` of positions `start..stop`."""
        return self._store[slot, :, start:stop].clone()

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self._store[target, :, :length] = self._store[source, :, :length]

    @property
    def scratch(self) -> int:
        """The position where padding tokens write."""
        return self._store.shape[2] - 1

    def aim(self, first: int, rows: int, slots: Tensor, positions: Tensor, visible: int) -> None:
        """Direct the next forward pass.

        Args:
            first: the first slot that attention sees.
            rows: number of slots that attention sees.
            slots: which slot each token goes to, `[N]`, on the CPU.
            positions: where in that slot, `[N]`, on the CPU.
            visible: number of positions that attention sees.
        """
        _, channels, capacity, _ = self._store.shape
        base = slots * (channels * capacity) + positions
        write = base + torch.arange(channels).unsqueeze(1) * capacity
        self._write = write.to(self._store.device, non_blocking=True)
        self._aim = (first, rows, visible)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values `[R, H, T, D]`; return all of them, `[R, H, L, D]`."""
        channel = 2 * layer_idx
        self._put(channel, key_states)
        self._put(channel + 1, value_states)
        at = (*self._aim, layer_idx)
        views = self._views.get(at)
        if views is None:
            if len(self._views) > 64 * self.channels:
                self._views.clear()
            views = self._views[at] = (self._see(channel, key_states), self._see(channel + 1, value_states))
        return views

    def _put(self, channel: int, states: Tensor) -> None:
        tokens = states.transpose(1, 2).reshape(self._write.shape[1], -1)
        flat = self._store.view(-1, self._store.shape[3])
        if tokens.shape[1] < flat.shape[1]:
            flat = flat[:, : tokens.shape[1]]
        flat.index_copy_(0, self._write[channel], tokens)

    def _see(self, channel: int, states: Tensor) -> Tensor:
        first, rows, length = self._aim
        heads, size = states.shape[1], states.shape[3]
        seen = self._store[first : first + rows, channel, :length, : heads * size]
        return seen.view(rows, length, heads, size).transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions and masks are always given, so no model may derive them from the cache."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the visible length and its offset."""
        return self._aim[2], 0
