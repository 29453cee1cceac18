"""`agentgym/Countdown-v0`: rules, tasks, players and exact snapshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import seeding, stack
from agentgym.envs._countdown_numbers import Move, combined, moves, result_of, solve
from agentgym.envs.countdown import Countdown, make_task
from agentgym.errors import EpisodeOver
from agentgym.messages import Message, ToolCall, call
from agentgym.tasks import Task

ENV_ID = "agentgym/Countdown-v0"
LEVELS = ("n3", "n4", "n5", "n6", "n7", "n8")
GOLDEN = {
    "train": "9ddfca8a56eebb19",
    "validation": "0101eeac164f3bc3",
    "test": "7c7948703f1fa4b7",
}


def game(numbers: Sequence[int], target: int, solution: Sequence[Move] = ()) -> Countdown:
    env = Countdown()
    data = {"numbers": list(numbers), "target": target, "solution": [list(move) for move in solution]}
    env.reset(seed=0, options={"task": Task("train/n3/0", "n3", data)})
    return env


def combine(a: int, op: str, b: int) -> Message:
    return call("combine", a=a, op=op, b=b)


def error_of(env: Countdown, action: str | Message) -> str:
    """Play an action that must be refused: the numbers stay, and the observation gives the reason and the state."""
    before = list(env.state["numbers"])
    observation, reward, terminated, _, info = env.step(action)
    (record,) = info["tool_calls"]
    assert not record["ok"]
    assert env.state["numbers"] == before
    assert (reward, terminated, info["success"]) == (0.0, False, None)
    assert observation.startswith("Error: " + record["error"])
    assert observation.endswith(f"\nNumbers: {' '.join(map(str, before))}. Target: {env.state['target']}.")
    return str(record["error"])


# --- rules ----------------------------------------------------------------------------------------------------


def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make(ENV_ID).unwrapped)


def test_a_game_from_first_observation_to_success() -> None:
    env = Countdown()
    task = Task("train/n3/0", "n3", {"numbers": [3, 7, 12], "target": 22, "solution": [[7, "+", 12], [19, "+", 3]]})
    assert env.reset(options={"task": task})[0] == "Numbers: 3 7 12. Target: 22."
    assert env.step(combine(7, "+", 12))[0] == "7 + 12 = 19.\nNumbers: 3 19. Target: 22."
    assert env.step(combine(3, "+", 19))[0] == "3 + 19 = 22.\nNumbers: 22. Target: 22."
    observation, reward, terminated, truncated, info = env.step(call("submit", number=22))
    assert (observation, terminated, truncated, info["success"]) == ("Correct.", True, False, True)
    assert info["reward_terms"] == {"success": 1.0, "progress": 0.1}
    assert reward == pytest.approx(1.1)
    with pytest.raises(EpisodeOver):
        env.step(call("submit", number=22))


@pytest.mark.parametrize(
    ("a", "op", "b", "reason"),
    [
        (9, "+", 12, "9 is not one of the numbers"),
        (12, "+", 9, "9 is not one of the numbers"),
        (7, "+", 7, "there is only one 7"),
        (12, "/", 7, "12 / 7 is not a whole number"),
        (7, "-", 12, "7 - 12 = -5 is not within 1 to 200"),
        (25, "*", 12, "25 * 12 = 300 is not within 1 to 200"),
        (0, "+", 12, "all numbers are within 1 to 200"),
        (12, "/", 0, "all numbers are within 1 to 200"),
        (12, "+", 10**40, "all numbers are within 1 to 200"),
    ],
)
def test_a_refused_combination_names_the_reason(a: int, op: str, b: int, reason: str) -> None:
    assert error_of(game([7, 12, 25], 30), combine(a, op, b)) == reason


def test_equal_numbers_are_used_one_at_a_time() -> None:
    env = game([5, 5, 8], 9)
    assert "0 is not within" in error_of(env, combine(5, "-", 5))
    assert env.step(combine(5, "/", 5))[0].endswith("Numbers: 8 1. Target: 9.")


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (combine(7, "^", 12), "op: Input should be '+', '-', '*' or '/'"),
        (call("combine", a="x", op="+", b=12), "a: Input should be a valid integer"),
        (call("combine", a=7, op="+"), "b is missing"),
        (call("submit", number=None), "number: Input should be a valid integer"),
        (call("undo"), "unknown tool 'undo'"),
        (Message(tool_calls=(ToolCall("combine", problem="the call is not valid JSON"),)), "not valid JSON"),
        ('<tool_call>\n{"name": "combine", "arguments": [7, "+", 12]}\n</tool_call>', "must be a JSON object"),
        ('<tool_call>{"name":"combine","arguments":{"a":NaN,"op":"+","b":7}}</tool_call>', "a: Input should be a"),
    ],
)
def test_a_bad_call_names_the_reason_and_restates_the_state(action: str | Message, reason: str) -> None:
    assert reason in error_of(game([7, 12, 25], 30), action)


@pytest.mark.parametrize("action", ["I would add 7 and 12.", "", Message(tool_calls=(), truncated=True)])
def test_the_state_is_restated_after_a_message_without_a_call(action: str | Message) -> None:
    env = game([7, 12, 25], 30)
    observation, _, _, _, info = env.step(action)
    assert info["tool_calls"] == []
    assert observation.endswith("\nNumbers: 7 12 25. Target: 30.")


def test_each_call_of_a_message_gets_one_answer_and_the_state_stands_once_at_the_end() -> None:
    env = game([3, 7, 12], 22)
    calls = (*combine(7, "+", 12).tool_calls, *combine(7, "+", 3).tool_calls, *combine(19, "+", 3).tool_calls)
    _, _, _, _, info = env.step(Message(tool_calls=calls))
    assert [m["content"] for m in info["messages"]] == [
        "7 + 12 = 19.",
        "Error: 7 is not one of the numbers",
        "19 + 3 = 22.\nNumbers: 22. Target: 22.",
    ]


@pytest.mark.parametrize(
    ("number", "answer"),
    [(0, "Wrong: not one of the numbers."), (30, "Wrong: not one of the numbers."), (12, "Wrong: not the target.")],
)
def test_a_wrong_submission_ends_the_game(number: int, answer: str) -> None:
    observation, _, terminated, _, info = game([7, 12, 25], 30).step(call("submit", number=number))
    assert (observation, terminated, info["success"]) == (answer, True, False)
    assert info["reward_terms"] == {"success": 0.0, "progress": pytest.approx(0.1 * 25 / 30)}


def test_the_target_without_submission_is_no_success() -> None:
    env = game([3, 7, 12], 19)
    env.step(combine(7, "+", 12))
    flags = [env.step("...")[2:4] for _ in range(env.turn_limit(env.task) - 1)]  # type: ignore[arg-type]
    assert flags[-1] == (False, True)
    assert True not in {flag for pair in flags[:-1] for flag in pair}


# --- tasks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_task_keeps_what_its_level_promises(level: str) -> None:
    for index in range(60):
        data = make_task(seeding.rng(index), level)
        numbers, target = data["numbers"], data["target"]
        assert len(numbers) == int(level[1:])
        assert numbers == sorted(numbers)
        assert 1 <= min(numbers) <= max(numbers) <= 25
        assert target not in numbers
        if len(numbers) >= 4:
            assert target not in {result_of(*move) for move in moves(numbers)}
        for a, op, b in data["solution"]:
            assert (a, op, b) in moves(numbers)
            assert target not in numbers
            numbers = combined(numbers, (a, op, b))
        assert numbers == [target]


def test_splits_share_no_numbers_with_target() -> None:
    seen: dict[str, set[str]] = {}
    for split in Countdown.tasks.sizes:
        rows = [Countdown.tasks.task(split, index, "n3").data for index in range(400)]
        seen[split] = {f"{row['numbers']} {row['target']}" for row in rows}
    assert len(set.union(*seen.values())) == sum(map(len, seen.values()))


@pytest.mark.parametrize("split", list(GOLDEN))
def test_tasks_are_the_same_in_every_process_and_version(split: str) -> None:
    rows = [[t.id, t.level, t.data] for t in (Countdown.tasks.task(split, i) for i in range(20))]
    text = json.dumps([*rows, dict(Countdown.tasks.task(split, 0, "n8").data)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == GOLDEN[split]


# --- players --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_expert_solves_every_task(level: str) -> None:
    env = Countdown(split="test", level=level)
    for index in range(100):
        env.reset(options={"task": index})
        over, turns = False, 0
        while not over:
            _, _, terminated, truncated, info = env.step(env.expert(seeding.rng(index, turns)))
            over, turns = terminated or truncated, turns + 1
        assert info["success"]
        assert turns == int(level[1:])


@pytest.mark.parametrize("level", LEVELS)
def test_a_random_valid_move_is_accepted(level: str) -> None:
    env = Countdown(level=level)
    for index in range(30):
        env.reset(options={"task": index})
        rng, over = seeding.rng(index), False
        while not over:
            _, _, terminated, truncated, info = env.step(env.random_valid(rng))
            assert [c["ok"] for c in info["tool_calls"]] == [True]
            over = terminated or truncated


def test_the_expert_finds_another_way_after_a_detour() -> None:
    env = game([2, 3, 4, 9], 21, [(4, "*", 3), (12, "+", 9), (21, "*", 2)])
    env.step(combine(4, "-", 2))
    for turn in range(3):
        info = env.step(env.expert(seeding.rng(turn)))[4]
    assert info["success"]


def test_the_expert_plays_a_lost_game_to_its_end_with_valid_moves() -> None:
    env = game([1, 1, 1, 1, 1, 1], 190)
    info: dict[str, Any] = {}
    for turn in range(6):
        _, _, terminated, _, info = env.step(env.expert(seeding.rng(turn)))
        assert all(c["ok"] for c in info["tool_calls"])
    assert terminated
    assert info["success"] is False


@given(st.lists(st.integers(1, 200), min_size=2, max_size=8))
def test_two_numbers_can_always_be_combined(numbers: list[int]) -> None:
    assert moves(numbers)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 25), min_size=2, max_size=4), st.integers(1, 60))
def test_the_search_agrees_with_trying_everything(numbers: list[int], target: int) -> None:
    def reachable(now: tuple[int, ...]) -> bool:
        return target in now or any(reachable(tuple(combined(now, move))) for move in moves(now))

    plan = solve(numbers, target)
    assert (plan is not None) == reachable(tuple(numbers))
    for move in plan or []:
        assert move in moves(numbers)
        numbers = combined(numbers, move)
    assert plan is None or target in numbers


# --- snapshots ------------------------------------------------------------------------------------------------

PLAYERS = ("expert", "random_valid")
GARBAGE = ["", "hello", "<tool_call>", "<tool_call>{</tool_call>", '<tool_call>{"name": "nope"}</tool_call>']
ACTIONS = st.one_of(
    st.sampled_from(PLAYERS),
    st.sampled_from(GARBAGE),
    st.builds(combine, st.integers(-1, 30), st.sampled_from("+-*/^"), st.integers(0, 30)),
    st.builds(lambda n: call("submit", number=n), st.integers(0, 3)),
)


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
    st.sampled_from(["n3", "n6"]),
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


def test_siblings_do_not_share_numbers() -> None:
    env = game([3, 7, 12], 22)
    left, right = env.fork(2)
    left.step(combine(7, "+", 12))
    assert right.step("")[0].endswith("Numbers: 3 7 12. Target: 22.")
