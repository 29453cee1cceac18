"""From the command line and a YAML file to one mapping of configuration keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.errors import BadInput


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        BadInput: it cannot be read, is not valid YAML or does not hold `key: value` lines.
    """
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"cannot read the configuration {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise BadInput(f"{path} must hold lines of the form `key: value`, such as `tasks: 16`")
    return found


def pairs(option: str, texts: Sequence[str] | None) -> dict[str, Any]:
    """Read `key=value` arguments. A value is read as YAML: `4` is a number, `null` is none, `cpu` is a text.

    Args:
        option: name of the option, for messages.
        texts: what was given; `None` for nothing.

    Raises:
        BadInput: an argument without `=` or without a key, or a key that is given twice.
    """
    import yaml

    found: dict[str, Any] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"{option} takes key=value, got {text!r}")
        if key.strip() in found:
            raise BadInput(f"{option}: {key.strip()!r} is given twice")
        try:
            found[key.strip()] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            raise BadInput(f"{option}: the value of {key.strip()!r} is not readable: {value!r}") from None
    return found


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `over` (the command line) over `base` (the file); options of env, policy and allocator key by key."""
    found = {**base, **over}
    for key, value in over.items():
        below = base.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            found[key] = {**below, **value}
    return found
