"""One continuation: its tokens, its limits, its env, and what happens when something in it fails."""

from __future__ import annotations

import asyncio
import math

import gymnasium
import lab
import pytest

import agentgym as ag
from agentgym.env import Outcome
from agentgym.errors import BadInput, DeadlineExceeded, PolicyError, SystemicFailure
from agentgym.messages import format_message
from agentgym.rollout.allocators.uniform import Uniform
from agentgym.rollout.policies.base import Completion, FinishReason
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.rollout.types import Failure, Status, StopReason

ONE = {"tasks": 1, "budget": 8}


class Long(lab.Chatter):
    tasks = lab.lengths(5)


# --- tokens (invariant 1) -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", lab.ALLOCATORS)
@pytest.mark.parametrize("thinking", ["none", "empty", "full"])
def test_the_tree_is_what_the_engine_was_given_and_gave(allocator, thinking):
    policy = lab.Around(renderer=BytesRenderer(thinking=thinking))
    forest = lab.run(lab.Chatter, policy=policy, allocator=allocator, concurrency=1)
    expected = []
    for tree in forest.trees:
        for node in range(1, tree.n_nodes):
            expected.append(tree.context(tree.parent[node]))
            assert tree.prefilled[node] == len(expected[-1])
    assert sorted(policy.prompts) == sorted(expected)
    for leaf in forest.leaves:
        assert [row.token_ids.tolist() for row in leaf.rows] == [
            leaf.tree.context(leaf.tree.parent[leaf.leaf]) + leaf.tree.sampled_ids(leaf.leaf).tolist()
        ]


def test_sampled_ids_are_kept_even_where_their_text_would_encode_differently():
    """The policy spells `<tool_call>` in single bytes: text, not a call; and it stays in single bytes."""
    spelled = [*b"<tool_call>{}</tool_call>", 258]

    async def spell(count, prompt_ids, sampling):
        return lab.completion(spelled)

    (leaf,) = lab.run(Long, policy=lab.Around(spell), tasks=1, budget=1, allocator_options={"n": 1}, max_turns=2).leaves
    assert all(leaf.tree.sampled_ids(node).tolist() == spelled for node in leaf.nodes[1:])
    assert leaf.n_sampled == 2 * len(spelled)


class Asker(lab.Chatter):
    """Answers with a user message, so that a thinking template drops earlier thoughts."""

    tasks = lab.lengths(3)

    def respond(self, message):
        super().respond(message)
        return "go on"


def think(situation):
    return f"<think>\nhm {situation.seed % 89}\n</think>\n\n" + format_message(lab.talk(situation))


def test_where_the_template_changes_earlier_turns_each_row_is_what_the_engine_saw():
    policy = lab.Around(script=think, renderer=BytesRenderer(thinking="full"))
    (leaf,) = lab.run(Asker, policy=policy, tasks=1, budget=1, allocator_options={"n": 1}).leaves
    assert len(leaf.rows) == 3
    for row, prompt, node in zip(leaf.rows, policy.prompts, leaf.nodes[1:], strict=True):
        assert row.prompt_ids.tolist() == prompt
        assert row.response_ids.tolist() == leaf.tree.sampled_ids(node).tolist()
    assert b"hm" not in bytes(t for t in policy.prompts[2] if t < 256)


@pytest.mark.parametrize("allocator", lab.ALLOCATORS)
def test_a_branch_below_a_reset_continues_the_row_that_the_engine_saw(allocator):
    policy = lab.Around(script=think, renderer=BytesRenderer(thinking="full"))
    forest = lab.run(Asker, policy=policy, allocator=allocator)
    expected = [tree.context(tree.parent[n]) for tree in forest.trees for n in range(1, tree.n_nodes)]
    assert sorted(policy.prompts) == sorted(expected)


def test_the_sampling_of_each_node_is_what_was_asked_for():
    policy = lab.Around()
    (tree,) = lab.run(Long, policy=policy, tasks=1, budget=1, allocator_options={"n": 1}, max_episode_tokens=100).trees
    limits = [tree.samplings[tree.sampling[node]].max_tokens for node in range(1, tree.n_nodes)]
    left = [100 - tree.sampled_on_path(tree.parent[node]) for node in range(1, tree.n_nodes)]
    assert limits == [s.max_tokens for s in policy.samplings] == left


