"""The budget: hard in every unit, and blind to what finishes first."""

from __future__ import annotations

import asyncio
import math
import random

import lab
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.ledger import UNITS, Amount, Purse
from agentgym.rollout.types import StopReason

COUNTS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(total=st.integers(0, 500), weights=COUNTS)
def test_a_split_is_whole_complete_and_in_proportion(total, weights):
    parts = [part.leaves for part in Amount(leaves=total).split(weights)]
    assert sum(parts) == (total if sum(weights) else 0)
    for part, weight in zip(parts, weights, strict=True):
        assert part == int(part)
        assert abs(part - total * weight / max(1, sum(weights))) < 1


def test_what_has_no_limit_has_none_after_a_split():
    assert Amount(leaves=4).split([1, 1])[1] == Amount(leaves=2, sampled_tokens=math.inf, env_steps=math.inf)


def test_limits_are_checked_and_named():
    with pytest.raises(UnknownName, match="did you mean 'sampled_tokens'"):
        Amount.limits({"sample_tokens": 3})
    with pytest.raises(BadInput, match="env_steps=0"):
        Amount.limits({"leaves": 3, "env_steps": 0})
    with pytest.raises(UnknownName, match="did you mean 'leaves'"):
        Purse(Amount(leaves=1)).left("leafs")


async def spend(limit, caps, costs, slots, naps):
    """Play continuations with these caps and real costs, `slots` at a time; return who was admitted with which cap."""
    purse, gate = Purse(Amount(leaves=len(caps), sampled_tokens=limit)), asyncio.Semaphore(slots)
    entries = [purse.claim(cap, 1) for cap in caps]
    admitted = {}

    async def one(i):
        spent = 0
        if await purse.admit(entries[i]):
            async with gate:
                admitted[i] = entries[i].tokens
                for _ in range(naps[i]):
                    await asyncio.sleep(0)
                spent = int(min(costs[i], entries[i].tokens))
        purse.settle(entries[i], spent, 1)

    async with asyncio.TaskGroup() as group:
        for i in range(len(caps)):
            group.create_task(one(i))
    return admitted, purse.spent()


@settings(max_examples=60)
@given(
    limit=st.integers(1, 100),
    plan=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12),
    naps=st.lists(st.integers(0, 5), min_size=12, max_size=12),
)
def test_who_is_admitted_depends_on_what_was_spent_and_not_on_when(limit, plan, naps):
    caps, costs = [cap for cap, _ in plan], [cost for _, cost in plan]
    runs = [asyncio.run(spend(limit, caps, costs, slots, naps)) for slots in (1, 3, 64)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][1].sampled_tokens <= limit


def test_equal_claims_are_told_apart():
    """Ten claims of the same size: together they get no more than there is."""
    admitted, spent = asyncio.run(spend(25, [10] * 10, [10] * 10, 64, [1] * 10))
    assert admitted == {0: 10, 1: 10, 2: 5}
    assert spent.sampled_tokens == 25


# --- whole runs ---------------------------------------------------------------------------------------------------


class Shaky(lab.Chatter):
    """Fails in the middle of a turn, by the numbers that were said: the same episode always fails the same way."""

    def hook(self, turn):
        if sum(self.state["deep"]["said"]) % 7 == 0:
            raise ConnectionError("lost the line")


def paid(forest):
    """Sampled tokens and steps of the forest, failed attempts included (those that reached the env)."""
    tokens = sum(sum(tree.n_sampled) for tree in forest.trees)
    return {"leaves": forest.n_leaves, "sampled_tokens": tokens, "env_steps": forest.counters.get("env_steps", 0)}


@settings(max_examples=25)
@given(
    allocator=st.sampled_from(lab.ALLOCATORS),
    turns=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    budget=st.integers(32, 48),
    tokens=st.one_of(st.none(), st.integers(1, 9000)),
    steps=st.one_of(st.none(), st.integers(1, 120)),
    max_tokens=st.sampled_from([20, 70, 200]),
    concurrency=st.sampled_from([1, 7, 64]),
    retries=st.integers(0, 2),
)
def test_no_unit_is_ever_overspent(allocator, turns, budget, tokens, steps, max_tokens, concurrency, retries):
    class Env(Shaky):
        tasks = lab.lengths(*turns)

    forest = lab.run(
        Env,
        allocator=allocator,
        budget=budget,
        budget_tokens=tokens,
        budget_env_steps=steps,
        max_tokens=max_tokens,
        concurrency=concurrency,
        retries=retries,
        step_tasks=2,
        max_turns=9,
    )
    limits = dict(zip(UNITS, (budget, tokens, steps), strict=True))
    for unit, spent in paid(forest).items():
        assert limits[unit] is None or spent <= limits[unit], unit


@pytest.mark.parametrize("allocator", lab.ALLOCATORS)
@pytest.mark.parametrize(
    "limit",
    [{"budget_tokens": 3500}, {"budget_env_steps": 60}, {"budget_tokens": 2000, "budget_env_steps": 40}],
    ids=["tokens", "steps", "both"],
)
def test_a_budget_that_runs_out_makes_no_tree_depend_on_concurrency(allocator, limit):
    random.seed(1)
    runs = [
        lab.run(Shaky, policy=lab.Around(lab.dawdle), allocator=allocator, concurrency=n, max_turns=9, **limit)
        for n in (1, 7, 64)
    ]
    assert lab.canonical(runs[0]) == lab.canonical(runs[1]) == lab.canonical(runs[2])
    assert 0 < runs[0].n_leaves < 32


def test_the_last_turn_may_use_what_is_left_and_then_the_budget_is_the_stop_reason():
    class Long(lab.Chatter):
        tasks = lab.lengths(8)

    forest = lab.run(Long, tasks=1, budget=2, allocator_options={"n": 2}, budget_tokens=150)
    leaves = list(forest.leaves)
    assert [leaf.stop for leaf in leaves] == [StopReason.BUDGET]
    assert leaves[0].success is None
    assert leaves[0].n_sampled == 150


def test_failed_attempts_do_not_end_an_episode_that_has_no_budget_in_tokens():
    """Every message uses all of its tokens and one attempt fails: the episode still has all of its turns."""

    class Once(lab.Chatter):
        tasks = lab.lengths(4)
        failures = 0

        def respond(self, message):
            if type(self).failures == 0:
                type(self).failures += 1
                raise ConnectionError("once")
            return super().respond(message)

    forest = lab.run(Once, tasks=1, budget=1, allocator_options={"n": 1}, max_tokens=5, max_turns=4)
    assert [leaf.stop for leaf in forest.leaves] == [StopReason.MAX_TURNS]
    assert forest.n_failed == 1


def test_failed_attempts_do_not_count_against_the_episodes_own_limit():
    class Once(lab.Chatter):
        tasks = lab.lengths(3)
        failures = 0

        def hook(self, turn):
            if turn == 2 and type(self).failures == 0:
                type(self).failures += 1
                raise ConnectionError("once")

    whole = lab.run(Once, tasks=1, budget=1, allocator_options={"n": 1})
    (leaf,) = whole.leaves
    assert whole.n_failed == 1
    Once.failures = 0
    (again,) = lab.run(Once, tasks=1, budget=1, allocator_options={"n": 1}, max_episode_tokens=leaf.n_sampled).leaves
    assert again.stop is StopReason.TERMINATED
