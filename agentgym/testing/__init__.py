"""The conformance suite for environments: `check_env` proves that an env keeps the contract of `agentgym.Env`.

    def test_conforms():
        agentgym.testing.check_env("shop/Till-v0")

Every rule is a member of `Rule`. A broken rule is reported by name, with the values that broke it.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Sequence

import gymnasium

from agentgym import registry, stack
from agentgym.env import Env
from agentgym.errors import BadInput
from agentgym.stack import AnyEnv
from agentgym.testing import determinism, results, snapshots, tool_rules  # noqa: F401  (they register checks)
from agentgym.testing.probe import MALFORMED, Probe, cut, draw_action
from agentgym.testing.rules import CHECKS, BrokenRule, CheckReport, ConformanceError, Finding, NotChecked, Rule

__all__ = ["MALFORMED", "CheckReport", "ConformanceError", "Finding", "Rule", "check_env", "draw_action"]


def check_env(
    env_or_id: str | AnyEnv | Callable[[], AnyEnv],
    *,
    seeds: Sequence[int] = (0, 1),
    steps: int = 6,
    report: Callable[[Finding], None] | None = None,
) -> CheckReport:
    """Check an env against every `Rule`.

    The actions are drawn from the env's `random_valid` and `expert`, from `random_call` and from `MALFORMED`, with
    a private generator. Async envs (`calls = "async"`) are driven in an event loop of their own, unwrapped.

    Args:
        env_or_id: a registered id, a class or function that makes envs, or an env (a twin of it is checked).
        seeds: the seeds of the episodes.
        steps: most steps of an episode, except where a rule needs its end.
        report: called with each finding as it is made; then nothing is raised for broken rules.

    Returns:
        The report.

    Raises:
        ConformanceError: a rule is broken, and no `report` was asked for.
        BadInput: `env_or_id` gives no `agentgym.Env`, or there are no seeds or steps.
        UnknownName: no env has this id.
    """
    if not seeds or steps < 1:
        raise BadInput(f"check_env needs seeds and at least one step, got seeds={seeds!r}, steps={steps}")
    make = _maker(env_or_id)
    with determinism.global_rngs_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        probe = Probe(make, tuple(seeds), steps)
        try:
            if probe.a.prefix and _loop_is_running():
                raise BadInput("an async env is checked in an event loop of its own: call check_env in another thread")
            result = _check_all(probe, report)
        finally:
            probe.close()
    if report is None:
        result.raise_on_failure()
    return result


def _check_all(probe: Probe, report: Callable[[Finding], None] | None) -> CheckReport:
    result = CheckReport(probe.name)
    for rule in Rule:
        finding = _apply(rule, probe, result)
        result.findings.append(finding)
        if report is not None:
            report(finding)
    return result


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _apply(rule: Rule, probe: Probe, so_far: CheckReport) -> Finding:
    if any(f.rule == Rule.RUNS.slug for f in so_far.broken):
        return Finding(rule.slug, None, f"not checked, because {Rule.RUNS.slug} is broken")
    try:
        CHECKS[rule](probe)
    except NotChecked as why:
        return Finding(rule.slug, None, str(why))
    except BrokenRule as broken:
        return Finding(rule.slug, False, str(broken))
    except Exception as error:  # boundary: the env is under test, whatever it raises is a finding
        return Finding(rule.slug, False, f"raised {type(error).__name__}: {cut(str(error))}")
    return Finding(rule.slug, True)


def _maker(env_or_id: str | AnyEnv | Callable[[], AnyEnv]) -> Callable[[], AnyEnv]:
    """Return a function that makes fresh envs, checked to be ours."""

    def make() -> AnyEnv:
        if isinstance(env_or_id, str):
            env = registry.make(env_or_id)
        else:
            env = env_or_id if isinstance(env_or_id, gymnasium.Env) else env_or_id()
        if not isinstance(env.unwrapped, Env):
            raise BadInput(f"{type(env.unwrapped).__name__} is not an agentgym.Env")
        return stack._rebuild(env) if env is env_or_id else env

    return make
