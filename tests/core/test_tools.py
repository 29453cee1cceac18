"""Typed functions as tools: schema, validation, words for the policy."""

from __future__ import annotations

import json
import warnings
from typing import Annotated, Any, Literal

import jsonschema
import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import seeding
from agentgym.errors import BadInput, ToolError
from agentgym.messages import ToolCall
from agentgym.tool_env import random_call
from agentgym.tools import Hidden, ToolSpec, clip, find_tool, is_tool, tool


class Point(pydantic.BaseModel):
    """A place."""

    x: int
    y: float = 0.0


def search(
    words: list[str],
    where: Literal["title", "text"] = "text",
    limit: int | None = None,
    near: Point | None = None,
    state: Annotated[dict[str, Any], Hidden] = {},  # noqa: B006  (never used: hidden parameters are filled)
) -> str:
    """Search documents.

    It ranks by BM25.

    Args:
        words: what to look for.
        where: the part to search.
    """
    return " ".join(words)


SPEC = ToolSpec.of(search)


def test_schema():
    assert SPEC.schema["function"]["name"] == "search"
    assert SPEC.description == "Search documents. It ranks by BM25."
    assert SPEC.hidden == ("state",)
    assert SPEC.parameters == {
        "type": "object",
        "properties": {
            "words": {"type": "array", "items": {"type": "string"}, "description": "what to look for."},
            "where": {
                "type": "string",
                "enum": ["title", "text"],
                "default": "text",
                "description": "the part to search.",
            },
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "near": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}], "default": None},
        },
        "required": ["words"],
        "$defs": {
            "Point": {
                "type": "object",
                "description": "A place.",
                "properties": {"x": {"type": "integer"}, "y": {"type": "number", "default": 0.0}},
                "required": ["x"],
            }
        },
    }
    jsonschema.Draft202012Validator.check_schema(dict(SPEC.parameters))


def test_arguments_get_defaults_and_models():
    assert SPEC.arguments({"words": ["a"], "near": {"x": 3}}) == {
        "words": ["a"],
        "where": "text",
        "limit": None,
        "near": Point(x=3),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "words is missing"),
        ({"words": ["a"], "wher": "text"}, "wher is not a parameter"),
        ({"words": "a"}, "words: Input should be a valid list, got 'a'"),
        ({"words": ["a"], "where": "body"}, "where: Input should be 'title' or 'text', got 'body'"),
        ({"words": ["a"], "near": {"y": 1}}, r"near.x is missing"),
        ({"words": ["a"], "state": {}}, "state is not a parameter"),
        ({"p0": ["a"]}, "p0 is not a parameter"),
    ],
)
def test_invalid_arguments_say_what_is_wrong_and_what_was_expected(arguments, message):
    with pytest.raises(ToolError, match=message) as caught:
        SPEC.arguments(arguments)
    assert 'Expected search(words: list of string, where: "title" | "text" (optional)' in str(caught.value)


@pytest.mark.parametrize("arguments", [{"x" * 100_000: 1}, {"words": "x" * 100_000}, {"words": ["a"] * 3, "where": []}])
def test_error_texts_are_bounded(arguments):
    with pytest.raises(ToolError) as caught:
        SPEC.arguments(arguments)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["json", "copy", "schema", "model_dump", "model_config", "_hidden", "p0", "validate"])
def test_a_parameter_may_have_any_name(name):
    scope: dict[str, Any] = {}
    exec(f'def f({name}: int, other: int = 3):\n    "Do it."', scope)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = ToolSpec.of(scope["f"])
    assert spec.arguments({name: 1}) == {name: 1, "other": 3}
    assert spec.parameters["required"] == [name]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(value):
    def weigh(kilos: float) -> str:
        """Weigh."""
        return f"{kilos}"

    with pytest.raises(ToolError, match="kilos: Input should be a finite number"):
        ToolSpec.of(weigh).arguments({"kilos": value})


def undocumented(x: int) -> str:
    return str(x)


def untyped(x) -> str:
    """Do it."""


def starred(*words: str) -> str:
    """Do it."""


def keywords(**words: str) -> str:
    """Do it."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "needs a docstring"),
        (untyped, "parameter 'x' needs a type annotation"),
        (starred, "variadic positional"),
        (keywords, "variadic keyword"),
    ],
)
def test_bad_functions_are_refused(function, message):
    with pytest.raises(BadInput, match=message):
        ToolSpec.of(function)


def test_mutable_defaults_are_not_shared():
    def add(word: str, to: list[str] = []) -> list[str]:  # noqa: B006  (that is what is tested)
        """Add a word."""
        to.append(word)
        return to

    spec = ToolSpec.of(add)
    assert [spec.function(**spec.arguments({"word": w})) for w in "ab"] == [["a"], ["b"]]


def test_the_decorator_keeps_the_function_and_marks_it():
    @tool(cost=2.0, max_output_chars=10)
    def f() -> str:
        """Do it."""
        return "x" * 40

    spec = ToolSpec.of(f, name="g")
    assert (f(), is_tool(f), is_tool(search)) == ("x" * 40, True, False)
    assert (spec.name, spec.options.cost) == ("g", 2.0)
    assert spec.render(f()) == "xxxxxxxx\n[... 30 characters cut ...]\nxx"


def test_results_that_are_no_text_are_shown_as_json():
    assert SPEC.render({"ä": [1, None]}) == '{"ä": [1, null]}'
    assert SPEC.render(7) == "7"


@given(st.text(max_size=200), st.integers(4, 60))
def test_clip_keeps_head_and_tail_and_counts_what_is_missing(text, limit):
    cut = clip(text, limit)
    if len(text) <= limit:
        assert cut == text
    else:
        head, mark, tail = cut[: limit - limit // 4], f"[... {len(text) - limit} characters cut ...]", limit // 4
        assert text.startswith(head)
        assert mark in cut
        assert cut.endswith(text[len(text) - tail :])


def test_find_tool():
    tools = {"search": SPEC}
    assert find_tool(tools, ToolCall("search")) is SPEC
    with pytest.raises(ToolError, match="did you mean 'search'"):
        find_tool(tools, ToolCall("serch"))
    with pytest.raises(ToolError, match="broken"):
        find_tool(tools, ToolCall("search", problem="broken"))


def every_type(
    a: Annotated[int, pydantic.Field(ge=3, le=5)],
    b: Annotated[float, pydantic.Field(gt=1, lt=2)],
    c: Annotated[list[int], pydantic.Field(min_length=4)],
    d: Annotated[str, pydantic.Field(min_length=2, max_length=3)],
    e: tuple[int, str],
    f: Literal[7],
    g: Point | None,
    h: bool,
    i: Annotated[int, pydantic.Field(le=-10)],
) -> str:
    """Take every type."""
    return ""


@given(st.integers(0, 2**32))
@settings(max_examples=60)
def test_random_calls_satisfy_the_schema(seed):
    specs = (ToolSpec.of(every_type), SPEC)
    [made] = random_call(specs, seeding.rng(seed)).tool_calls
    spec = next(s for s in specs if s.name == made.name)
    jsonschema.validate(made.arguments, dict(spec.parameters))
    spec.arguments(made.arguments)
    json.dumps(made.arguments, allow_nan=False)
