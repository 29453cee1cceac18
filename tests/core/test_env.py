"""The env contract: Gymnasium's five values, limits, rewards, snapshots, replay."""

from __future__ import annotations

import copy
import math
import pickle
import random
import threading

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import Env, Outcome, Task, TaskSet, seeding
from agentgym.env import TextSpace
from agentgym.errors import (
    BadInput,
    EpisodeOver,
    InvalidReward,
    ReplayDivergence,
    SnapshotError,
    UnknownName,
    UnsupportedSnapshot,
)
from agentgym.messages import Message, ToolCall, call


class Chat(Env):
    """Say a word; the env answers with another one. No tools."""

    tasks = TaskSet.from_rows({"train": [{"word": "a"}, {"word": "b"}], "test": [{"word": "c"}]})
    max_turns = 4

    def begin(self, task, rng):
        self.state = {"said": []}
        return f"{task.data['word']} {rng.integers(1000)}"

    def respond(self, message):
        self.state["said"].append(message.content)
        if message.content == "stop":
            self.finish()
        return f"{len(self.state['said'])} {self.np_random.integers(1000)}"

    def judge(self):
        return Outcome(self.state["said"][-1] == "stop", {"words": len(self.state["said"]) / 10})


@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes")
def test_gymnasium_accepts_it():
    gymnasium_check_env(Chat())


def test_info_has_its_schema_from_reset_on():
    env = Chat()
    _, info = env.reset(seed=0)
    keys = {"success", "reward_terms", "tool_calls", "cost", "messages", "task", "level"}
    assert set(info) == keys
    assert set(env.step("x")[4]) == keys
    assert info["messages"] == [{"role": "user", "content": env.reset(seed=0)[0]}]


def test_the_episode_ends_by_finish():
    env = Chat()
    env.reset(seed=0)
    assert env.step("x")[1:4] == (0.0, False, False)
    _, reward, terminated, truncated, info = env.step("stop")
    assert (reward, terminated, truncated, info["success"]) == (0.2, True, False, True)
    assert info["reward_terms"] == {"words": 0.2}


@pytest.mark.parametrize(("limit", "turns"), [(None, 4), (2, 2), (1, 1)])
def test_the_episode_ends_at_the_turn_limit(limit, turns):
    env = Chat(max_turns=limit)
    env.reset(seed=0)
    flags = [env.step("x")[2:4] for _ in range(turns)]
    assert flags == [(False, False)] * (turns - 1) + [(False, True)]
    assert env.most_turns(env.task) == turns


def test_a_finish_at_the_limit_is_a_finish():
    env = Chat(max_turns=1)
    env.reset(seed=0)
    assert env.step("stop")[2:4] == (True, False)


def test_steps_need_a_running_episode():
    env = Chat()
    with pytest.raises(EpisodeOver, match="call reset first"):
        env.step("x")
    env.reset(seed=0)
    env.step("stop")
    with pytest.raises(EpisodeOver, match="the episode is over"):
        env.step("x")
    env.close()
    env.close()
    with pytest.raises(EpisodeOver):
        env.snapshot()


