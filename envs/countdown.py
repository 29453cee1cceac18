"""`agentgym/Countdown-v0`: reach a target from 3 to 8 given numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from agentgym.env import CallMode, Outcome
from agentgym.envs._countdown_numbers import MAX_RESULT, Move, allowed, combined, draw_chain, moves, result_of, solve
from agentgym.envs._restate import restate
from agentgym.errors import ToolError
from agentgym.messages import ChatMessage, Message, call
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet
from agentgym.tool_env import ToolEnv
from agentgym.tools import tool

SIZES = {"train": 8000, "validation": 1000, "test": 1000}
MIX = {"n3": 0.7, "n4": 0.2, "n5": 0.1, "n6": 0.0, "n7": 0.0, "n8": 0.0}
SEARCHABLE = 4
PROGRESS_WEIGHT = 0.1


def make_task(rng: Rng, level: str) -> dict[str, Any]:
    """Draw a task of level `n3` to `n8`: `numbers` (sorted), `target`, and `solution`, moves that use them all."""
    numbers, chain, target = draw_chain(int(level[1:]), rng)
    return {"numbers": numbers, "target": target, "solution": [list(move) for move in chain]}


def _asked(data: Mapping[str, Any]) -> list[Any]:
    """Return what the policy is asked, without the solution."""
    return [data["numbers"], data["target"]]


class Countdown(ToolEnv):
    """Combine numbers two at a time until one of them is the target, then submit it. Nothing can be undone.

    Levels `n3` to `n8` give that many numbers within 1..25; every result is a whole number within 1..200. Every
    task has a solution that uses all numbers, so the expert takes as many turns as there are numbers; not all
    need be used. The limit is 3 turns more.

    Success: the submitted number is the target and one of the current numbers. The shaped term `progress` is
    `0.1 * max(0, 1 - d / target)`, `d` being the distance from the target to the nearest current number.
    """

    tasks: ClassVar[TaskSet] = TaskSet.generated(make_task, sizes=SIZES, mix=MIX, key=_asked)
    instructions: ClassVar[str] = (
        "Make the target from the numbers. Each number can be used once and every result must be a whole number "
        "from 1 to 200. Submit the target when you have it."
    )
    calls: ClassVar[CallMode] = "inline"

    def begin(self, task: Task, rng: Rng) -> str:
        """Show the numbers and the target."""
        self.state = {"numbers": list(task.data["numbers"]), "target": task.data["target"], "submitted": None}
        return self._line()

    def turn_limit(self, task: Task) -> int:
        """Three turns more than there are numbers: room for invalid moves."""
        return len(task.data["numbers"]) + 3

    def respond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Execute the calls, then restate numbers and target."""
        reply = super().respond(message)
        return reply if self.state["submitted"] is not None else restate(reply, self._line())

    @tool
    def combine(self, a: int, op: Literal["+", "-", "*", "/"], b: int) -> str:
        """Replace the numbers a and b by a op b."""
        numbers = self.state["numbers"]
        for n in (a, b):
            _check_present(n, numbers)
        if a == b and numbers.count(a) < 2:
            raise ToolError(f"there is only one {a}")
        value = result_of(a, op, b)
        if value is None:
            raise ToolError(f"{a} / {b} is not a whole number")
        if not allowed(a, op, b):
            raise ToolError(f"{a} {op} {b} = {value} is not within 1 to {MAX_RESULT}")
        self.state["numbers"] = combined(numbers, (a, op, b))
        return f"{a} {op} {b} = {value}."

    @tool
    def submit(self, number: int) -> str:
        """End the game with one of the numbers."""
        self.state["submitted"] = number
        self.finish()
        if number not in self.state["numbers"]:
            return "Wrong: not one of the numbers."
        return "Correct." if number == self.state["target"] else "Wrong: not the target."

    def judge(self) -> Outcome:
        """Success if the target was made and submitted."""
        numbers, target = self.state["numbers"], self.state["target"]
        success = self.state["submitted"] == target and target in numbers
        distance = min(abs(n - target) for n in numbers)
        progress = PROGRESS_WEIGHT * max(0.0, 1 - distance / target)
        return Outcome(success, {"success": float(success), "progress": progress})

    def expert(self, rng: Rng) -> Message:
        """Submit the target or a last number; else follow the task's solution, else search, else move at random.

        The search is exhaustive for up to 4 numbers. Where it finds nothing the game is lost.
        """
        numbers, target = self.state["numbers"], self.state["target"]
        if target in numbers:
            return call("submit", number=target)
        if len(numbers) == 1:
            return call("submit", number=numbers[0])
        return _combine(self._planned() or self._found() or _pick(moves(numbers), rng))

    def random_valid(self, rng: Rng) -> Message:
        """Return one of all allowed combinations and of all submissions of a current number, equally likely."""
        numbers = self.state["numbers"]
        submits = [call("submit", number=n) for n in sorted(set(numbers))]
        messages = [*map(_combine, moves(numbers)), *submits]
        return messages[int(rng.integers(len(messages)))]

    def _planned(self) -> Move | None:
        """Return the next move of the task's solution while the numbers are those on its way."""
        if self.task is None:
            return None
        now, then = sorted(self.state["numbers"]), list(self.task.data["numbers"])
        for a, op, b in self.task.data["solution"]:
            if sorted(then) == now:
                return a, op, b
            then = combined(then, (a, op, b))
        return None

    def _found(self) -> Move | None:
        numbers, target = self.state["numbers"], self.state["target"]
        plan = solve(numbers, target) if len(numbers) <= SEARCHABLE else None
        return plan[0] if plan else None

    def _line(self) -> str:
        return f"Numbers: {' '.join(map(str, self.state['numbers']))}. Target: {self.state['target']}."


def _check_present(number: int, numbers: Sequence[int]) -> None:
    if not 1 <= number <= MAX_RESULT:
        raise ToolError(f"all numbers are within 1 to {MAX_RESULT}")
    if number not in numbers:
        raise ToolError(f"{number} is not one of the numbers")


def _combine(move: Move) -> Message:
    a, op, b = move
    return call("combine", a=a, op=op, b=b)


def _pick(options: Sequence[Move], rng: Rng) -> Move:
    return options[int(rng.integers(len(options)))]
