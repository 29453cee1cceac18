"""One run seed, many independent streams.

Every random stream is derived from the run seed and a path of names, so that a stream depends neither on
how many draws other streams made nor on the order in which things finish.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np

Rng: TypeAlias = np.random.Generator
_MASK63 = (1 << 63) - 1


def derive(seed: int, *path: int | str) -> int:
    """Derive a 63-bit seed from `seed` and a path of names.

    Args:
        seed: the run seed, or the result of another `derive`.
        path: integers and strings that name the stream, e.g. `("policy", task_id, "0.0.1", attempt)`.
            `1` and `"1"` name different streams.

    Returns:
        An integer in `[0, 2**63)`, equal on every machine and Python version.
    """
    text = f"{seed}\x1f" + "\x1f".join(["s" + p if isinstance(p, str) else f"i{p}" for p in path])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _MASK63


def rng(seed: int, *path: int | str) -> Rng:
    """Return a private NumPy generator (PCG64) for the stream named by `path`."""
    return np.random.Generator(np.random.PCG64(derive(seed, *path) if path else seed))
