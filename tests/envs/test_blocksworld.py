"""`agentgym/Blocksworld-v0`: rules, tasks, players and exact snapshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import seeding, stack
from agentgym.envs.blocksworld import NAMES, TABLE, Blocksworld, make_task
from agentgym.errors import EpisodeOver
from agentgym.messages import Message, call
from agentgym.tasks import Task

ENV_ID = "agentgym/Blocksworld-v0"
LEVELS = ("b3", "b4", "b5", "b6", "b8", "b10")
START = {"red": "blue", "blue": TABLE, "green": TABLE}
GOAL = {"red": "green", "blue": "red", "green": TABLE}
GOLDEN = {
    "train": "d1f4a6dcb5584ad0",
    "validation": "cb6863b05130cead",
    "test": "c4d20a906cb85ea2",
}


def game(start: Mapping[str, str] = START, goal: Mapping[str, str] = GOAL) -> Blocksworld:
    env = Blocksworld(max_turns=5)
    env.reset(seed=0, options={"task": Task("train/b3/0", "b3", {"start": start, "goal": goal, "moves": 2})})
    return env


def move(block: str, to: str) -> Message:
    return call("move", block=block, to=to)


# --- rules ----------------------------------------------------------------------------------------------------


def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make(ENV_ID).unwrapped)


def test_a_game_from_first_observation_to_success() -> None:
    env = Blocksworld()
    data = {"start": START, "goal": GOAL, "moves": 2}
    observation, _ = env.reset(options={"task": Task("train/b3/0", "b3", data)})
    assert observation == (
        "done green on table goal table\ncovered blue on table goal red\nready red on blue goal green"
    )
    observation, reward, terminated, _, _ = env.step(move("red", "green"))
    assert (reward, terminated) == (0.0, False)
    assert observation == (
        "Moved.\ndone green on table goal table\ndone red on green goal green\nready blue on table goal red"
    )
    observation, reward, terminated, truncated, info = env.step(move("blue", "red"))
    assert (observation, terminated, truncated, info["success"]) == ("Moved. All done.", True, False, True)
    assert info["reward_terms"] == {"success": 1.0, "progress": 0.1}
    with pytest.raises(EpisodeOver):
        env.step(move("blue", "table"))


@pytest.mark.parametrize(
    ("block", "to", "reason"),
    [
        ("blue", "green", "blue is not clear: red is on it"),
        ("green", "blue", "blue is not clear: red is on it"),
        ("red", "blue", "red is already on blue"),
        ("green", "table", "green is already on table"),
        ("red", "red", "red cannot be put on itself"),
        ("rd", "table", "unknown block 'rd': did you mean 'red'? Valid: blue, green, red"),
        ("violet", "table", "unknown block 'violet'"),
        ("red", "tabel", "unknown place 'tabel': did you mean 'table'? Valid: blue, green, red, table"),
        ("table", "red", "unknown block 'table'"),
        ("", "red", "unknown block ''"),
        ("red", "0", "unknown place '0'"),
    ],
)
def test_a_refused_move_names_the_reason_and_counts_as_a_turn(block: str, to: str, reason: str) -> None:
    env = game()
    observation, reward, terminated, _, info = env.step(move(block, to))
    assert (reward, terminated, info["success"]) == (0.0, False, None)
    assert info["tool_calls"][0]["error"].startswith(reason)
    assert observation.startswith(f"Error: {reason}")
    assert observation.endswith("\nready red on blue goal green")
    assert env.state["on"] == START
    assert env.snapshot().turn == 1


@pytest.mark.parametrize(
    ("action", "says"),
    [
        ("Put red on green.", "No tool call found"),
        ("", "No tool call found"),
        (Message(truncated=True), "cut off by the token limit"),
        ('<tool_call>{"name": "move", "arguments": {"block": 0, "to": "table"}}</tool_call>', "got 0"),
        ('<tool_call>{"name": "move", "arguments": null}</tool_call>', "must be a JSON object, not null"),
        ('<tool_call>{"name": "move", "arguments": {"block": "red"}}</tool_call>', "to is missing"),
        ('<tool_call>{"name": "mov', "not closed"),
        ('<tool_call>{"name": "stack"}</tool_call>', "unknown tool 'stack'"),
    ],
)
def test_a_bad_message_is_answered_in_words_and_the_blocks_restated(action: str | Message, says: str) -> None:
    env = game()
    observation = env.step(action)[0]
    assert says in observation
    assert observation.endswith("\nready red on blue goal green")
    assert env.state["on"] == START


def test_calls_after_the_goal_are_refused() -> None:
    env = game()
    calls = [*move("red", "green").tool_calls, *move("blue", "red").tool_calls, *move("blue", "table").tool_calls]
    _, _, terminated, _, info = env.step(Message(tool_calls=tuple(calls)))
    assert [m["content"] for m in info["messages"]][:2] == ["Moved.", "Moved. All done."]
    assert [c["ok"] for c in info["tool_calls"]] == [True, True, False]
    assert (terminated, info["success"], env.state["on"]) == (True, True, GOAL)


def test_the_step_limit_ends_a_failing_episode() -> None:
    env = Blocksworld()
    env.reset(options={"task": Task("train/b3/0", "b3", {"start": START, "goal": GOAL, "moves": 2})})
    steps = [env.step(""), env.step("")]
    assert [s[2:4] for s in steps] == [(False, False), (False, True)]
    assert steps[-1][4]["success"] is False
    assert steps[-1][4]["reward_terms"] == {"success": 0.0, "progress": pytest.approx(0.1 / 3)}


# --- tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_keeps_what_its_level_promises(level: str) -> None:
    for index in range(60):
        data = make_task(seeding.rng(index), level)
        for supports in (data["start"], data["goal"]):
            blocks = set(supports)
            assert blocks <= set(NAMES)
            assert len(blocks) == int(level[1:])
            carrying = [below for below in supports.values() if below != TABLE]
            assert len(carrying) == len(set(carrying))
            assert set(carrying) <= blocks
            for block in blocks:
                below, height = block, 0
                while below != TABLE:
                    below, height = supports[below], height + 1
                    assert height <= len(blocks)
        assert sum(data["start"][b] != data["goal"][b] for b in data["start"]) >= 2


def test_splits_share_no_task() -> None:
    seen = {
        split: {json.dumps(Blocksworld.tasks.task(split, i, "b3").data, sort_keys=True) for i in range(400)}
        for split in Blocksworld.tasks.sizes
    }
    assert len(set.union(*seen.values())) == sum(map(len, seen.values()))


@pytest.mark.parametrize("split", list(GOLDEN))
def test_tasks_are_the_same_in_every_process_and_version(split: str) -> None:
    rows = [[t.id, t.level, t.data] for t in (Blocksworld.tasks.task(split, i) for i in range(20))]
    text = json.dumps([*rows, dict(Blocksworld.tasks.task(split, 0, "b10").data)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[split]


# --- players --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_task(level: str) -> None:
    env = Blocksworld(split="test", level=level)
    for index in range(100):
        env.reset(options={"task": index})
        over, turns = False, 0
        while not over:
            _, _, terminated, truncated, info = env.step(env.expert(seeding.rng(index, turns)))
            over, turns = terminated or truncated, turns + 1
        assert info["success"]
        assert 2 <= turns <= 2 * int(level[1:])


@pytest.mark.parametrize("level", LEVELS)
def test_a_random_valid_move_is_accepted(level: str) -> None:
    env = Blocksworld(level=level)
    for index in range(20):
        env.reset(options={"task": index})
        rng, over = seeding.rng(index), False
        while not over:
            _, _, terminated, truncated, info = env.step(env.random_valid(rng))
            assert [c["ok"] for c in info["tool_calls"]] == [True]
            over = terminated or truncated


def test_the_longest_level_needs_about_15_moves() -> None:
    env = Blocksworld(level="b10")
    limits = [env.turn_limit(env.tasks.task("train", i, "b10")) for i in range(50)]
    assert 13 <= sum(limits) / len(limits) <= 17
    assert max(limits) >= 17


@pytest.mark.parametrize(("level", "tasks"), [("b3", 40), ("b4", 25), ("b5", 4)])
def test_the_limit_is_the_length_of_a_shortest_plan(level: str, tasks: int) -> None:
    for index in range(tasks):
        data = make_task(seeding.rng(7, index), level)
        names = list(data["start"])
        reached, moves = {tuple(data["start"].values())}, 0
        wanted = tuple(data["goal"][name] for name in names)
        while wanted not in reached:  # every valid move from every state: breadth first
            reached = {after for state in reached for after in _after_any_move(dict(zip(names, state, strict=True)))}
            moves += 1
        assert moves == data["moves"]


def _after_any_move(on: Mapping[str, str]) -> list[tuple[str, ...]]:
    clear = [name for name in on if name not in on.values()]
    places = [*clear, TABLE]
    return [tuple({**on, a: b}.values()) for a in clear for b in places if a != b and on[a] != b]


@settings(max_examples=25)
@given(st.integers(0, 200), st.integers(0, 15), st.sampled_from(LEVELS))
def test_the_expert_reaches_the_goal_from_anywhere(index: int, detours: int, level: str) -> None:
    env = Blocksworld(level=level, max_turns=100)
    env.reset(options={"task": index})
    rng, success = seeding.rng(index, detours), None
    for turn in range(detours + 2 * int(level[1:])):
        player = env.random_valid if turn < detours else env.expert
        _, _, terminated, _, info = env.step(player(rng))
        if terminated:
            success = info["success"]
            break
    assert success


# --- snapshots ------------------------------------------------------------------------------------------------

PLAYERS = ("expert", "random_valid")
GARBAGE = ["", "hello", "<tool_call>", "<tool_call>{</tool_call>", '<tool_call>{"name": "nope"}</tool_call>']
PLACES = st.sampled_from([*NAMES, TABLE, "nowhere"])
ACTIONS = st.one_of(st.sampled_from(PLAYERS), st.sampled_from(GARBAGE), st.builds(move, PLACES, PLACES))


def play(env: stack.AnyEnv, actions: Sequence[str | Message]) -> tuple[list[str], bool]:
    """Play until the episode ends; return all answers with the generator's state, and whether the episode ended.

    Named players draw from the env's own generator, so that it is checked too.
    """
    core: Any = env.unwrapped
    seen: list[str] = []
    for action in actions:
        answer = env.step(getattr(core, str(action))(core.np_random) if action in PLAYERS else action)
        seen.append(json.dumps([answer, core.np_random.bit_generator.state]))
        if answer[2] or answer[3]:
            return seen, True
    return seen, False


@settings(max_examples=40)
@given(
    st.lists(ACTIONS, max_size=4),
    st.lists(ACTIONS, min_size=1, max_size=12),
    st.integers(0, 30),
    st.sampled_from(["b3", "b8"]),
    st.sampled_from([None, 7]),
)
def test_the_same_actions_after_restore_give_the_same_answers(
    before: list[str | Message], after: list[str | Message], index: int, level: str, limit: int | None
) -> None:
    env, other = (gymnasium.make(ENV_ID, level=level, max_episode_steps=limit) for _ in range(2))
    other.reset(seed=99)
    env.reset(seed=index, options={"task": index})
    _, over = play(env, before)
    if over:
        return
    saved = stack.snapshot(env)
    first = play(env, after)
    for again in (env, other, env):
        stack.restore(again, saved)
        assert play(again, after) == first


def test_siblings_do_not_share_blocks() -> None:
    left, right = game().fork(2)
    left.step(move("red", "green"))
    assert right.state["on"] == START
    assert "red on blue" in right.step("")[0]
