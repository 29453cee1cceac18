"""Envs whose policy acts by calling tools, synchronous and natively async."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, ClassVar

from agentgym.env import Action, CallMode, Env, Recording, Snapshot
from agentgym.errors import BadInput, ToolError
from agentgym.messages import ChatMessage, Message, ToolCall, call
from agentgym.seeding import Rng
from agentgym.tools import DEFAULT_OUTPUT_CHARS, ToolSpec, clip, find_tool, is_tool


class ToolEnv(Env):
    """An env whose actions are tool calls: the methods marked with `@tool`, and `extra_tools`.

    The calls of one message run in order; each gets exactly one `tool` message, all are returned together.
    A malformed call, an unknown tool, invalid arguments and a `ToolError` are answered in words. Every other
    exception that leaves a tool is an infrastructure failure and leaves `step`. A truncated message executes
    no call. A message without calls is answered by `no_call`.
    """

    extra_tools: Sequence[Callable[..., Any] | ToolSpec] = ()

    @cached_property
    def _tools(self) -> dict[str, ToolSpec]:
        own: type = type(self)
        methods = [replace(spec, function=getattr(self, name)) for name, spec in _method_specs(own).items()]
        specs = [*methods, *(t if isinstance(t, ToolSpec) else ToolSpec.of(t) for t in self.extra_tools)]
        table = {spec.name: spec for spec in specs}
        if len(table) < len(specs):
            raise BadInput(f"{type(self).__name__} has two tools of one name: {sorted(s.name for s in specs)}")
        return table

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools, methods first in the order of definition."""
        return tuple(self._tools.values())

    def no_call(self, content: str) -> str:
        """Answer a message without tool calls. Override where plain text is an action."""
        return f"No tool call found. Call one of: {', '.join(spec.signature for spec in self.tools)}."

    def respond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Execute the message's calls in order and return one `tool` message for each."""
        if message.truncated:
            return "Your message was cut off by the token limit. No tool was called. Write a shorter message."
        if not message.tool_calls:
            return self.no_call(message.content)
        return [{"role": "tool", "content": self._execute(c)} for c in message.tool_calls]

    def _execute(self, tool_call: ToolCall) -> str:
        if self._live().ended:
            return self._refuse(tool_call)
        try:
            spec, arguments = self._bind(tool_call)
            result = spec.function(**arguments)
            if inspect.iscoroutine(result):
                result.close()
                raise BadInput(f"tool {spec.name!r} is a coroutine function: use AsyncToolEnv and its astep")
            return self._record(spec, result)
        except ToolError as error:
            return self._fault(tool_call, error)

    def _bind(self, tool_call: ToolCall) -> tuple[ToolSpec, dict[str, Any]]:
        spec = find_tool(self._tools, tool_call)
        arguments = spec.arguments(tool_call.arguments)
        for name in spec.hidden:
            arguments[name] = getattr(self, name)
        return spec, arguments

    def _record(self, spec: ToolSpec, result: object) -> str:
        episode = self._live()
        episode.cost += spec.options.cost
        episode.calls.append({"name": spec.name, "ok": True, "error": None})
        return spec.render(result)

    def _fault(self, tool_call: ToolCall, error: ToolError) -> str:
        text = clip(str(error), DEFAULT_OUTPUT_CHARS)
        self._live().calls.append({"name": tool_call.name[:80], "ok": False, "error": text})
        return f"Error: {text}"

    def _refuse(self, tool_call: ToolCall) -> str:
        return self._fault(tool_call, ToolError("not executed: an earlier call of this message ended the episode"))


