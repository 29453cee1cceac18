"""The manifest of a run folder: what was run, with what, and whether a run may be resumed."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from agentgym.errors import BadInput, ConfigMismatch, JournalError
from agentgym.rollout import journal

FILE = "manifest.json"
FORMAT = 1
"""Version of the run folder's format; raised when older readers would misread it."""

FREE_ON_RESUME = frozenset(
    {
        "config.allow_failed",
        "config.concurrency",
        "config.env_deadline",
        "config.policy_options.device",
        "config.policy_deadline",
        "config.retries",
        "policy.device",
    }
)
"""Dotted keys that may differ when a run is resumed; all below them as well."""
COMPARED = ("config", "env", "policy", "renderer")


def build(
    config: Mapping[str, Any],
    *,
    env_id: str,
    task_digest: str,
    policy: Mapping[str, Any],
    renderer: Mapping[str, Any],
) -> dict[str, Any]:
    """Collect what a run folder says about its run.

    Args:
        config: the run's settings, JSON-safe.
        env_id: id of the env.
        task_digest: digest of the tasks, so that a changed task set is noticed.
        policy: `Policy.describe()`.
        renderer: facts about the renderer (name, control tokens, extension property).
    """
    return {
        "format": FORMAT,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": dict(config),
        "env": {"id": env_id, "tasks": task_digest},
        "policy": dict(policy),
        "renderer": dict(renderer),
        "versions": {
            "agentgym": version("agentgym-trees"),
            "python": platform.python_version(),
            "numpy": version("numpy"),
            "gymnasium": version("gymnasium"),
        },
    }


def write(folder: str | Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a run folder in one atomic step."""
    path = Path(folder) / FILE
    draft = path.with_name(f"{FILE}.{os.getpid()}.tmp")
    draft.write_bytes(orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    os.replace(draft, path)


def read(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a run folder.

    Raises:
        BadInput: there is none, or it was written in a newer format.
        JournalError: it is not valid JSON.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise BadInput(f"{folder} is no run folder: it has no {FILE}")
    try:
        manifest = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise JournalError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise BadInput(f"{path} is not the manifest of an agentgym run")
    if manifest["format"] > FORMAT:
        raise BadInput(f"{path} has format {manifest['format']}; this version of agentgym reads up to {FORMAT}")
    return manifest


def check_resume(folder: str | Path, manifest: Mapping[str, Any]) -> None:
    """Check that a run may be resumed with a manifest made now.

    Raises:
        BadInput: the folder has no manifest.
        ConfigMismatch: keys outside of `FREE_ON_RESUME` differ; each is named with both values.
    """
    old, new = read(folder), orjson.loads(orjson.dumps(manifest))
    before = _flat({key: old.get(key) for key in COMPARED})
    now = _flat({key: new.get(key) for key in COMPARED})
    absent = "(absent)"
    differing = [
        f"{key}: {before.get(key, absent)!r} in the folder, {now.get(key, absent)!r} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent) and not _free(key)
    ]
    if differing:
        raise ConfigMismatch(f"{folder} belongs to another configuration: " + "; ".join(differing))


def open_run(folder: str | Path, manifest: Mapping[str, Any], *, resume: bool = False) -> None:
    """Prepare a run folder: create it for a new run, or check it for a resumed one.

    Raises:
        BadInput: the folder has a run already and `resume` is false, it has none and `resume` is true, or it cannot
            be written.
        ConfigMismatch: the run to be resumed has another configuration.
    """
    path = Path(folder)
    if resume:
        check_resume(path, manifest)
        return
    taken = [name for name in (FILE, journal.FILE) if (path / name).exists()]
    if taken:
        raise BadInput(f"{path} has a run already ({taken[0]}): continue it with --resume, or choose another folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
        write(path, manifest)
    except OSError as error:
        raise BadInput(f"cannot write the run folder {path}: {error.strerror}") from error


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested objects to dotted keys."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    parts = [_flat(part, f"{prefix}.{key}" if prefix else str(key)) for key, part in value.items()]
    return {key: leaf for part in parts for key, leaf in part.items()}


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE_ON_RESUME)
