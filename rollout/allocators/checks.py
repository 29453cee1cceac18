"""Checks that the allocators share."""

from __future__ import annotations

import math

from agentgym.errors import BadInput
from agentgym.rollout.allocators.base import LedgerView


def require_whole(owner: str, name: str, value: object, *, least: int) -> None:
    """Raise `BadInput` unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInput(f"{owner}: {name} must be an integer (int), got {value!r} ({type(value).__name__})")
    if value < least:
        raise BadInput(f"{owner}: {name} must be >= {least}, got {value}")


def leaves_left(owner: str, ledger: LedgerView) -> int:
    """Return the leaves that are left for this event; `BadInput` when nothing limits them."""
    left = ledger.left("leaves")
    if math.isinf(left):
        raise BadInput(f"{owner} distributes a budget of leaves, but the budget has no limit in leaves")
    return int(left)


def even_shares(total: int, parts: int) -> list[int]:
    """Split `total` into whole parts that differ by at most 1, larger ones first."""
    base, extra = divmod(max(0, total), parts) if parts else (0, 0)
    return [base + (i < extra) for i in range(parts)]
