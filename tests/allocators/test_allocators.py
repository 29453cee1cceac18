"""What each allocator does, by hand and by property."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import seeding
from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.allocators.base import Allocator, Event, Expansion, ForestView, Watch
from agentgym.rollout.allocators.random_tree import RandomTree
from agentgym.rollout.allocators.trace import Trace
from agentgym.rollout.allocators.uniform import Uniform
from agentgym.rollout.predictors import Beta, Constant

ALL = [
    Uniform(n=4),
    Uniform(n=None),
    RandomTree(),
    RandomTree(chains=3, nodes=1, rounds=3),
    Trace(),
    Trace(continuations=1, cap=4),
    Trace(continuations=0),
]
each = pytest.mark.parametrize("allocator", ALL, ids=repr)


def ask(allocator, event, views, left, fake, predict=lambda view, node: 0.5, seed=0):
    return list(allocator.propose(ForestView(event, views, predict), fake.Left(left), seeding.rng(seed)))


def grown(fake, *, roots, **world):
    """One tree with `roots` bare rollouts."""
    step = fake.play(Uniform(n=roots), fake.World(**world), trees=1, budget=roots)
    return step, step.view(0, left=roots * 2)


# --- contract -------------------------------------------------------------------------------------------------


@each
def test_is_an_allocator_and_survives_pickling(allocator):
    assert isinstance(allocator, Allocator)
    assert pickle.loads(pickle.dumps(allocator)) == allocator
    assert hash(allocator) == hash(pickle.loads(pickle.dumps(allocator)))


@each
@given(
    turns=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    trees=st.integers(1, 5),
    extra=st.integers(0, 30),
    unscored=st.sampled_from([0.0, 0.3, 1.0]),
    failing=st.sampled_from([0.0, 0.3, 1.0]),
    outcome=st.sampled_from([None, None, True, False]),
    stride=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_never_overspends_and_names_valid_anchors(
    fake, allocator, turns, trees, extra, unscored, failing, outcome, stride, seed
):
    """`play` refuses more than the budget; the tree refuses a start at a leaf or at a failed node."""
    world = fake.World(
        turns=turns,
        unscored=unscored,
        failing=failing,
        outcome=outcome,
        restorable=lambda depth: depth % stride == 0,
    )
    step = fake.play(allocator, world, trees=trees, budget=allocator.minimum(trees) + extra, seed=seed)
    for event, index, key, count, propensity in step.log:
        assert count >= 1
        assert 0 < propensity <= 1
        if event == "start":
            assert key == ""
        else:
            tree = step.trees[index]
            assert key, "a continuation of the root"
            assert any(tree.restorable(node) for node in tree.walk() if tree.path_key(node) == key)


@each
@given(seed=st.integers(0, 1000), order=st.integers(0, 1000))
@settings(max_examples=20)
def test_trees_do_not_depend_on_completion_order(fake, allocator, seed, order):
    """complaints.md rows 56 and 57: two runs with shuffled completion order give equal trees."""
    world = fake.World(turns=(4, 3, 1), unscored=0.1, failing=0.1)
    one = fake.play(allocator, world, budget=40, seed=seed)
    other = fake.play(allocator, world, budget=40, seed=seed, completion=seeding.rng(order))
    assert [t.canonical() for t in one.trees] == [t.canonical() for t in other.trees]
    assert one.log == other.log


@each
def test_no_trees_is_no_proposal(fake, allocator):
    assert ask(allocator, Event.START, [], 8, fake) == []
    assert ask(allocator, Event.STEP, [], 8, fake) == []


@pytest.mark.parametrize("allocator", [Uniform(n=None), RandomTree(), Trace()], ids=repr)
def test_a_budget_without_leaves_is_bad_input(fake, allocator):
    step = fake.play(Uniform(n=1), trees=1, budget=1)
    with pytest.raises(BadInput, match="no limit in leaves"):
        ask(allocator, Event.START, [step.view(0)], float("inf"), fake)


# --- uniform --------------------------------------------------------------------------------------------------


def test_uniform_gives_flat_groups(fake):
    step = fake.play(Uniform(n=3), budget=12)
    assert [len(tree.leaves) for tree in step.trees] == [3, 3, 3, 3]
    assert step.log == [("start", i, "", 3, 1.0) for i in range(4)]


def test_uniform_without_n_divides_the_budget_remainders_to_the_first(fake):
    step = fake.play(Uniform(n=None), budget=10)
    assert [len(tree.leaves) for tree in step.trees] == [3, 3, 2, 2]


def test_uniform_spreads_a_short_budget(fake):
    views = fake.play(Uniform(n=1), budget=4).view_all()
    assert [e.count for e in ask(Uniform(n=8), Event.START, views, 6, fake)] == [2, 2, 1, 1]


# --- random-tree ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chains", "nodes", "rounds"), [(2, 2, 1), (1, 3, 2), (3, 1, 3), (2, 0, 1), (2, 2, 0)])
def test_random_tree_has_m_times_ln_plus_1_leaves(fake, chains, nodes, rounds):
    allocator = RandomTree(chains=chains, nodes=nodes, rounds=rounds)
    step = fake.play(allocator, budget=4 * 20)
    assert [len(tree.leaves) for tree in step.trees] == [chains * (rounds * nodes + 1)] * 4
    for tree in step.trees:
        chain_of = [tree.path(leaf)[1] for leaf in tree.leaves]
        assert all(chain_of.count(c) == rounds * nodes + 1 for c in chain_of), "each chain is a tree of its own"


def test_random_tree_stores_the_propensity_of_each_draw(fake):
    step = fake.play(RandomTree(chains=1, nodes=2, rounds=1), fake.World(turns=(4,)), trees=1, budget=10)
    tree = step.trees[0]
    assert sorted(tree.propensity[leaf] for leaf in tree.leaves) == pytest.approx([1 / 3, 1 / 3, 1.0])


def test_random_tree_draws_uniformly_over_all_inner_nodes(fake):
    _, view = grown(fake, roots=1, turns=(5,))
    counts: dict[int, int] = {}
    for seed in range(400):
        for e in ask(RandomTree(chains=1, nodes=2), Event.TREE, [view], 10, fake, seed=seed):
            counts[e.anchor] = counts.get(e.anchor, 0) + 1
    assert sorted(counts) == view.anchors(view.leaves[0])
    assert all(abs(n - 200) < 5 * (800 * 0.25 * 0.75) ** 0.5 for n in counts.values())


def test_random_tree_second_round_draws_from_continuations_too(fake):
    seen = set()
    for seed in range(20):
        step = fake.play(RandomTree(chains=1, nodes=2, rounds=2), trees=1, budget=10, seed=seed)
        seen |= {len(key.split(".")) for event, _, key, *_ in step.log if event == "tree" and "1" in key.split(".")[1:]}
    assert seen, "an anchor on the path of a continuation"


def test_random_tree_is_cut_evenly_over_chains(fake):
    _, view = grown(fake, roots=3, turns=(4,))
    found = ask(RandomTree(chains=3, nodes=4), Event.TREE, [view], 4, fake)
    chains = [view.tree.path(e.anchor)[1] for e in found]
    assert sorted(chains.count(c) for c in set(chains)) == [1, 1, 2]


def test_random_tree_leaves_the_share_of_single_turn_tasks_unspent(fake):
    step = fake.play(RandomTree(), fake.World(turns=(1, 4)), budget=24)
    assert [len(tree.leaves) for tree in step.trees] == [2, 6, 2, 6]
    assert step.spent == 16


# --- trace ----------------------------------------------------------------------------------------------------


def test_trace_spends_the_whole_budget(fake):
    step = fake.play(Trace(), budget=48)
    assert step.spent == 48
    roots = {i: count for event, i, _, count, _ in step.log if event == "start"}
    assert sum(roots.values()) == 16
    assert all(m >= 2 for m in roots.values())
    for i, m in roots.items():
        assert len(step.trees[i].leaves) == 3 * m


def test_trace_filters_decided_tasks(fake):
    values = [0.02, 0.5, 0.98, 0.5]
    step = fake.play(Trace(), budget=24, predict=lambda view, node: values[view.index])
    assert [len(tree.leaves) for tree in step.trees] == [0, 12, 0, 12]


def test_trace_branches_low_on_successes_and_high_on_failures(fake):
    _, view = grown(fake, roots=8, turns=(5,), starts=(1,))
    tree = view.tree
    depth_value = {1: 0.9, 2: 0.7, 3: 0.4, 4: 0.2}
    found = ask(Trace(), Event.TREE, [view], 8, fake, predict=lambda v, node: depth_value[tree.depth[node]])
    leaf_of = {node: leaf for leaf in view.leaves for node in view.anchors(leaf)}
    wins = {tree.depth[e.anchor] for e in found if tree.success[leaf_of[e.anchor]]}
    losses = {tree.depth[e.anchor] for e in found if not tree.success[leaf_of[e.anchor]]}
    assert wins <= {4}
    assert losses <= {1}
    assert wins | losses


def test_trace_expands_only_scored_bare_rollouts_and_only_once(fake):
    step, view = grown(fake, roots=4, turns=(4,), unscored=1.0)
    assert ask(Trace(), Event.TREE, [view], 8, fake) == []
    step, view = grown(fake, roots=4, turns=(4,))
    first = ask(Trace(), Event.TREE, [view], 8, fake)
    assert sum(e.count for e in first) == 8
    step.run(first)
    assert ask(Trace(), Event.TREE, [step.view(0, left=8)], 8, fake) == []


def test_trace_spills_what_single_turn_tasks_leave(fake):
    step = fake.play(Trace(), fake.World(turns=(1, 5)), budget=36, predict=lambda view, node: 0.5)
    spilled = [(index, key) for event, index, key, _, _ in step.log if event == "step"]
    assert step.spent == 36
    assert spilled
    assert {index for index, _ in spilled} == {1, 3}
    tried = {(index, key) for event, index, key, _, _ in step.log if event == "tree"}
    assert not tried & set(spilled), "an inner node is tried once"


def test_trace_reports_unspent_budget_where_nothing_can_be_continued(fake):
    step = fake.play(Trace(), fake.World(turns=(1,)), budget=36)
    assert step.spent == 12


def test_trace_breaks_ties_at_random_and_not_by_index(fake):
    _, view = grown(fake, roots=4, turns=(5,))
    first = {ask(Trace(), Event.TREE, [view], 1, fake, seed=seed)[0].anchor for seed in range(40)}
    assert len(first) > 8, "of 16 equal anchors"
    views = fake.play(Uniform(n=1), budget=4).view_all()
    winners = {ask(Trace(), Event.START, views, 6, fake, seed=seed)[0].tree for seed in range(40)}
    assert winners == {0, 1, 2, 3}


@each
def test_a_resumed_tree_gets_the_same_proposals(fake, allocator):
    """On resume the arena already holds continuations that the allocator has not been told of."""
    step, view = grown(fake, roots=4, turns=(5,))
    before = ask(allocator, Event.TREE, [view], 8, fake)
    anchor = view.anchors(view.leaves[0])[0]
    step.run([Expansion(0, anchor, 2)])
    assert ask(allocator, Event.TREE, [view], 8, fake) == before


def test_trace_without_continuations_is_root_allocation_alone(fake):
    step = fake.play(Trace(continuations=0), budget=31)
    assert {event for event, *_ in step.log} == {"start"}
    assert step.spent == 31


def test_trace_takes_any_predictor_and_target():
    table = Constant(value=0.3)
    assert Trace(predictor=table).predictor is table
    assert Trace(predictor="beta", target="descendant").predictor == Beta(target="descendant")
    assert Trace(predictor=Beta(strength=5), target="descendant").predictor == Beta(strength=5, target="descendant")
    assert Trace(predictor=table, target="own").predictor is table


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(n=0), "uniform: n must be >= 1"),
        (lambda: Uniform(n=2.0), "uniform: n must be an integer"),
        (lambda: Uniform(n=True), "uniform: n must be an integer"),
        (lambda: RandomTree(chains=0), "random-tree: chains must be >= 1"),
        (lambda: RandomTree(nodes=-1), "random-tree: nodes must be >= 0"),
        (lambda: RandomTree(rounds="1"), "random-tree: rounds must be an integer"),
        (lambda: Trace(continuations=-1), "trace: continuations must be >= 0"),
        (lambda: Trace(cap=1), "trace: cap must be >= 2"),
        (lambda: Trace(predictor=3), "predictor must be one of"),
    ],
)
def test_options_out_of_range(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_unknown_predictor_and_target_name_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'logistic'"):
        Trace(predictor="logistics")
    with pytest.raises(UnknownName, match="did you mean 'descendant'"):
        Trace(target="descendants")


def test_minimum():
    assert [Uniform(n=4).minimum(3), Uniform(n=None).minimum(3)] == [12, 3]
    assert RandomTree(chains=2).minimum(3) == 6
    assert Trace(continuations=2).minimum(16) == 6


def test_watches():
    assert Uniform.watches is Watch.NOTHING
    assert RandomTree.watches is Trace.watches is Watch.TREE
