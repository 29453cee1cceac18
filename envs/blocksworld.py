"""`agentgym/Blocksworld-v0`: move 3 to 10 blocks to a goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from agentgym.env import CallMode, Outcome
from agentgym.envs._restate import restate
from agentgym.errors import ToolError, UnknownName
from agentgym.messages import ChatMessage, Message, call
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet
from agentgym.tool_env import ToolEnv
from agentgym.tools import tool

Supports: TypeAlias = dict[str, str]
Move: TypeAlias = tuple[str, str]

TABLE = "table"
NAMES = ("red", "blue", "green", "black", "white", "pink", "gray", "gold", "brown", "violet")
MIX = {"b3": 0.0, "b4": 0.1, "b5": 0.1, "b6": 0.3, "b8": 0.3, "b10": 0.2}
PROGRESS_WEIGHT = 0.1
_LINES = ("done", "covered", "clear", "ready")
_NEW_STACK = 0.1


def make_task(rng: Rng, level: str) -> dict[str, Any]:
    """Draw a task of level `b3` to `b10`: what each block stands on at the `start` and in the `goal`.

    At least two blocks stand on something else in the goal, so that no single move reaches it. `moves` is the length
    of a shortest plan.
    """
    names = [NAMES[i] for i in sorted(rng.choice(len(NAMES), size=int(level[1:]), replace=False))]
    while True:
        start, goal = _random_supports(names, rng), _random_supports(names, rng)
        if sum(start[name] != goal[name] for name in names) >= 2:
            return {"start": start, "goal": goal, "moves": plan_length(start, goal, _bottom_up(goal))}


def _asked(data: Mapping[str, Any]) -> list[Any]:
    """Return what the policy is asked, without the length of the plan."""
    return [data["start"], data["goal"]]


class Blocksworld(ToolEnv):
    """Move one clear block at a time until every block stands on what the goal says.

    Levels `b3` to `b10` have that many blocks. The episode ends by itself when the goal is reached; the limit is the
    length of a shortest plan, so that every move counts and a wasted one cannot be made up for.

    The observation has a line for each block, `ready gray on white goal red`: its status, its name, what it is on,
    and what it is on in the goal. The status is `done` when the block and all below it are where the goal wants them,
    else `covered` when another block is on it, else `ready` when its place in the goal is free and done (or the
    table), else `clear`. Lines are sorted by status in the order `done`, `covered`, `clear` (those on the table
    first), `ready`, so that the blocks worth moving stand last.

    Success: the goal is reached. The shaped term `progress` is `0.1 *` the share of blocks that are done.
    """

    tasks: ClassVar[TaskSet] = TaskSet.generated(
        make_task, sizes={"train": 8000, "validation": 1000, "test": 1000}, mix=MIX, key=_asked
    )
    instructions: ClassVar[str] = (
        "Move the blocks until all are done. Each line shows a block's status, its name, what it is on and what it is "
        "on in the goal. A ready block can be moved to its goal. A covered block cannot be moved."
    )
    calls: ClassVar[CallMode] = "inline"

    def begin(self, task: Task, rng: Rng) -> str:
        """Show the blocks."""
        goal = dict(task.data["goal"])
        self.state = {"on": dict(task.data["start"]), "goal": goal, "order": _bottom_up(goal)}
        return self._lines()

    def turn_limit(self, task: Task) -> int:
        """The length of a shortest plan."""
        return int(task.data["moves"])

    def respond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Execute the calls, then restate all blocks."""
        reply = super().respond(message)
        return reply if self._solved() else restate(reply, self._lines())

    @tool
    def move(self, block: str, to: str) -> str:
        """Put a clear block on a clear block or on the table."""
        on: Supports = self.state["on"]
        _check_name("block", block, [*on])
        _check_name("place", to, [*on, TABLE])
        if block == to:
            raise ToolError(f"{block} cannot be put on itself")
        if on[block] == to:
            raise ToolError(f"{block} is already on {to}")
        for name in (block, to):
            above = next((other for other, below in on.items() if below == name != TABLE), None)
            if above is not None:
                raise ToolError(f"{name} is not clear: {above} is on it")
        on[block] = to
        if not self._solved():
            return "Moved."
        self.finish()
        return "Moved. All done."

    def judge(self) -> Outcome:
        """Success if every block stands on what the goal says."""
        on, goal, order = self.state["on"], self.state["goal"], self.state["order"]
        success = self._solved()
        share = len(_done(on, goal, order)) / len(order)
        return Outcome(success, {"success": float(success), "progress": PROGRESS_WEIGHT * share})

    def expert(self, rng: Rng) -> Message:
        """Return the first move of a shortest plan from here; one of the best, equally likely."""
        return _pick(best_moves(self.state["on"], self.state["goal"], self.state["order"]), rng)

    def random_valid(self, rng: Rng) -> Message:
        """Return one of all valid moves, equally likely."""
        on: Supports = self.state["on"]
        clear = [name for name in self.state["order"] if name not in on.values()]
        return _pick([(a, b) for a in clear for b in [*clear, TABLE] if a != b and on[a] != b], rng)

    def _solved(self) -> bool:
        return bool(self.state["on"] == self.state["goal"])

    def _lines(self) -> str:
        on, goal = self.state["on"], self.state["goal"]
        status = _statuses(on, goal, self.state["order"])
        order = sorted(self.state["order"], key=lambda name: (_LINES.index(status[name]), on[name] != TABLE))
        return "\n".join(f"{status[name]} {name} on {on[name]} goal {goal[name]}" for name in order)