def test_success_defaults():
    assert Outcome(True).terms() == {"success": 1.0}
    assert Outcome(False).terms() == {"success": 0.0}
    assert Outcome(None).terms() == {}
    assert Outcome(True, {"a": 2.0}).terms() == {"a": 2.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_number_is_refused(value):
    class Bad(Chat):
        def judge(self):
            return Outcome(True, {"broken": value})

    env = Bad()
    env.reset(seed=0, options={"task": 1})
    with pytest.raises(InvalidReward, match=r"Bad, task train/default/1: reward terms \{'broken': (nan|-?inf)\}"):
        env.step("stop")


def test_tasks_are_chosen_by_index_id_or_value():
    env = Chat()
    other = Chat.tasks.task("test", 0)
    chosen = [env.reset(options={"task": t})[1]["task"] for t in (1, "test/default/0", other)]
    assert chosen == ["train/default/1", "test/default/0", "test/default/0"]


def test_begin_gets_equal_randomness_whether_the_task_was_drawn_or_chosen():
    drawn = Chat().reset(seed=9)
    assert Chat().reset(seed=9, options={"task": drawn[1]["task"]}) == drawn


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Chat(split="tran"), UnknownName, "did you mean 'train'"),
        (lambda: Chat(level="defalt"), UnknownName, "did you mean 'default'"),
        (lambda: Chat(max_turns=0), BadInput, "max_turns must be >= 1"),
        (lambda: Chat().reset(options={"tsk": 1}), BadInput, r"unknown reset options \['tsk'\]"),
        (lambda: Chat().reset(options={"task": 5}), BadInput, "out of range"),
        (lambda: Chat().reset(options={"task": 1.5}), BadInput, "not float"),
    ],
)
def test_bad_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_an_env_that_lacks_a_method_says_which():
    class Half(Env):
        tasks = Chat.tasks

        def begin(self, task, rng):
            return "hello"

    with pytest.raises(BadInput, match="Half has to define respond, judge"):
        Half()


def test_render():
    env = Chat(render_mode="ansi")
    assert env.render() is None
    assert env.reset(seed=1)[0] == env.render()
    assert Chat().render() is None


def test_text_space():
    space, actions = TextSpace(), TextSpace(messages=True)
    assert Message() in actions
    assert Message() not in space
    assert space != actions
    assert space == TextSpace()
    space.seed(3)
    first = space.sample()
    space.seed(3)
    assert space.sample() == first
    assert 1 <= len(first) <= 40
    assert not space.is_np_flattenable


# --- snapshots ----------------------------------------------------------------------------------------------------


@given(data=st.data(), seed=st.integers(0, 2**31))
@settings(max_examples=40)
@pytest.mark.parametrize("mechanism", ["state", "replay"])
def test_restored_episodes_go_on_equally(mechanism, data, seed, dice, replay_dice, run, actions):
    """The invariant: restore, then the same actions, give the same results, in any instance, any number of times."""
    cls = dice if mechanism == "state" else replay_dice
    env, other = cls(), cls()
    script = data.draw(st.lists(st.sampled_from(actions), min_size=1, max_size=10))
    cut = data.draw(st.integers(0, len(script) - 1))
    other.reset(seed=seed)
    straight = run(other, script)
    env.reset(seed=seed)
    head = run(env, script[:cut])
    saved = pickle.loads(pickle.dumps(env.snapshot()))
    if head and (head[-1][2] or head[-1][3]):
        env.reset(seed=0)
        env.restore(saved)
        with pytest.raises(EpisodeOver):
            env.step("x")
        return
    rest = straight[cut:]
    assert run(env, script[cut:]) == rest
    env.restore(saved)
    assert run(env, script[cut:]) == rest
    other.restore(saved)
    assert run(other, script[cut:]) == rest


@pytest.mark.parametrize("mechanism", ["state", "replay"])
def test_reseeded_branches_can_be_snapshotted_again(mechanism, dice, replay_dice, run):
    cls = dice if mechanism == "state" else replay_dice
    env, other = cls(), cls()
    env.reset(seed=1, options={"task": Task("train/easy/0", "easy", {"goal": 90, "bonus": []})})
    env.step(call("roll"))
    here = env.snapshot()
    env.restore(here, reseed=77)
    env.step(call("roll", count=3))
    later = env.snapshot()
    expected = run(env, [call("roll", count=2)] * 3)
    other.restore(later)
    assert run(other, [call("roll", count=2)] * 3) == expected
    other.restore(here, reseed=78)
    env.restore(here, reseed=77)
    assert other.step(call("roll", count=3)) != env.step(call("roll", count=3))


