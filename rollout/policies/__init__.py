"""Policies: what generates tokens.

`make_policy` builds one by name together with the renderer that speaks its format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.policies.base import Policy
from agentgym.rollout.renderers.base import Renderer

TINY = Path(__file__).parent.parent / "models" / "tiny"
POLICIES = {
    "tiny": "the embedded model (Qwen2 architecture, its own tokenizer), on torch",
    "scripted": "random calls that satisfy the tools' schemas; instant, deterministic, no model",
    "PATH": "folder of a Hugging Face causal LM with the Qwen3 tool format, on torch",
}


def make_policy(name: str, options: Mapping[str, Any] | None = None) -> tuple[Policy, Renderer]:
    """Build a policy and its renderer.

    Args:
        name: `tiny`, `scripted`, or the folder of a Hugging Face model.
        options: for models, arguments of `TorchPolicy.load` (`device`, `dtype`, `max_batch`, `cache_bytes` ...)
            and `thinking` of the renderer.

    Raises:
        UnknownName: neither a known name nor a folder, or an unknown option.
        BadInput: the folder holds no readable model.
        MissingExtra: torch is not installed.
    """
    given = dict(options or {})
    if name == "scripted":
        if given:
            raise BadInput(f"the scripted policy takes no options, got {sorted(given)}")
        return _scripted()
    folder = TINY if name == "tiny" else Path(name)
    if not folder.is_dir():
        raise UnknownName.of("policy", name, POLICIES)
    from agentgym.rollout.policies.torch_policy import TorchPolicy
    from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

    renderer = Qwen3Renderer(folder, thinking=given.pop("thinking", "none"))
    valid = ("device", "dtype", "max_batch", "cache_bytes", "max_context", "threads", "thinking")
    for key in given:
        if key not in valid:
            raise UnknownName.of("policy option", key, valid)
    return TorchPolicy.load(folder, name=name if name == "tiny" else folder.name, **given), renderer


def _scripted() -> tuple[Policy, Renderer]:
    from agentgym.rollout.policies.scripted import ScriptedPolicy, random_caller
    from agentgym.rollout.renderers.bytes import BytesRenderer

    renderer = BytesRenderer()
    return ScriptedPolicy(random_caller, renderer), renderer
