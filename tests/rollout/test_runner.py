"""The runner: when it asks the allocator, what it refuses, when it gives up, what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import pickle
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import lab
import pytest

from agentgym.errors import BadInput, SystemicFailure
from agentgym.rollout import journal
from agentgym.rollout.allocators.base import Event, Expansion, ForestView, LedgerView, Start, Watch
from agentgym.rollout.types import Failure, StopReason
from agentgym.rollout.views import Forest
from agentgym.seeding import Rng


@dataclass(frozen=True)
class Probe:
    """An allocator for tests: `plan` answers, `log` keeps what it was shown."""

    name: ClassVar[str] = "probe"
    family: ClassVar[str] = "control"
    source: ClassVar[str] = "none"
    predictor: ClassVar[None] = None

    plan: Any = field(compare=False)
    watches: Watch = Watch.NOTHING
    snapshots: bool = True
    log: list[tuple[Event, list[int], list[str], float]] = field(default_factory=list, compare=False)

    def minimum(self, trees: int) -> int:
        return 1

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        new = [tree.tree.path_key(leaf) for tree in view.trees for leaf in tree.new_leaves]
        self.log.append((view.event, [tree.index for tree in view.trees], new, ledger.left()))
        return self.plan(view, ledger)


class Three(lab.Chatter):
    tasks = lab.lengths(3)


def probe(plan, env=Three, **keys):
    options = {key: keys.pop(key) for key in ("watches", "snapshots") if key in keys}
    allocator = Probe(plan, **options)
    keys.setdefault("policy", lab.Around(lab.dawdle))
    # An allocator's options go into the manifest: those of a probe are no JSON.
    config = {"tasks": 2, "budget": 12, **keys}
    return allocator, asyncio.run(_run(env, allocator, config))


async def _run(env, allocator, keys):
    policy = keys.pop("policy")
    return await lab.arun(env, policy=policy, allocator=allocator, **keys)


def roots(count):
    return lambda view: [Expansion(tree.index, count=count) for tree in view.trees]


# --- events -------------------------------------------------------------------------------------------------------


def test_an_allocator_that_watches_nothing_is_asked_once():
    allocator, forest = probe(lambda view, _: roots(3)(view))
    assert allocator.log == [(Event.START, [0, 1], [], 12.0)]
    assert forest.n_leaves == 6


def test_leaves_are_told_in_the_order_of_dispatch_whatever_ended_first():
    def plan(view, ledger):
        return roots(5)(view) if view.event is Event.START else []

    allocator, _ = probe(plan, watches=Watch.LEAF)
    told = {index: [new for event, trees, new, _ in allocator.log if trees == [index]] for index in (0, 1)}
    assert told == {index: [["0.0.0"], ["1.0.0"], ["2.0.0"], ["3.0.0"], ["4.0.0"]] for index in (0, 1)}
    assert allocator.log[-1] == (Event.STEP, [0, 1], [], 2.0)


def test_what_is_dispatched_after_a_leaf_is_told_after_what_was_dispatched_before():
    def plan(view, ledger):
        if view.event is Event.START:
            return [Expansion(0, count=2)]
        if view.event is Event.LEAF and len(view.trees[0].leaves) == 1:
            leaf = view.trees[0].new_leaves[0]
            return [Expansion(0, view.trees[0].anchors(leaf)[0], 2)]
        return []

    allocator, forest = probe(plan, watches=Watch.LEAF, tasks=1, budget=9)
    told = [new for event, _, new, _ in allocator.log if event is Event.LEAF]
    assert told == [["0.0.0"], ["1.0.0"], ["0.1.0"], ["0.2.0"]]
    assert [forest.trees[0].path_key(leaf.leaf) for leaf in forest.leaves] == ["0.0.0", "0.1.0", "0.2.0", "1.0.0"]


def test_a_tree_is_idle_when_all_that_it_waits_for_has_ended():
    def plan(view, ledger):
        if view.event is Event.START:
            return [Expansion(0, count=2), Expansion(1, count=1)]
        tree = view.trees[0]
        if view.event is Event.TREE and len(tree.leaves) < 4:
            return [Expansion(tree.index, tree.anchors(tree.leaves[0])[0])]
        return []

    allocator, _ = probe(plan, watches=Watch.TREE)
    mine = [(new, left) for event, trees, new, left in allocator.log if event is Event.TREE and trees == [0]]
    assert mine == [(["0.0.0", "1.0.0"], 6.0), (["0.1.0"], 5.0), (["0.2.0"], 4.0)]
    assert allocator.log[-1][0] is Event.STEP


def test_the_share_of_each_tree_is_in_proportion_to_its_rollouts():
    def plan(view, ledger):
        return [Expansion(0, count=2), Expansion(1, count=1)] if view.event is Event.START else []

    allocator, _ = probe(plan, watches=Watch.TREE)
    assert {(trees[0], left) for event, trees, _, left in allocator.log if event is Event.TREE} == {(0, 6.0), (1, 3.0)}


@pytest.mark.parametrize("watches", [Watch.LEAF, Watch.TREE, Watch.STEP])
def test_what_trees_leave_may_be_spent_anywhere_until_nothing_is_wanted(watches):
    def plan(view, ledger):
        if view.event is Event.START:
            return roots(1)(view)
        if view.event is Event.STEP and ledger.left() > 4:
            return [Expansion(1, count=3)]
        return []

    allocator, forest = probe(plan, watches=watches)
    assert [left for event, _, _, left in allocator.log if event is Event.STEP] == [10.0, 7.0, 4.0]
    assert [len(tree.leaves) for tree in forest.trees] == [1, 7]


def test_a_proposal_beyond_the_budget_is_cut_in_the_order_given():
    def plan(view, ledger):
        if view.event is Event.START:
            return [Expansion(1, count=5), Expansion(0, count=9), Expansion(1, count=9)]
        return [Expansion(0, count=99)]

    _allocator, forest = probe(plan, watches=Watch.TREE, budget=12)
    assert [len(tree.leaves) for tree in forest.trees] == [7, 5]


def test_a_proposal_of_an_idle_tree_is_cut_to_its_share():
    def plan(view, ledger):
        if view.event is Event.START:
            return roots(1)(view)
        return [Expansion(view.trees[0].index, count=99)] if view.event is Event.TREE else []

    _, forest = probe(plan, watches=Watch.TREE)
    assert [len(tree.leaves) for tree in forest.trees] == [6, 6]


def test_an_unfilled_budget_is_no_error():
    _, forest = probe(lambda view, _: [], watches=Watch.TREE)
    assert forest.n_leaves == 0
    assert [tree.n_nodes for tree in forest.trees] == [1, 1]


def test_a_failed_rollout_is_no_leaf_that_an_allocator_hears_of():
    class Lossy(Three):
        def hook(self, turn):
            if self.state["deep"]["thrown"][0] % 3 == 0:
                raise ConnectionError

    def plan(view, ledger):
        return roots(6)(view) if view.event is Event.START else []

    allocator, forest = probe(plan, Lossy, watches=Watch.LEAF, retries=0, tasks=1)
    assert 0 < forest.n_failed < 6
    told = [new for event, _, new, _ in allocator.log if event is Event.LEAF]
    assert told == [[forest.trees[0].path_key(leaf)] for leaf in forest.trees[0].leaves]
    assert "~" not in str(told)


def test_ordinals_count_continuations_and_below_the_root_0_is_the_anchors_own():
    def plan(view, ledger):
        if view.event is Event.START:
            return [Expansion(0, count=2)]
        tree = view.trees[0]
        if view.event is Event.TREE and len(tree.leaves) == 2:
            return [Expansion(0, tree.tree.path(tree.leaves[1])[1], 2), Expansion(0, 0)]
        return []

    _, forest = probe(plan, watches=Watch.TREE, tasks=1)
    tree = forest.trees[0]
    assert [tree.path_key(leaf) for leaf in tree.leaves] == ["0.0.0", "1.0.0", "1.1.0", "1.2.0", "2.0.0"]
    assert [tree.path_key(tree.origin[leaf]) for leaf in tree.leaves] == ["", "", "1", "1", ""]


def test_propensities_are_stored_on_leaves(tmp_path):
    _allocator, forest = probe(lambda view, _: [Expansion(0, count=2, propensity=0.25), Expansion(1)])
    assert [forest.trees[0].propensity[leaf] for leaf in forest.trees[0].leaves] == [0.25, 0.25]
    assert [forest.trees[1].propensity[leaf] for leaf in forest.trees[1].leaves] == [1.0]


# --- what it refuses ----------------------------------------------------------------------------------------------


def leaf_of(view):
    return view.trees[0].leaves[0]


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (lambda view: Expansion(7), "was not asked about this tree"),
        (lambda view: Expansion(0, 99), "the tree has 4 nodes"),
        (lambda view: Expansion(0, -1), "the tree has 4 nodes"),
        (lambda view: Expansion(0, leaf_of(view)), "no anchor"),
        (lambda view: Expansion(0, count=0), "count must be >= 1"),
        (lambda view: Expansion(0, propensity=0.0), r"propensity in \(0, 1\]"),
        (lambda view: Expansion(0, start=Start("force")), "no other start than 'sample'"),
    ],
)
def test_an_invalid_proposal_is_bad_input_that_names_it(wanted, says, tmp_path):
    def plan(view, ledger):
        return [Expansion(0)] if view.event is Event.START else [wanted(view)]

    with pytest.raises(BadInput, match=rf"allocator 'probe' proposed Expansion\(tree=.*: .*{says}"):
        probe(plan, watches=Watch.TREE, tasks=1)


def test_a_node_without_a_snapshot_is_no_anchor():
    def plan(view, ledger):
        return [Expansion(0)] if view.event is Event.START else [Expansion(0, 1)]

    with pytest.raises(BadInput, match="no anchor"):
        probe(plan, watches=Watch.TREE, snapshots=False, tasks=1)


# --- giving up ----------------------------------------------------------------------------------------------------


def test_when_every_env_fails_the_run_stops_with_the_top_reasons():
    class Broken(lab.Chatter):
        def begin(self, task, rng):
            raise ConnectionError("the server is down" if task.id.endswith("/3") else "no route")

    with pytest.raises(SystemicFailure) as caught:
        lab.run(Broken)
    assert str(caught.value) == (
        "all 4 rollouts failed: 3 x env_error: ConnectionError: no route; "
        "1 x env_error: ConnectionError: the server is down"
    )


def test_when_every_message_fails_the_run_stops_early():
    async def down(count, prompt_ids, sampling):
        await asyncio.sleep(0)
        raise ConnectionError("no engine")

    policy = lab.Around(down)
    with pytest.raises(SystemicFailure, match="x policy_error: ConnectionError: no engine"):
        lab.run(Three, policy=policy, tasks=100, budget=800, concurrency=4)
    assert len(policy.prompts) < 600


def test_a_systemic_failure_leaves_a_journal_that_tells_why(tmp_path):
    async def down(count, prompt_ids, sampling):
        raise ConnectionError("no engine")

    with pytest.raises(SystemicFailure):
        lab.run(Three, policy=lab.Around(down), out=tmp_path / "run")
    forest = Forest.load(tmp_path / "run")
    assert forest.n_leaves == 0
    assert set(lab.kinds(forest)) == {Failure.POLICY_ERROR}


def test_many_broken_tasks_do_not_stop_the_others():
    """The first tasks to end are the broken ones: there are 20 failures before there is any leaf."""

    class HalfBroken(lab.Chatter):
        tasks = lab.lengths(3)

        def begin(self, task, rng):
            if int(task.id.rpartition("/")[2]) % 2:
                raise ConnectionError("this one")
            return super().begin(task, rng)

    forest = lab.run(HalfBroken, tasks=40, budget=40, allocator_options={"n": 1})
    assert (forest.n_leaves, forest.n_failed) == (20, 20)


def test_one_task_that_fails_at_once_does_not_stop_the_others():
    class FirstBroken(lab.Chatter):
        tasks = lab.lengths(3)

        def hook(self, turn):
            if self.task.id.endswith("/0"):
                raise ConnectionError("this one")

    forest = lab.run(FirstBroken, tasks=2, budget=64, allocator_options={"n": 32}, retries=0)
    assert (forest.n_leaves, forest.n_failed) == (32, 32)


# --- cancellation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", ["inline", "thread"])
def test_cancellation_leaves_a_readable_journal_and_no_env(calls, tmp_path):
    class Env(Three):
        pass

    Env.calls = calls
    begun = asyncio.Event()

    async def stall(count, prompt_ids, sampling):
        if count > 30:
            begun.set()
            await asyncio.sleep(60)

    async def interrupted():
        task = asyncio.create_task(lab.arun(Env, policy=lab.Around(stall), out=tmp_path / "run"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(interrupted())
    assert Env.closed == Env.made
    forest = Forest.load(tmp_path / "run")
    turns = sum(tree.n_nodes - 1 for tree in forest.trees)
    assert turns == 31 if calls == "inline" else 0 < turns <= 31
    assert forest.n_failed == 0
    whole = lab.run(Env, out=tmp_path / "run", resume=True)
    assert lab.canonical(whole) == lab.canonical(lab.run(Env))


def test_an_allocator_that_raises_stops_the_run_with_its_own_error():
    def plan(view, ledger):
        if view.event is Event.TREE:
            raise ZeroDivisionError("in the allocator")
        return roots(2)(view)

    with pytest.raises(ZeroDivisionError, match="in the allocator"):
        probe(plan, watches=Watch.TREE)


# --- progress -----------------------------------------------------------------------------------------------------


def test_progress_is_told_after_each_leaf_and_step():
    told = []

    class Lossy(Three):
        def hook(self, turn):
            if self.state["deep"]["thrown"][0] % 5 == 0:
                raise ConnectionError("lost")

    forest = lab.run(Lossy, step_tasks=2, retries=0, progress=lambda p: told.append((p.leaves, p.failed, p.steps)))
    assert told[-1] == (forest.n_leaves, forest.n_failed, 2)
    assert [steps for _, _, steps in told] == sorted(steps for _, _, steps in told)
    assert len(told) == 32 + 2


# --- what stays in memory -----------------------------------------------------------------------------------------


def test_snapshots_are_kept_for_the_step_and_no_longer():
    kept = []

    def plan(view, ledger):
        kept.append([len(tree.tree.snapshots) for tree in view.trees])
        return roots(3)(view) if view.event is Event.START else []

    _, forest = probe(plan, watches=Watch.TREE, step_tasks=1)
    assert max(kept) == [6]
    assert all(not tree.snapshots for tree in forest.trees)
    assert all(tree.captured(1) for tree in forest.trees)


def test_peer_46_memory_does_not_grow_with_the_number_of_runs():
    class Small(lab.Chatter):
        tasks = lab.lengths(3)

    def several(count):
        for _ in range(count):
            lab.run(Small, allocator="random-tree", tasks=1, budget=4)
        gc.collect()

    several(10)
    tracemalloc.start()
    try:
        several(10)
        before = tracemalloc.get_traced_memory()[0]
        several(60)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 60 * 1000


# --- the example of the design ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FlipFailures:
    """Continue every failed leaf once from its middle turn."""

    name: ClassVar[str] = "flip-failures"
    family: ClassVar[str] = "control"
    source: ClassVar[str] = "design, section 6"
    watches: ClassVar[Watch] = Watch.LEAF
    snapshots: ClassVar[bool] = True
    predictor: ClassVar[None] = None

    n: int = 4

    def minimum(self, trees: int) -> int:
        return trees

    def propose(self, view: ForestView, ledger: LedgerView, rng: Rng) -> Sequence[Expansion]:
        if view.event is Event.START:
            return [Expansion(tree.index, count=self.n) for tree in view.trees]
        return [
            Expansion(view.index, view.tree.path(leaf)[len(view.tree.path(leaf)) // 2])
            for view in view.trees
            for leaf in view.new_leaves
            if view.tree.success[leaf] is False and view.anchors(leaf)
        ]


def test_the_allocator_of_the_design_runs_and_is_deterministic(tmp_path):
    pickle.loads(pickle.dumps(FlipFailures()))
    runs = [
        lab.run(Three, policy=lab.Around(lab.dawdle), allocator=FlipFailures(), concurrency=n, out=tmp_path / str(n))
        for n in (1, 64)
    ]
    assert lab.canonical(runs[0]) == lab.canonical(runs[1])
    assert journal.timeless(tmp_path / "1") == journal.timeless(tmp_path / "64")
    forest = runs[0]
    assert 16 < forest.n_leaves <= 32
    for tree in forest.trees:
        for leaf in tree.leaves:
            if tree.origin[leaf]:
                assert tree.depth[tree.origin[leaf]] in (2, 1)
    stops = {leaf.stop for leaf in forest.leaves}
    assert stops == {StopReason.TERMINATED}
