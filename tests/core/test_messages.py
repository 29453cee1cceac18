"""Parsing what a model writes: never raises, round trips, and says what is wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.messages import (
    CLOSE_CALL,
    OPEN_CALL,
    Message,
    ToolCall,
    call,
    format_call,
    format_message,
    parse_call,
    parse_message,
)
from agentgym.testing import MALFORMED

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.builds(ToolCall, TEXT.filter(bool), st.dictionaries(TEXT, JSON, max_size=3))
FRAGMENTS = st.sampled_from(
    [OPEN_CALL, CLOSE_CALL, '{"name":', '"arguments"', "{", "}", "[", "null", "\ud800", "\\ud800"]
)


@given(st.lists(FRAGMENTS | st.text(max_size=5), max_size=20).map("".join), st.booleans())
@settings(max_examples=300)
def test_no_text_raises(text, truncated):
    message = parse_message(text, truncated=truncated)
    assert message.truncated is truncated
    for tool_call in message.tool_calls:
        assert (tool_call.problem is None) == bool(tool_call.name and not tool_call.problem)
    json.dumps([message.content, *(dict(c.arguments) for c in message.tool_calls)], ensure_ascii=False).encode()


@given(TEXT.map(str.strip).filter(lambda t: OPEN_CALL not in t), st.lists(CALLS, max_size=3))
def test_round_trip(content, calls):
    message = Message(content, tuple(calls))
    assert parse_message(format_message(message)) == message


@pytest.mark.parametrize("value", [CLOSE_CALL, OPEN_CALL, f"{CLOSE_CALL}{OPEN_CALL}"])
def test_markers_inside_of_arguments_survive_the_round_trip(value):
    message = call("write", text=value)
    assert parse_message(format_message(message)) == message


def test_the_format_is_the_one_of_qwen3():
    assert format_call(ToolCall("pay", {"coin": 5})) == (
        '<tool_call>\n{"name": "pay", "arguments": {"coin": 5}}\n</tool_call>'
    )


def test_text_and_calls_in_the_order_they_were_written():
    text = 'I pay.<tool_call>{"name": "a"}</tool_call>and<tool_call>{"name": "b", "arguments": {"x": 1}}</tool_call>'
    message = parse_message(text)
    assert message.content == "I pay.and"
    assert message.tool_calls == (ToolCall("a"), ToolCall("b", {"x": 1}))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ("null", "must be a JSON object, not null"),
        ("3.5", "must be a JSON object, not a number"),
        ("true", "must be a JSON object, not a boolean"),
        ('{"arguments": {}}', 'has no "name"'),
        ('{"name": 3}', 'has no "name"'),
        ('{"name": "f", "arguments": [1, 2]}', '"arguments" must be a JSON object, not a list'),
        ('{"name": "f", "arguments": null}', '"arguments" must be a JSON object, not null'),
        ('{"name": "f", "arguments": 42}', '"arguments" must be a JSON object, not a number'),
        ('{"name": "f", "arguments": ""}', '"arguments" must be a JSON object, not a string'),
        ('{"name": "f", "arguments": "[1]"}', '"arguments" must be a JSON object, not a list'),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "unpaired surrogate"),
        ('{"name": "\\ud800"}', "unpaired surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 80 + "]" * 80 + "}}", "nested more than 64 levels"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 5000 + "]" * 5000 + "}}", "not valid JSON"),
        ('{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_a_bad_call_says_what_is_wrong(body, problem):
    assert problem in (parse_call(body).problem or "")


def test_surrogate_pairs_are_text():
    assert parse_call('{"name": "f", "arguments": {"a": "\\ud83d\\ude00"}}').arguments == {"a": "\U0001f600"}


def test_an_unclosed_call_is_a_problem():
    assert "not closed" in (parse_message('<tool_call>{"name": "f"}').tool_calls[0].problem or "")


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_problems_are_bounded(text):
    assert all(len(c.problem or "") < 500 for c in parse_message(text).tool_calls)
