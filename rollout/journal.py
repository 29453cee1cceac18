"""The journal: append-only JSON lines, the truth of which trees are a projection."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from agentgym.errors import AgentGymError, BadInput, JournalError
from agentgym.rollout import records
from agentgym.rollout.records import Record
from agentgym.rollout.tree import Tree

FILE = "journal.jsonl"
_LOCK = ".lock"
_BLOCK = 1 << 16


class Journal:
    """Writes the journal of a run folder.

    Opening repairs a torn tail: what follows the last complete, valid line is cut off. Each `write` is one
    unbuffered system call of whole lines, so that a killed process loses at most what it had not yet handed over.
    One process at a time may hold it.

    Args:
        folder: the run folder. It must exist.

    Attributes:
        dropped: bytes of torn tail that opening cut off.

    Raises:
        BadInput: another process is writing this journal.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / FILE
        self._lock = os.open(self.path.with_name(_LOCK), os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise BadInput(f"another process is writing {self.path}; wait for it or choose another folder") from None
        self._file = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_APPEND, 0o644)
        self.dropped = _repair(self._file)
        self._open = True

    def write(self, *events: Mapping[str, Any]) -> None:
        """Append records (see `agentgym.rollout.records`) in one system call, stamped with the time (`t.at`).

        Raises:
            JournalError: the journal is closed.
        """
        if not self._open:
            raise JournalError(f"{self.path} is closed")
        now = round(time.time(), 3)
        stamped = [{**event, "t": {"at": now, **event.get("t", {})}} for event in events]
        lines = b"".join([records.dumps(event) for event in stamped])
        while lines:
            lines = lines[os.write(self._file, lines) :]

    def close(self) -> None:
        """Flush to disk and let go of the file. Idempotent."""
        if self._open:
            self._open = False
            os.fsync(self._file)
            os.close(self._file)
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def scan(folder: str | Path) -> Iterator[tuple[int, Record]]:
    """Yield `(line number, record)` of a journal. A torn tail is left out; it is repaired when the run resumes.

    Raises:
        BadInput: the folder has no journal.
        JournalError: a line that is not the last is damaged.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise BadInput(f"{folder} is no run folder: it has no {FILE}")
    damaged: str | None = None
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = _parse(line)
            if record is None:
                damaged = damaged or f"{path}, line {number}: not a JSON object: {line[:80]!r}"
            elif damaged is not None:
                raise JournalError(damaged)
            else:
                yield number, record


def project(folder: str | Path) -> tuple[list[Tree], dict[str, float]]:
    """Build the trees that a journal tells of, in the order in which they were started, in linear time.

    Returns:
        The trees, and the counters of all `step` records summed (`env_steps`, `restores`, `seconds` ...).

    Raises:
        BadInput: the folder has no journal.
        JournalError: a damaged line, a node that is recorded twice or whose parent is missing, or any other record
            that the tree refuses; the message names the line.
    """
    trees: dict[str, tuple[Tree, dict[str, int]]] = {}
    counters: dict[str, float] = {}
    for number, record in scan(folder):
        try:
            if record["e"] == "step":
                _count(counters, record)
            elif record["e"] != "end":
                _project(trees, record)
        except (AgentGymError, LookupError, ValueError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise JournalError(f"{Path(folder) / FILE}, line {number}: {what}") from error
    return [tree for tree, _ in trees.values()], counters


def read(folder: str | Path) -> list[Tree]:
    """Return the trees of `project`."""
    return project(folder)[0]


def timeless(folder: str | Path) -> list[bytes]:
    """Return the lines of a journal sorted and without what depends on timing: equal for equal runs."""
    return sorted(orjson.dumps(records.timeless(record)) for _, record in scan(folder))


def _project(trees: dict[str, tuple[Tree, dict[str, int]]], record: Record) -> None:
    group = record["tree"]
    if record["e"] == "tree":
        if group in trees:
            raise JournalError(f"tree {group} is recorded twice")
        trees[group] = (records.start(record), {"": 0})
    elif group not in trees:
        raise JournalError(f"tree {group} was never started")
    else:
        records.replay(*trees[group], record)


def _count(counters: dict[str, float], record: Record) -> None:
    for name, value in {**record, **record.get("t", {})}.items():
        if name not in ("e", "t", "at", "step") and isinstance(value, int | float):
            counters[name] = counters.get(name, 0) + value


def _parse(line: bytes) -> Record | None:
    """Return the record of a complete line, or `None` for what is not one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _repair(file: int) -> int:
    """Cut off what follows the last valid line. Returns the number of bytes dropped."""
    size = end = os.fstat(file).st_size
    while end:
        start = _line_start(file, end)
        if _parse(os.pread(file, end - start, start)) is not None:
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return size - end


def _line_start(file: int, end: int) -> int:
    """Return the offset at which the line that ends at `end` starts."""
    at = end - 1
    while at > 0:
        block = os.pread(file, min(_BLOCK, at), max(0, at - _BLOCK))
        newline = block.rfind(b"\n")
        if newline >= 0:
            return at - len(block) + newline + 1
        at -= len(block)
    return 0