# --- branching ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("allocator", ["random-tree", "trace"])
@pytest.mark.parametrize("by", ["state", "replay"])
def test_a_continuation_sees_its_own_path_and_nothing_of_its_siblings(allocator, by):
    class Env(Long):
        snapshot_by = by

    forest = lab.run(Env, policy=lab.Around(lab.dawdle), allocator=allocator, budget=60)
    branched = 0
    for tree in forest.trees:
        for node in range(1, tree.n_nodes):
            assert lab.known(tree, node)["said"] == lab.said(tree, node)
            branched += len(tree.children(node)) > 1
    assert branched
    assert forest.n_failed == 0


def test_siblings_have_their_own_env_randomness_and_it_repeats():
    runs = [lab.run(Long, policy=lab.Around(lab.dawdle), allocator="trace", budget=60) for _ in range(2)]
    assert lab.canonical(runs[0]) == lab.canonical(runs[1])
    for tree in runs[0].trees:
        for node in range(tree.n_nodes):
            throws = [lab.known(tree, child)["thrown"][-1] for child in tree.children(node)]
            assert len(set(throws)) == len(throws)


def test_an_episode_that_was_restored_is_the_one_that_was_interrupted():
    """After a failure the env is restored: what it throws is what it would have thrown."""

    class Once(Long):
        failing = True

        def hook(self, turn):
            if turn == 3 and type(self).failing:
                type(self).failing = False
                raise ConnectionError

    options = {"tasks": 1, "budget": 1, "allocator_options": {"n": 1}}
    script = lambda situation: ag.call("say", number=situation.turn)  # noqa: E731
    broken, whole = (lab.run(Once, policy=lab.Around(script=script), **options) for _ in range(2))
    assert broken.n_failed == 1
    ends = [next(forest.leaves) for forest in (broken, whole)]
    assert lab.known(ends[0].tree, ends[0].leaf) == lab.known(ends[1].tree, ends[1].leaf)


# --- limits -------------------------------------------------------------------------------------------------------


def single(env=Long, policy=None, **keys):
    """Play one episode; return its leaf and the policy."""
    policy = policy or lab.Around()
    forest = lab.run(env, policy=policy, tasks=1, budget=1, allocator_options={"n": 1}, **keys)
    return next(forest.leaves), policy


def test_complaint_48_no_request_is_sent_when_the_context_is_full():
    _whole, policy = single()
    third = len(policy.prompts[2])
    leaf, policy = single(max_context=third)
    assert (leaf.stop, leaf.success, leaf.n_turns) == (StopReason.CONTEXT_LIMIT, False, 2)
    assert len(policy.prompts) == 2
    leaf, policy = single(max_context=third + 1)
    assert policy.samplings[2].max_tokens == 1
    assert leaf.tree.finish[leaf.leaf] is FinishReason.LENGTH


def test_complaint_48_a_prompt_beyond_the_context_is_one_failure_without_a_request():
    class Wordy(Long):
        def begin(self, task, rng):
            text = super().begin(task, rng)
            return text + " please" * 1000 if task.id.endswith("/1") else text

    policy = lab.Around()
    forest = lab.run(Wordy, policy=policy, max_context=3000)
    assert lab.kinds(forest) == [Failure.PROMPT_TOO_LONG]
    assert [len(tree.leaves) for tree in forest.trees] == [8, 0, 8, 8]
    assert max(map(len, policy.prompts)) < 3000


def test_the_policys_own_context_counts_too():
    policy = lab.Around(max_context=100)
    with pytest.raises(SystemicFailure, match=r"prompt_too_long: BadInput: the prompt has .* tokens, the context 100"):
        single(policy=policy)
    assert policy.prompts == []


