"""Measure a policy on an env: per difficulty level and over the default mix, beside a random valid player.

python -m agentgym.rollout.models.evaluate --model tiny --env agentgym/Countdown-v0 --tasks 100 --samples 16
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from agentgym import seeding
from agentgym.env import Action, Env
from agentgym.errors import BadInput
from agentgym.messages import ChatMessage
from agentgym.registry import env_ids, make
from agentgym.rollout.policies import make_policy
from agentgym.rollout.policies.base import FinishReason, Policy, Sampling
from agentgym.rollout.renderers.base import Renderer
from agentgym.tasks import Task

Speak: TypeAlias = Callable[[Sequence[ChatMessage]], Awaitable[Action | None]]
"""Says the next message, given the env's messages since the last one; `None` gives up."""
MIX = "mix"
CONCURRENT = 64
MAX_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode: outcome, turns, calls (a message without a call counts as one) and those that failed."""

    success: bool
    turns: int
    calls: int
    invalid: int


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report.

    Attributes:
        env: id of the env.
        level: a level, or `mix` for the default mix.
        share: the level's share of the default mix.
        success: at temperature 1, mean over tasks and samples.
        greedy: success at temperature 0.
        mixed: share of tasks with both outcomes among the samples.
        invalid: share of calls that were malformed or refused, at temperature 1.
        turns: mean length of an episode at temperature 1.
        random: success of the random valid player.
        random_mixed: share of tasks with both outcomes, for the random valid player.
    """

    env: str
    level: str
    share: float
    success: float
    greedy: float
    mixed: float
    invalid: float
    turns: float
    random: float
    random_mixed: float


