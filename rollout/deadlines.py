"""A deadline on every engine call at next to no cost: one watchdog instead of one timer for each call.

`asyncio.timeout` costs several microseconds and leaves a cancelled timer behind each time; a run makes thousands of
short calls with a long deadline that hardly ever fires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentgym.errors import DeadlineExceeded

T = TypeVar("T")
_CHECKS = 20


class Watchdog:
    """Runs calls with one common deadline.

    Args:
        what: names the call in the error.
        seconds: the deadline. A call is cancelled between 1 and 1.05 times this long after it started.
    """

    def __init__(self, what: str, seconds: float) -> None:
        self._what, self._seconds = what, seconds
        self._running: dict[asyncio.Task[Any], float] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Await `call`.

        Raises:
            DeadlineExceeded: it took too long; it was cancelled.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is None:
            raise RuntimeError("a watchdog needs a running task")
        self._running[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._seconds / _CHECKS, self._check, loop)
        try:
            return await call
        except (Exception, asyncio.CancelledError) as error:
            if self._was_late(task) and not task.cancelling():
                raise DeadlineExceeded(f"{self._what} took longer than {self._seconds:g} s") from error
            raise
        finally:
            self._was_late(task)
            self._running.pop(task, None)

    def _was_late(self, task: asyncio.Task[Any]) -> bool:
        """Whether `task` was cancelled by `_check`, which is undone, whatever the call made of it."""
        late = task in self._late
        if late:
            self._late.discard(task)
            task.uncancel()
        return late

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() - self._seconds
        for task in [task for task, began in self._running.items() if began <= due]:
            del self._running[task]
            self._late.add(task)
            task.cancel()
        self._timer = loop.call_later(self._seconds / _CHECKS, self._check, loop) if self._running else None
