"""What the tests of the runner share: a small env that says everything it knows, policies that misbehave, a run."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import agentgym as ag
from agentgym.env import Outcome
from agentgym.messages import Message, call
from agentgym.rollout import api
from agentgym.rollout.policies.base import Completion, FinishReason, Policy, Sampling
from agentgym.rollout.policies.scripted import Script, ScriptedPolicy, Situation
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import Failure
from agentgym.rollout.views import Forest
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet

ALLOCATORS = ("uniform", "random-tree", "trace")


def lengths(*turns: int) -> TaskSet:
    """Tasks of so many turns, over and over."""
    return TaskSet({"train": 1000}, lambda split, level, index: {"turns": turns[index % len(turns)]}, {"default": 1.0})


class Chatter(ag.ToolEnv):
    """Ends after the task's number of calls. Each answer tells all that was said and thrown in this episode.

    Success: what was said and thrown is even in sum. So outcomes are mixed, and an effect of a sibling, a wrong
    snapshot or a shared generator shows in the next answer.
    """

    tasks = lengths(1, 2, 3, 5, 8)
    max_turns: ClassVar[int] = 20
    calls: ClassVar[Any] = "inline"
    made: ClassVar[int] = 0
    closed: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.made = cls.closed = 0

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        type(self).made += 1
        self.open = True

    def begin(self, task: Task, rng: Rng) -> str:
        self.state = {"turns": task.data["turns"], "deep": {"said": [], "thrown": []}, "first": int(rng.integers(1000))}
        return f"Talk for {task.data['turns']} turns. {self.state['first']}"

    @ag.tool
    def say(self, number: int) -> str:
        """Say a number.

        Args:
            number: which.
        """
        deep = self.state["deep"]
        deep["said"].append(number)
        deep["thrown"].append(int(self.np_random.integers(1000)))
        self.hook(len(deep["said"]))
        if len(deep["said"]) >= self.state["turns"]:
            self.finish()
        return json.dumps(deep)

    def hook(self, turn: int) -> None:
        """For subclasses: called in the middle of turn `turn` (1, 2 ...)."""

    def judge(self) -> Outcome:
        deep = self.state["deep"]
        return Outcome(sum(deep["said"] + deep["thrown"]) % 2 == 0)

    def close(self) -> None:
        type(self).closed += self.open
        self.open = False
        super().close()


def talk(situation: Situation) -> Message:
    """Say a number that depends on the request's seed only."""
    return call("say", number=int(situation.rng.integers(100)))


def known(tree: Tree, node: int) -> dict[str, list[int]]:
    """What the env told at a node."""
    return json.loads(re.search(r"\{.*\}", tree.replies(node)[-1]["content"])[0])  # type: ignore[index]


def said(tree: Tree, node: int) -> list[int]:
    """Numbers that the policy said on the path to a node, read from its messages."""
    texts = [tree.text(n) for n in tree.path(node)[1:]]
    return [int(re.search(r'"number": (\d+)', text)[1]) for text in texts]  # type: ignore[index]


class Around:
    """A policy around a scripted one.

    `before(n, prompt_ids, sampling)` is awaited first; if it returns a completion, that is the answer.

    Attributes:
        prompts: every prompt that it was given.
        samplings: with which parameters.
    """

    def __init__(
        self,
        before: Callable[[int, Sequence[int], Sampling], Awaitable[Completion | None]] | None = None,
        *,
        script: Script = talk,
        renderer: BytesRenderer | None = None,
        **options: Any,
    ) -> None:
        self.renderer = renderer or BytesRenderer()
        self._inner: Policy = ScriptedPolicy(script, self.renderer, **options)
        self._before = before
        self._count = itertools.count()
        self.name, self.max_context = self._inner.name, self._inner.max_context
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **keys: Any) -> Completion:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        answer = None if self._before is None else await self._before(next(self._count), prompt_ids, sampling)
        return answer or await self._inner.generate(prompt_ids, sampling, **keys)

    def describe(self) -> dict[str, object]:
        return self._inner.describe()

    async def aclose(self) -> None:
        return None


async def dawdle(count: int, prompt_ids: Sequence[int], sampling: Sampling) -> None:
    """Take a random time, so that what is asked last may be answered first."""
    for _ in range(random.randrange(4)):
        await asyncio.sleep(random.random() * 0.002)


def completion(ids: Sequence[int], finish: FinishReason = FinishReason.STOP) -> Completion:
    return Completion(list(ids), [0.0] * len(ids), finish)


def name(env: type[Chatter] | type[ag.ToolEnv]) -> str:
    """Register an env class of a test and return its id."""
    env_id = f"lab/{env.__name__}-v0"
    ag.register(env_id, env)
    return env_id


def run(env: type[ag.ToolEnv] | str, *, policy: Any = None, **keys: Any) -> Forest:
    """Run rollouts of an env class of a test."""
    return asyncio.run(arun(env, policy=policy, **keys))


async def arun(env: type[ag.ToolEnv] | str, *, policy: Any = None, **keys: Any) -> Forest:
    policy = policy or Around()
    env_id = env if isinstance(env, str) else name(env)
    keys.setdefault("renderer", policy.renderer)
    return await api.arollout(env_id, policy=policy, **{"tasks": 4, "budget": 32, "max_tokens": 200, **keys})


def canonical(forest: Forest) -> list[Any]:
    return [tree.canonical() for tree in forest.trees]


def kinds(forest: Forest) -> list[Failure]:
    """Kinds of all failed attempts, by tree and path."""
    return [tree.failure[node] for tree in forest.trees for node in tree.failed]
