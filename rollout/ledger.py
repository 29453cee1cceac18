"""The budget: what a run may spend, and what it has spent.

Hard in every unit: a continuation starts only when the most that it can spend still fits, and it is told that
most. Whether it starts depends on what earlier continuations (in dispatch order) spent, never on which of them
finished first, so a budget never makes a tree depend on concurrency.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from agentgym.errors import BadInput, UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """An amount in each unit that can be limited; infinite where nothing limits it."""

    leaves: float = math.inf
    sampled_tokens: float = math.inf
    env_steps: float = math.inf

    @classmethod
    def limits(cls, given: Mapping[str, int | None]) -> Amount:
        """Build limits from a mapping; `None` is no limit. Raises `BadInput` unless every limit is >= 1."""
        for unit, value in given.items():
            if unit not in UNITS:
                raise UnknownName.of("budget unit", unit, UNITS)
            if value is not None and value < 1:
                raise BadInput(f"a budget must be >= 1, got {unit}={value}")
        return cls(**{unit: value for unit, value in given.items() if value is not None})

    def minus(self, spent: Sequence[Amount]) -> Amount:
        """Return what is left after `spent`, at least 0."""
        return Amount(**{u: max(0.0, getattr(self, u) - sum(getattr(s, u) for s in spent)) for u in UNITS})

    def split(self, weights: Sequence[int]) -> list[Amount]:
        """Split into whole parts in proportion to `weights` (largest remainder, earlier parts first)."""
        columns = {unit: _apportion(getattr(self, unit), weights) for unit in UNITS}
        return [Amount(**{unit: columns[unit][i] for unit in UNITS}) for i in range(len(weights))]


UNITS = tuple(field.name for field in fields(Amount))


@dataclass(slots=True, eq=False)
class Entry:
    """One continuation's claim on a purse.

    Attributes:
        claim: the sampled tokens and env steps that it asked for.
        tokens: the most that it may sample until it is settled, then what it sampled.
        steps: the same in env steps.
        settled: whether it has ended.
    """

    claim: tuple[float, float]
    tokens: float
    steps: float
    settled: bool = False


class Purse:
    """A share of the budget, for one tree or for what all trees of a step left over.

    Args:
        amount: what may be spent.
    """

    def __init__(self, amount: Amount) -> None:
        self._amount = amount
        self._entries: list[Entry] = []
        self._changed = asyncio.Event()
        self._limited = math.isfinite(amount.sampled_tokens) or math.isfinite(amount.env_steps)

    def left(self, unit: str = "leaves") -> float:
        """Return what is not yet claimed, in `leaves`, `sampled_tokens` or `env_steps`."""
        if unit not in UNITS:
            raise UnknownName.of("budget unit", unit, UNITS)
        return float(getattr(self._amount.minus([self.spent()]), unit))

    def spent(self) -> Amount:
        """Return what has been claimed, in every unit: what was really spent once all entries are settled."""
        return Amount(
            leaves=len(self._entries),
            sampled_tokens=sum(e.tokens for e in self._entries),
            env_steps=sum(e.steps for e in self._entries),
        )

    def left_after(self, ended: int) -> Amount:
        """Return what is left when the first `ended` continuations count as what they spent, the others as claimed.

        Unlike `left`, it does not depend on which of the others have ended by now.
        """
        later = [entry.claim for entry in self._entries[ended:]]
        tokens = sum(e.tokens for e in self._entries[:ended]) + sum(tokens for tokens, _ in later)
        steps = sum(e.steps for e in self._entries[:ended]) + sum(steps for _, steps in later)
        spent = Amount(leaves=len(self._entries), sampled_tokens=tokens, env_steps=steps)
        return self._amount.minus([spent])

    def claim(self, tokens: float, steps: float) -> Entry:
        """Claim one leaf, in dispatch order.

        Args:
            tokens: the most sampled tokens that the continuation may use.
            steps: the most env steps that it may use.
        """
        entry = Entry((tokens, steps), tokens, steps)
        self._entries.append(entry)
        return entry

    async def admit(self, entry: Entry) -> bool:
        """Wait until it is certain what earlier entries leave for `entry`.

        Lowers the entry's caps to what is left once all earlier entries are settled.

        Returns:
            Whether anything is left for it.
        """
        if not self._limited:
            return True
        earlier = self._entries[: self._entries.index(entry)]
        while True:
            tokens = self._amount.sampled_tokens - sum(e.tokens for e in earlier)
            steps = self._amount.env_steps - sum(e.steps for e in earlier)
            if entry.tokens <= tokens and entry.steps <= steps:
                return True
            if all(e.settled for e in earlier):
                entry.tokens, entry.steps = max(0.0, min(entry.tokens, tokens)), max(0.0, min(entry.steps, steps))
                return entry.tokens >= 1 and entry.steps >= 1
            self._changed.clear()
            await self._changed.wait()

    def settle(self, entry: Entry, tokens: int, steps: int) -> None:
        """Replace an entry's caps by what it spent."""
        entry.tokens, entry.steps, entry.settled = tokens, steps, True
        self._changed.set()


def _apportion(total: float, weights: Sequence[int]) -> list[float]:
    whole = sum(weights)
    if math.isinf(total) or whole == 0:
        return [total if math.isinf(total) else 0.0] * len(weights)
    exact = [total * w / whole for w in weights]
    parts = [math.floor(x) for x in exact]
    order = sorted(range(len(weights)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: int(total) - sum(parts)]:
        parts[i] += 1
    return [float(p) for p in parts]
