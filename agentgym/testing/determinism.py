"""Rules about declarations, seeds and randomness."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentgym import seeding
from agentgym.env import CallMode, Coverage, SnapshotKind
from agentgym.testing.probe import Probe, equal, equal_runs, replay
from agentgym.testing.rules import BrokenRule, NotChecked, Rule, checks


@checks(Rule.DECLARATIONS)
def _declarations(probe: Probe) -> None:
    env = probe.a.core
    valid: dict[str, tuple[Any, ...]] = {"snapshot_by": get_args(SnapshotKind), "calls": get_args(CallMode)}
    for name, values in valid.items():
        if getattr(env, name) not in values:
            raise BrokenRule(f"{name} = {getattr(env, name)!r} is none of {', '.join(values)}")
    if set(env.covers) - set(get_args(Coverage)):
        raise BrokenRule(f"covers = {env.covers!r} is no set of {', '.join(get_args(Coverage))}")


@checks(Rule.RUNS)
def _runs(probe: Probe) -> None:
    for script in probe.scripts():
        if not script.actions:
            raise BrokenRule(f"seed {script.seed}: the episode is over after reset")


@checks(Rule.GYMNASIUM)
def _gymnasium(probe: Probe) -> None:
    if probe.a.prefix:
        raise NotChecked("the env is async")
    probe.a.reset(probe.seeds[0])
    if probe.a.core._live().limit == 1:
        raise NotChecked("episodes of one turn end before Gymnasium's checker is done")
    gymnasium_check_env(probe.a.core)


@checks(Rule.SAME_SEED)
def _same_seed(probe: Probe) -> None:
    for script in probe.scripts():
        first = script.results[0]
        equal(first, probe.a.frozen_reset(script.seed), f"seed {script.seed}, reset again in the same instance")
        probe.c.reset(script.seed + 1)
        second = probe.b.frozen_reset(script.seed)
        probe.c.play(script.actions[:1])
        equal(first, second, f"seed {script.seed}, reset in another instance, while a third one runs")


@checks(Rule.STEP_DETERMINISM)
def _step_determinism(probe: Probe) -> None:
    for script in probe.scripts():
        runs = [replay(player, script) for player in (probe.b, probe.b, probe.c)]
        equal_runs(runs[0], runs[1], f"seed {script.seed}, played twice in one instance")
        equal_runs(runs[0], runs[2], f"seed {script.seed}, played in another instance")


@checks(Rule.PRIVATE_RNG)
def _private_rng(probe: Probe) -> None:
    for script in probe.scripts():
        runs = []
        for noise in (1, 2):
            random.seed(noise)
            np.random.seed(noise)
            run = [probe.b.frozen_reset(script.seed)]
            for action in script.actions:
                for _ in range(noise - 1):
                    random.random()
                    np.random.random()
                run.append(probe.b.frozen_step(action))
            runs.append(run)
        equal_runs(runs[0], runs[1], f"seed {script.seed}, with other states of the global generators")


@checks(Rule.GLOBAL_RNG_UNTOUCHED)
def _global_rng_untouched(probe: Probe) -> None:
    for script in probe.scripts():
        before = _global_rngs()
        replay(probe.b, script)
        for name, was, now in zip(("random", "numpy.random"), before, _global_rngs(), strict=True):
            if was != now:
                raise BrokenRule(f"seed {script.seed}: an episode changes the state of the global `{name}`")


@checks(Rule.HINTS_PURE)
def _hints_pure(probe: Probe) -> None:
    for script in probe.scripts():
        rng = seeding.rng(script.seed, "check_env", "hints")
        run = [probe.b.frozen_reset(script.seed)]
        for action in script.actions:
            probe.b.core.expert(rng)
            probe.b.core.random_valid(rng)
            run.append(probe.b.frozen_step(action))
        equal_runs(replay(probe.c, script), run, f"seed {script.seed}, without and with hints")


def _global_rngs() -> tuple[str, str]:
    return repr(random.getstate()), repr(np.random.get_state())


@contextmanager
def global_rngs_kept() -> Iterator[None]:
    """Put the global generators back at the end, since some rules seed them."""
    kept = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
