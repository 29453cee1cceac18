"""The envs that the tests of the core play in."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
import pytest

from agentgym import Outcome, TaskSet, ToolEnv, tool
from agentgym.errors import ToolError
from agentgym.messages import Message, call
from agentgym.tools import Hidden

TASKS = TaskSet.generated(
    lambda rng, level: {"goal": int(rng.integers(8, 40)), "bonus": [int(x) for x in rng.integers(9, size=3)]},
    sizes={"train": 50, "test": 20},
    mix=["easy", "hard"],
)


class Dice(ToolEnv):
    """Reach a sum by rolling dice. Random in `begin` and in every step; nested state; several tools."""

    tasks = TASKS
    max_turns = 12

    def begin(self, task, rng):
        self.state = {"left": task.data["goal"] + int(rng.integers(3)), "log": [], "bonus": list(task.data["bonus"])}
        return f"Roll {self.state['left']} in all."

    @tool(cost=0.5)
    def roll(self, count: int = 1, mode: Literal["fair", "wild"] = "fair") -> dict[str, Any]:
        """Roll dice.

        Args:
            count: number of dice, 1 to 3.
            mode: wild dice have 12 sides.
        """
        if not 1 <= count <= 3:
            raise ToolError(f"count must be 1 to 3, got {count}")
        thrown = [int(x) for x in self.np_random.integers(1, 7 if mode == "fair" else 13, size=count)]
        self.state["log"].append(thrown)
        self.state["left"] -= sum(thrown)
        self.add_reward("progress", 0.01 * sum(thrown))
        if self.state["left"] <= 0:
            self.finish()
        return {"thrown": thrown, "left": self.state["left"]}

    @tool
    def history(self, state: Annotated[dict[str, Any], Hidden]) -> str:
        """List the rolls so far."""
        return str(state["log"])

    def judge(self):
        return Outcome(self.state["left"] == 0)

    def random_valid(self, rng):
        return call("roll", count=int(rng.integers(1, 4)))


class Echo(gymnasium.Wrapper):
    """A user's wrapper: a deque of observations, a counter and a random generator of its own."""

    def __init__(self, env):
        super().__init__(env)
        self.seen = deque(maxlen=3)
        self.rng = np.random.default_rng(5)
        self.total = {"steps": 0}

    def reset(self, **kwargs):
        observation, info = self.env.reset(**kwargs)
        self.seen.clear()
        self.rng = np.random.default_rng(5)
        self.total["steps"] = 0
        return observation, info

    def step(self, action):
        observation, *rest = self.env.step(action)
        self.seen.append(observation[:20])
        self.total["steps"] += 1
        mark = f"{self.total['steps']} {self.rng.integers(1000)} {list(self.seen)}"
        return f"{observation}\n{mark}", *rest


def play(env, actions):
    """Step through `actions` until the episode is over."""
    results = []
    for action in actions:
        results.append(env.step(action))
        if results[-1][2] or results[-1][3]:
            break
    return results


ACTIONS: list[str | Message] = [
    call("roll"),
    call("roll", count=2, mode="wild"),
    call("history"),
    call("roll", count=9),
    call("roll", count="x"),
    call("nope"),
    "plain text",
    "",
    '<tool_call>{"name": "roll", "arguments": {"count": 2}}</tool_call>',
    '<tool_call>{"name": "roll", "arguments": {"count": 2}',
    Message(tool_calls=(call("roll").tool_calls[0], call("history").tool_calls[0])),
    Message("cut", call("roll").tool_calls, truncated=True),
]


@pytest.fixture(scope="session")
def dice():
    return Dice


@pytest.fixture(scope="session")
def replay_dice():
    return type("ReplayDice", (Dice,), {"snapshot_by": "replay"})


@pytest.fixture(scope="session")
def echo():
    return Echo


@pytest.fixture(scope="session")
def run():
    return play


@pytest.fixture(scope="session")
def actions():
    return ACTIONS
