"""The runner: grows the trees of each step, asks the allocator, enforces the budget, isolates failures.

One asyncio process. Whatever finishes first, the trees are the same: a tree is driven by its own loop, hears of
its leaves in dispatch order, spends its own share of the budget and draws from its own random streams.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

from agentgym import seeding
from agentgym.errors import BadInput, SystemicFailure
from agentgym.messages import ChatMessage
from agentgym.rollout import records
from agentgym.rollout.allocators.base import (
    Allocator,
    Event,
    Expansion,
    ForestView,
    LedgerView,
    Start,
    TreeView,
    Watch,
)
from agentgym.rollout.episode import FOREIGN, Player, RolloutFailure, Setting
from agentgym.rollout.grove import ByReset, Grove, Job
from agentgym.rollout.hosts import Host
from agentgym.rollout.ledger import Amount, Entry, Purse
from agentgym.rollout.records import Record
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure, Status
from agentgym.stack import StackSnapshot
from agentgym.tasks import Task

_HOPELESS = 16
"""A run without a leaf gives up after so many failed rollouts, once each of as many first trees of a step has one."""


@dataclass(frozen=True, slots=True)
class StepLedger:
    """What the allocator sees of a budget that nothing spends from while it is asked."""

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
        self._hopeful: set[str] = set()
        self._predictor = allocator.predictor.initial() if allocator.predictor is not None else None
        self.progress = Progress()
        self.seconds = 0.0

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
                for leaf in tree.leaves:
                    self._count(tree, leaf)
        else:
            trees = await self._run_step(number, tasks, budget)
        if self._predictor is not None:
            self._predictor = self._predictor.updated(trees)
        self.progress.steps += 1
        self._notify(self.progress)
        return trees

    async def _run_step(self, number: int, tasks: Sequence[Task], budget: Amount) -> list[Tree]:
        began, before = time.monotonic(), self._s.counters.copy()
        self._hopeful = {_group(number, index) for index in range(min(_HOPELESS, len(tasks)))}
        groves = await self._plant(number, tasks)
        await self._grow(number, groves, budget)
        if self.progress.failed and not self.progress.leaves:
            self._give_up()
        trees = [grove.tree for grove in groves]
        for tree in trees:
            tree.release()
        seconds = time.monotonic() - began
        self.seconds += seconds
        if self._s.journal is not None:
            spent = self._s.counters - before
            self._s.journal.write(records.step(number, seconds=round(seconds, 3), **spent))
        return trees

    # --- planting ---------------------------------------------------------------------------------------------

    async def _plant(self, number: int, tasks: Sequence[Task]) -> list[Grove]:
        """Reset an env for each task and start its tree."""
        places = []
        for index, task in enumerate(tasks):
            places.append((index, task, self._dispatched[task.id]))
            self._dispatched[task.id] += 1
        events: list[list[Record]] = [[] for _ in tasks]
        try:
            async with _together() as group:
                planted = [group.create_task(self._plant_one(number, *place, events[place[0]])) for place in places]
        finally:
            if self._s.journal is not None:
                self._s.journal.write(*itertools.chain(*events))
        return [task.result() for task in planted]

    async def _plant_one(self, number: int, index: int, task: Task, dispatch: int, events: list[Record]) -> Grove:
        """Return a tree that is ready to grow; `events` gets what the journal has to be told of it."""
        tree = self._recorded.get((number, index))
        if tree is not None and _stillborn(tree):
            self._count(tree, tree.failed[0])
            return Grove(tree, task, dispatch, None)
        async with self._slots:
            start, opening, failure = await self._reset(task, dispatch)
        prompt = self._s.renderer.prompt(opening, self._s.pool.tools) if opening else []
        if tree is None:
            tree = Tree(
                task.id,
                task.level,
                _group(number, index),
                index,
                prompt,
                step=number,
                messages=opening,
                tools=[spec.schema for spec in self._s.pool.tools],
                sampling=self._s.sampling,
            )
            events.append(records.tree(tree))
        elif prompt and tree.prompt_ids.tolist() != prompt:
            raise BadInput(
                f"task {task.id} no longer starts as it did in this run; the env or the template has changed"
            )
        if failure is None and len(prompt) >= self._s.max_context:
            length = BadInput(f"the prompt has {len(prompt)} tokens, the context {self._s.max_context}")
            failure, start = RolloutFailure(Failure.PROMPT_TOO_LONG, length), None
        if failure is not None:
            node = tree.fail(0, ordinal=0, origin=0, failure=failure.kind, message=str(failure))
            events.append(records.failed(tree, node))
            self._count(tree, node)
        return Grove(tree, task, dispatch, start)

    async def _reset(
        self, task: Task, dispatch: int
    ) -> tuple[StackSnapshot | ByReset | None, list[ChatMessage], RolloutFailure | None]:
        """Reset an env, in a fresh one after a failure, and capture its first state."""
        failure: RolloutFailure | None = None
        seed = seeding.derive(self._s.seed, "env", task.id, dispatch)
        for _ in range(self._s.retries + 1):
            host: Host | None = None
            try:
                host = self._s.pool.acquire()
                info = await host.reset(task, seed)
                start = await host.snapshot() if self._s.pool.covered else ByReset(seed)
            except FOREIGN as error:  # boundary: the env's code
                failure = RolloutFailure.of_env(error)
                if host is not None:
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
        proposals = self._propose(Event.START, alive, StepLedger(budget), "start", number)
        first = self._cut(proposals, budget.leaves)
        mine = [[e for e in first if e.tree == index] for index in range(len(groves))]
        counts = [sum(e.count for e in part) for part in mine]
        rest = replace(budget, leaves=budget.leaves - sum(counts))
        for grove, count, share in zip(groves, counts, rest.split(counts), strict=True):
            grove.purse = Purse(replace(share, leaves=share.leaves + count))
        async with _together() as group:
            for index, (grove, part) in enumerate(zip(groves, mine, strict=True)):
                group.create_task(self._drive(group, index, grove, part))
        if self._allocator.watches is not Watch.NOTHING:
            await self._spill(number, groves, budget)

    async def _drive(self, group: asyncio.TaskGroup, index: int, grove: Grove, first: Sequence[Expansion]) -> None:
        """Run one tree: hear of its leaves in dispatch order, ask the allocator, dispatch what it wants."""
        watches, asked, ended = self._allocator.watches, 0, 0
        order = deque(self._dispatch(group, grove, first, grove.purse))
        fresh: list[int] = []
        while order:
            job, running = order.popleft()
            await running
            ended += 1
            if job.end is not None and grove.tree.is_leaf(job.end):
                grove.delivered.append(job.end)
                fresh.append(job.end)
            event = Event.LEAF if watches is Watch.LEAF and fresh else Event.TREE
            left = int(grove.purse.left())
            if not left or (event is Event.TREE and (watches is not Watch.TREE or order)):
                continue
            view = TreeView(index, grove.tree, tuple(grove.delivered), tuple(fresh), left)
            fresh = []
            ledger = StepLedger(grove.purse.left_after(ended))
            wanted = self._propose(event, [view], ledger, grove.tree.group, asked)
            asked += 1
            order.extend(self._dispatch(group, grove, self._cut(wanted, left), grove.purse))

    async def _spill(self, number: int, groves: Sequence[Grove], budget: Amount) -> None:
        """Offer what the trees left unspent, until the allocator wants nothing more."""
        spent = [grove.purse.spent() for grove in groves]
        pool = Purse(budget.minus(spent))
        asked = 0
        while left := int(pool.left()):
            views = [
                TreeView(i, grove.tree, tuple(grove.delivered), (), left)
                for i, grove in enumerate(groves)
                if grove.start is not None
            ]
            wanted = self._cut(self._propose(Event.STEP, views, pool, f"{number}.spill", asked), left)
            asked += 1
            if not wanted:
                return
            async with _together() as group:
                running = [
                    (groves[e.tree], *pair) for e in wanted for pair in self._dispatch(group, groves[e.tree], [e], pool)
                ]
            for grove, job, _ in running:
                if job.end is not None and grove.tree.is_leaf(job.end):
                    grove.delivered.append(job.end)

    def _propose(
        self, event: Event, views: Sequence[TreeView], ledger: LedgerView, *stream: int | str
    ) -> Sequence[Expansion]:
        """Ask the allocator and check what it answers."""
        predictor = self._predictor
        predict = predictor.predict if predictor is not None else _no_prediction
        rng = seeding.rng(self._s.seed, "allocator", *stream)
        proposals = self._allocator.propose(ForestView(event, views, predict), ledger, rng)
        trees = {view.index: view.tree for view in views}
        for e in proposals:
            if fault := _fault(trees.get(e.tree), e):
                raise BadInput(f"the allocator {self._allocator.name!r} proposed {e}: {fault}")
        return proposals

    @staticmethod
    def _cut(proposals: Sequence[Expansion], left: float) -> list[Expansion]:
        """Keep the first `left` continuations."""
        kept = []
        for e in proposals:
            count = int(min(e.count, left))
            if count:
                kept.append(replace(e, count=count))
            left -= count
        return kept

    def _dispatch(
        self, group: asyncio.TaskGroup, grove: Grove, expansions: Sequence[Expansion], purse: Purse
    ) -> list[tuple[Job, asyncio.Task[None]]]:
        """Start continuations, in order; each claims its share at once."""
        started = []
        turns = self._s.pool.turn_limit(grove.task)
        again = self._s.retries
        tokens = min(self._s.max_episode_tokens, turns * self._s.sampling.max_tokens)
        tokens += again * self._s.sampling.max_tokens
        for e in expansions:
            for _ in range(e.count):
                job = Job.dispatch(grove, e.anchor, e.propensity, self._s.retries)
                entry = purse.claim(tokens, turns + again)
                started.append((job, group.create_task(self._play(job, entry, purse))))
        return started

    async def _play(self, job: Job, entry: Entry, purse: Purse) -> None:
        if job.end is None:
            if await purse.admit(entry):
                async with self._slots:
                    await self._player.play(job, entry)
            else:
                self._s.counters["unstarted"] += 1
        purse.settle(entry, job.sampled, job.steps)
        if job.end is not None:
            self._count(job.grove.tree, job.end)

    # --- counting ---------------------------------------------------------------------------------------------

    def _count(self, tree: Tree, node: int) -> None:
        if tree.status[node] is Status.FAILED:
            self.progress.failed += 1
            self.progress.reasons[f"{tree.failure[node]}: {tree.error.get(node, '')}"[:300]] += 1
            self._hopeful.discard(tree.group)
        else:
            self.progress.leaves += 1
            self.progress.successes += tree.success[node] is True
        self._notify(self.progress)
        if self.progress.failed >= _HOPELESS and not self.progress.leaves and not self._hopeful:
            self._give_up()

    def _give_up(self) -> NoReturn:
        top = "; ".join(f"{count} x {reason}" for reason, count in self.progress.reasons.most_common(3))
        raise SystemicFailure(f"all {self.progress.failed} rollouts failed: {top}")


@asynccontextmanager
async def _together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first error of its tasks itself instead of a group of errors."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors.exceptions[0].__cause__


def _group(number: int, index: int) -> str:
    return f"{number}.{index}"


def _fault(tree: Tree | None, wanted: Expansion) -> str | None:
    """Say what is wrong with a proposal."""
    if tree is None:
        return "it was not asked about this tree"
    if not 0 <= wanted.anchor < tree.n_nodes:
        return f"the tree has {tree.n_nodes} nodes"
    if wanted.anchor and not tree.restorable(wanted.anchor):
        return "this node is no anchor (it is a leaf, failed, or has no snapshot)"
    if wanted.count < 1 or not 0 < wanted.propensity <= 1:
        return "count must be >= 1, propensity in (0, 1]"
    return None if wanted.start == Start() else "the runner knows no other start than 'sample'"


def _stillborn(tree: Tree) -> bool:
    """Whether a recorded tree never got a rollout: its env could not be reset, or its prompt was too long."""
    return bool(tree.failed) and (not tree.n_reply[0] or Failure.PROMPT_TOO_LONG in tree.failure.values())


def _no_prediction(view: TreeView, node: int) -> float:
    return 0.5