class AsyncToolEnv(ToolEnv):
    """A tool env whose tools may be coroutine functions (network, sandboxes, MCP).

    Runners use `areset`, `astep`, `asnapshot`, `arestore` and `aclose`. The synchronous methods of Gymnasium
    raise for envs that need an event loop; override the async ones where the work itself is asynchronous.
    """

    calls: ClassVar[CallMode] = "async"

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode; see `Env.reset`."""
        return self.reset(seed=seed, options=options)

    async def astep(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer one policy message; see `Env.step`."""
        return self._after(await self.arespond(self._before(action)))

    async def asnapshot(self) -> Snapshot:
        """Capture the episode; see `Env.snapshot`."""
        return self.snapshot()

    async def arestore(self, snapshot: Snapshot, *, reseed: int | None = None) -> None:
        """Go back to `snapshot`; see `Env.restore`."""
        self._check_class(snapshot)
        self.task = snapshot.task
        if self.snapshot_by == "replay":
            await self._areplay(snapshot.payload)
        else:
            self.reinstate(snapshot.payload)
        self._set_rng(snapshot, reseed)

    async def aclose(self) -> None:
        """Release everything; see `Env.close`."""
        self.close()

    async def _areplay(self, recording: Recording) -> None:
        await self.areset(seed=recording.seed, options={"task": self.task})
        self._compare(recording.first)
        for entry in recording.entries:
            if isinstance(entry, int):
                self._reseed(entry)
            else:
                await self.astep(pickle.loads(entry[0]))
                self._compare(entry[1])

    async def arespond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Execute the message's calls in order, awaiting those that are coroutines."""
        if message.truncated or not message.tool_calls:
            return self.respond(message)
        return [{"role": "tool", "content": await self._aexecute(c)} for c in message.tool_calls]

    async def _aexecute(self, tool_call: ToolCall) -> str:
        if self._live().ended:
            return self._refuse(tool_call)
        try:
            spec, arguments = self._bind(tool_call)
            result = spec.function(**arguments)
            return self._record(spec, await result if inspect.isawaitable(result) else result)
        except ToolError as error:
            return self._fault(tool_call, error)


def random_call(tools: Sequence[ToolSpec], rng: Rng) -> Message:
    """Return a call of a random tool with random arguments that satisfy its schema.

    Understood are types, `enum`, `const`, `anyOf`, references, nested objects and arrays, and bounds; not `pattern`,
    `format` and `multipleOf`. Optional arguments are given or left out at random.
    """
    spec = tools[int(rng.integers(len(tools)))]
    return call(spec.name, **random_arguments(spec.parameters, rng))


def random_arguments(parameters: Mapping[str, Any], rng: Rng) -> dict[str, Any]:
    """Return random arguments that satisfy a tool's parameter schema."""
    return _random_object(parameters, parameters.get("$defs", {}), rng)


def _random_object(schema: Mapping[str, Any], defs: Mapping[str, Any], rng: Rng) -> dict[str, Any]:
    required = schema.get("required", ())
    properties = schema.get("properties", {}).items()
    return {name: _random_value(prop, defs, rng) for name, prop in properties if name in required or rng.random() < 0.5}


def _random_value(prop: Mapping[str, Any], defs: Mapping[str, Any], rng: Rng) -> Any:
    if "$ref" in prop:
        return _random_value(defs[prop["$ref"].rpartition("/")[2]], defs, rng)
    if "const" in prop:
        return prop["const"]
    for key in ("enum", "anyOf", "oneOf"):
        if key in prop:
            pick = prop[key][int(rng.integers(len(prop[key])))]
            return pick if key == "enum" else _random_value(pick, defs, rng)
    kind = prop.get("type")
    if kind == "null":
        return None
    if kind == "boolean":
        return bool(rng.integers(2))
    if kind in ("integer", "number"):
        return _random_number(prop, rng)
    if kind == "object":
        return _random_object(prop, defs, rng)
    if kind == "array":
        items = prop.get("prefixItems") or [prop.get("items", {})] * _random_length(prop, "Items", 3, rng)
        return [_random_value(item, defs, rng) for item in items]
    return "".join(chr(97 + c) for c in rng.integers(0, 26, size=_random_length(prop, "Length", 8, rng)))


def _random_number(prop: Mapping[str, Any], rng: Rng) -> int | float:
    whole = prop["type"] == "integer"
    step, span = (1, 100) if whole else (1e-9, 1.0)
    low, high = prop.get("minimum"), prop.get("maximum")
    if low is None and "exclusiveMinimum" in prop:
        low = prop["exclusiveMinimum"] + step
    if high is None and "exclusiveMaximum" in prop:
        high = prop["exclusiveMaximum"] - step
    if low is None:
        low = 0 if high is None or high >= 0 else high - span
    if high is None:
        high = low + span
    return int(rng.integers(int(low), int(high) + 1)) if whole else float(rng.uniform(low, high))


def _random_length(prop: Mapping[str, Any], what: str, usual: int, rng: Rng) -> int:
    least = prop.get(f"min{what}", 1)
    return int(rng.integers(least, min(prop.get(f"max{what}", least + usual), least + usual) + 1))


@cache
def _method_specs(cls: type) -> dict[str, ToolSpec]:
    """Return the specs of a class's tool methods, not bound to an instance. Building one takes milliseconds."""
    return {attribute: ToolSpec.of(getattr(cls, attribute)) for attribute in _tool_names(cls)}


def _tool_names(cls: type) -> list[str]:
    names: dict[str, None] = {}
    for base in reversed(cls.__mro__):
        names.update({key: None for key, value in vars(base).items() if is_tool(value)})
    return list(names)
