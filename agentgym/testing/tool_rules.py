"""Rules about tools, malformed messages, experts and random players."""

from __future__ import annotations

from typing import Any

from agentgym import seeding
from agentgym.errors import ToolError
from agentgym.messages import Message, ToolCall
from agentgym.testing.probe import MALFORMED, Probe, canonical, cut, tools_of
from agentgym.testing.rules import BrokenRule, NotChecked, Rule, checks
from agentgym.tool_env import random_call


@checks(Rule.TOOL_SCHEMAS)
def _tool_schemas(probe: Probe) -> None:
    for spec in tools_of(probe):
        if not spec.name or not spec.description:
            raise BrokenRule(f"tool {spec.name!r} has the description {spec.description!r}")
        problem = _schema_problem(dict(spec.parameters))
        if problem:
            raise BrokenRule(f"tool {spec.name!r}: {problem}: {cut(canonical(spec.parameters))}")


@checks(Rule.TOOLS_CALLABLE)
def _tools_callable(probe: Probe) -> None:
    rng = seeding.rng(probe.seeds[0], "check_env", "tools")
    for spec in tools_of(probe):
        for _ in range(4):
            action = random_call((spec,), rng)
            arguments = dict(action.tool_calls[0].arguments)
            if not _schema_allows(dict(spec.parameters), arguments):
                continue
            try:
                spec.arguments(arguments)
            except ToolError as error:
                raise BrokenRule(f"tool {spec.name!r} refuses {cut(canonical(arguments))}: {error}") from None
            probe.a.reset(probe.seeds[0])
            records = probe.a.step(action)[4]["tool_calls"]
            if [record["name"] for record in records] != [spec.name]:
                raise BrokenRule(f"a call of {spec.name!r} was recorded as {records}")


@checks(Rule.MALFORMED_ACTIONS)
def _malformed_actions(probe: Probe) -> None:
    for action in MALFORMED:
        probe.a.reset(probe.seeds[0])
        try:
            observation, *_, info = probe.a.step(action)
        except Exception as error:  # boundary: the env is under test
            raise BrokenRule(f"{cut(repr(action))} raised {type(error).__name__}: {cut(str(error))}") from error
        if not observation:
            raise BrokenRule(f"{cut(repr(action))} was answered by {observation!r}")
        executed = [record["name"] for record in info["tool_calls"] if record["ok"]]
        if executed:
            raise BrokenRule(f"{cut(repr(action))} executed {executed}")


@checks(Rule.ONE_REPLY_PER_CALL)
def _one_reply_per_call(probe: Probe) -> None:
    rng = seeding.rng(probe.seeds[0], "check_env", "calls")
    calls = [c for spec in tools_of(probe) for c in random_call((spec,), rng).tool_calls]
    calls += [ToolCall("no_such_tool"), ToolCall("", problem="the call is not valid JSON"), calls[0]]
    for count in range(1, len(calls) + 1):
        probe.a.reset(probe.seeds[0])
        info = probe.a.step(Message(tool_calls=tuple(calls[-count:])))[4]
        replies = [message for message in info["messages"] if message["role"] == "tool"]
        if len(replies) != count or len(info["tool_calls"]) != count:
            raise BrokenRule(f"{count} calls gave {len(replies)} messages and {len(info['tool_calls'])} records")


@checks(Rule.TRUNCATED_MESSAGE)
def _truncated_message(probe: Probe) -> None:
    rng = seeding.rng(probe.seeds[0], "check_env", "truncated")
    tools = tools_of(probe)
    cost = probe.a.reset(probe.seeds[0])[1]["cost"]
    message = probe.a.core.random_valid(rng) or random_call(tools, rng)
    info = probe.a.step(Message(message.content, message.tool_calls, truncated=True))[4]
    executed = [record["name"] for record in info["tool_calls"] if record["ok"]]
    if executed or info["cost"] != cost:
        raise BrokenRule(f"a truncated message executed {executed}, at a cost of {info['cost'] - cost}")


@checks(Rule.EXPERT_SOLVES)
def _expert_solves(probe: Probe) -> None:
    for seed in probe.seeds:
        rng = seeding.rng(seed, "check_env", "expert")
        _, info = probe.a.reset(seed)
        turns = 0
        while not probe.a.over:
            message = probe.a.core.expert(rng)
            if message is None:
                if not turns:
                    raise NotChecked("the env has no expert")
                raise BrokenRule(f"seed {seed}, task {info['task']}: the expert gives up after {turns} turns")
            info = probe.a.step(message)[4]
            turns += 1
        if info["success"] is not True:
            raise BrokenRule(f"seed {seed}, task {info['task']}: success is {info['success']} after {turns} turns")


@checks(Rule.RANDOM_VALID)
def _random_valid(probe: Probe) -> None:
    for seed in probe.seeds:
        rng = seeding.rng(seed, "check_env", "random_valid")
        probe.a.reset(seed)
        for _ in range(probe.steps):
            message = None if probe.a.over else probe.a.core.random_valid(rng)
            if message is None:
                break
            refused = [record for record in probe.a.step(message)[4]["tool_calls"] if not record["ok"]]
            if refused:
                raise BrokenRule(f"seed {seed}: {cut(repr(message))} was refused: {cut(repr(refused))}")


def _schema_problem(schema: dict[str, Any]) -> str | None:
    if schema.get("type") != "object":
        return "the schema's type must be 'object'"
    undeclared = set(schema.get("required", ())) - set(schema.get("properties", {}))
    if undeclared:
        return f"required but not in properties: {sorted(undeclared)}"
    try:
        import jsonschema
    except ImportError:
        return None
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"no valid JSON schema: {error.message}"
    return None


def _schema_allows(schema: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether drawn arguments satisfy a schema; assumed where `jsonschema` is not installed."""
    try:
        import jsonschema
    except ImportError:
        return True
    return bool(jsonschema.Draft202012Validator(schema).is_valid(arguments))
