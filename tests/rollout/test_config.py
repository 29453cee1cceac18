"""The configuration: closed keys, plain values, errors that teach."""

from __future__ import annotations

import dataclasses
import math

import orjson
import pytest
import yaml

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.config import RunConfig
from agentgym.rollout.ledger import Amount

COUNTS = ("tasks", "step_tasks", "budget", "max_empty", "concurrency", "max_tokens")
LIMITS = ("max_turns", "max_context", "max_episode_tokens")


def config(**keys):
    return RunConfig.from_mapping({"env": "a/B-v0", **keys})


def test_it_survives_yaml_and_json():
    one = config(env_options={"colour": [1, 2]}, level="easy", budget_tokens=10, temperature=0.5, step_tasks=3)
    assert RunConfig.from_mapping(yaml.safe_load(yaml.safe_dump(one.to_mapping()))) == one
    assert RunConfig.from_mapping(orjson.loads(orjson.dumps(one.to_mapping()))) == one


def test_every_key_is_documented():
    for field in dataclasses.fields(RunConfig):
        assert f"\n        {field.name}: " in RunConfig.__doc__


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(UnknownName, match="unknown key 'allocater': did you mean 'allocator'"):
        config(allocater="trace")
    with pytest.raises(BadInput, match="env"):
        RunConfig.from_mapping({})


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        *[(key, 0, f"{key} must be >= 1, got 0") for key in COUNTS],
        *[(key, 0, f"{key} must be >= 1 or null") for key in LIMITS],
        *[(key, -1, f"{key} must be >= 0") for key in ("first_task", "retries")],
        *[(key, 0, f"{key} must be > 0 seconds") for key in ("env_deadline", "policy_deadline")],
        ("env_deadline", math.nan, "must be > 0 seconds"),
        ("allow_failed", 1.5, r"allow_failed must be in \[0, 1\]"),
        ("top_p", 0, r"top_p must be in \(0, 1\]"),
        ("top_k", -1, "top_k must be >= 0"),
        ("temperature", math.nan, "temperature must be >= 0"),
        ("budget_tokens", -3, "sampled_tokens=-3"),
        ("budget_env_steps", 0, "env_steps=0"),
        ("tasks", "three", "tasks: .*got 'three'"),
        ("tasks", 2.5, "tasks: .*got 2.5"),
        ("env_options", [1], r"env_options: .*got \[1\]"),
        ("seed", None, "seed: .*got None"),
    ],
)
def test_a_wrong_value_names_key_value_and_rule(key, value, says):
    with pytest.raises(BadInput, match=says):
        config(**{key: value})


def test_steps_cover_the_tasks_once():
    assert config(tasks=7, step_tasks=3).steps() == [range(3), range(3, 6), range(6, 7)]
    assert config(tasks=7).steps() == [range(7)]
    assert config(tasks=2, step_tasks=9).steps() == [range(2)]


def test_limits_and_sampling():
    one = config(budget=9, budget_tokens=100, max_tokens=7, top_p=0.9)
    assert one.limits() == Amount(leaves=9, sampled_tokens=100)
    assert (one.sampling().max_tokens, one.sampling().top_p, one.sampling().full_support) == (7, 0.9, False)
    assert one.episode_tokens == math.inf
    assert config(max_episode_tokens=5).episode_tokens == 5


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seed = 3
