"""Tasks and task sets: what an episode is about."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

from agentgym import seeding
from agentgym.errors import BadInput, UnknownName
from agentgym.seeding import Rng

MakeTask: TypeAlias = Callable[[Rng, str], Mapping[str, Any]]
_TRIES = 500


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a task set.

    Attributes:
        id: `split/level/index`, unique within the task set.
        level: name of the difficulty level.
        data: JSON-safe content, read by the env's `begin`. Never mutated.
    """

    id: str
    level: str
    data: Mapping[str, Any]

    @property
    def split(self) -> str:
        """The split that the task belongs to."""
        return self.id.partition("/")[0]


class TaskSet:
    """Tasks by split, level and index, made on demand.

    Args:
        sizes: number of tasks of each split, e.g. `{"train": 2000, "validation": 200, "test": 200}`.
        get: makes the content of one task from `(split, level, index)`.
        mix: share of each level in the default mix; the keys are the levels, the values sum to 1.
    """

    def __init__(
        self, sizes: Mapping[str, int], get: Callable[[str, str, int], Mapping[str, Any]], mix: Mapping[str, float]
    ) -> None:
        if not sizes or min(sizes.values()) < 1:
            raise BadInput(f"every split needs at least one task, got {dict(sizes)}")
        if any("/" in name for name in [*sizes, *mix]):
            raise BadInput("split and level names must not contain '/'")
        if abs(sum(mix.values()) - 1) > 1e-9 or min(mix.values()) < 0:
            raise BadInput(f"the shares of the levels must be >= 0 and sum to 1, got {dict(mix)}")
        self.sizes = dict(sizes)
        self.mix = dict(mix)
        self._content = lru_cache(maxsize=4096)(get)

    @classmethod
    def generated(
        cls,
        make: MakeTask,
        *,
        sizes: Mapping[str, int],
        mix: Mapping[str, float] | Sequence[str] = ("default",),
        key: Callable[[Mapping[str, Any]], Any] = lambda data: data,
    ) -> TaskSet:
        """Make tasks with a seeded generator, without overlap between splits.

        The content of a task belongs to exactly one split, by a hash of its key's JSON: the generator is drawn
        from until it gives content of the wanted split. So no test task can ever be a training task.

        Args:
            make: `(rng, level) -> JSON-safe dict`; must use no other randomness.
            sizes: number of tasks of each split.
            mix: share of each level, or the levels in equal shares.
            key: the part of the content that makes two tasks the same, JSON-safe; all of it by default. Leave out
                what the policy does not see, such as a stored solution.
        """
        splits = list(sizes)

        def get(split: str, level: str, index: int) -> Mapping[str, Any]:
            for attempt in range(_TRIES):
                data = make(seeding.rng(0, "task", split, level, index, attempt), level)
                if splits[_bucket(key(data), len(splits))] == split:
                    return data
            raise BadInput(f"the generator gave no task of split {split!r}, level {level!r} in {_TRIES} tries")

        return cls(sizes, get, mix if isinstance(mix, Mapping) else {level: 1 / len(mix) for level in mix})

    @classmethod
    def from_rows(cls, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> TaskSet:
        """Wrap given rows: `{"train": [...], "test": [...]}`. All rows have the level `default`."""
        return cls({s: len(r) for s, r in rows.items()}, lambda split, _, index: rows[split][index], {"default": 1.0})

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the difficulty levels."""
        return tuple(self.mix)

    def size(self, split: str) -> int:
        """Number of tasks of a split. Raises `UnknownName` for an unknown split."""
        if split not in self.sizes:
            raise UnknownName.of("split", split, self.sizes)
        return self.sizes[split]

    def task(self, split: str, index: int, level: str | None = None) -> Task:
        """Return task `index` of a split.

        Args:
            split: name of the split.
            index: position, `0 <= index < size(split)`.
            level: name of the level, or `None` for the level that the default mix gives this index.

        Raises:
            BadInput: an index out of range.
            UnknownName: an unknown split or level.
        """
        if not 0 <= index < self.size(split):
            raise BadInput(f"task index {index} is out of range: split {split!r} has {self.size(split)} tasks")
        if level is None:
            level = self.level_of(index)
        elif level not in self.mix:
            raise UnknownName.of("level", level, self.mix)
        return Task(f"{split}/{level}/{index}", level, self._content(split, level, index))

    def by_id(self, task_id: str) -> Task:
        """Return the task named `split/level/index`. Raises `BadInput` for a malformed id."""
        parts = task_id.split("/")
        if len(parts) != 3 or not parts[2].isdecimal():
            raise BadInput(f"task id {task_id!r} is not of the form split/level/index")
        return self.task(parts[0], int(parts[2]), parts[1])

    def level_of(self, index: int) -> str:
        """Return the level of task `index` in the default mix."""
        if len(self.mix) == 1:
            return next(iter(self.mix))
        point = seeding.derive(0, "level", index) / 2**63
        for level, share in self.mix.items():
            point -= share
            if point < 0:
                return level
        return next(level for level in reversed(self.mix) if self.mix[level] > 0)


def _bucket(key: Any, count: int) -> int:
    text = json.dumps(key, sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % count