def test_a_continuation_without_room_for_a_first_message_is_an_empty_unscored_leaf():
    """A token budget that is used up by a failed attempt: nothing was said, so there is nothing to score."""

    class Fails(Long):
        def respond(self, message):
            raise ConnectionError

    leaf, _ = single(Fails, budget_tokens=30)
    assert (leaf.stop, leaf.success, leaf.reward, leaf.n_sampled) == (StopReason.BUDGET, None, None, 0)
    assert not leaf.tree.scored(leaf.leaf)
    assert leaf.tree.n_sampled[leaf.tree.failed[0]] == 30


def test_an_episodes_own_limit_on_tokens_holds_over_the_whole_path():
    class Bush(Long):
        tasks = lab.lengths(6)

    leaf, _ = single()
    limit = 3 * leaf.tree.n_sampled[1]
    forest = lab.run(Bush, allocator="trace", max_episode_tokens=limit, budget=60)
    assert {leaf.stop for leaf in forest.leaves} == {StopReason.TOKEN_LIMIT}
    assert all(leaf.n_sampled == limit and leaf.success is False for leaf in forest.leaves)
    assert any(leaf.tree.origin[leaf.leaf] for leaf in forest.leaves)


def test_empty_messages_end_an_episode_and_only_in_a_row():
    async def mostly_empty(count, prompt_ids, sampling):
        return None if count == 2 else lab.completion([258])

    leaf, policy = single(policy=lab.Around(mostly_empty))
    assert (leaf.stop, leaf.success) == (StopReason.EMPTY_MESSAGE, False)
    assert len(policy.prompts) == 2 + 1 + 3
    leaf, policy = single(policy=lab.Around(mostly_empty), max_empty=2)
    assert len(policy.prompts) == 2


def test_complaint_70_a_truncated_message_calls_no_tool():
    async def cut(count, prompt_ids, sampling):
        if count:
            return None
        whole = BytesRenderer().message(format_message(ag.call("say", number=7)))[:-1]
        return lab.completion(whole, FinishReason.LENGTH)

    leaf, _ = single(policy=lab.Around(cut))
    first, second = leaf.nodes[1:3]
    assert "cut off" in leaf.tree.replies(first)[0]["content"]
    assert len(lab.known(leaf.tree, second)["said"]) == 1
    assert leaf.tree.finish[first] is FinishReason.LENGTH


def test_the_envs_turn_limit_is_judged_by_the_env():
    class Never(lab.Chatter):
        tasks = lab.lengths(99)

        def judge(self):
            return Outcome(False, {"close": 0.25})

    leaf, _ = single(Never, max_turns=3)
    assert (leaf.stop, leaf.success, leaf.reward, leaf.n_turns) == (StopReason.MAX_TURNS, False, 0.25, 3)


def test_complaint_75_a_time_limit_wrapper_ends_episodes_and_is_restored_with_them():
    class Wrapped(Long):
        pass

    leaf, _ = single(Wrapped, env_options={"max_episode_steps": 3})
    assert (leaf.stop, leaf.success, leaf.n_turns) == (StopReason.MAX_TURNS, None, 3)
    forest = lab.run(Wrapped, allocator="random-tree", env_options={"max_episode_steps": 3})
    assert {leaf.n_turns for leaf in forest.leaves} == {3}
    assert any(leaf.tree.origin[leaf.leaf] for leaf in forest.leaves)


def test_the_end_by_the_env_comes_before_every_other_limit():
    whole, _ = single()
    leaf, _ = single(max_episode_tokens=whole.n_sampled, max_turns=5, budget_tokens=whole.n_sampled, budget_env_steps=5)
    assert leaf.stop is StopReason.TERMINATED


ORDER = [
    (StopReason.EMPTY_MESSAGE, {"max_empty": 2}),
    (StopReason.CONTEXT_LIMIT, {}),
    (StopReason.TOKEN_LIMIT, {"max_episode_tokens": 2}),
    (StopReason.BUDGET, {"budget_env_steps": 2}),
]