@pytest.mark.parametrize("option", [None, 3])
def test_replay_restores_what_begin_drew(option, replay_dice):
    env, other = replay_dice(), replay_dice()
    first, _ = env.reset(options=option if option is None else {"task": option})
    saved = env.snapshot()
    other.restore(saved)
    assert other._episode.observation == first
    assert other.state == env.state


def test_replay_keeps_messages_that_text_cannot_express(replay_dice):
    env, other = replay_dice(), replay_dice()
    env.reset(seed=3)
    env.step(Message("cut", (ToolCall("roll", {}),), truncated=True))
    env.step(Message(tool_calls=(ToolCall("", problem="the call is not valid JSON"),)))
    other.restore(env.snapshot())
    assert other.state == env.state


def test_hidden_nondeterminism_is_a_replay_divergence(dice):
    class Hidden(dice):
        snapshot_by = "replay"
        drawn = 0

        def begin(self, task, rng):
            super().begin(task, rng)
            return "begin"

        def respond(self, message):
            Hidden.drawn += 1
            return f"{Hidden.drawn}"

    env = Hidden()
    env.reset(seed=0)
    env.step("x")
    with pytest.raises(ReplayDivergence, match="replayed turn 1 gave another observation: '2'"):
        env.restore(env.snapshot())


def test_a_first_observation_that_differs_is_a_replay_divergence(dice):
    class Hidden(dice):
        snapshot_by = "replay"

        def begin(self, task, rng):
            return str(random.random())

    env = Hidden()
    env.reset(seed=0)
    with pytest.raises(ReplayDivergence, match="replayed turn 0"):
        env.restore(env.snapshot())


def test_forks_are_independent(dice):
    env = dice()
    env.reset(seed=2)
    env.step(call("roll"))
    a, b = env.fork(2)
    a.step(call("roll", count=3))
    assert b.state == env.state
    assert a.state["log"] != b.state["log"]
    assert a.state["bonus"] is not b.state["bonus"]
    assert env.fork(0) == []


def test_forks_are_made_with_the_same_arguments(dice):
    env = dice(split="test", level="hard", max_turns=3)
    env.reset(seed=0)
    [child] = env.fork(1)
    assert (child.split, child.level, child.most_turns(child.task)) == ("test", "hard", 3)
    assert copy.deepcopy(env).state == env.state
    assert copy.deepcopy(dice()).task is None


def test_what_is_not_covered_is_refused(dice):
    env = dice()
    env.reset(seed=0)
    with pytest.raises(UnsupportedSnapshot, match="Dice cannot snapshot files, processes; it covers memory"):
        env.snapshot(require={"memory", "files", "processes"})


def test_state_that_cannot_be_pickled_is_refused(dice):
    env = dice()
    env.reset(seed=0)
    env.state["lock"] = threading.Lock()
    with pytest.raises(UnsupportedSnapshot, match="state of Dice cannot be pickled"):
        env.snapshot()


def test_a_snapshot_of_another_class_is_refused(dice):
    env, other = dice(), Chat()
    env.reset(seed=0)
    with pytest.raises(SnapshotError, match=r"snapshot of .*Dice cannot be restored in .*Chat"):
        other.restore(env.snapshot())


def test_a_snapshot_knows_its_size_and_turn(dice, replay_dice):
    for cls in (dice, replay_dice):
        env = cls()
        env.reset(seed=0)
        env.step("x")
        saved = env.snapshot()
        assert saved.turn == 1
        assert saved.nbytes > 50
        assert isinstance(saved.task, Task)


def test_restoring_does_not_disturb_the_seed_stream_of_others():
    one, two = Chat(), Chat()
    one.reset(seed=5)
    two.restore(one.snapshot(), reseed=1)
    assert two.np_random.bit_generator.state == seeding.rng(1).bit_generator.state
    assert one.step("x")[0] != two.step("x")[0]


def test_gymnasium_wrappers_accept_it():
    env = gymnasium.wrappers.RecordEpisodeStatistics(Chat())
    env.reset(seed=0)
    assert env.step("stop")[4]["episode"]["l"] == 1
