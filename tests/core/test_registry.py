"""Ids, registration, entry points, and errors that name the nearest id."""

from __future__ import annotations

import subprocess
import sys

import gymnasium
import pytest
from gymnasium.wrappers import TimeLimit

import agentgym
from agentgym import registry, stack
from agentgym.errors import BadInput, UnknownName
from agentgym.messages import call


@pytest.fixture
def shop(dice):
    agentgym.register("shop/Dice-v0", dice, max_turns=3)
    yield "shop/Dice-v0"
    gymnasium.registry.pop("shop/Dice-v0")


def test_registered_envs_are_made_by_both_makes(shop, dice):
    for make in (agentgym.make, gymnasium.make):
        env = make(shop, split="test")
        assert type(env) is dice
        assert (env.split, env._limit, env.spec.id) == ("test", 3, shop)
    assert shop in agentgym.env_ids()
    assert registry.env_class(shop) is dice


def test_ids_vanish_with_gymnasiums_registry(dice):
    agentgym.register("shop/Gone-v0", dice)
    gymnasium.registry.pop("shop/Gone-v0")
    assert "shop/Gone-v0" not in agentgym.env_ids()


def test_registering_again_replaces(shop, dice):
    agentgym.register(shop, dice, max_turns=5)
    assert agentgym.make(shop)._limit == 5


def test_wrappers_of_make_are_part_of_snapshots(shop):
    env = gymnasium.make(shop, max_episode_steps=2)
    assert isinstance(env, TimeLimit)
    env.reset(seed=0)
    saved = stack.snapshot(env)
    for _ in range(2):
        stack.restore(env, saved)
        assert [env.step(call("history"))[3] for _ in range(2)] == [False, True]
    [child] = stack.fork(env, 1)
    assert child.spec.id == shop


@pytest.mark.parametrize("env_id", ["Dice-v0", "shop/Dice", "shop/Dice-v", "shop Dice-v0", "a/b/c-v0", ""])
def test_malformed_ids_are_refused(env_id, dice):
    with pytest.raises(BadInput, match="is not of the form namespace/Name-vN"):
        agentgym.register(env_id, dice)


@pytest.mark.parametrize("lookup", [agentgym.make, registry.check_id, registry.env_class])
def test_an_unknown_id_names_the_nearest(lookup):
    with pytest.raises(
        UnknownName, match=r"unknown env 'agentgym/CountDown-v0': did you mean 'agentgym/Countdown-v0'\?"
    ):
        lookup("agentgym/CountDown-v0")


def test_unknown_arguments_splits_and_levels_are_refused(shop):
    with pytest.raises(BadInput, match=r"shop/Dice-v0 does not take these arguments \(levl\)"):
        agentgym.make(shop, levl="easy")
    with pytest.raises(UnknownName, match="did you mean 'easy'"):
        agentgym.make(shop, level="eesy")
    with pytest.raises(UnknownName, match="did you mean 'test'"):
        agentgym.make(shop, split="tes")


PLUGIN = """
import agentgym

class Till(agentgym.ToolEnv):
    tasks = agentgym.TaskSet.from_rows({"train": [{}]})

    def begin(self, task, rng):
        return "Pay."

    def judge(self):
        return agentgym.Outcome(None)
"""


@pytest.fixture
def plugin(tmp_path):
    """A folder that holds an installed package with two entry points, one of them with a malformed name."""
    (tmp_path / "till_plugin.py").write_text(PLUGIN)
    info = tmp_path / "till_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: till-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentgym.envs]\nshop/Till-v0 = till_plugin:Till\nbad = till_plugin:Till\n")
    return tmp_path


def python(code, folder):
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_an_entry_point_registers_without_being_imported(plugin):
    code = (
        "import agentgym\n"
        "print('shop/Till-v0' in agentgym.env_ids(), 'till_plugin' in sys.modules)\n"
        "env = agentgym.make('shop/Till-v0'); print(env.reset(seed=0)[0], type(env).__module__)"
    )
    done = python(code, plugin)
    assert done.stdout == "True False\nPay. till_plugin\n"


def test_an_entry_point_with_a_malformed_name_is_reported(plugin):
    assert "entry point 'bad' of agentgym.envs is ignored" in python("import agentgym", plugin).stderr
