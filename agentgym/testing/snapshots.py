"""Rules about snapshots, forks and wrapper stacks."""

from __future__ import annotations

import copy
import pickle
from itertools import zip_longest
from typing import get_args

from gymnasium.wrappers import TimeLimit

from agentgym import stack
from agentgym.env import Action, Coverage
from agentgym.errors import SnapshotError, UnsupportedSnapshot
from agentgym.testing.probe import (
    Frozen,
    Probe,
    branch_points,
    canonical,
    equal_runs,
    must_raise,
    play_until_end,
    replay,
    snapshot_at,
)
from agentgym.testing.rules import BrokenRule, NotChecked, Rule, checks


@checks(Rule.SNAPSHOT_RESTORE)
def _snapshot_restore(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, saved = snapshot_at(probe.b, script, turn)
        first = probe.b.play(rest)
        probe.b.restore(saved)
        equal_runs(first, probe.b.play(rest), f"seed {script.seed}, before and after restoring turn {turn}", turn + 1)


@checks(Rule.SNAPSHOT_PURE)
def _snapshot_pure(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, _ = snapshot_at(probe.b, script, turn)
        expected = replay(probe.c, script)[turn + 1 :]
        equal_runs(expected, probe.b.play(rest), f"seed {script.seed}, with a snapshot at turn {turn}", turn + 1)


@checks(Rule.SNAPSHOT_ELSEWHERE)
def _snapshot_elsewhere(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, saved = snapshot_at(probe.b, script, turn)
        first = probe.b.play(rest)
        other = probe.fresh()
        other.restore(saved)
        equal_runs(first, other.play(rest), f"seed {script.seed}, turn {turn} restored in a new instance", turn + 1)
        other.close()


@checks(Rule.SNAPSHOT_IMMUTABLE)
def _snapshot_immutable(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, saved = snapshot_at(probe.b, script, turn)
        probe.b.restore(saved)
        first = probe.b.play(rest)
        play_until_end(probe.c, probe.other_actions(saved, script.seed))
        probe.b.restore(saved)
        equal_runs(first, probe.b.play(rest), f"seed {script.seed}, turn {turn} restored again", turn + 1)


@checks(Rule.SNAPSHOT_PICKLES)
def _snapshot_pickles(probe: Probe) -> None:
    script = probe.script(probe.seeds[0])
    turn = len(script.actions) // 2
    rest, saved = snapshot_at(probe.b, script, turn)
    first = probe.b.play(rest)
    probe.b.restore(pickle.loads(pickle.dumps(saved)))
    equal_runs(first, probe.b.play(rest), f"seed {script.seed}, turn {turn} restored from a pickle", turn + 1)


@checks(Rule.SNAPSHOT_STACK)
def _snapshot_stack(probe: Probe) -> None:
    if probe.a.prefix:
        raise NotChecked("the env is async, wrappers are synchronous")
    for script in probe.scripts():
        half = len(script.actions) // 2
        head, rest = script.actions[:half], script.actions[half:]
        limit = len(script.actions) + 1  # not reached, unless a restore forgets steps
        env = TimeLimit(probe.make(), limit)
        env.reset(seed=script.seed)
        for action in head:
            env.step(action)
        saved = stack.snapshot(env)
        runs = []
        for _ in range(2):
            runs.append([{"result": canonical(env.step(action))} for action in rest])
            stack.restore(env, saved)
        equal_runs(runs[0], runs[1], f"seed {script.seed}, restored turn {half} in a TimeLimit", half + 1)
        env.close()


@checks(Rule.SNAPSHOT_REFUSES)
def _snapshot_refuses(probe: Probe) -> None:
    env = probe.a.core
    uncovered = sorted(set(get_args(Coverage)) - set(env.covers))
    probe.a.reset(probe.seeds[0])
    for what in uncovered:
        try:
            env.snapshot(require={what})
        except UnsupportedSnapshot:
            continue
        raise BrokenRule(f"snapshot(require={{{what!r}}}) gave a snapshot, though covers = {sorted(env.covers)}")


@checks(Rule.SIBLINGS)
def _siblings(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, saved = snapshot_at(probe.b, script, turn)
        scripts: list[list[Action]] = [rest, probe.other_actions(saved, script.seed)]
        alone = []
        for actions in scripts:
            probe.c.restore(saved)
            alone.append(play_until_end(probe.c, actions))
        forks = [probe.fresh(), probe.fresh()]
        for fork in forks:
            fork.restore(saved)
        together: list[list[Frozen]] = [[], []]
        for row in zip_longest(*scripts):
            for fork, action, results in zip(forks, row, together, strict=True):
                if action is not None and not fork.over:
                    results.append(fork.frozen_step(action))
        for k, fork in enumerate(forks):
            equal_runs(
                alone[k], together[k], f"seed {script.seed}, fork {k} of turn {turn}, alone and beside", turn + 1
            )
            fork.close()


@checks(Rule.RESEED)
def _reseed(probe: Probe) -> None:
    for script, turn in branch_points(probe):
        rest, saved = snapshot_at(probe.b, script, turn)
        runs = []
        for player in (probe.b, probe.c):
            player.restore(saved, reseed=4321)
            runs.append(play_until_end(player, rest))
        equal_runs(runs[0], runs[1], f"seed {script.seed}, turn {turn} restored with reseed=4321", turn + 1)


@checks(Rule.NO_SHALLOW_COPY)
def _no_shallow_copy(probe: Probe) -> None:
    must_raise(SnapshotError, lambda: copy.copy(probe.a.core), "copy.copy(env)")
