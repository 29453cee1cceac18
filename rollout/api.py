"""One call from a configuration to a forest: check everything, then run, journal and resume."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from agentgym import registry
from agentgym.env import Env
from agentgym.errors import BadInput
from agentgym.rollout import journal as journals
from agentgym.rollout import manifest as manifests
from agentgym.rollout import records
from agentgym.rollout.allocators import make_allocator
from agentgym.rollout.allocators.base import Allocator
from agentgym.rollout.allocators.options import require_allocator
from agentgym.rollout.config import RunConfig
from agentgym.rollout.episode import Setting
from agentgym.rollout.hosts import HostPool
from agentgym.rollout.journal import Journal
from agentgym.rollout.policies import make_policy
from agentgym.rollout.policies.base import Policy
from agentgym.rollout.renderers.base import Renderer
from agentgym.rollout.runner import Progress, Runner
from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Forest
from agentgym.stack import AnyEnv
from agentgym.tasks import Task, TaskSet

_DIGESTED_TASKS = 64


def rollout(
    env: str | RunConfig,
    *,
    policy: str | Policy | None = None,
    allocator: str | Allocator | None = None,
    renderer: Renderer | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
    **keys: Any,
) -> Forest:
    """Run rollouts and return their trees; see `arollout` for the arguments. Not for use inside an event loop."""
    return asyncio.run(
        arollout(
            env,
            policy=policy,
            allocator=allocator,
            renderer=renderer,
            out=out,
            resume=resume,
            progress=progress,
            **keys,
        )
    )


async def arollout(
    env: str | RunConfig,
    *,
    policy: str | Policy | None = None,
    allocator: str | Allocator | None = None,
    renderer: Renderer | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
    **keys: Any,
) -> Forest:
    """Run rollouts and return their trees.

    Args:
        env: id of a registered env, or a whole configuration (then names and `keys` are in it).
        policy: a name for `make_policy` (`tiny` by default), or a policy (then `renderer` is needed, and closing it
            is yours).
        allocator: a name for `make_allocator` (`uniform` by default), or an allocator.
        renderer: the renderer of a given policy.
        out: run folder for journal and manifest; `None` keeps the run in memory only.
        resume: continue the run in `out`.
        progress: called after each leaf and at the end of each step.
        keys: further keys of `RunConfig`, e.g. `tasks=64, budget=512, seed=0`.

    Raises:
        BadInput: anything that can be known to be wrong before work starts.
        SystemicFailure: nothing but failures.
        JournalError: the journal to be resumed is damaged.
    """
    config = _config(env, policy, allocator, keys)
    if resume and out is None:
        raise BadInput("resume needs the run folder (out)")
    if isinstance(allocator, str | None):
        allocator = make_allocator(config.allocator, **config.allocator_options)
    plan = _Plan(config, allocator)
    if not isinstance(policy, str | None):
        if renderer is None:
            raise BadInput("a policy object needs its renderer: rollout(..., policy=p, renderer=r)")
        return await _run(plan, policy, renderer, out, resume, progress)
    if renderer is not None:
        raise BadInput(f"the policy {config.policy!r} brings its own renderer; pass one only with a policy object")
    engine, renderer = make_policy(config.policy, config.policy_options)
    try:
        return await _run(plan, engine, renderer, out, resume, progress)
    finally:
        await engine.aclose()


def _config(
    env: str | RunConfig, policy: str | Policy | None, allocator: str | Allocator | None, keys: dict[str, Any]
) -> RunConfig:
    named = {key: value for key, value in (("policy", policy), ("allocator", allocator)) if isinstance(value, str)}
    if isinstance(env, RunConfig):
        if named or keys:
            raise BadInput(f"a RunConfig has all keys: pass it without {', '.join([*named, *keys])}")
        return dataclasses.replace(env, **_objects(policy, allocator))
    return RunConfig.from_mapping({"env": env, **named, **_objects(policy, allocator), **keys})


def _objects(policy: str | Policy | None, allocator: str | Allocator | None) -> dict[str, Any]:
    """Return what the manifest says of a policy or an allocator that was given as an object."""
    given: dict[str, Any] = {}
    if not isinstance(policy, str | None):
        given["policy"] = policy.name
    if not isinstance(allocator, str | None):
        require_allocator(type(allocator).__name__, type(allocator))
        given |= {"allocator": allocator.name, "allocator_options": {"object": repr(allocator)}}
    return given


class _Plan:
    """A checked configuration: which tasks each step has and what it may spend."""

    def __init__(self, config: RunConfig, allocator: Allocator) -> None:
        made_by: object = registry.env_class(config.env)
        self.config, self.allocator = config, allocator
        foreign = isinstance(made_by, type) and not issubclass(made_by, Env)
        probe = None if foreign else self.make_env()
        if probe is None or not isinstance(probe.unwrapped, Env):
            raise BadInput(f"{config.env} is not an agentgym env: it has no text, tools and snapshots")
        self.tasks: TaskSet = probe.unwrapped.tasks
        self._check_env(probe, probe.unwrapped)
        probe.close()
        steps = config.steps()
        self.budgets = config.limits().split([len(step) for step in steps])
        for step, budget in zip(steps, self.budgets, strict=True):
            needed = allocator.minimum(len(step))
            if budget.leaves < needed:
                raise BadInput(
                    f"a budget of {int(budget.leaves)} leaves for a step of {len(step)} tasks is too small: "
                    f"the allocator {allocator.name!r} needs at least {needed}"
                )
        self.steps = [[self.task(i) for i in step] for step in steps]

    def _check_env(self, env: AnyEnv, core: Env) -> None:
        """Refuse what the runner could only fail at."""
        missing = core.touches - core.covers
        if missing and self.allocator.snapshots:
            raise BadInput(
                f"the allocator {self.allocator.name!r} continues from inner turns, but the snapshots of "
                f"{self.config.env} do not cover {', '.join(sorted(missing))}; use 'uniform', or snapshot_by='replay'"
            )
        if core.calls == "async" and env is not core:
            raise BadInput(f"{self.config.env} is async: wrappers (such as max_episode_steps) are not supported")

    def make_env(self) -> AnyEnv:
        """Make one env."""
        c = self.config
        options = {"split": c.split, "level": c.level, **c.env_options}
        if c.max_turns is not None:
            options["max_turns"] = c.max_turns
        return registry.make(c.env, **options)

    def task(self, number: int) -> Task:
        """Return task `number` of the run."""
        c = self.config
        return self.tasks.task(c.split, (c.first_task + number) % self.tasks.size(c.split), c.level)

    def digest(self) -> str:
        """Return a digest of the first tasks, so that a changed generator is noticed when a run is resumed."""
        first = [task for step in self.steps for task in step][:_DIGESTED_TASKS]
        rows = [[task.id, dict(task.data)] for task in first]
        return hashlib.blake2b(orjson.dumps(rows, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


async def _run(
    plan: _Plan,
    policy: Policy,
    renderer: Renderer,
    out: str | Path | None,
    resume: bool,
    progress: Callable[[Progress], None],
) -> Forest:
    manifest = manifests.build(
        plan.config.to_mapping(),
        env_id=plan.config.env,
        task_digest=plan.digest(),
        policy=policy.describe(),
        renderer={"name": renderer.name, "stop_ids": list(renderer.stop_ids), "is_extension": renderer.is_extension},
    )
    if out is None:
        return await _execute(plan, policy, renderer, None, manifest, progress)
    manifests.open_run(out, manifest, resume=resume)
    with Journal(out) as journal:
        return await _execute(plan, policy, renderer, journal, manifest, progress)


async def _execute(
    plan: _Plan,
    policy: Policy,
    renderer: Renderer,
    journal: Journal | None,
    manifest: dict[str, Any],
    progress: Callable[[Progress], None],
) -> Forest:
    config = plan.config
    pool = HostPool(plan.make_env, config.env_deadline)
    setting = Setting(
        seed=config.seed,
        policy=policy,
        renderer=renderer,
        pool=pool,
        sampling=config.sampling(),
        max_context=min(policy.max_context, config.max_context or policy.max_context),
        max_episode_tokens=config.episode_tokens,
        max_empty=config.max_empty,
        retries=config.retries,
        policy_deadline=config.policy_deadline,
        journal=journal,
    )
    recorded = _Recorded(journal)
    runner = Runner(
        setting,
        plan.allocator,
        concurrency=config.concurrency,
        recorded={(tree.step, tree.index): tree for tree in recorded.trees},
        finished=recorded.steps,
        progress=progress,
    )
    trees: list[Tree] = []
    try:
        for number, (tasks, budget) in enumerate(zip(plan.steps, plan.budgets, strict=True)):
            trees += await runner.step(number, tasks, budget)
    finally:
        await pool.close()
    if journal is not None and not recorded.ended:
        journal.write(records.end(trees=len(trees), leaves=sum(len(tree.leaves) for tree in trees)))
    return Forest(trees, manifest, {**setting.counters, "seconds": runner.seconds})


class _Recorded:
    """What the journal of a resumed run already holds."""

    def __init__(self, journal: Journal | None) -> None:
        self.trees: list[Tree] = []
        self.steps: frozenset[int] = frozenset()
        self.ended = False
        if journal is None:
            return
        self.trees = journals.read(journal.path.parent)
        marks = [record for _, record in journals.scan(journal.path.parent) if record["e"] in ("step", "end")]
        self.steps = frozenset(record["step"] for record in marks if record["e"] == "step")
        self.ended = any(record["e"] == "end" for record in marks)
