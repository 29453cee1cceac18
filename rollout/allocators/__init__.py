"""Allocators by name. None is imported before it is asked for; `base` has the contract.

A name is one of `ALLOCATORS` or the import path of a class: `package.module:Class`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from agentgym.errors import UnknownName

if TYPE_CHECKING:
    from agentgym.rollout.allocators.base import Allocator

__all__ = ["ALLOCATORS", "allocator_class", "allocator_names", "describe", "make_allocator"]

ALLOCATORS: Mapping[str, str] = {
    "uniform": "agentgym.rollout.allocators.uniform:Uniform",
    "random-tree": "agentgym.rollout.allocators.random_tree:RandomTree",
    "trace": "agentgym.rollout.allocators.trace:Trace",
}
"""Name -> `module:Class`."""


def allocator_names() -> list[str]:
    """Names of the shipped allocators, sorted."""
    return sorted(ALLOCATORS)


def allocator_class(name: str) -> type[Allocator]:
    """Return the class behind a name or an import path.

    Raises:
        UnknownName: no such allocator, module or class.
        BadInput: what is there is no allocator; says what it lacks.
    """
    if name not in ALLOCATORS and ":" not in name:
        raise UnknownName.of("allocator", name, ALLOCATORS)
    module, _, attribute = ALLOCATORS.get(name, name).partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnknownName(
            f"unknown allocator {name!r}: {error}. Valid: {', '.join(ALLOCATORS)}, or module:Class"
        ) from error
    from agentgym.rollout.allocators.options import require_allocator

    require_allocator(name, found)
    return found  # type: ignore[no-any-return]


def make_allocator(name: str, /, **options: Any) -> Allocator:
    """Make an allocator.

    Args:
        name: see `allocator_names`, or `package.module:Class`.
        options: its fields. Text is converted to the field's type, `none` to `None` where that is allowed.

    Raises:
        UnknownName: an unknown allocator or option, with the nearest valid one.
        BadInput: an option of the wrong type or out of range.
    """
    from agentgym.rollout.allocators.options import coerced

    cls = allocator_class(name)
    return cls(**coerced(name, cls, options))


def describe(name: str) -> dict[str, Any]:
    """Describe an allocator from its class and docstring, JSON-safe.

    Returns:
        `name`, `summary`, `family`, `source`, `watches`, `snapshots`, `equations` and `options`, a list of `name`,
        `type`, `default`, `meaning`.

    Raises:
        UnknownName, BadInput: as `allocator_class` does.
    """
    from agentgym.rollout.allocators.options import described

    return described(name, allocator_class(name))
