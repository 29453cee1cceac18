"""Options of allocators, read from their dataclass fields and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

from docstring_parser.google import DEFAULT_SECTIONS, GoogleParser, Section, SectionType
from pydantic import ConfigDict, PydanticUserError, TypeAdapter

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.allocators.base import Allocator
from agentgym.rollout.predictors import PredictorSpec, predictors, resolve_predictor

_MEMBERS = ("name", "family", "source", "watches", "snapshots", "predictor", "minimum", "propose")
REQUIRED = "(required)"
"""Stands for the default of an option that has none."""


def require_allocator(name: str, found: object) -> None:
    """Raise `BadInput` unless `found` is a dataclass with all members of `Allocator`."""
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise BadInput(f"{name} is no allocator: expected a frozen dataclass, got {found!r}")
    fields = {f.name for f in dataclasses.fields(found)}
    missing = [member for member in _MEMBERS if not hasattr(found, member) and member not in fields]
    if missing:
        raise BadInput(f"{name} is no allocator: it lacks {', '.join(missing)} (see agentgym.rollout.allocators.base)")


def coerced(name: str, cls: type[Allocator], options: Mapping[str, object]) -> dict[str, Any]:
    """Convert option values to the types of the fields of `cls`. Raises `UnknownName` or `BadInput`."""
    hints = _hints(cls)
    for key in options:
        if key not in hints:
            raise UnknownName.of(f"option of {name}", key, hints)
    for option in dataclasses.fields(cls):  # type: ignore[arg-type]  # `require_allocator` made sure
        if option.name in hints and option.name not in options and _default(option) == REQUIRED:
            raise BadInput(f"option {option.name} of {name} has no default: give it a value")
    return {key: _convert(name, key, hints[key], value) for key, value in options.items()}


def described(name: str, cls: type[Allocator]) -> dict[str, Any]:
    """Describe `cls`; see `agentgym.rollout.allocators.describe`."""
    doc = GoogleParser([*DEFAULT_SECTIONS, Section("Equations", "equations", SectionType.SINGULAR)])
    parsed = doc.parse(inspect.getdoc(cls) or "")
    meanings = {p.arg_name: " ".join((p.description or "").split()) for p in parsed.params}
    equations = next((m.description or "" for m in parsed.meta if m.args[:1] == ["equations"]), "")
    hints = _hints(cls)
    options = [
        {"name": f.name, "type": _type_name(hints[f.name]), "default": _default(f), "meaning": meanings.get(f.name, "")}
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]  # `require_allocator` made sure
        if f.init
    ]
    return {
        "name": cls.name,
        "summary": parsed.short_description or "",
        "family": cls.family,
        "source": cls.source,
        "watches": str(cls.watches),
        "snapshots": cls.snapshots,
        "equations": equations,
        "options": options,
    }


def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _convert(name: str, key: str, hint: Any, value: object) -> Any:
    if hint is PredictorSpec:
        return resolve_predictor(value)
    allowed = typing.get_args(hint) or (hint,)
    if isinstance(value, str) and value.lower() in ("none", "null") and types.NoneType in allowed:
        return None
    try:
        if isinstance(value, bool) and bool not in allowed:
            raise ValueError("a truth value")
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticUserError:
        return value  # a type that pydantic cannot describe: the class itself checks it
    except ValueError:  # pydantic's `ValidationError` is one
        wanted = f"expected {_type_name(hint)}, got {value!r} ({type(value).__name__})"
        raise BadInput(f"option {key} of {name}: {wanted}") from None


def _type_name(hint: Any) -> str:
    if hint is types.NoneType:
        return "none"
    if typing.get_origin(hint) is typing.Literal:
        return " | ".join(map(str, typing.get_args(hint)))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _default(option: dataclasses.Field[Any]) -> Any:
    value = option.default if option.default_factory is dataclasses.MISSING else option.default_factory()
    if value is dataclasses.MISSING:
        return REQUIRED
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return next((name for name, spec in predictors().items() if type(value) is spec), repr(value))
