"""Integer allocation problems of TRACE (arXiv 2606.11119), solved exactly. Pure functions over plain lists.

The paper states the objectives; the solvers are ours. Ties go to the earlier entry, so a caller that wants them
broken at random shuffles what it passes.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from agentgym.errors import BadInput


def expected_mixed(v: float, m: int) -> float:
    """Return the probability that `m` rollouts of success probability `v` hold a success and a failure.

    `1 - v^m - (1-v)^m`; 0 for `m < 2`.
    """
    return 1.0 - v**m - (1.0 - v) ** m if m >= 2 else 0.0


def solve_roots(v: Sequence[float], total: int, cap: int) -> list[int]:
    """Distribute root rollouts over prompts.

    Maximises `sum_i expected_mixed(v_i, m_i)` with `sum_i m_i <= total` and every `m_i` 0 or in `[2, cap]` (one
    rollout alone has nobody to be compared with). The value is concave but for its first step, so: buy in order of
    value per rollout, the first two together at `v(1-v)` each, then one by one at `v(1-v)(v^(m-1) + (1-v)^(m-1))`.
    A third one is worth exactly as much as each of a pair, so among equals a prompt with fewer rollouts comes first.
    When one rollout is left and a pair would be next, it either goes to the best prompt that already has two or
    more, or joins one taken back from the prompt that loses least, whichever is worth more. That is optimal (the
    tests compare with dynamic programming).

    Args:
        v: success probability of each prompt, in [0, 1].
        total: rollouts to distribute.
        cap: most rollouts of one prompt (>= 2).

    Returns:
        `m`, as long as `v`. It sums to `total`, unless all prompts are at `cap` or the last rollout could only be
        placed by a swap that lowers the value.

    Raises:
        BadInput: a probability outside [0, 1], or a cap below 2.
    """
    _check(v, "v")
    if cap < 2:
        raise BadInput(f"cap must be >= 2, because one rollout alone is never compared; got {cap}")
    counts = [0] * len(v)
    left = max(0, total)
    heap = [(-p * (1.0 - p), 0, i) for i, p in enumerate(v)]
    heapq.heapify(heap)
    waiting: tuple[float, int] | None = None
    while heap and left:
        gain, _, i = heapq.heappop(heap)
        if counts[i] == 0 and left == 1:
            waiting = waiting or (-gain, i)
            continue
        lump = 1 if counts[i] else 2
        if waiting and _swap(v, counts, pair=waiting, single=-gain):
            return counts
        counts[i] += lump
        left -= lump
        if counts[i] < cap:
            heapq.heappush(heap, (-_next_gain(v[i], counts[i]), counts[i], i))
    if left and waiting:
        _swap(v, counts, pair=waiting, single=0.0)
    return counts


def solve_prefixes(q: Sequence[float], total: int) -> list[int]:
    """Distribute continuations over prefixes.

    Maximises `sum_j 1 - q_j^K_j` with `sum_j K_j = total`, where `q_j` is the probability that a continuation
    from prefix j ends as its rollout did, so that `1 - q^K` is the probability that one of K flips the outcome. The
    marginal value `(1-q) q^(K-1)` falls with K, so buying the best next one is optimal.

    Args:
        q: agreement at each prefix, in [0, 1].
        total: continuations to distribute.

    Returns:
        `K`, as long as `q`; sums to `total` (nothing for an empty `q`).

    Raises:
        BadInput: a probability outside [0, 1].
    """
    _check(q, "q")
    counts = [0] * len(q)
    heap = [(p - 1.0, j) for j, p in enumerate(q)]
    heapq.heapify(heap)
    for _ in range(total if heap else 0):
        gain, j = heap[0]
        counts[j] += 1
        heapq.heapreplace(heap, (gain * q[j], j))
    return counts


def _next_gain(v: float, m: int) -> float:
    """Value of rollout `m + 1` of a prompt that has `m >= 2`."""
    return v * (1.0 - v) * (v ** (m - 1) + (1.0 - v) ** (m - 1) if m > 2 else 1.0)


def _swap(v: Sequence[float], counts: list[int], *, pair: tuple[float, int], single: float) -> bool:
    """Take one rollout back and buy the waiting pair with it, if that is worth more than `single`."""
    each, i = pair
    losses = [(_next_gain(v[j], m - 1), j) for j, m in enumerate(counts) if m >= 3]
    if not losses:
        return False
    loss, j = min(losses)
    if 2.0 * each - loss <= single:
        return False
    counts[j] -= 1
    counts[i] = 2
    return True


def _check(values: Sequence[float], name: str) -> None:
    for i, value in enumerate(values):
        if not 0.0 <= value <= 1.0:
            raise BadInput(f"{name}[{i}] must be a probability in [0, 1], got {value}")
