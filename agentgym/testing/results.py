"""Rules about the life of an episode and about what `reset` and `step` return."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from agentgym.errors import EpisodeOver
from agentgym.testing.probe import (
    MOST_TURNS,
    Probe,
    canonical,
    cut,
    difference,
    kind_of,
    must_raise,
    results_of,
    to_the_end,
)
from agentgym.testing.rules import BrokenRule, NotChecked, Rule, checks

_INFO_KEYS = ("success", "reward_terms", "tool_calls", "cost", "messages", "task", "level")


@checks(Rule.STEP_BEFORE_RESET)
def _step_before_reset(probe: Probe) -> None:
    player = probe.fresh()
    must_raise(EpisodeOver, lambda: player.step("hello"), "step before reset")
    player.close()


@checks(Rule.STEP_AFTER_END)
def _step_after_end(probe: Probe) -> None:
    player = probe.b
    player.reset(probe.seeds[0])
    to_the_end(player)
    before = canonical(player.core.state)
    must_raise(EpisodeOver, lambda: player.step("hello"), "step after the end")
    after = canonical(player.core.state)
    if after != before:
        raise BrokenRule(f"a refused step changed the state: {difference(before, after)}")


@checks(Rule.TURN_LIMIT)
def _turn_limit(probe: Probe) -> None:
    for seed in probe.seeds:
        probe.a.reset(seed)
        limit = probe.a.core._live().limit
        if limit > MOST_TURNS:
            raise NotChecked(f"the limit of {limit} turns is too high to try")
        taken = 0
        while not probe.a.over and taken <= limit:
            probe.a.step("")
            taken += 1
        if taken > limit:
            raise BrokenRule(f"seed {seed}: no end after {taken} turns, the limit is {limit}")


@checks(Rule.CLOSE_TWICE)
def _close_twice(probe: Probe) -> None:
    player = probe.fresh()
    player.reset(probe.seeds[0])
    player.close()
    player.close()


@checks(Rule.JSON_SAFE)
def _json_safe(probe: Probe) -> None:
    for where, result in results_of(probe):
        for name, value in (("observation", result[0]), ("info", result[-1])):
            try:
                json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
            except (ValueError, TypeError) as error:
                raise BrokenRule(f"{where}: {name} is no strict JSON ({error}): {cut(repr(value))}") from None


@checks(Rule.INFO_SCHEMA)
def _info_schema(probe: Probe) -> None:
    for where, result in results_of(probe):
        observation, info = result[0], result[-1]
        if not isinstance(observation, str):
            raise BrokenRule(f"{where}: the observation is {kind_of(observation)}, not a str")
        missing = [key for key in _INFO_KEYS if key not in info]
        if missing:
            raise BrokenRule(f"{where}: info lacks {', '.join(missing)}; it has {', '.join(map(str, info))}")
        for key, problem in _info_problems(observation, info):
            raise BrokenRule(f"{where}: info[{key!r}] {problem}, got {cut(repr(info[key]))}")


@checks(Rule.REWARD)
def _reward(probe: Probe) -> None:
    for where, result in results_of(probe):
        if len(result) != 5:
            continue
        reward, terms = result[1], result[4].get("reward_terms", {})
        if not isinstance(reward, float) or not math.isfinite(reward):
            raise BrokenRule(f"{where}: the reward is {reward!r} ({kind_of(reward)})")
        if not math.isclose(reward, math.fsum(terms.values()), rel_tol=1e-9, abs_tol=1e-12):
            raise BrokenRule(f"{where}: the reward {reward} is not the sum of reward_terms {terms}")


@checks(Rule.SUCCESS_AT_END)
def _success_at_end(probe: Probe) -> None:
    for where, result in results_of(probe):
        success = result[-1].get("success")
        ended = len(result) == 5 and (result[2] or result[3])
        if not (success is None or (ended and isinstance(success, bool))):
            raise BrokenRule(f"{where}: success is {success!r} ({kind_of(success)}), over: {bool(ended)}")


@checks(Rule.RETURNED_DATA)
def _returned_data(probe: Probe) -> None:
    for script in probe.scripts():
        kept: list[Any] = [probe.b.reset(script.seed)]
        texts = [canonical(kept[0])]
        for action in script.actions:
            kept.append(probe.b.step(action))
            texts.append(canonical(kept[-1]))
        for turn, (text, result) in enumerate(zip(texts, kept, strict=True)):
            if text != canonical(result):
                raise BrokenRule(
                    f"seed {script.seed}: the result of turn {turn} changed later to {cut(canonical(result))}"
                )


@checks(Rule.TASK_UNCHANGED)
def _task_unchanged(probe: Probe) -> None:
    for seed in probe.seeds:
        probe.b.reset(seed)
        task = probe.b.core.task
        fresh = copy.deepcopy(task.data) if task else None
        probe.b.reset(seed)
        to_the_end(probe.b)
        if task is not None and canonical(task.data) != canonical(fresh):
            raise BrokenRule(f"seed {seed}: task {task.id} was {cut(canonical(fresh))}, is {cut(canonical(task.data))}")


def _info_problems(observation: str, info: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not (info["success"] is None or isinstance(info["success"], bool)):
        yield "success", "must be a bool or None"
    if not isinstance(info["reward_terms"], dict) or not all(map(_is_number, info["reward_terms"].values())):
        yield "reward_terms", "must be a dict of numbers"
    if not isinstance(info["tool_calls"], list) or not all(map(_is_record, info["tool_calls"])):
        yield "tool_calls", "must be a list of records with name (str), ok (bool) and error (str or None)"
    if not _is_number(info["cost"]):
        yield "cost", "must be a number"
    messages = info["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        yield "messages", "must be a list of chat messages"
    elif "\n".join(m["content"] for m in messages) != observation:
        yield "messages", "must say what the observation says"
    for key in ("task", "level"):
        if not isinstance(info[key], str):
            yield key, "must be a str"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_record(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("name"), str)
        and isinstance(value.get("ok"), bool)
        and isinstance(value.get("error", 0), str | None)
    )


def _is_message(value: Any) -> bool:
    roles = ("system", "user", "assistant", "tool")
    return isinstance(value, dict) and value.get("role") in roles and isinstance(value.get("content"), str)
