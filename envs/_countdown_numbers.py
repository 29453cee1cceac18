"""The arithmetic of Countdown: allowed moves, task making and an exhaustive search for few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Literal, TypeAlias

from agentgym.seeding import Rng

Op: TypeAlias = Literal["+", "-", "*", "/"]
Move: TypeAlias = tuple[int, Op, int]

OPS: tuple[Op, ...] = ("+", "-", "*", "/")
MAX_RESULT = 200
MAX_GIVEN = 25


def result_of(a: int, op: Op, b: int) -> int | None:
    """Return `a op b`, or `None` for a division that leaves a remainder (or by 0). Any size and sign."""
    if op == "+":
        return a + b
    if op == "-":
        return a - b
    if op == "*":
        return a * b
    return a // b if b and a % b == 0 else None


def moves(numbers: Sequence[int]) -> list[Move]:
    """Return every allowed combination of two of `numbers`, each once, in a fixed order.

    Two or more numbers always have one: unequal numbers can be subtracted, equal ones divided.
    """
    pairs = {pair for x, y in combinations(numbers, 2) for pair in ((x, y), (y, x))}
    return [(a, op, b) for a, b in sorted(pairs) for op in OPS if allowed(a, op, b)]


def allowed(a: int, op: Op, b: int) -> bool:
    """Whether the result of `a op b` is a whole number within 1..`MAX_RESULT`."""
    value = result_of(a, op, b)
    return value is not None and 1 <= value <= MAX_RESULT


def combined(numbers: Sequence[int], move: Move) -> list[int]:
    """Return `numbers` after an allowed move: the others in order, then the result."""
    a, op, b = move
    rest = list(numbers)
    rest.remove(a)
    rest.remove(b)
    value = result_of(a, op, b)
    return rest if value is None else [*rest, value]


def draw_chain(count: int, rng: Rng) -> tuple[list[int], list[Move], int]:
    """Draw a task: `count` given numbers (sorted), moves that use them all, and the target that they end in.

    The target is not among the given numbers and no result before the last; from 4 numbers on it is no combination
    of two given numbers either.
    """
    while True:
        given = sorted(int(n) for n in rng.integers(1, MAX_GIVEN + 1, size=count))
        chain, results = _random_chain(given, rng)
        *earlier, target = results
        near = {*given, *earlier}
        if count >= 4:
            near.update(v for a, op, b in moves(given) if (v := result_of(a, op, b)) is not None)
        if target not in near:
            return given, chain, target


def solve(numbers: Sequence[int], target: int) -> list[Move] | None:
    """Search all ways to make `target` from some of `numbers`; shortest prefix of moves first found, or `None`.

    Depth first over multisets, each visited once. Meant for up to 4 numbers (a few thousand multisets).
    """
    return _search(tuple(sorted(numbers)), target, set())


def _search(numbers: tuple[int, ...], target: int, seen: set[tuple[int, ...]]) -> list[Move] | None:
    if target in numbers:
        return []
    if numbers in seen:
        return None
    seen.add(numbers)
    for move in moves(numbers):
        rest = _search(tuple(sorted(combined(numbers, move))), target, seen)
        if rest is not None:
            return [move, *rest]
    return None


def _random_chain(given: Sequence[int], rng: Rng) -> tuple[list[Move], list[int]]:
    """Combine random pairs by random operations until one number is left; return the moves and their results.

    `* 1` and `/ 1`, which change nothing, are left out; where nothing else is allowed the pair is subtracted, or
    divided when equal.
    """
    numbers = list(given)
    chain: list[Move] = []
    results: list[int] = []
    while len(numbers) > 1:
        i, j = rng.choice(len(numbers), size=2, replace=False)
        a, b = numbers[i], numbers[j]
        ops: list[Op] = [op for op in OPS if allowed(a, op, b) and not (op in "*/" and 1 in (a, b))]
        if not ops:
            a, b = max(a, b), min(a, b)
            ops = ["-" if a > b else "/"]
        move: Move = (a, ops[int(rng.integers(len(ops)))], b)
        chain.append(move)
        numbers = combined(numbers, move)
        results.append(numbers[-1])
    return chain, results
