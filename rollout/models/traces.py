"""Expert traces with mistakes and recovery: what `tiny` learns from."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentgym.env import Env
from agentgym.errors import BadInput
from agentgym.messages import CLOSE_CALL, ChatMessage, Message, ToolCall, format_message
from agentgym.registry import make
from agentgym.seeding import Rng
from agentgym.tools import ToolSpec

_MISTAKES = ("valid", "valid", "value", "value", "missing", "type", "unknown", "prose", "cut")
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a trace.

    Attributes:
        text: what was said.
        mistake: it was put in on purpose and must not be imitated.
        answer: the env's messages after it.
    """

    text: str
    mistake: bool
    answer: Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class Trace:
    """A successful episode: the messages before the first turn, and the turns."""

    opening: Sequence[ChatMessage]
    tools: tuple[ToolSpec, ...]
    turns: Sequence[Turn]

    @property
    def texts(self) -> Iterator[str]:
        """Every text of the episode except the tools."""
        yield from (m["content"] for m in self.opening)
        for turn in self.turns:
            yield turn.text
            yield from (m["content"] for m in turn.answer)


class TraceMaker:
    """Plays an env with its expert.

    Args:
        env_id: a registered env that has an expert.
        levels: share of each level; the env's default mix where empty.
        mistakes: probability that a turn is a mistake instead of the expert's message.
        split: where the tasks come from.
    """

    def __init__(
        self,
        env_id: str,
        *,
        levels: Mapping[str, float] | None = None,
        mistakes: float = 0.12,
        split: str = "train",
    ) -> None:
        env = make(env_id, split=split).unwrapped
        if not isinstance(env, Env):
            raise BadInput(f"{env_id} is not an agentgym env")
        self._env = env
        self._mistakes = mistakes
        shares = dict(levels or env.tasks.mix)
        self._levels = list(shares)
        total = sum(shares.values())
        self._shares = [share / total for share in shares.values()]

    def draw(self, rng: Rng) -> Trace:
        """Return the trace of a successful episode of a random task. Raises `BadInput` when the expert never wins."""
        for _ in range(_TRIES):
            trace = self._play(rng)
            if trace is not None:
                return trace
        raise BadInput(f"the expert of {type(self._env).__name__} won none of {_TRIES} episodes")

    def _play(self, rng: Rng) -> Trace | None:
        env = self._env
        level = self._levels[int(rng.choice(len(self._levels), p=self._shares))]
        task = env.tasks.task(env.split, int(rng.integers(env.tasks.size(env.split))), level)
        _, info = env.reset(seed=int(rng.integers(2**62)), options={"task": task})
        system: list[ChatMessage] = [{"role": "system", "content": env.instructions}] if env.instructions else []
        opening = [*system, *info["messages"]]
        turns: list[Turn] = []
        over = False
        while not over:
            text, mistake = self._say(rng)
            _, _, terminated, truncated, info = env.step(text)
            turns.append(Turn(text, mistake, info["messages"]))
            over = terminated or truncated
        return Trace(opening, env.tools, turns) if info["success"] else None

    def _say(self, rng: Rng) -> tuple[str, bool]:
        best = self._env.expert(rng)
        if best is None:
            raise BadInput(f"{type(self._env).__name__} has no expert")
        if rng.random() >= self._mistakes:
            return format_message(best), False
        return _mistake(self._env, best, rng), True


def _mistake(env: Env, best: Message, rng: Rng) -> str:
    """Return a random valid message or a spoilt version of `best`, as text."""
    kind = _MISTAKES[int(rng.integers(len(_MISTAKES)))]
    random = env.random_valid(rng) or best
    if kind == "valid":
        return format_message(random)
    if kind == "prose":
        return "I do not know."
    if kind == "cut":
        return format_message(best).partition(CLOSE_CALL)[0][: -int(rng.integers(2, 12))]
    called = best.tool_calls[0]
    arguments: dict[str, Any] = copy.deepcopy(dict(called.arguments))
    key = list(arguments)[int(rng.integers(len(arguments)))]
    name = called.name
    if kind == "missing":
        del arguments[key]
    elif kind == "unknown":
        name = ("go", "look", "undo", "find")[int(rng.integers(4))]
    elif kind == "type":
        arguments[key] = str(arguments[key]) if isinstance(arguments[key], int) else int(rng.integers(20))
    else:
        other = list(random.tool_calls[0].arguments.values())
        numbers = isinstance(arguments[key], int)
        arguments[key] = int(rng.integers(100)) if numbers else str(other[int(rng.integers(len(other)))])
    return format_message(Message(tool_calls=(ToolCall(name, arguments),)))
