"""Every exception is picklable, has a standard-library parent, and teaches."""

from __future__ import annotations

import inspect
import pickle

import pytest

from agentgym import errors
from agentgym.errors import AgentGymError, BadInput, MissingExtra, UnknownName
from agentgym.testing import ConformanceError

CLASSES = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, AgentGymError)]


@pytest.mark.parametrize("cls", [*CLASSES, ConformanceError], ids=lambda c: c.__name__)
def test_pickles_with_its_message(cls):
    back = pickle.loads(pickle.dumps(cls("what was wrong")))
    assert type(back) is cls
    assert str(back) == "what was wrong"


@pytest.mark.parametrize("cls", [c for c in CLASSES if c is not AgentGymError], ids=lambda c: c.__name__)
def test_is_named_in_the_module_docstring(cls):
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("error", [UnknownName.of("env", "x", ["y"]), MissingExtra.of("mcp", "mcp")])
def test_built_errors_pickle(error):
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_unknown_name_names_the_nearest_and_all_valid_ones():
    error = UnknownName.of("allocator", "trce", ["uniform", "trace"])
    assert str(error) == "unknown allocator 'trce': did you mean 'trace'? Valid: trace, uniform"
    assert isinstance(error, BadInput)
    assert isinstance(error, LookupError)


def test_unknown_name_says_when_nothing_is_near():
    assert "nothing similar is known. Valid: a" in str(UnknownName.of("key", "zzzzz", ["a"]))
    assert "Valid: (none)" in str(UnknownName.of("key", "a", []))


def test_unknown_name_shortens_a_long_list():
    assert str(UnknownName.of("key", "zzz", [f"k{i:03}" for i in range(100)])).endswith("k023 and 76 more")


def test_missing_extra_names_the_command():
    error = MissingExtra.of("mcp", "mcp")
    assert "pip install 'agentgym-trees[mcp]'" in str(error)
    assert isinstance(error, ImportError)