def evaluate(
    policy: Policy, renderer: Renderer, env_id: str, *, tasks: int, samples: int, split: str, seed: int
) -> list[Row]:
    """Return a row for each level of an env and one for its default mix.

    Args:
        policy: what plays.
        renderer: its renderer.
        env_id: a registered env with `random_valid`.
        tasks: number of tasks of each row.
        samples: episodes for each task at temperature 1 (one more is played at temperature 0).
        split: where the tasks come from.
        seed: of all sampling.
    """
    probe = _make(env_id, split)
    levels = probe.tasks.levels
    rows = []
    for level in [*levels, MIX] if len(levels) > 1 else [MIX]:
        names = [None if level == MIX else level] * tasks
        chosen = [probe.tasks.task(split, index, name) for index, name in enumerate(names)]
        sampled, greedy = asyncio.run(_play_policy(policy, renderer, env_id, chosen, samples, seed))
        chance = _play_random(env_id, chosen, samples, seed)
        episodes = [episode for group in sampled for episode in group]
        rows.append(
            Row(
                env=env_id,
                level=level,
                share=1.0 if level == MIX else probe.tasks.mix[level],
                success=_mean([e.success for e in episodes]),
                greedy=_mean([e.success for e in greedy]),
                mixed=_mean([_is_mixed(group) for group in sampled]),
                invalid=sum(e.invalid for e in episodes) / max(1, sum(e.calls for e in episodes)),
                turns=_mean([e.turns for e in episodes]),
                random=_mean([e.success for group in chance for e in group]),
                random_mixed=_mean([_is_mixed(group) for group in chance]),
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Render rows as a Markdown table, shares in per cent."""
    head = "| env | level | share | success | greedy | mixed | invalid calls | turns | random valid | random mixed |"
    lines = [head, "|---|---|" + "---:|" * 8]
    for r in rows:
        cells = [r.share, r.success, r.greedy, r.mixed, r.invalid]
        percent = " | ".join(f"{100 * value:.1f}" for value in cells)
        lines.append(
            f"| {r.env} | {r.level} | {percent} | {r.turns:.1f} | {100 * r.random:.1f} | {100 * r.random_mixed:.1f} |"
        )
    return "\n".join(lines)


async def _play_policy(
    policy: Policy, renderer: Renderer, env_id: str, tasks: Sequence[Task], samples: int, seed: int
) -> tuple[list[list[Episode]], list[Episode]]:
    gate = asyncio.Semaphore(CONCURRENT)

    async def one(task: Task, sample: int, temperature: float) -> Episode:
        sampling = Sampling(temperature=temperature, max_tokens=MAX_TOKENS)
        stream = seeding.derive(seed, "evaluate", task.id, sample)
        async with gate:
            env = _make(env_id, task.split)
            return await _episode(env, task, stream, _talker(policy, renderer, env, sampling, stream))

    jobs = [one(task, sample, 1.0) for task in tasks for sample in range(samples)]
    played = await asyncio.gather(*jobs, *(one(task, 0, 0.0) for task in tasks))
    sampled = [list(played[i * samples : (i + 1) * samples]) for i in range(len(tasks))]
    return sampled, list(played[len(tasks) * samples :])


def _play_random(env_id: str, tasks: Sequence[Task], samples: int, seed: int) -> list[list[Episode]]:
    async def play() -> list[list[Episode]]:
        groups = []
        for task in tasks:
            group = []
            for sample in range(samples):
                env, stream = _make(env_id, task.split), seeding.derive(seed, "random", task.id, sample)
                group.append(await _episode(env, task, stream, _guesser(env, stream)))
            groups.append(group)
        return groups

    return asyncio.run(play())


async def _episode(env: Env, task: Task, seed: int, speak: Speak) -> Episode:
    _, info = env.reset(seed=seed, options={"task": task})
    turns = calls = invalid = 0
    while (action := await speak(info["messages"])) is not None:
        _, _, terminated, truncated, info = env.step(action)
        turns += 1
        calls += max(1, len(info["tool_calls"]))
        invalid += sum(not c["ok"] for c in info["tool_calls"]) if info["tool_calls"] else 1
        if terminated or truncated:
            return Episode(bool(info["success"]), turns, calls, invalid)
    return Episode(False, turns, calls, invalid)


def _talker(policy: Policy, renderer: Renderer, env: Env, sampling: Sampling, seed: int) -> Speak:
    ids: list[int] = []
    turn = 0

    async def speak(messages: Sequence[ChatMessage]) -> Action | None:
        nonlocal turn
        ids.extend(_context(ids, messages, renderer, env))
        if len(ids) >= policy.max_context:
            return None
        request = seeding.derive(seed, "turn", turn)
        completion = await policy.generate(ids, sampling, seed=request, stop=renderer.stop_ids)
        turn += 1
        ids.extend(completion.token_ids)
        return renderer.parse(completion.token_ids, truncated=completion.finish_reason is not FinishReason.STOP)

    return speak


def _context(ids: Sequence[int], messages: Sequence[ChatMessage], renderer: Renderer, env: Env) -> list[int]:
    """Return what the env's messages add to the conversation `ids`: the whole prompt on the first turn."""
    if not ids:
        system: list[ChatMessage] = [{"role": "system", "content": env.instructions}] if env.instructions else []
        return renderer.prompt([*system, *messages], env.tools)
    answer = renderer.reply(messages, last=ids[-1])
    if answer is None:
        raise BadInput("evaluation needs a renderer whose conversations are extended, not rewritten")
    return answer


def _guesser(env: Env, seed: int) -> Speak:
    rng = seeding.rng(seed)

    async def speak(_: Sequence[ChatMessage]) -> Action | None:
        return env.random_valid(rng)

    return speak


def _make(env_id: str, split: str) -> Env:
    env = make(env_id, split=split).unwrapped
    if not isinstance(env, Env):
        raise BadInput(f"{env_id} is not an agentgym env")
    return env


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _is_mixed(group: Sequence[Episode]) -> bool:
    return 0 < sum(e.success for e in group) < len(group)


def main() -> None:
    """Parse the command line, evaluate, print the table and write the rows."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.rollout.models.evaluate", description=__doc__)
    parser.add_argument("--model", default="tiny", help="`tiny` or the folder of a Hugging Face model")
    parser.add_argument("--env", nargs="+", default=[i for i in env_ids() if i.startswith("agentgym/")])
    parser.add_argument("--tasks", type=int, default=100, help="tasks of each level and of the mix")
    parser.add_argument("--samples", type=int, default=16, help="episodes of each task at temperature 1")
    parser.add_argument("--split", default="validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--json", type=Path, help="file for the rows as JSON")
    args = parser.parse_args()
    policy, renderer = make_policy(args.model, {"threads": args.threads, "device": "cpu"})
    rows: list[Row] = []
    for env_id in args.env:
        start = time.monotonic()
        rows += evaluate(
            policy, renderer, env_id, tasks=args.tasks, samples=args.samples, split=args.split, seed=args.seed
        )
        print(f"{env_id}: {time.monotonic() - start:.0f} s", file=sys.stderr)
    asyncio.run(policy.aclose())
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