def best_moves(on: Mapping[str, str], goal: Mapping[str, str], order: Sequence[str]) -> list[Move]:
    """Return the moves with which a shortest plan can go on. Never empty before the goal is reached.

    Moving a block to its final place never lengthens a plan; where no block can, all that is left to choose is which
    one goes to the table first (Slaney and Thiebaux, "Blocks World revisited", 2001).

    Args:
        on: what each block stands on.
        goal: what each block stands on in the goal.
        order: the blocks, each after the one below it in the goal.
    """
    final, table = _good_moves(on, goal, order)
    if final or len(table) == 1:
        return final or table
    lengths = [plan_length({**on, name: TABLE}, goal, order) for name, _ in table]
    return [move for move, length in zip(table, lengths, strict=True) if length == min(lengths)]


def plan_length(on: Mapping[str, str], goal: Mapping[str, str], order: Sequence[str]) -> int:
    """Return the length of a shortest plan from `on` to `goal`."""
    state, made = dict(on), 0
    while state != goal:
        final, table = _good_moves(state, goal, order)
        if not final:
            return made + 1 + min(plan_length({**state, name: TABLE}, goal, order) for name, _ in table)
        name, place = final[0]
        state[name] = place
        made += 1
    return made


def _good_moves(on: Mapping[str, str], goal: Mapping[str, str], order: Sequence[str]) -> tuple[list[Move], list[Move]]:
    """Return the moves of clear blocks to their final places, and those of other clear blocks to the table."""
    status = _statuses(on, goal, order)
    final = [(name, goal[name]) for name in order if status[name] == "ready"]
    table = [(name, TABLE) for name in order if status[name] == "clear" and on[name] != TABLE]
    return final, table


def _statuses(on: Mapping[str, str], goal: Mapping[str, str], order: Sequence[str]) -> dict[str, str]:
    """Return `done`, `covered`, `ready` or `clear` for each block, as the class says."""
    done, covered = _done(on, goal, order), set(on.values())
    free = (done - covered) | {TABLE}

    def status(name: str) -> str:
        if name in done:
            return "done"
        if name in covered:
            return "covered"
        return "ready" if goal[name] in free else "clear"

    return {name: status(name) for name in order}


def _done(on: Mapping[str, str], goal: Mapping[str, str], order: Sequence[str]) -> set[str]:
    """Return the blocks that, with all below them, stand where the goal wants them."""
    done = {TABLE}
    for name in order:
        if on[name] == goal[name] and goal[name] in done:
            done.add(name)
    return done - {TABLE}


def _bottom_up(supports: Mapping[str, str]) -> list[str]:
    """Return the blocks stack by stack, each from the bottom up; the stacks by their lowest blocks."""
    above = {below: name for name, below in supports.items() if below != TABLE}
    order: list[str] = []
    for name in NAMES:
        stacked: str | None = name if supports.get(name) == TABLE else None
        while stacked is not None:
            order.append(stacked)
            stacked = above.get(stacked)
    return order


def _random_supports(names: Sequence[str], rng: Rng) -> Supports:
    """Stack the blocks in random order, each on the table with probability 1/10, else on a random stack."""
    on: Supports = {}
    tops: list[str] = []
    for i in rng.permutation(len(names)):
        name = names[i]
        if not tops or rng.random() < _NEW_STACK:
            on[name] = TABLE
            tops.append(name)
        else:
            stack = int(rng.integers(len(tops)))
            on[name], tops[stack] = tops[stack], name
    return on


def _check_name(kind: str, name: str, valid: Sequence[str]) -> None:
    if name not in valid:
        raise ToolError(str(UnknownName.of(kind, name[:40], valid)))


def _pick(moves: Sequence[Move], rng: Rng) -> Message:
    block, to = moves[int(rng.integers(len(moves)))]
    return call("move", block=block, to=to)