@pytest.mark.parametrize("first", range(len(ORDER)), ids=[str(reason) for reason, _ in ORDER])
def test_of_limits_that_are_reached_together_the_first_of_the_list_is_the_reason(first):
    """After two empty messages all four limits are reached."""

    async def empty(count, prompt_ids, sampling):
        return lab.completion([258])

    leaf, policy = single(policy=lab.Around(empty), max_turns=3, max_empty=9)
    context = len(policy.prompts[2])
    limits = {key: value for _, keys in ORDER[first:] for key, value in keys.items()}
    limits = {"max_empty": 9, **limits, "max_context": context if first < 2 else 1 << 20}
    leaf, policy = single(policy=lab.Around(empty), **limits)
    assert leaf.stop is ORDER[first][0]
    assert len(policy.prompts) == 2
    assert list(StopReason).index(ORDER[0][0]) < list(StopReason).index(ORDER[-1][0])


# --- failures -----------------------------------------------------------------------------------------------------


class Unlucky(lab.Chatter):
    """One task, eight rollouts: those that threw an 'unlucky' first number fail in turn 2, for ever or once."""

    tasks = lab.lengths(4)
    forever = True

    def __init_subclass__(cls, **keys):
        super().__init_subclass__(**keys)
        cls.seen = []

    def hook(self, turn):
        if turn != 2:
            return
        mark = self.state["deep"]["thrown"][0]
        seen = type(self).seen
        if mark not in seen:
            seen.append(mark)
            fails = len(seen) == 3
        else:
            fails = self.forever and mark == seen[2]
        if fails:
            self.fault()

    def fault(self):
        raise ConnectionError("lost the line")


def test_complaint_62_one_rollout_fails_and_seven_are_complete():
    class Env(Unlucky):
        pass

    forest = lab.run(Env, concurrency=1, **ONE)
    (tree,) = forest.trees
    assert forest.n_leaves == 7
    assert all(leaf.stop is StopReason.TERMINATED for leaf in forest.leaves)
    assert lab.kinds(forest) == [Failure.ENV_ERROR] * 3
    assert {tree.depth[node] for node in tree.failed} == {2}
    assert [tree.attempt[node] for node in tree.failed] == [0, 1, 2]
    assert all(tree.error[node] == "ConnectionError: lost the line" for node in tree.failed)
    assert all(tree.n_sampled[node] > 0 and tree.reward[node] == 0 for node in tree.failed)
    assert not any(tree.is_leaf(node) for node in tree.failed)


def test_peer_31_a_fault_that_passes_is_retried_in_a_fresh_env():
    class Env(Unlucky):
        forever = False

    probes = 2
    forest = lab.run(Env, concurrency=1, **ONE)
    assert forest.n_leaves == 8
    assert lab.kinds(forest) == [Failure.ENV_ERROR]
    assert Env.made == probes + 2
    assert Env.closed == Env.made


def test_without_retries_a_failure_is_final():
    class Env(Unlucky):
        forever = False

    forest = lab.run(Env, retries=0, **ONE)
    assert (forest.n_leaves, lab.kinds(forest)) == (7, [Failure.ENV_ERROR])


def broken(where):
    """An env of which one call misbehaves in turn 2 of some rollouts."""

    class Env(Unlucky):
        def fault(self):
            if where == "exit":
                raise SystemExit(3)
            if where == "nan":
                self.add_reward("broken", math.nan)
            elif where == "infinite":
                self.add_reward("broken", math.inf)
            elif where == "snapshot":
                self.state["odd"] = [lambda: None]
            elif where == "judge":
                self.state["judge"] = 1 / 2
                self.finish()
            elif where == "surrogate":
                raise OSError("\ud800")
            elif where == "timeout":
                raise TimeoutError("the database")
            elif where == "deadline":
                raise DeadlineExceeded("the sandbox took longer than 2 s")

        def judge(self):
            if "judge" in self.state:
                raise ZeroDivisionError
            return super().judge()

        @ag.tool
        def say(self, number: int) -> str:
            """Say a number. Args: number: which."""
            super().say(number)
            return str(len(self.state["deep"]["said"]))

    return Env


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ("exit", Failure.ENV_ERROR),
        ("nan", Failure.INVALID_REWARD),
        ("infinite", Failure.INVALID_REWARD),
        ("snapshot", Failure.SNAPSHOT_ERROR),
        ("judge", Failure.ENV_ERROR),
        ("surrogate", Failure.ENV_ERROR),
        ("timeout", Failure.ENV_ERROR),
        ("deadline", Failure.ENV_TIMEOUT),
    ],
)
@pytest.mark.parametrize("calls", ["inline", "thread"])
def test_whatever_an_env_does_its_siblings_finish(where, kind, calls, tmp_path):
    env = broken(where)
    env.calls = calls
    forest = lab.run(env, allocator=Branching(), out=tmp_path / "run", concurrency=1, **ONE)
    assert forest.n_leaves == 7
    assert lab.kinds(forest) == [kind] * 3
    assert lab.canonical(type(forest).load(tmp_path / "run")) == lab.canonical(forest)


