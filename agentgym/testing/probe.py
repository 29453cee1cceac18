"""What the checks play with: envs driven alike, played episodes, comparisons."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from agentgym import seeding
from agentgym.env import Action, Env
from agentgym.seeding import Rng
from agentgym.stack import AnyEnv
from agentgym.testing.rules import BrokenRule, NotChecked
from agentgym.tool_env import ToolEnv, random_call
from agentgym.tools import ToolSpec

MALFORMED: tuple[str, ...] = (
    "",
    "\x00\x1b[31m garbage \ufffd",
    "<tool_call>",
    '<tool_call>\n{"name": "x", "arguments": {"a": 1',
    '<tool_call>\n{"name": "x", "arguments": [1, 2]}\n</tool_call>',
    '<tool_call>\n{"name": "x", "arguments": null}\n</tool_call>',
    '<tool_call>\n{"name": "x", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
    "<tool_call>\n[]\n</tool_call>",
    '<tool_call>\n{"name": "no_such_tool", "arguments": {}}\n</tool_call>',
    "<tool_call>" + "x" * 100_000 + "</tool_call>",
    "y" * 100_000,
    "<|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "a lone surrogate: \ud800",
    '<tool_call>\n{"name": "\\ud800", "arguments": {"\\udfff": "\\ud800"}}\n</tool_call>',
    '<tool_call>{"name": "x", "arguments": ' + '{"a":' * 900 + "1" + "}" * 901 + "</tool_call>",
)
"""Messages that no env may choke on."""

MOST_TURNS = 2_000
_SHOWN = 200
Frozen: TypeAlias = dict[str, str]  # a result of reset or step, as canonical texts


class Player:
    """One env, driven alike whether it is synchronous or async."""

    def __init__(self, env: AnyEnv, run: Callable[[Any], Any]) -> None:
        self.core: Env = env.unwrapped  # type: ignore[assignment]  # checked by _maker
        self.prefix = "a" if self.core.calls == "async" else ""
        self._run = run

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        value = getattr(self.core, self.prefix + name)(*args, **kwargs)
        return self._run(value) if inspect.isawaitable(value) else value

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        return self._call("reset", seed=seed)  # type: ignore[no-any-return]

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take one step."""
        return self._call("step", action)  # type: ignore[no-any-return]

    def snapshot(self) -> Any:
        """Capture the episode."""
        return self._call("snapshot")

    def restore(self, snapshot: Any, reseed: int | None = None) -> None:
        """Go back to `snapshot`."""
        self._call("restore", snapshot, reseed=reseed)

    def close(self) -> None:
        """Close the env."""
        self._call("close")

    def frozen_reset(self, seed: int) -> Frozen:
        """Start an episode; the result as texts."""
        observation, info = self.reset(seed)
        return self._freeze(observation=observation, info=info)

    def frozen_step(self, action: Action) -> Frozen:
        """Take one step; the result as texts."""
        observation, reward, terminated, truncated, info = self.step(action)
        return self._freeze(
            observation=observation, reward=reward, terminated=terminated, truncated=truncated, info=info
        )

    def play(self, actions: Sequence[Action]) -> list[Frozen]:
        """Take several steps."""
        return [self.frozen_step(action) for action in actions]

    def _freeze(self, **result: Any) -> Frozen:
        result["random generator"] = self.core.np_random.bit_generator.state
        return {key: canonical(value) for key, value in result.items()}

    @property
    def over(self) -> bool:
        """Whether the episode has ended, or none was started."""
        return self.core._episode is None or self.core._episode.over


@dataclass(frozen=True, slots=True)
class Script:
    """An episode that was played once: its actions and results (`results[0]` is that of reset)."""

    seed: int
    actions: list[Action]
    results: list[Frozen]
    ended: bool


class Probe:
    """What the checks work with: three long-lived instances, and one played episode for each seed."""

    def __init__(self, make: Callable[[], AnyEnv], seeds: tuple[int, ...], steps: int) -> None:
        self.make, self.seeds, self.steps = make, seeds, steps
        self._runner = asyncio.Runner()  # makes its event loop on first use
        self.a, self.b, self.c = self.fresh(), self.fresh(), self.fresh()
        self.name = self.a.core.spec.id if self.a.core.spec is not None else type(self.a.core).__name__
        self._scripts: dict[int, Script] = {}

    def fresh(self) -> Player:
        """Make another instance."""
        return Player(self.make(), self._run)

    def _run(self, awaitable: Any) -> Any:
        async def main() -> Any:
            return await awaitable

        return self._runner.run(main())

    def close(self) -> None:
        """Close the long-lived instances and the event loop."""
        for player in (self.a, self.b, self.c):
            with contextlib.suppress(Exception):  # boundary: CLOSE_TWICE has said what is wrong
                player.close()
        self._runner.close()

    def script(self, seed: int) -> Script:
        """Play an episode of mixed actions; of valid ones only where a malformed one makes the env raise."""
        if seed not in self._scripts:
            try:
                self._scripts[seed] = self._explore(seed, MALFORMED)
            except Exception:  # boundary: the env is under test; MALFORMED_ACTIONS says what is wrong
                self._scripts[seed] = self._explore(seed, ())
        return self._scripts[seed]

    def scripts(self) -> Iterator[Script]:
        """Give the played episode of each seed."""
        return map(self.script, self.seeds)

    def _explore(self, seed: int, malformed: Sequence[str]) -> Script:
        rng = seeding.rng(seed, "check_env")
        actions: list[Action] = []
        results = [self.a.frozen_reset(seed)]
        while len(actions) < self.steps and not self.a.over:
            actions.append(draw_action(self.a.core, rng, malformed))
            results.append(self.a.frozen_step(actions[-1]))
        return Script(seed, actions, results, self.a.over)

    def other_actions(self, snapshot: Any, seed: int) -> list[Action]:
        """Draw actions from `snapshot` on, others than those of `script`; leaves `c` at `snapshot`."""
        rng = seeding.rng(seed, "check_env", "other")
        self.c.restore(snapshot)
        actions: list[Action] = []
        while len(actions) < self.steps and not self.c.over:
            actions.append(draw_action(self.c.core, rng, ("something else",)))
            self.c.step(actions[-1])
        self.c.restore(snapshot)
        return actions


