"""The budget: what a run may spend, and what it has spent.

Hard in every unit: a continuation starts only when the most that it can spend still fits, and it is told that
most. Whether it starts depends on what earlier continuations (in dispatch order) spent, never on which of them
finished first, so a budget never makes a tree depend on concurrency.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

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
        admitted: whether anything is left for it, once `decided` is set.
        settled: whether it has ended.
    """

    claim: tuple[float, float]
    tokens: float
    steps: float
    admitted: bool = True
    settled: bool = False
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class Purse:
    """A share of the budget, for one tree or for what all trees of a step left over.

    Args:
        amount: what may be spent.
    """

    def __init__(self, amount: Amount) -> None:
        self._amount = amount
        self._entries: list[Entry] = []
        self._undecided: deque[Entry] = deque()
        self._decided_tokens = self._decided_steps = 0.0
        self._running = 0
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
        self._undecided.append(entry)
        return entry

    async def admit(self, entry: Entry) -> bool:
        """Wait until it is certain what earlier entries leave for `entry`.

        Lowers the entry's caps to what is left once all earlier entries are settled.

        Returns:
            Whether anything is left for it.
        """
        if self._limited:
            self._decide()
            await entry.decided.wait()
        return entry.admitted

    def settle(self, entry: Entry, tokens: int, steps: int) -> None:
        """Replace an entry's caps by what it spent."""
        if entry.decided.is_set():
            self._decided_tokens += tokens - entry.tokens
            self._decided_steps += steps - entry.steps
            self._running -= 1
        entry.tokens, entry.steps, entry.settled = tokens, steps, True
        if self._limited:
            self._decide()

    def _decide(self) -> None:
        """Decide on entries in order, up to the first that may get more when an earlier one is settled."""
        while self._undecided:
            entry = self._undecided[0]
            if not entry.settled:
                tokens = self._amount.sampled_tokens - self._decided_tokens
                steps = self._amount.env_steps - self._decided_steps
                if self._running and (entry.tokens > tokens or entry.steps > steps):
                    return
                entry.tokens, entry.steps = max(0.0, min(entry.tokens, tokens)), max(0.0, min(entry.steps, steps))
                entry.admitted = entry.tokens >= 1 and entry.steps >= 1
                self._running += 1
            self._decided_tokens += entry.tokens
            self._decided_steps += entry.steps
            self._undecided.popleft()
            entry.decided.set()


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
