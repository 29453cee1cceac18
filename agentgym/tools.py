"""Typed Python functions as tools: schema from the signature, validation, calls that answer in words."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import docstring_parser
import pydantic

from agentgym.errors import BadInput, ToolError, UnknownName
from agentgym.messages import ToolCall

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__agentgym_tool__"
DEFAULT_OUTPUT_CHARS = 16_384


class Hidden:
    """Marks a parameter that the policy does not see: `state: Annotated[dict, Hidden]`.

    It is filled from the attribute of the same name of the env that owns the tool.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """Options of the `tool` decorator.

    Attributes:
        cost: what one executed call adds to the episode's `cost`, in units of your choice (dollars, seconds ...).
        max_output_chars: longest result in characters; a longer one is cut in the middle and marked.
    """

    cost: float = 0.0
    max_output_chars: int = DEFAULT_OUTPUT_CHARS


def tool(function: F | None = None, /, *, cost: float = 0.0, max_output_chars: int = DEFAULT_OUTPUT_CHARS) -> Any:
    """Mark a function or method as a tool: `@tool` or `@tool(cost=0.01, max_output_chars=2000)`.

    The description and the meaning of each parameter come from the docstring (Google style), types and
    defaults from the signature. The function may raise `ToolError` to tell the policy what is wrong.
    """
    options = ToolOptions(cost=cost, max_output_chars=max_output_chars)

    def mark(f: F) -> F:
        setattr(f, _MARK, options)
        return f

    return mark if function is None else mark(function)


def is_tool(obj: object) -> bool:
    """Whether `obj` was decorated with `tool`."""
    return hasattr(obj, _MARK)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool as the policy and the env see it.

    Attributes:
        name: the name by which it is called.
        description: what it does.
        parameters: JSON schema (draft 2020-12) of the arguments. Arguments that it does not name are refused.
        function: called with the validated arguments as keywords.
        hidden: parameters filled from the env's attributes.
        options: cost and output cap.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    validate: Callable[[Mapping[str, Any]], dict[str, Any]] = field(repr=False)
    hidden: tuple[str, ...] = ()
    options: ToolOptions = field(default_factory=ToolOptions)

    @classmethod
    def of(cls, function: Callable[..., Any], *, name: str | None = None) -> ToolSpec:
        """Build the spec of a typed function.

        Raises:
            BadInput: a parameter without annotation, `*args` or `**kwargs`, or no docstring.
        """
        name = name or function.__name__
        doc = docstring_parser.parse(inspect.getdoc(function) or "")
        if not doc.short_description:
            raise BadInput(f"tool {name!r} needs a docstring: it is what the policy reads")
        fields, hidden = _fields(function, name, {p.arg_name: p.description for p in doc.params})
        # Numbered fields with aliases: a parameter may be called `json`, `copy` or `_x`, a pydantic field may not.
        numbered = {f"p{i}": field for i, field in enumerate(fields.values())}
        config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
        model = pydantic.create_model(name, __config__=config, **numbered)
        validator = model.__pydantic_validator__
        names = dict(zip(numbered, fields, strict=True))

        def validate(arguments: Mapping[str, Any]) -> dict[str, Any]:
            return {names[key]: value for key, value in validator.validate_python(arguments).__dict__.items()}

        schema = _clean(model.model_json_schema())
        keys: tuple[str, ...] = ("type", "properties", "required", "$defs")
        parameters = {key: schema[key] for key in keys if key in schema}
        description = " ".join(filter(None, [doc.short_description, doc.long_description]))
        options = getattr(function, _MARK, ToolOptions())
        return cls(name, description, parameters, function, validate, hidden, options)

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in the OpenAI form that chat templates take."""
        body = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": body}

    @property
    def signature(self) -> str:
        """One line that names the arguments, for error messages."""
        required = self.parameters.get("required", [])
        parts = [
            f"{key}: {_type_name(prop)}" + ("" if key in required else " (optional)")
            for key, prop in self.parameters.get("properties", {}).items()
        ]
        return f"{self.name}({', '.join(parts)})"

    def arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Validate arguments. Raises `ToolError` that says what is wrong and what was expected."""
        try:
            return self.validate(arguments)
        except pydantic.ValidationError as error:
            faults = "; ".join(_fault(e) for e in error.errors(include_url=False, include_context=False)[:4])
            raise ToolError(f"invalid arguments: {faults}. Expected {self.signature}") from None

    def render(self, result: object) -> str:
        """Turn a result into the text that the policy reads, cut to `max_output_chars` characters."""
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return clip(text, self.options.max_output_chars)


def find_tool(tools: Mapping[str, ToolSpec], tool_call: ToolCall) -> ToolSpec:
    """Return the called tool. Raises `ToolError` for a malformed call or an unknown name, listing the valid ones."""
    if tool_call.problem is not None:
        raise ToolError(tool_call.problem)
    if tool_call.name not in tools:
        raise ToolError(str(UnknownName.of("tool", tool_call.name[:80], tools)))
    return tools[tool_call.name]


def clip(text: str, limit: int) -> str:
    """Cut `text` to `limit` characters, keeping head and tail and saying how many characters are missing."""
    if len(text) <= limit:
        return text
    head, tail = limit - limit // 4, limit // 4
    return f"{text[:head]}\n[... {len(text) - head - tail} characters cut ...]\n{text[len(text) - tail :]}"


def _fields(
    function: Callable[..., Any], name: str, docs: Mapping[str, str | None]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    hidden: list[str] = []
    for key, parameter in inspect.signature(function).parameters.items():
        if key == "self":
            continue
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            kind = parameter.kind.description
            raise BadInput(f"tool {name!r}: parameter {key!r} must be an ordinary named one, not {kind}")
        if key not in hints:
            raise BadInput(f"tool {name!r}: parameter {key!r} needs a type annotation")
        hint = hints[key]
        if get_origin(hint) is Annotated and Hidden in get_args(hint):
            hidden.append(key)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[key] = (hint, pydantic.Field(default, alias=key, description=docs.get(key)))
    return fields, tuple(hidden)


def _clean(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop pydantic's titles, which tell the policy nothing."""
    kept = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    for key in ("properties", "$defs"):
        if key in kept:
            kept[key] = {name: _clean(part) for name, part in kept[key].items()}
    return kept


def _type_name(prop: Mapping[str, Any]) -> str:
    if "enum" in prop:
        return " | ".join(json.dumps(v) for v in prop["enum"])
    if "anyOf" in prop:
        return " | ".join(_type_name(p) for p in prop["anyOf"])
    if "const" in prop:
        return json.dumps(prop["const"])
    if prop.get("type") == "array":
        return f"list of {_type_name(prop.get('items', {}))}"
    return str(prop.get("type") or prop.get("$ref", "any").rpartition("/")[2])


def _fault(error: Mapping[str, Any]) -> str:
    where = ".".join(map(str, error["loc"]))[:80] or "arguments"
    if error["type"] == "extra_forbidden":
        return f"{where} is not a parameter"
    if error["type"] == "missing":
        return f"{where} is missing"
    shown = repr(error["input"])
    return f"{where}: {error['msg']}, got {shown if len(shown) <= 60 else shown[:60] + '...'}"