class Branching(Uniform):
    """Flat groups, but every turn is captured."""

    snapshots = True


class Improper(gymnasium.Wrapper):
    """A wrapper that answers what no env of ours would."""

    def __init__(self, env, what):
        super().__init__(env)
        self.what, self.turn = what, 0

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.turn += 1
        if self.turn == 2 and self.what == "nan":
            reward = math.nan
        if self.turn == 2 and self.what == "info":
            info = {}
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(("what", "kind"), [("nan", Failure.INVALID_REWARD), ("info", Failure.ENV_ERROR)])
def test_a_wrapper_that_answers_anything_fails_the_rollout_and_not_the_run(what, kind, monkeypatch):
    wrapped = ag.registry.make
    monkeypatch.setattr(ag.registry, "make", lambda env_id, **keys: Improper(wrapped(env_id, **keys), what))
    with pytest.raises(SystemicFailure, match=f"{kind}"):
        lab.run(Long, **ONE)


def test_complaint_68_a_turn_that_hangs_is_a_timeout_and_its_slot_is_free_again():
    import threading

    release = threading.Event()

    class Hangs(Unlucky):
        calls = "thread"

        def fault(self):
            release.wait()

    forest = lab.run(Hangs, concurrency=1, env_deadline=1.0, retries=1, **ONE)
    assert forest.n_leaves == 7
    assert lab.kinds(forest) == [Failure.ENV_TIMEOUT] * 2
    assert "step took longer than 1 s" in forest.trees[0].error[forest.trees[0].failed[0]]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "agentgym-env")
    release.set()


@pytest.mark.parametrize("where", ["constructor", "reset", "start"])
def test_a_task_whose_env_cannot_start_is_one_failure(where):
    class Env(lab.Chatter):
        def __init__(self, **keys):
            super().__init__(**keys)
            if where == "constructor" and type(self).made > 6:
                raise OSError("no more of them")

        def begin(self, task, rng):
            text = super().begin(task, rng)
            if where == "reset" and task.id.endswith("/1"):
                raise ConnectionError("not this one")
            if where == "start" and task.id.endswith("/1"):
                self.state["odd"] = [lambda: None]
            return text

        def hook(self, turn):
            if where == "constructor":
                raise ConnectionError("fails always, and there is no other env")

    if where == "constructor":
        with pytest.raises(SystemicFailure, match="OSError: no more of them"):
            lab.run(Env)
        return
    forest = lab.run(Env)
    assert lab.kinds(forest) == [Failure.ENV_ERROR if where == "reset" else Failure.SNAPSHOT_ERROR]
    assert [len(tree.leaves) for tree in forest.trees] == [8, 0, 8, 8]
    assert forest.trees[1].failed == [1]
    assert forest.trees[1].status[1] is Status.FAILED


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("raises", Failure.POLICY_ERROR, "PolicyError: out of memory"),
        ("many", Failure.POLICY_ERROR, "201 tokens, 1 to 200 were asked for"),
        ("none", Failure.POLICY_ERROR, "0 tokens"),
        ("nan", Failure.POLICY_ERROR, "log-prob is NaN"),
        ("floats", Failure.POLICY_ERROR, "token ids must be integers"),
        ("fewer logprobs", Failure.POLICY_ERROR, "3 token ids but 2 log-probs"),
        ("hangs", Failure.POLICY_TIMEOUT, "a message took longer than 0.1 s"),
        ("hangs and hides it", Failure.POLICY_TIMEOUT, "a message took longer than 0.1 s"),
        ("cancelled", Failure.POLICY_ERROR, "CancelledError"),
        ("own timeout", Failure.POLICY_ERROR, "TimeoutError: the server"),
        ("exit", Failure.POLICY_ERROR, "SystemExit"),
    ],
)
def test_whatever_an_engine_does_is_a_failed_attempt(fault, kind, says):
    async def misbehave(count, prompt_ids, sampling):
        if count != 3:
            return None
        if fault == "raises":
            raise PolicyError("out of memory")
        if fault == "many":
            return lab.completion([65] * 201)
        if fault == "none":
            return lab.completion([])
        if fault == "nan":
            return Completion([65], [math.nan], FinishReason.STOP)
        if fault == "floats":
            return lab.completion([0.5])
        if fault == "fewer logprobs":
            return Completion([65, 66, 67], [0.0, 0.0], FinishReason.STOP)
        if fault == "cancelled":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        if fault == "own timeout":
            raise TimeoutError("the server")
        if fault == "exit":
            raise SystemExit
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if fault == "hangs":
                raise
            raise RuntimeError("request aborted") from None

    forest = lab.run(lab.Chatter, policy=lab.Around(misbehave), policy_deadline=0.1, concurrency=2, **ONE)
    assert forest.n_leaves == 8
    assert lab.kinds(forest) == [kind]
    (tree,) = forest.trees
    assert says in tree.error[tree.failed[0]]
    assert tree.n_sampled[tree.failed[0]] == 0


