"""Overhead of the runner: an instant policy on an 8-turn one-tool env, beside a bare Python loop in the same run.

    python bench/runner.py [--rollouts 4000] [--rounds 5] [--json FILE]

Each row is the best of the rounds (own CPU) and their median (wall clock); the rounds of all rows are interleaved.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import agentgym as ag
from agentgym.env import CallMode, Outcome
from agentgym.messages import call, format_message
from agentgym.rollout.policies.base import Completion, FinishReason, Sampling
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet

TURNS = 8
RENDERER = BytesRenderer()
TEXT = format_message(call("add", a=1, b=2))
IDS = tuple(RENDERER.message(TEXT))
COMPLETION = Completion(IDS, (-0.5,) * len(IDS), FinishReason.STOP)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class Calc(ag.ToolEnv):
    """One tool that adds two numbers, for eight turns."""

    tasks = TaskSet.from_rows({"train": [{"number": i} for i in range(100_000)]})
    max_turns = TURNS
    calls: CallMode = "inline"

    def begin(self, task: Task, rng: Rng) -> str:
        """Start with an empty sum."""
        self.state = {"sum": 0}
        return "Add numbers."

    @ag.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        self.state["sum"] += a + b
        return str(a + b)

    def judge(self) -> Outcome:
        """Always a success."""
        return Outcome(True)


class Instant:
    """Answers every request at once with the same call."""

    name = "instant"
    max_context = 1 << 20

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[int] = (),
        draft: Sequence[int] | None = None,
        affinity: str = "",
    ) -> Completion:
        """Return the call."""
        return COMPLETION

    def describe(self) -> dict[str, object]:
        """Return the name."""
        return {"name": self.name}

    async def aclose(self) -> None:
        """Nothing to release."""


def bare_loop(rollouts: int) -> None:
    """What cannot be avoided: read the call, run the tool, keep the messages."""
    tools = {"add": lambda a, b: str(a + b)}
    for _ in range(rollouts):
        messages = ["Add numbers."]
        for _ in range(TURNS):
            messages.append(TEXT)
            body = json.loads(CALL.search(TEXT)[1])  # type: ignore[index]
            messages.append(tools[body["name"]](**body["arguments"]))


def runner(rollouts: int, allocator: str, journal: bool) -> None:
    """Run `rollouts` leaves in groups of eight."""
    with tempfile.TemporaryDirectory() as folder:
        forest = ag.rollout(
            "bench/Calc-v0",
            policy=Instant(),
            renderer=RENDERER,
            allocator=allocator,
            tasks=rollouts // 8,
            budget=rollouts,
            out=Path(folder) / "run" if journal else None,
        )
    if forest.n_leaves != rollouts:
        raise RuntimeError(f"{forest.n_leaves} leaves instead of {rollouts}")


def snapshots(count: int) -> None:
    """Snapshot and restore a small env."""
    env = ag.make("agentgym/Countdown-v0").unwrapped
    env.reset(seed=0)
    for _ in range(count):
        env.restore(env.snapshot())


def measure(work: Callable[[], None]) -> tuple[float, float]:
    """Return (own CPU seconds, wall seconds)."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("bench/results/runner.json"))
    args = parser.parse_args()
    ag.register("bench/Calc-v0", Calc)
    n = args.rollouts
    rows: dict[str, Callable[[], None]] = {
        "bare loop": lambda: bare_loop(n),
        "uniform, in memory": lambda: runner(n, "uniform", journal=False),
        "uniform, journal on": lambda: runner(n, "uniform", journal=True),
        "trace, journal on": lambda: runner(n, "trace", journal=True),
        "snapshot + restore": lambda: snapshots(n * TURNS),
    }
    for work in rows.values():
        measure(work)
    rounds = [{name: measure(work) for name, work in rows.items()} for _ in range(args.rounds)]
    result = {}
    for name in rows:
        cpu = min(r[name][0] for r in rounds) / (n * TURNS) * 1e6
        wall = n / statistics.median(r[name][1] for r in rounds)
        base = [r[name][0] / r["bare loop"][0] for r in rounds]
        result[name] = {"cpu_us_per_turn": cpu, "rollouts_per_s": wall, "ratio_to_bare": statistics.median(base)}
    print(f"{'row':24}{'own CPU us/turn':>18}{'rollouts/s (wall)':>20}{'x bare loop':>14}")
    for name, r in result.items():
        print(f"{name:24}{r['cpu_us_per_turn']:18.1f}{r['rollouts_per_s']:20.0f}{r['ratio_to_bare']:14.1f}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {"rollouts": n, "rounds": args.rounds, "python": platform.python_version()}
    args.json.write_text(json.dumps({**facts, "rows": result}, indent=2) + "\n")


if __name__ == "__main__":
    main()
