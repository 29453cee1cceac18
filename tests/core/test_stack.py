"""Snapshots of whole wrapper stacks: counters, deques and generators of the wrappers included."""

from __future__ import annotations

import threading

import gymnasium
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit, TransformReward
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import stack
from agentgym.errors import SnapshotError, UnsupportedSnapshot
from agentgym.messages import call


def double(reward):
    return 2 * reward


WRAPPERS = {
    "limit": lambda env, echo: TimeLimit(env, 7),
    "echo": lambda env, echo: echo(env),
    "reward": lambda env, echo: TransformReward(env, double),
}


@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=40)
@pytest.mark.parametrize("mechanism", ["state", "replay"])
def test_restored_stacks_go_on_equally(mechanism, data, seed, dice, replay_dice, echo, run, actions):
    names = data.draw(st.lists(st.sampled_from(sorted(WRAPPERS)), min_size=1, max_size=3))

    def make():
        env = dice() if mechanism == "state" else replay_dice()
        for name in names:
            env = WRAPPERS[name](env, echo)
        return env

    env, other = make(), make()
    script = data.draw(st.lists(st.sampled_from(actions), min_size=2, max_size=9))
    env.reset(seed=seed)
    straight = run(env, script)
    cut = data.draw(st.integers(0, len(straight) - 1))
    env.reset(seed=seed)
    run(env, script[:cut])
    saved = stack.snapshot(env)
    assert saved.turn == cut
    assert run(env, script[cut:]) == straight[cut:]
    stack.restore(env, saved)
    assert run(env, script[cut:]) == straight[cut:]
    stack.restore(other, saved)
    assert run(other, script[cut:]) == straight[cut:]


def test_forks_of_a_stack_are_independent(dice, echo):
    env = echo(TimeLimit(dice(), 9))
    env.reset(seed=1)
    env.step(call("history"))
    a, b = stack.fork(env, 2)
    first = a.step(call("roll"))
    assert (a.seen, a.total) != (b.seen, b.total)
    assert b.step(call("roll")) == first
    assert env.step(call("roll")) == first
    assert a.unwrapped is not env.unwrapped
    assert a.env is not env.env


def test_fork_of_a_bare_env(dice):
    env = dice()
    env.reset(seed=1)
    [child] = stack.fork(env, 1)
    assert child.state == env.state


def test_attributes_born_after_the_snapshot_are_gone(dice, echo):
    env = echo(dice())
    env.reset(seed=0)
    saved = stack.snapshot(env)
    env.later = 1
    stack.restore(env, saved)
    assert not hasattr(env, "later")


def test_reseed_reaches_the_core(dice, echo):
    envs = [echo(dice()) for _ in range(2)]
    envs[0].reset(seed=0)
    saved = stack.snapshot(envs[0])
    for env in envs:
        stack.restore(env, saved, reseed=4)
    assert envs[0].step(call("roll", count=3)) == envs[1].step(call("roll", count=3))


def test_another_stack_is_refused(dice, echo):
    env = TimeLimit(dice(), 9)
    env.reset(seed=0)
    saved = stack.snapshot(env)
    with pytest.raises(
        SnapshotError, match=r"has the wrappers \['gymnasium.wrappers.common.TimeLimit'\], this env has none"
    ):
        stack.restore(env.unwrapped, saved)
    with pytest.raises(SnapshotError, match="Echo"):
        stack.restore(echo(dice()), saved)


def test_foreign_envs_and_wrappers_that_cannot_be_copied_are_refused(dice, echo):
    with pytest.raises(UnsupportedSnapshot, match=r"CartPoleEnv is not an agentgym\.Env"):
        stack.snapshot(gymnasium.make("CartPole-v1"))
    env = echo(dice())
    env.reset(seed=0)
    env.lock = threading.Lock()
    with pytest.raises(UnsupportedSnapshot, match="Echo has state that cannot be copied"):
        stack.snapshot(env)


def test_gymnasium_statistics_survive(dice):
    env = RecordEpisodeStatistics(dice(max_turns=3))
    env.reset(seed=0)
    env.step("x")
    saved = stack.snapshot(env)
    for _ in range(2):
        stack.restore(env, saved)
        env.step("x")
        assert env.step("x")[4]["episode"]["l"] == 3
