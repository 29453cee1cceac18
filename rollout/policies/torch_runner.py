"""Prefill and decode passes of a Hugging Face causal LM over key/value slots."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from agentgym.errors import BadInput
from agentgym.rollout.policies.torch_load import vocab_size
from agentgym.rollout.policies.torch_rows import (
    KV_BLOCK,
    MIN_ROWS,
    PASS_ROWS,
    Segment,
    install_row_attention,
    pad_rows,
    round_up,
    row_exact,
    row_mode,
)
from agentgym.rollout.policies.torch_slots import SlotCache

_PADDED_PASS = 4096
"""Most tokens (padding included) of one prefill pass in the padded layout: bounds activations and the mask."""


class _Piece(NamedTuple):
    """Consecutive tokens of one sequence: `tokens` go to `slot` from position `start` on."""

    slot: int
    tokens: Sequence[int]
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


class ModelRunner:
    """Runs one model. Used by one thread at a time.

    Two layouts of a pass over several sequences, both through the model's own `forward`:

    - packed (CPU, models that attend by `sdpa`): all tokens in one row `[1, N]`, attention per sequence, row-exact
      (see `torch_rows`);
    - padded (everything else): one sequence per row `[R, T]`, left-padded, with a 4-D mask.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare `model` (put in eval mode) and check that its cached path agrees with its plain forward pass.

        Raises:
            BadInput: the model cannot be run this way; the message carries the reason.
        """
        self.model = model.train(False)
        self.vocab = vocab_size(model)
        self._packed = model.device.type == "cpu" and install_row_attention(model)
        self.exact = row_exact(model) if self._packed else False
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        try:
            with torch.inference_mode():
                self._slots = self._checked_slots()
        except BadInput:
            raise
        except Exception as error:  # boundary: any architecture's code runs here
            raise BadInput(
                f"{type(model).__name__} cannot run with per-token positions and a 4-D mask: "
                f"{type(error).__name__}: {error}"
            ) from error

    @property
    def slots(self) -> SlotCache:
        """The key/value slots."""
        return self._slots

    def prefill(self, first: int, suffixes: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Compute prompt suffixes whose prefixes are already in the slots.

        Args:
            first: the first slot; row `r` is slot `first + r`.
            suffixes: tokens to compute, `[R]` lists of at least one token.
            starts: number of tokens already in each slot, `[R]`.

        Returns:
            Logits after the last token of each row, `[R, V]`.
        """
        whole = [_Piece(first + r, s, at) for r, (s, at) in enumerate(zip(suffixes, starts, strict=True))]
        after: dict[int, Tensor] = {}
        for pieces in _packed_passes(whole) if self._packed else _padded_passes(whole):
            logits = self._run_packed(pieces) if self._packed else self._run_padded(pieces)
            after.update(zip((piece.slot for piece in pieces), logits, strict=True))
        return torch.stack([after[piece.slot] for piece in whole])

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Compute one token of each of the slots `0..B`.

        Args:
            tokens: the tokens, `[B]`.
            lengths: number of tokens already in each slot, `[B]`.

        Returns:
            Logits after those tokens, `[B, V]`.
        """
        pieces = [_Piece(slot, [token], at) for slot, (token, at) in enumerate(zip(tokens, lengths, strict=True))]
        return self._run_packed(pieces, together=True) if self._packed else self._run_padded(pieces)

    def _run_packed(self, pieces: Sequence[_Piece], *, together: bool = False) -> Tensor:
        """Run pieces of different, ascending slots as one row of tokens; logits after each piece, `[R, V]`.

        `together`: the pieces are single tokens of consecutive slots, and attention runs on all of them at once.
        """
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        ends: list[int] = []
        first, rows = pieces[0].slot, pieces[-1].slot - pieces[0].slot + 1
        visible = round_up(max(piece.stop for piece in pieces), KV_BLOCK)
        plan = [Segment(0, len(pieces), 0, rows, visible)] if together else []
        for piece in pieces:
            if not together:
                visible_here = round_up(piece.stop, KV_BLOCK)
                plan.append(Segment(len(tokens), len(piece.tokens), piece.slot - first, 1, visible_here))
            tokens += piece.tokens
            slots += [piece.slot] * len(piece.tokens)
            positions += range(piece.start, piece.stop)
            ends.append(len(tokens) - 1)
        pad = pad_rows(len(tokens)) - len(tokens)
        self._slots.reserve(first + rows, visible)
        where = torch.tensor(positions + [self._slots.scratch] * pad)
        self._slots.aim(first, rows, torch.tensor(slots + [first] * pad), where, visible)
        ends += [0] * max(0, MIN_ROWS - len(ends))
        kept = torch.arange(len(ends)) if together else torch.tensor(ends)
        every = torch.tensor([positions + [0] * pad])
        with row_mode(plan):
            return self._forward(torch.tensor([tokens + [0] * pad]), every, visible, kept)[0, : len(pieces)]

    def _run_padded(self, pieces: Sequence[_Piece]) -> Tensor:
        """Run pieces of consecutive slots as left-padded rows; logits after each piece, `[R, V]`."""
        rows, steps = len(pieces), max(len(piece.tokens) for piece in pieces)
        visible = round_up(max(piece.stop for piece in pieces), KV_BLOCK)
        first = pieces[0].slot
        self._slots.reserve(first + rows, visible)
        tokens = torch.zeros(rows, steps, dtype=torch.long)
        positions = torch.zeros(rows, steps, dtype=torch.long)
        where = torch.full((rows, steps), self._slots.scratch)
        for row, piece in enumerate(pieces):
            pad = steps - len(piece.tokens)
            tokens[row, pad:] = torch.tensor(piece.tokens)
            where[row, pad:] = positions[row, pad:] = torch.arange(piece.start, piece.stop)
        slots = torch.arange(first, first + rows).repeat_interleave(steps)
        self._slots.aim(first, rows, slots, where.view(-1), visible)
        return self._forward(tokens, positions, visible, 1)[:, -1]

    def _forward(self, tokens: Tensor, positions: Tensor, visible: int, keep: Tensor | int) -> Tensor:
        """Run the model on `tokens` and `positions`, `[R, T]`; return the kept logits, `[R, K, V]`."""
        device, dtype = self.model.device, self.model.dtype
        hidden = torch.arange(visible) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keep else {}
        output = self.model(
            input_ids=tokens.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            past_key_values=self._slots,
            use_cache=True,
            **options,
        )
        logits: Tensor = output.logits
        if not self._keep:
            logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        return logits

    def _checked_slots(self) -> SlotCache:
        """Make the slots for this model and compare a prefill and two decode steps with its plain forward pass."""
        model, count = self.model, 12
        ids = [(7 * i + 3) % self.vocab for i in range(count)]
        plain = model(input_ids=torch.tensor([ids], device=model.device), use_cache=True)
        cache = plain.past_key_values
        layers = cache.layers if isinstance(cache, DynamicCache) else []
        shapes = [
            (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
            for layer in layers
            if isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
        ]
        if not shapes or len(shapes) < len(layers):
            raise BadInput(f"{type(model).__name__} keeps a state other than keys and values in each layer")
        self._slots = SlotCache(shapes, model.dtype, model.device)
        got = [self.prefill(0, [ids[: count - 2]], [0])]
        got += [self.decode(ids[i : i + 1], [i]) for i in (count - 2, count - 1)]
        want = plain.logits[0, -3:].double()
        error = ((torch.cat(got).double() - want).norm() / want.norm()).item()
        if not error < (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1):
            raise BadInput(f"{type(model).__name__}: cached logits differ from the plain forward pass by {error:.1e}")
        return self._slots

    def swap(self, state: Mapping[str, Tensor]) -> None:
        """Copy checked weights into the model."""
        with torch.inference_mode(False), torch.no_grad():
            self.model.load_state_dict(dict(state), strict=False)
        self.model.train(False)

    def check_state(self, state: Mapping[str, Tensor]) -> None:
        """Refuse weights that are not exactly this model's.

        Raises:
            BadInput: a name is missing or unknown, or a shape differs.
        """
        have = self.model.state_dict()
        given = {have[name].data_ptr() for name in state if name in have}
        missing = sorted(n for n in have if n not in state and have[n].data_ptr() not in given)
        unknown = sorted(set(state) - set(have))
        shapes = sorted(n for n in state if n in have and state[n].shape != have[n].shape)
        for what, names in (("missing", missing), ("unknown", unknown), ("of another shape", shapes)):
            if names:
                raise BadInput(f"state dict does not fit {type(self.model).__name__}: {what}: {', '.join(names[:5])}")


def _packed_passes(whole: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Cut the pieces, in order, into passes of at most `PASS_ROWS` tokens."""
    group: list[_Piece] = []
    room = PASS_ROWS
    for slot, tokens, start in whole:
        at = 0
        while at < len(tokens):
            part = tokens[at : at + room]
            group.append(_Piece(slot, part, start + at))
            at, room = at + len(part), room - len(part)
            if room == 0:
                yield group
                group, room = [], PASS_ROWS
    if group:
        yield group


def _padded_passes(whole: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Cut the pieces into passes of at most `_PADDED_PASS` tokens, padding included."""
    group: list[_Piece] = []
    longest = 0
    for slot, tokens, start in whole:
        at = 0
        while len(tokens) - at > _PADDED_PASS:
            yield [_Piece(slot, tokens[at : at + _PADDED_PASS], start + at)]
            at += _PADDED_PASS
        longest = max(longest, len(tokens) - at)
        if group and longest * (len(group) + 1) > _PADDED_PASS:
            yield group
            group, longest = [], len(tokens) - at
        group.append(_Piece(slot, tokens[at:], start + at))
    if group:
        yield group
