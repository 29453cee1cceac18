"""The runner: grows the trees of each step, asks the allocator, enforces the budget, isolates failures.

One asyncio process. Whatever finishes first, the trees are the same: a tree is driven by its own loop, hears of
its leaves in dispatch order, spends its own share of the budget and draws from its own random streams.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from agentgym import seeding
from agentgym.env import Env
from agentgym.errors import AgentGymError, BadInput, SystemicFailure
from agentgym.messages import ChatMessage
from agentgym.rollout.allocators.base import Allocator, Event, Expansion, ForestView, LedgerView, TreeView, Watch
from agentgym.rollout.episode import Player, Setting
from agentgym.rollout.grove import Grove, Job
from agentgym.rollout.journal import step_event, tree_event
from agentgym.rollout.ledger import UNITS, Amount, Purse
from agentgym.rollout.predictors import CLIP, Predictor
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Status
from agentgym.tasks import Task

_HOPELESS = 16
"""Failed rollouts without a single good one after which a run gives up."""


@dataclass(frozen=True, slots=True)
class StepLedger:
    """What the allocator sees of the budget at the start of a step and when the step is idle."""

    amount: Amount

    def left(self, unit: str = "leaves") -> float:
        """See `LedgerView.left`."""
        return float(getattr(self.amount, unit))


@dataclass(slots=True)
class Progress:
    """Running totals, handed to the progress callback after each leaf and step."""

    leaves: int = 0
    failed: int = 0
    successes: int = 0
    steps: int = 0
    reasons: Counter[str] = field(default_factory=Counter)


class Runner:
    """Runs steps.

    Args:
        setting: what all rollouts share.
        allocator: decides where to branch.
        concurrency: continuations in flight.
        recorded: trees that a journal already has, by `(step, index)`: what they hold is not done again.
        finished: steps that a journal has as finished.
        progress: called after each leaf and at the end of each step.
    """

    def __init__(
        self,
        setting: Setting,
        allocator: Allocator,
        *,
        concurrency: int = 64,
        recorded: Mapping[tuple[int, int], Tree] | None = None,
        finished: frozenset[int] = frozenset(),
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self._s = replace(setting, keep_snapshots=allocator.snapshots)
        self._player = Player(self._s)
        self._allocator = allocator
        self._slots = asyncio.Semaphore(concurrency)
        self._recorded = recorded or {}
        self._finished = finished
        self._dispatched: Counter[str] = Counter()
        self._notify = progress
        self._predictor = allocator.predictor.initial() if allocator.predictor is not None else None
        self.progress = Progress()

    async def step(self, number: int, tasks: Sequence[Task], budget: Amount) -> list[Tree]:
        """Grow one tree for each task within `budget`, then let the predictor learn from them.

        Args:
            number: number of the step within the run.
            tasks: the tasks of the step.
            budget: what the step may spend.

        Returns:
            The trees, in the order of `tasks`.

        Raises:
            SystemicFailure: nothing but failures.
        """
        if number in self._finished:
            trees = [self._recorded[number, index] for index in range(len(tasks))]
            self._dispatched.update(task.id for task in tasks)
            for tree in trees:
                self._count_all(tree)
        else:
            trees = await self._run_step(number, tasks, budget)
        if self._predictor is not None:
            self._predictor = self._predictor.updated(trees)
        self.progress.steps += 1
        self._notify(self.progress)
        return trees

    async def _run_step(self, number: int, tasks: Sequence[Task], budget: Amount) -> list[Tree]:
        began, before = time.monotonic(), self._s.counters.copy()
        groves = await self._plant(number, tasks)
        await self._grow(number, groves, budget)
        self._give_up_if_hopeless(at_least=1)
        trees = [grove.tree for grove in groves]
        for tree in trees:
            tree.release()
        if self._s.journal is not None:
            spent = self._s.counters - before
            self._s.journal.write(step_event(number, seconds=time.monotonic() - began, **spent))
        return trees

    # --- planting ---------------------------------------------------------------------------------------------

    async def _plant(self, number: int, tasks: Sequence[Task]) -> list[Grove]:
        """Reset an env for each task and start its tree."""
        places = []
        for index, task in enumerate(tasks):
            places.append((index, task, self._dispatched[task.id]))
            self._dispatched[task.id] += 1
        async with asyncio.TaskGroup() as group:
            planted = [group.create_task(self._plant_one(number, *place)) for place in places]
        return [task.result() for task in planted]

    async def _plant_one(self, number: int, index: int, task: Task, dispatch: int) -> Grove:
        async with self._slots:
            start, opening, error = await self._reset(task, dispatch)
        prompt = self._s.renderer.prompt(opening, self._s.pool.tools) if opening else []
        tree = self._recorded.get((number, index))
        if tree is None:
            tree = Tree(
                task.id,
                task.level,
                f"{number}.{index}",
                index,
                prompt,
                step=number,
                messages=opening,
                tools=[spec.schema for spec in self._s.pool.tools],
                sampling=self._s.sampling,
            )
            if self._s.journal is not None:
                self._s.journal.write(tree_event(tree))
        elif prompt and tree.prompt_ids.tolist() != prompt:
            raise BadInput(f"task {task.id} no longer starts as it did in this run; the env or the template has changed")
        if error is not None and not tree.failed:
            self._player.record_stillborn(tree, error)
            self._count_failure(str(error))
        return Grove(tree, task, dispatch, start)

    async def _reset(
        self, task: Task, dispatch: int
    ) -> tuple[StackSnapshot | None, list[ChatMessage], RolloutFailure | None]:
        """Reset an env, in a fresh one after a failure, and capture its first state."""
        failure: RolloutFailure | None = None
        for _ in range(self._s.retries + 1):
            host = self._s.pool.acquire()
            try:
                info = await host.reset(task, seeding.derive(self._s.seed, "env", task.id, dispatch))
                start = await host.snapshot()
            except Exception as error:  # boundary: the env's code
                failure = RolloutFailure.of_env(error)
                await self._s.pool.discard(host)
            else:
                self._s.pool.release(host)
                system: list[ChatMessage] = [{"role": "system", "content": self._s.pool.instructions}]
                return start, (system if self._s.pool.instructions else []) + info["messages"], None
        return None, [], failure

    # --- growing ----------------------------------------------------------------------------------------------

    async def _grow(self, number: int, groves: list[Grove], budget: Amount) -> None:
        views = [TreeView(i, grove.tree) for i, grove in enumerate(groves)]
        alive = [view for view, grove in zip(views, groves, strict=True) if grove.start is not None]
        ledger = StepLedger(budget)
        proposals = self._propose(Event.START, alive, ledger, "start", number)
        first = self._cut(proposals, groves, budget.leaves)
        counts = [sum(1 for e in first if e.tree == i) for i in range(len(groves))]
        for grove, count, share in zip(groves, counts, self._shares(budget, counts), strict=True):
            grove.purse = Purse(replace(share, leaves=share.leaves + count))
        async with asyncio.TaskGroup() as group:
            for index, grove in enumerate(groves):
                mine = [e for e in first if e.tree == index]
                group.create_task(self._drive(group, index, grove, mine))
        if self._allocator.watches is not Watch.NOTHING:
            await self._spill(number, groves, budget)

    @staticmethod
    def _shares(budget: Amount, counts: Sequence[int]) -> list[Amount]:
        """Split what the first proposals left over in proportion to the continuations that each tree got."""
        return replace(budget, leaves=budget.leaves - sum(counts)).split(counts)

    async def _drive(self, group: asyncio.TaskGroup, index: int, grove: Grove, first: list[Expansion]) -> None:
        """Run one tree: hear of its leaves in dispatch order, ask the allocator, dispatch what it wants."""
        watches, asked = self._allocator.watches, 0
        order = deque(self._dispatch(group, [grove] * (index + 1), first, grove.purse))
        fresh: list[int] = []
        while order:
            job, running = order.popleft()
            await running
            if job.end is not None and grove.tree.is_leaf(job.end):
                grove.delivered.append(job.end)
                fresh.append(job.end)
            if watches is Watch.LEAF and fresh:
                event = Event.LEAF
            elif watches is Watch.TREE and not order:
                event = Event.TREE
            else:
                continue
            left = int(grove.purse.left())
            view = TreeView(index, grove.tree, tuple(grove.delivered), tuple(fresh), left)
            fresh = []
            wanted = self._propose(event, [view], grove.purse, grove.tree.group, asked) if left else []
            asked += 1
            kept = self._cut(wanted, [grove] * (index + 1), left)
            order.extend(self._dispatch(group, [grove] * (index + 1), kept, grove.purse))
