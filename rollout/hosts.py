"""Env hosts: how the runner calls an env, by what the env declares in `calls`.

`inline` envs are called in the event loop, so no deadline can interrupt them: an env that declares it promises to
be cheap and pure. `thread` and `affine` envs live in a daemon thread of their own, from construction to close.
`async` envs are awaited. A host whose call passed its deadline is fenced: it is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from agentgym import stack
from agentgym.env import Env
from agentgym.errors import DeadlineExceeded, UnsupportedSnapshot
from agentgym.messages import Message
from agentgym.stack import AnyEnv, StackSnapshot
from agentgym.tasks import Task
from agentgym.tool_env import AsyncToolEnv

T = TypeVar("T")
StepResult: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]
MakeEnv: TypeAlias = Callable[[], AnyEnv]


class Host(Protocol):
    """One env instance behind an async face."""

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """Start an episode of `task` and return `info`."""
        ...

    async def step(self, message: Message) -> StepResult:
        """Step the env."""
        ...

    async def snapshot(self) -> StackSnapshot:
        """Capture the whole wrapper stack."""
        ...

    async def restore(self, saved: StackSnapshot) -> None:
        """Go back to `saved`."""
        ...

    async def reseed(self, seed: int) -> None:
        """Give the episode randomness of its own from here on."""
        ...

    async def close(self) -> None:
        """Release the env."""
        ...


class InlineHost:
    """Calls the env in the event loop."""

    def __init__(self, env: AnyEnv) -> None:
        self._env = env

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """See `Host`."""
        return self._env.reset(seed=seed, options={"task": task})[1]

    async def step(self, message: Message) -> StepResult:
        """See `Host`."""
        return self._env.step(message)  # type: ignore[return-value]

    async def snapshot(self) -> StackSnapshot:
        """See `Host`."""
        return stack.snapshot(self._env)

    async def restore(self, saved: StackSnapshot) -> None:
        """See `Host`."""
        stack.restore(self._env, saved)

    async def reseed(self, seed: int) -> None:
        """See `Host`."""
        core_of(self._env)._reseed(seed)

    async def close(self) -> None:
        """See `Host`."""
        self._env.close()


class ThreadHost:
    """Runs the env in a daemon thread of its own, with a deadline on every call."""

    def __init__(self, make: MakeEnv, deadline: float) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._deadline = deadline
        self._fenced = False
        self._make = make
        self._inner: InlineHost | None = None
        threading.Thread(target=self._work, name="agentgym-env", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    async def _call(self, what: str, function: Callable[[InlineHost], Awaitable[T]]) -> T:
        if self._fenced:
            raise DeadlineExceeded("this env was abandoned after an earlier call passed its deadline")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                if self._inner is None:
                    self._inner = InlineHost(self._make())
                result = _finish(function(self._inner))
            except BaseException as error:  # boundary: whatever the env raises belongs to the caller
                _deliver(loop, future, error=error)
            else:
                _deliver(loop, future, result=result)

        self._jobs.put(job)
        try:
            async with asyncio.timeout(self._deadline) as clock:
                return await future
        except TimeoutError:
            if not clock.expired():
                raise
            self._fence()
            raise DeadlineExceeded(f"env {what} took longer than {self._deadline:g} s") from None
        except asyncio.CancelledError:
            self._fence()
            raise

    def _fence(self) -> None:
        """Abandon the env: its thread closes it once the call that it is in returns, and ends."""
        self._fenced = True
        self._jobs.put(self._close_abandoned)
        self._jobs.put(None)

    def _close_abandoned(self) -> None:
        if self._inner is not None:
            with contextlib.suppress(Exception):  # boundary: closing a failed env may fail again
                _finish(self._inner.close())

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """See `Host`."""
        return await self._call("reset", lambda host: host.reset(task, seed))

    async def step(self, message: Message) -> StepResult:
        """See `Host`."""
        return await self._call("step", lambda host: host.step(message))

    async def snapshot(self) -> StackSnapshot:
        """See `Host`."""
        return await self._call("snapshot", lambda host: host.snapshot())

    async def restore(self, saved: StackSnapshot) -> None:
        """See `Host`."""
        await self._call("restore", lambda host: host.restore(saved))

    async def reseed(self, seed: int) -> None:
        """See `Host`."""
        await self._call("reseed", lambda host: host.reseed(seed))

    async def close(self) -> None:
        """See `Host`."""
        if not self._fenced:
            if self._inner is not None:
                await self._call("close", lambda host: host.close())
            self._fenced = True
            self._jobs.put(None)


class AsyncHost:
    """Awaits a natively async env, with a deadline on every call. Wrappers are not supported."""

    def __init__(self, env: AnyEnv, deadline: float) -> None:
        if not isinstance(env, AsyncToolEnv):
            what = type(env).__name__
            raise UnsupportedSnapshot(f"an async env must be an AsyncToolEnv without wrappers, not {what}")
        self._env = env
        self._deadline = deadline

    async def _within(self, what: str, call: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._deadline) as clock:
                return await call
        except TimeoutError:
            if not clock.expired():
                raise
            raise DeadlineExceeded(f"env {what} took longer than {self._deadline:g} s") from None

    async def reset(self, task: Task, seed: int) -> dict[str, Any]:
        """See `Host`."""
        return (await self._within("reset", self._env.areset(seed=seed, options={"task": task})))[1]

    async def step(self, message: Message) -> StepResult:
        """See `Host`."""
        return await self._within("step", self._env.astep(message))

    async def snapshot(self) -> StackSnapshot:
        """See `Host`."""
        return StackSnapshot((), await self._within("snapshot", self._env.asnapshot()))

    async def restore(self, saved: StackSnapshot) -> None:
        """See `Host`."""
        await self._within("restore", self._env.arestore(saved.core))

    async def reseed(self, seed: int) -> None:
        """See `Host`."""
        self._env._reseed(seed)

    async def close(self) -> None:
        """See `Host`."""
        await self._within("close", self._env.aclose())


class HostPool:
    """Hosts of one env, made when needed and used again.

    Args:
        make: makes one env.
        deadline: seconds that one call of a threaded or async env may take.

    Attributes:
        calls: how the env may be called.
        tools: its tools.
        instructions: its system prompt.
        turn_limit: `task -> most turns of an episode`.
        covered: whether snapshots cover all that an episode touches.
    """

    def __init__(self, make: MakeEnv, deadline: float) -> None:
        self._make = make
        self._deadline = deadline
        probe = make()
        core = core_of(probe)
        self.calls = core.calls
        self.tools = core.tools
        self.instructions = core.instructions
        self.turn_limit = core.most_turns
        self.covered = core.touches <= core.covers
        self._idle: list[Host] = []
        self._all: list[Host] = []
        probe.close()

    def acquire(self) -> Host:
        """Return an idle host, or a new one."""
        if self._idle:
            return self._idle.pop()
        host: Host
        if self.calls == "inline":
            host = InlineHost(self._make())
        elif self.calls == "async":
            host = AsyncHost(self._make(), self._deadline)
        else:
            host = ThreadHost(self._make, self._deadline)
        self._all.append(host)
        return host

    def release(self, host: Host) -> None:
        """Give a healthy host back."""
        self._idle.append(host)

    async def discard(self, host: Host) -> None:
        """Close a host after a failure and never use it again."""
        self._all.remove(host)
        await _quietly_close(host)

    async def close(self) -> None:
        """Close every host. Idempotent."""
        hosts, self._all, self._idle = self._all, [], []
        for host in hosts:
            await _quietly_close(host)


def core_of(env: AnyEnv) -> Env:
    """Return the env inside all wrappers. Raises `UnsupportedSnapshot` unless it is one of ours."""
    core = env.unwrapped
    if not isinstance(core, Env):
        raise UnsupportedSnapshot(f"{type(core).__name__} is not an agentgym.Env")
    return core


async def _quietly_close(host: Host) -> None:
    """Close a host that may be broken: its failure was already recorded."""
    try:
        await host.close()
    except Exception:  # boundary: closing a failed env may fail again
        return


def _finish(call: Awaitable[T]) -> T:
    """Run a coroutine that never suspends (an `InlineHost` method) to its end."""
    try:
        call.__await__().send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("an inline env call suspended")


def _deliver(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    *,
    result: T | None = None,
    error: BaseException | None = None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(settle)
