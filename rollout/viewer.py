"""One self-contained HTML page to read a run: the forest, each tree, each turn, its tokens and log-probs.

The page needs no network and may not use it: its content security policy allows the one script and the one style
sheet in it, by hash. The run's data is inlined as JSON in which no `<` is left, so that nothing a policy or an env
wrote can end the block.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson

from agentgym.errors import BadInput
from agentgym.rollout import policies
from agentgym.rollout.renderers.base import Renderer
from agentgym.rollout.report import summarise
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Status
from agentgym.rollout.views import Forest

FILE = "view.html"
_INERT = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def write(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run folder and return its path.

    Args:
        folder: the run folder.
        out: file to write; `view.html` in the run folder by default. It is replaced, whole or not at all.

    Raises:
        BadInput: no run folder, or `out` cannot be written.
        JournalError: the journal is damaged.
    """
    forest = Forest.load(folder)
    target = Path(out) if out is not None else Path(folder) / FILE
    text = page(data(forest, Path(folder).resolve().name, renderer_of(forest.manifest)))
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise BadInput(f"cannot write {target}: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
    return target


def renderer_of(manifest: Mapping[str, Any]) -> Renderer | None:
    """Return the renderer that a run used, for the text of its tokens; `None` where it is not here any more."""
    name = manifest.get("renderer", {}).get("name")
    if name == "bytes":
        from agentgym.rollout.renderers.bytes import BytesRenderer

        return BytesRenderer()
    if name == "qwen3":
        from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

        policy = str(manifest.get("config", {}).get("policy"))
        try:
            return Qwen3Renderer(policies.TINY if policy == "tiny" else policy)
        except BadInput:
            return None
    return None


def data(forest: Forest, name: str, renderer: Renderer | None) -> dict[str, Any]:
    """Collect what the page shows.

    Args:
        forest: the run.
        name: its name.
        renderer: gives the text of tokens; `None` shows ids only.

    Returns:
        `run`, `config`, `summary` (see `summarise`), `pieces` (token id -> text) and `trees`. A tree has `group`,
        `task`, `level`, `step`, `messages`, `tools` (names) and `nodes` in path order, parents first; see `_node` for
        the keys of a node, absent where they have the default (0, `null`, empty).
    """
    trees = [_tree(tree) for tree in forest.trees]
    used = sorted({int(token) for tree in trees for node in tree["nodes"] for token in _tokens(node)})
    return {
        "run": name,
        "config": forest.manifest.get("config", {}),
        "summary": summarise(forest),
        "pieces": {} if renderer is None else {str(token): renderer.decode_piece(token) for token in used},
        "trees": trees,
    }


def page(data: Mapping[str, Any]) -> str:
    """Return the page that shows `data` (JSON-safe values and NumPy arrays)."""
    script, style = _template("viewer.js"), _template("viewer.css")
    parts = {
        "policy": f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'",
        "style": style,
        "data": _inert(data),
        "script": script,
    }
    before, *rest = _template("viewer.html").split("{{")
    filled = [parts[name] + after for name, _, after in (part.partition("}}") for part in rest)]
    return "".join([before, *filled])


def _tree(tree: Tree) -> dict[str, Any]:
    order = list(tree.walk(failed=True))
    number = {node: i for i, node in enumerate(order)}
    return {
        "group": tree.group,
        "task": tree.task_id,
        "level": tree.level,
        "step": tree.step,
        "messages": tree.messages,
        "tools": [tool.get("function", {}).get("name") for tool in tree.tools],
        "nodes": [_node(tree, node, number) for node in order],
    }


def _node(tree: Tree, node: int, number: Mapping[int, int]) -> dict[str, Any]:
    """Describe a node: `path`, `parent` and `origin` (positions in `nodes`), tokens (`ids`, `lp`, `reply`), outcome."""
    failed = tree.status[node] is Status.FAILED
    found = {
        "path": tree.path_key(node),
        "parent": number.get(tree.parent[node]),
        "origin": number[tree.origin[node]],
        "status": tree.status[node],
        "ids": tree.sampled_ids(node),
        "lp": tree.logprobs(node),
        "reply": tree.reply_ids(node),
        "text": tree.text(node),
        "answer": tree.replies(node),
        "calls": tree.tool_calls.get(node),
        "reward": tree.reward[node],
        "terms": tree.reward_terms.get(node),
        "cost": tree.cost.get(node),
        "stop": tree.stop[node],
        "success": tree.success[node],
        "propensity": tree.propensity[node] if tree.is_leaf(node) else None,
        "finish": tree.finish[node],
        "version": tree.policy_version[node],
        "prefilled": tree.prefilled[node],
        "cached": tree.cached[node],
        "attempt": tree.attempt[node],
        "reset": bool(node and tree.reset[node]),
        "failure": tree.failure[node] if failed else None,
        "error": tree.error[node] if failed else None,
    }
    keep = ("path", "parent", "origin", "status", "ids", "lp", "reply", "success")
    return {key: value for key, value in found.items() if key in keep or value}


def _tokens(node: Mapping[str, Any]) -> Iterable[int]:
    return [*node["ids"].tolist(), *node["reply"].tolist()]


def _inert(data: Mapping[str, Any]) -> str:
    """Encode JSON that no HTML parser can read anything into; `JSON.parse` gives back the same values."""
    text = orjson.dumps(data, option=orjson.OPT_SERIALIZE_NUMPY).decode()
    return text.translate(_INERT)


def _template(name: str) -> str:
    return files("agentgym.rollout").joinpath(name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"