def draw_action(env: Env, rng: Rng, malformed: Sequence[str] = MALFORMED) -> Action:
    """Draw a next action for `env`: mostly valid ones, of every source that the env has."""
    kind = rng.random()
    message = env.random_valid(rng) if kind < 0.45 else env.expert(rng) if kind < 0.7 else None
    if message is None and env.tools and kind < 0.85:
        message = random_call(env.tools, rng)
    if message is not None:
        return message
    return malformed[int(rng.integers(len(malformed)))] if malformed else "a plain message"


def branch_points(probe: Probe) -> Iterator[tuple[Script, int]]:
    """Give each played episode with the turns to branch at: the first, one in the middle, the last."""
    for script in probe.scripts():
        for turn in sorted({0, len(script.actions) // 2, len(script.actions) - 1}):
            yield script, turn


def snapshot_at(player: Player, script: Script, turn: int) -> tuple[list[Action], Any]:
    """Play a script up to `turn` and return the remaining actions and a snapshot."""
    player.reset(script.seed)
    player.play(script.actions[:turn])
    return script.actions[turn:], player.snapshot()


def replay(player: Player, script: Script) -> list[Frozen]:
    """Play a script from its reset on."""
    return [player.frozen_reset(script.seed), *player.play(script.actions)]


def play_until_end(player: Player, actions: Sequence[Action]) -> list[Frozen]:
    """Take steps until there are no more actions or the episode is over."""
    results = []
    for action in actions:
        if player.over:
            break
        results.append(player.frozen_step(action))
    return results


def to_the_end(player: Player) -> None:
    """Play valid messages, then empty ones, until the episode is over."""
    rng = seeding.rng(0, "check_env", "end")
    for _ in range(MOST_TURNS):
        if player.over:
            return
        player.step(player.core.expert(rng) or player.core.random_valid(rng) or "")
    raise NotChecked(f"the episode has more than {MOST_TURNS} turns")


def results_of(probe: Probe) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Give every result of the played episodes, and of episodes played to their end."""
    for script in probe.scripts():
        yield f"seed {script.seed}, reset", probe.b.reset(script.seed)
        for turn, action in enumerate(script.actions, 1):
            yield f"seed {script.seed}, turn {turn} ({cut(repr(action), 60)})", probe.b.step(action)
        rng = seeding.rng(script.seed, "check_env", "results")
        for turn in range(len(script.actions) + 1, MOST_TURNS):
            if probe.b.over:
                break
            action = probe.b.core.expert(rng) or probe.b.core.random_valid(rng) or ""
            yield f"seed {script.seed}, turn {turn} ({cut(repr(action), 60)})", probe.b.step(action)


def tools_of(probe: Probe) -> Sequence[ToolSpec]:
    """The env's tools. Raises `NotChecked` where there are none."""
    if not isinstance(probe.a.core, ToolEnv) or not probe.a.core.tools:
        raise NotChecked("the env has no tools")
    return probe.a.core.tools


def equal(first: Frozen, second: Frozen, where: str) -> None:
    """Raise `BrokenRule` unless two results are equal."""
    for key in first:
        if first[key] != second.get(key):
            raise BrokenRule(f"{where}: {key} differs: {difference(first[key], second.get(key, ''))}")


def equal_runs(first: list[Frozen], second: list[Frozen], where: str, start: int = 0) -> None:
    """Raise `BrokenRule` unless two lists of results are equal; the first one is that of turn `start`."""
    if len(first) != len(second):
        raise BrokenRule(f"{where}: {len(first)} and {len(second)} turns until the end")
    for turn, (one, two) in enumerate(zip(first, second, strict=True), start):
        equal(one, two, f"{where}, turn {turn}")


def difference(first: str, second: str) -> str:
    """Show two texts from shortly before the place where they part."""
    at = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(0, at - 40)
    return f"{cut(first[start:])} != {cut(second[start:])}"


def must_raise(error: type[Exception], action: Callable[[], object], what: str) -> None:
    """Raise `BrokenRule` unless `action` raises `error`."""
    try:
        result = action()
    except error:
        return
    raise BrokenRule(f"{what} raised no {error.__name__}, it returned {cut(repr(result))}")


def canonical(value: object) -> str:
    """Write a value as text: JSON where that is possible."""
    return json.dumps(value, sort_keys=True, default=repr)


def cut(text: str, limit: int = _SHOWN) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def kind_of(value: object) -> str:
    """Name of a value's type."""
    return type(value).__name__