def test_hidden_nondeterminism_is_a_replay_divergence_and_never_another_episode():
    """Flat groups keep no snapshots: after a failure the actions are replayed, and the answers compared."""
    import itertools

    clock = itertools.count()

    class Clock(lab.Chatter):
        tasks = lab.lengths(4)
        failing = True

        def hook(self, turn):
            self.state["deep"]["thrown"][-1] = next(clock)
            if turn == 3 and type(self).failing:
                type(self).failing = False
                raise ConnectionError("once")

    forest = lab.run(Clock, concurrency=1, **ONE)
    assert lab.kinds(forest) == [Failure.ENV_ERROR, *[Failure.REPLAY_DIVERGENCE] * 2]
    assert forest.n_leaves == 7
    (tree,) = forest.trees
    assert "replaying node 0 gave" in tree.error[tree.failed[1]]


class Outside(lab.Chatter):
    """Its world is outside of what a snapshot covers: flat groups reset it for each rollout."""

    tasks = lab.lengths(4)
    touches = frozenset({"memory", "external"})

    def snapshot(self, **keys):
        raise AssertionError("nobody asks for a snapshot")


def test_an_env_that_no_snapshot_covers_is_reset_for_each_rollout():
    runs = [lab.run(Outside, policy=lab.Around(lab.dawdle), concurrency=n) for n in (1, 64)]
    assert lab.canonical(runs[0]) == lab.canonical(runs[1])
    assert (runs[0].n_leaves, runs[0].n_failed) == (32, 0)
    for allocator in ("random-tree", "trace"):
        with pytest.raises(BadInput, match=r"snapshots of lab/Outside-v0 do not cover external; use 'uniform'"):
            lab.run(Outside, allocator=allocator)


def test_a_reset_that_starts_otherwise_is_a_divergence():
    class Drifts(Outside):
        resets = 0

        def begin(self, task, rng):
            type(self).resets += 1
            return super().begin(task, rng) + (" Hm." if type(self).resets == 3 else "")

    forest = lab.run(Drifts, concurrency=1, **ONE)
    assert lab.kinds(forest) == [Failure.REPLAY_DIVERGENCE]
    assert forest.n_leaves == 8
    assert "the same reset gave" in forest.trees[0].error[forest.trees[0].failed[0]]


def test_a_message_of_an_exception_is_bounded():
    class Wordy(Unlucky):
        def fault(self):
            raise ValueError("x" * 100_000)

    forest = lab.run(Wordy, **ONE)
    assert {len(text) for text in forest.trees[0].error.values()} == {2000}
