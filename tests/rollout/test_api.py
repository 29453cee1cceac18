"""From one call to a forest: what is checked before any work, and what is written where."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import lab
import orjson
import pytest

import agentgym as ag
from agentgym.errors import BadInput, ConfigMismatch, UnknownName
from agentgym.rollout import api, journal, manifest
from agentgym.rollout.allocators.random_tree import RandomTree
from agentgym.rollout.allocators.uniform import Uniform
from agentgym.rollout.config import RunConfig
from agentgym.rollout.policies.scripted import ScriptedPolicy
from agentgym.rollout.renderers.bytes import BytesRenderer

ENV = lab.name(lab.Chatter)
SMALL = {"policy": "scripted", "tasks": 2, "budget": 16, "max_tokens": 400, "max_turns": 4}


@pytest.fixture(autouse=True)
def chatter():
    lab.name(lab.Chatter)


def test_one_call_makes_a_forest():
    forest = ag.rollout(ENV, **SMALL)
    assert forest.n_leaves == 16
    assert forest.manifest["config"]["env"] == ENV
    assert forest.counters["env_steps"] == sum(leaf.n_turns for leaf in forest.leaves)
    assert forest.counters["restores"] == 16


def test_a_config_does_the_same_as_its_keys():
    config = RunConfig(env=ENV, **SMALL)
    assert lab.canonical(api.rollout(config)) == lab.canonical(ag.rollout(ENV, **SMALL))


def test_a_config_comes_alone():
    config = RunConfig(env=ENV, **SMALL)
    with pytest.raises(BadInput, match="pass it without policy, allocator, seed"):
        api.rollout(config, policy="tiny", allocator="trace", seed=3)


def test_a_config_takes_the_objects_that_it_names():
    config = RunConfig(env=ENV, **{**SMALL, "max_tokens": 200})
    policy = lab.Around()
    forest = api.rollout(config, policy=policy, renderer=policy.renderer, allocator=Uniform(n=2))
    assert forest.n_leaves == 4
    assert policy.prompts


def never(*_):
    pytest.fail("work was started")


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        ({"env": "lab/Chater-v0"}, UnknownName, "did you mean 'lab/Chatter-v0'"),
        ({"allocator": "tracer"}, UnknownName, "did you mean 'trace'"),
        ({"allocator": "trace", "allocator_options": {"continuation": 3}}, UnknownName, "did you mean 'continuations'"),
        ({"policy": "tyni"}, UnknownName, "did you mean 'tiny'"),
        ({"bugdet": 3}, UnknownName, "did you mean 'budget'"),
        ({"split": "trian"}, UnknownName, "did you mean 'train'"),
        ({"level": "hard"}, UnknownName, "level"),
        ({"env_options": {"colour": 1}}, BadInput, "colour"),
        ({"tasks": 0}, BadInput, "tasks must be >= 1, got 0"),
        ({"budget": 0}, BadInput, "budget must be >= 1"),
        ({"budget": 15}, BadInput, "15 leaves for a step of 2 tasks is too small.*'uniform' needs at least 16"),
        ({"budget": 16, "step_tasks": 1, "allocator_options": {"n": 9}}, BadInput, "needs at least 9"),
        ({"budget_tokens": 0}, BadInput, "sampled_tokens=0"),
        ({"temperature": -1}, BadInput, "temperature must be >= 0"),
        ({"tasks": "many"}, BadInput, "tasks: .*'many'"),
        ({"policy_options": {"speed": 3}}, BadInput, "takes no options"),
        ({"renderer": BytesRenderer()}, BadInput, "brings its own renderer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_bad_input_is_refused_before_any_work(keys, error, says, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "_execute", never)
    given = {"env": ENV, **SMALL, **keys}
    with pytest.raises(error, match=says):
        ag.rollout(given.pop("env"), out=tmp_path / "run", **given)
    assert not (tmp_path / "run").exists()


def test_an_env_of_somebody_else_is_refused():
    with pytest.raises(BadInput, match="is not an agentgym env"):
        ag.rollout("CartPole-v1", **{**SMALL, "max_turns": None, "env_options": {}})


def test_a_policy_object_needs_its_renderer_and_stays_open():
    class Closing(ScriptedPolicy):
        closed = 0

        async def aclose(self):
            self.closed += 1

    renderer = BytesRenderer()
    policy = Closing(lab.talk, renderer)
    with pytest.raises(BadInput, match="needs its renderer"):
        ag.rollout(ENV, **{**SMALL, "policy": policy})
    ag.rollout(ENV, renderer=renderer, **{**SMALL, "policy": policy})
    assert policy.closed == 0


def test_a_policy_made_by_name_is_closed_whatever_happens(monkeypatch):
    closed = []

    class Closing(ScriptedPolicy):
        async def aclose(self):
            closed.append(self)

    def make(name, options):
        renderer = BytesRenderer()
        return Closing(lab.talk, renderer), renderer

    monkeypatch.setattr(api, "make_policy", make)
    ag.rollout(ENV, **SMALL)
    monkeypatch.setattr(api, "_run", never)
    with pytest.raises(pytest.fail.Exception):
        ag.rollout(ENV, **SMALL)
    assert len(closed) == 2


def test_an_object_that_is_no_allocator_is_refused_by_what_it_lacks():
    @dataclass(frozen=True)
    class Half:
        name = "half"

        def propose(self, view, ledger, rng):
            return []

    with pytest.raises(BadInput, match="Half is no allocator: it lacks family, source, watches"):
        ag.rollout(ENV, allocator=Half(), **SMALL)


def test_objects_are_named_in_the_manifest_and_compared_on_resume(tmp_path):
    keys = {**SMALL, "out": tmp_path / "run"}
    ag.rollout(ENV, allocator=RandomTree(chains=3, nodes=1), **keys)
    config = manifest.read(tmp_path / "run")["config"]
    assert config["allocator"] == "random-tree"
    assert config["allocator_options"] == {"object": "RandomTree(chains=3, nodes=1, rounds=1)"}
    ag.rollout(ENV, allocator=RandomTree(chains=3, nodes=1), resume=True, **keys)
    with pytest.raises(ConfigMismatch, match=r"chains=3.*chains=2"):
        ag.rollout(ENV, allocator=RandomTree(chains=2, nodes=1), resume=True, **keys)


def test_a_run_folder_holds_manifest_and_journal(tmp_path):
    forest = ag.rollout(ENV, out=tmp_path / "a" / "b", **SMALL)
    out = tmp_path / "a" / "b"
    assert {path.name for path in out.iterdir()} == {"manifest.json", "journal.jsonl", ".lock"}
    events = [record["e"] for _, record in journal.scan(out)]
    assert events[:2] == ["tree", "tree"]
    assert events[-2:] == ["step", "end"]
    assert events.count("leaf") == forest.n_leaves
    last = orjson.loads((out / journal.FILE).read_bytes().splitlines()[-1])
    assert (last["trees"], last["leaves"]) == (2, 16)


def test_two_runs_cannot_write_one_folder(tmp_path):
    async def both():
        async def late(count, prompt_ids, sampling):
            await asyncio.sleep(0.01)

        keys = {"tasks": 1, "budget": 8, "out": tmp_path / "run"}
        first = asyncio.create_task(lab.arun(lab.Chatter, policy=lab.Around(late), **keys))
        while not (tmp_path / "run" / journal.FILE).exists():  # noqa: ASYNC110  (no event tells of a file)
            await asyncio.sleep(0.001)
        with pytest.raises(BadInput, match="has a run already"):
            await lab.arun(lab.Chatter, **keys)
        return await first

    assert asyncio.run(both()).n_leaves == 8


def test_tasks_go_on_where_the_split_begins_again():
    class Few(lab.Chatter):
        tasks = ag.TaskSet({"train": 3}, lambda split, level, index: {"turns": 1}, {"default": 1.0})

    forest = lab.run(Few, first_task=2, tasks=3, budget=24)
    assert [tree.task_id for tree in forest.trees] == [f"train/default/{i}" for i in (2, 0, 1)]


def test_the_budget_is_divided_over_steps():
    forest = lab.run(lab.Chatter, tasks=5, step_tasks=2, budget=45)
    assert [tree.step for tree in forest.trees] == [0, 0, 1, 1, 2]
    assert [len(tree.leaves) for tree in forest.trees] == [8] * 5


def test_arollout_runs_in_a_loop_that_is_there():
    async def twice():
        return await asyncio.gather(api.arollout(ENV, **SMALL), api.arollout(ENV, **SMALL))

    one, other = asyncio.run(twice())
    assert lab.canonical(one) == lab.canonical(other)
