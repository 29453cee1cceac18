"""Equal seeds give equal trees and journals, whatever finishes first (invariant 4)."""

from __future__ import annotations

import random
from dataclasses import dataclass

import lab
import orjson
import pytest

import agentgym as ag
from agentgym.rollout import journal
from agentgym.rollout.allocators.base import Event, Expansion, Watch
from agentgym.rollout.policies.scripted import random_caller

SHIPPED = ("agentgym/Countdown-v0", "agentgym/Blocksworld-v0", "agentgym/SearchQA-v0")


def contents(forest):
    return orjson.dumps(lab.canonical(forest))


def random_player(**options):
    return lab.Around(lab.dawdle, script=random_caller, **options)


@pytest.mark.parametrize("env", [lab.Chatter, *SHIPPED], ids=str)
@pytest.mark.parametrize("allocator", lab.ALLOCATORS)
def test_concurrency_and_completion_order_change_nothing(env, allocator, tmp_path):
    """Chatter draws from `np_random` in every turn; the policy answers after random naps."""
    found = []
    for concurrency in (1, 64):
        out = tmp_path / str(concurrency)
        script = lab.talk if env is lab.Chatter else random_caller
        policy = lab.Around(lab.dawdle if concurrency > 1 else None, script=script)
        forest = lab.run(
            env, policy=policy, allocator=allocator, concurrency=concurrency, seed=5, step_tasks=2, out=out, max_turns=6
        )
        found.append((contents(forest), journal.timeless(out)))
        assert forest.n_leaves > 8
        assert forest.n_failed == 0
    assert found[0] == found[1]


def test_two_runs_at_full_concurrency_agree(tmp_path):
    runs = [
        contents(lab.run(lab.Chatter, policy=lab.Around(lab.dawdle), allocator="trace", budget=40, step_tasks=2))
        for _ in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("allocator", lab.ALLOCATORS)
def test_another_seed_gives_another_run(allocator):
    one, other = (lab.run(lab.Chatter, allocator=allocator, seed=seed) for seed in (0, 1))
    assert contents(one) != contents(other)
    assert one.trees[0].prompt_ids.tolist() != other.trees[0].prompt_ids.tolist()


def test_the_journal_on_disk_is_the_forest_that_was_returned(tmp_path):
    forest = lab.run(lab.Chatter, policy=lab.Around(lab.dawdle), allocator="trace", out=tmp_path / "run", step_tasks=2)
    again = type(forest).load(tmp_path / "run")
    assert contents(again) == contents(forest)
    assert {k: again.counters[k] for k in ("env_steps", "restores")} == {
        k: forest.counters[k] for k in ("env_steps", "restores")
    }


def test_the_global_generators_neither_matter_nor_change():
    random.seed(3)
    before = random.getstate()
    one = lab.run(lab.Chatter, allocator="trace")
    assert random.getstate() == before
    random.seed(4)
    assert contents(lab.run(lab.Chatter, allocator="trace")) == contents(one)


def test_a_task_that_is_dispatched_twice_is_two_groups_with_their_own_randomness():
    class Few(lab.Chatter):
        tasks = ag.TaskSet({"train": 2}, lambda split, level, index: {"turns": 3}, {"default": 1.0})

    forest = lab.run(Few, tasks=4)
    first, _, again, _ = forest.trees
    assert first.task_id == again.task_id
    assert (first.group, again.group) == ("0.0", "0.2")
    assert first.prompt_ids.tolist() != again.prompt_ids.tolist()
    assert contents(lab.run(Few, tasks=4, step_tasks=1)).count(b'"index":0') == 4


def test_no_task_depends_on_how_many_others_run():
    alone = lab.run(lab.Chatter, tasks=1, budget=8).trees[0]
    among = lab.run(lab.Chatter, tasks=4, budget=32).trees[0]
    assert alone.canonical() == among.canonical()


@dataclass(frozen=True)
class Frugal:
    """Asks for one more rollout after each leaf if the number of tokens left is even: it reads the ledger."""

    name = "frugal"
    family = "control"
    source = "none"
    watches = Watch.LEAF
    snapshots = False
    predictor = None

    def minimum(self, trees):
        return trees

    def propose(self, view, ledger, rng):
        if view.event is Event.START:
            return [Expansion(tree.index, count=3) for tree in view.trees]
        if view.event is Event.LEAF and ledger.left("sampled_tokens") % 2 == 0:
            return [Expansion(view.trees[0].index)]
        return []


def test_what_an_allocator_reads_in_the_ledger_does_not_depend_on_what_has_ended_by_now():
    runs = [
        contents(lab.run(lab.Chatter, policy=lab.Around(lab.dawdle), allocator=Frugal(), concurrency=n, retries=0,
                         budget=60, budget_tokens=60000, max_turns=8))
        for n in (1, 2, 64, 64)
    ]  # fmt: skip
    assert len(set(runs)) == 1
    assert runs[0].count(b'"e":"leaf"') > 12
