"""Loading a Hugging Face causal LM: devices, folders, digests, context limits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from agentgym.errors import BadInput, UnknownName

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype asked for; float32 on CPU and bfloat16 on CUDA by default.

    Raises:
        UnknownName: no dtype that a model can have.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise UnknownName.of("dtype", name, _DTYPES)
    return _DTYPES[name]


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
    return on_device(model, device, dtype)


def on_device(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Move and cast a model in place."""
    nn.Module.to(model, device, dtype)
    return model


def vocab_size(model: PreTrainedModel) -> int:
    """Return the number of token ids that the model can read."""
    table = model.get_input_embeddings().weight
    if not isinstance(table, Tensor):
        raise BadInput(f"{type(model).__name__} has no table of input embeddings")
    return table.shape[0]


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
