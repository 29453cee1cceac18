"""Loading a Hugging Face causal LM and running it over key/value slots."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from agentgym.errors import BadInput
from agentgym.rollout.policies.torch_rows import (
    KV_BLOCK,
    MIN_ROWS,
    install_row_attention,
    round_up,
    row_exact,
    row_mode,
)
from agentgym.rollout.policies.torch_slots import SlotCache

_PASS = 1024
"""Most tokens (padding included) of one prefill pass: bounds activations and the attention mask."""


def pick_device(device: str | None) -> torch.device:
    """Return the device asked for, or the best one present.

    Raises:
        BadInput: the device is unknown or not present.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise BadInput(f"unknown device {device!r}; valid: 'cpu', 'cuda', 'cuda:N'") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"device {device!r} was asked for, but torch {torch.__version__} sees no CUDA device; use 'cpu'")
    return picked


def load_model(path: str | Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Load a model folder in Hugging Face format. Never reaches for the network.

    Raises:
        BadInput: the folder is missing, incomplete or damaged; the message carries the reason.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise BadInput(f"model folder {str(folder)!r} does not exist; expected a folder in Hugging Face format")
    if not (folder / "config.json").is_file():
        raise BadInput(f"model folder {str(folder)!r} has no config.json; expected a folder in Hugging Face format")
    try:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except Exception as error:  # boundary: transformers raises many kinds for damaged folders
        raise BadInput(f"cannot load the model in {str(folder)!r}: {type(error).__name__}: {error}") from error
    moved: PreTrainedModel = model.to(device)
    return moved


def digest(model: nn.Module) -> str:
    """Return the blake2b digest (128 bit, hex) of names, dtypes, shapes and bytes of all weights."""
    state = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(model.state_dict().items()):
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        state.update(flat.view(torch.uint8).numpy())
    return state.hexdigest()


def context_limit(model: PreTrainedModel, asked: int | None) -> int:
    """Return the most tokens a sequence may have.

    Sliding-window layers cap it at their window: up to there they equal full attention.

    Raises:
        BadInput: `asked` is not positive or beyond what the model can do.
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None) or 1 << 20]
    kinds = getattr(config, "layer_types", None)
    windowed = getattr(config, "use_sliding_window", True) if kinds is None else "sliding_attention" in kinds
    if windowed and getattr(config, "sliding_window", None):
        limits.append(config.sliding_window)
    if kinds and "chunked_attention" in kinds:
        limits.append(config.attention_chunk_size)
    most = int(min(limits))
    if asked is None:
        return most
    if not 2 <= asked <= most:
        raise BadInput(f"max_context must be in 2..{most} for this model, got {asked}")
    return asked


class ModelRunner:
    """Prefill and decode passes of one model. Used by one thread at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Prepare `model` (put in eval mode) and check that its cached path agrees with its plain forward pass.

        Raises:
            BadInput: the model cannot be run this way; the message carries the reason.
        """
        self.model = model.eval()
        self.vocab = int(model.get_input_embeddings().weight.shape[0])
        self.exact: bool | None = False
        self._on_cpu = model.device.type == "cpu"
        if self._on_cpu and install_row_attention(model):
            self.exact = row_exact(model)
        self._keep = "logits_to_keep" in inspect.signature(model.forward).parameters
        name = type(model).__name__
        try:
            with torch.inference_mode():
                self._slots = self._checked_slots()
        except BadInput:
            raise
        except Exception as error:  # boundary: any architecture's code runs here
            raise BadInput(
                f"{name} cannot run with per-token positions and a 4-D mask: {type(error).__name__}: {error}"
            ) from error

    @property
    def slots(self) -> SlotCache:
        """The key/value slots."""
        return self._slots

    def prefill(self, first: int, suffixes: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        """Compute prompt suffixes whose prefixes are already in the slots; little padding if sorted by length.

        Args:
            first: the first slot; row `r` is slot `first + r`.
            suffixes: tokens to compute, `[R]` lists of at least one token.
            starts: number of tokens already in each slot, `[R]`.

        Returns:
            Logits after the last token of each row, `[R, V]`.
        """
        rest, begin = list(suffixes), list(starts)
        for row, suffix in enumerate(suffixes):
            while len(rest[row]) > _PASS:
                self._pass(first + row, [rest[row][:_PASS]], [begin[row]])
                begin[row] += _PASS
                rest[row] = suffix[begin[row] - starts[row] :]
        logits, row = [], 0
        while row < len(rest):
            stop = _pass_end(rest, row)
            logits.append(self._pass(first + row, rest[row:stop], begin[row:stop]))
            row = stop
        return torch.cat(logits)

    def _pass(self, first: int, suffixes: Sequence[Sequence[int]], starts: Sequence[int]) -> Tensor:
        rows = len(suffixes)
        keep = round_up(MIN_ROWS, rows) // rows if self._on_cpu else 1
        steps = max(keep, max(map(len, suffixes)))
        tokens = torch.zeros(rows, steps, dtype=torch.long)
        positions = torch.zeros(rows, steps, dtype=torch.long)
        real = torch.zeros(rows, steps, dtype=torch.bool)
        for row, (suffix, start) in enumerate(zip(suffixes, starts, strict=True)):
            pad = steps - len(suffix)
            tokens[row, pad:] = torch.tensor(suffix)
            positions[row, pad:] = torch.arange(start, start + len(suffix))
            real[row, pad:] = True
        length = max(start + len(suffix) for suffix, start in zip(suffixes, starts, strict=True))
        self._slots.reserve(first + rows, length)
        self._slots.aim(first, positions, real, length)
        plan = [
            (steps - len(suffix), round_up(start + len(suffix), KV_BLOCK))
            for suffix, start in zip(suffixes, starts, strict=True)
        ]
        return self._forward(tokens, positions, plan, keep)

    def decode(self, tokens: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Compute one token of each of the slots `0..B`.

        Args:
            tokens: the tokens, `[B]`.
            lengths: number of tokens already in each slot, `[B]`.

        Returns:
            Logits after those tokens, `[B, V]`.
        """
        rows = len(tokens)
        pad = round_up(rows, MIN_ROWS) - rows if self._on_cpu else 0
        length = max(lengths) + 1
        positions = torch.tensor([*lengths, *[0] * pad]).unsqueeze(1)
        self._slots.reserve(rows + pad, length)
        self._slots.aim(0, positions, None, length)
        plan = [(0, round_up(length, KV_BLOCK))] * rows
        return self._forward(torch.tensor([*tokens, *[0] * pad]).unsqueeze(1), positions, plan, 1)[:rows]

    def _forward(self, tokens: Tensor, positions: Tensor, plan: Sequence[tuple[int, int]], keep: int) -> Tensor:
        device, dtype = self.model.device, self.model.dtype
        visible = self._slots.get_mask_sizes(0)[0]
        hidden = torch.arange(visible) > positions.unsqueeze(-1)
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, torch.finfo(dtype).min).unsqueeze(1)
        options: dict[str, Any] = {"logits_to_keep": keep} if self._keep else {}
        with row_mode(plan) if self._on_cpu else nullcontext():
            output = self.model(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=self._slots,
                use_cache=True,
                **options,
            )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _checked_slots(self) -> SlotCache:
        """Make the slots for this model and compare a prefill and two decode steps with its plain forward pass."""
        model, count = self.model, 12
        ids = [(7 * i + 3) % self.vocab for i in range(count)]
        plain = model(input_ids=torch.tensor([ids], device=model.device), use_cache=True)
        cache = plain.past_key_values
        if not isinstance(cache, DynamicCache) or any(layer.keys is None for layer in cache.layers):
            raise BadInput(f"{type(model).__name__} keeps a state other than keys and values ({type(cache).__name__})")
        shapes = [(layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in cache.layers]
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
        self.model.eval()

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


def _pass_end(suffixes: Sequence[Sequence[int]], row: int) -> int:
    """Return where the pass that begins at `row` ends so that it has at most `_PASS` tokens."""
    stop, longest = row, 0
    while stop < len(suffixes):
        longest = max(longest, len(suffixes[stop]))
        if stop > row and longest * (stop + 1 - row) > _PASS:
            break
        stop += 1
    return stop
