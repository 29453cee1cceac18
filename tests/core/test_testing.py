"""The conformance suite: good envs pass, and each broken env fails by the rule that it breaks."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
import math
import pickle
import random

import gymnasium
import numpy as np
import pytest

import agentgym
from agentgym import AsyncToolEnv, Outcome, TaskSet, tool
from agentgym.errors import AgentGymError, BadInput, ToolError, UnknownName
from agentgym.messages import Message, call
from agentgym.testing import MALFORMED, CheckReport, ConformanceError, Finding, Rule, check_env
from agentgym.testing.rules import CHECKS


@pytest.mark.parametrize("env_id", agentgym.env_ids())
def test_every_registered_env_conforms(env_id):
    check_env(env_id)


def test_every_rule_has_a_check_and_a_statement():
    assert set(CHECKS) == set(Rule)
    assert len({rule.value for rule in Rule}) == len(Rule)


def test_a_good_env_passes_in_every_form(dice, replay_dice, echo):
    for env in (dice, dice(max_turns=4), lambda: dice(level="hard"), replay_dice, echo(dice())):
        report = check_env(env)
        assert report.ok
        assert [f.rule for f in report.findings] == [rule.slug for rule in Rule]


def test_what_does_not_apply_is_said(dice):
    findings = {f.rule: f for f in check_env(dice).findings}
    assert findings["expert-solves"] == Finding("expert-solves", None, "the env has no expert")
    assert findings["siblings"].ok is True


def test_the_given_env_and_the_global_generators_are_left_alone(dice):
    env = dice()
    observation, _ = env.reset(seed=3)
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    check_env(env)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    assert env._episode.observation == observation


# --- broken envs --------------------------------------------------------------------------------------------------


def shared_state(dice):
    class Broken(dice):
        """The list is the class's, not the instance's."""

        log: list[int] = []  # noqa: RUF012  (that is what is broken)

        def respond(self, message):
            self.log.append(len(self.log))
            return f"{len(self.log)}"

    return Broken


def shared_task(dice):
    class Broken(dice):
        """The state holds the list of the task set itself."""

        tasks = TaskSet.from_rows({"train": [{"goal": 30, "bonus": [1]}]})

        def begin(self, task, rng):
            text = super().begin(task, rng)
            task.data["bonus"].append(1)
            return text

    return Broken


def siblings_only(dice):
    class Broken(dice):
        """All instances write to one board; reset clears it."""

        board: dict[str, int] = {}  # noqa: RUF012  (that is what is broken)

        def begin(self, task, rng):
            Broken.board = {"steps": 0}
            return super().begin(task, rng)

        def respond(self, message):
            Broken.board["steps"] += 1
            return f"step {Broken.board['steps']}"

    return Broken


def global_random(dice):
    class Broken(dice):
        def respond(self, message):
            return f"{random.random()}"

    return Broken


def global_numpy(dice):
    class Broken(dice):
        def begin(self, task, rng):
            super().begin(task, rng)
            return f"{np.random.randint(10**9)}"

    return Broken


def seeds_global(dice):
    class Broken(dice):
        def begin(self, task, rng):
            random.seed(5)
            return super().begin(task, rng)

    return Broken


def counter_outside(dice):
    class Broken(dice):
        def begin(self, task, rng):
            self.count = 0
            return super().begin(task, rng)

        def respond(self, message):
            self.count += 1
            return f"turn {self.count}"

    return Broken


def own_generator(dice):
    class Broken(dice):
        def begin(self, task, rng):
            self.mine = np.random.default_rng(3)
            return super().begin(task, rng)

        def respond(self, message):
            return f"{self.mine.integers(10**9)}"

    return Broken


def ignores_seed(dice):
    class Broken(dice):
        fresh = itertools.count()

        def begin(self, task, rng):
            super().begin(task, rng)
            return f"game {next(self.fresh)}"

    return Broken


def nan_in_info(dice):
    class Broken(dice):
        def step(self, action):
            *result, info = super().step(action)
            return *result, info | {"score": math.nan}

    return Broken


def numpy_in_info(dice):
    class Broken(dice):
        def step(self, action):
            *result, info = super().step(action)
            return *result, info | {"score": np.float64(1).astype(np.float32)}

    return Broken


def no_cost(dice):
    class Broken(dice):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            del info["cost"]
            return observation, info

    return Broken


def early_success(dice):
    class Broken(dice):
        def step(self, action):
            *result, info = super().step(action)
            return *result, info | {"success": bool(info["success"])}

    return Broken


def integer_success(dice):
    class Broken(dice):
        def judge(self):
            return Outcome(int(self.state["left"] == 0))

    return Broken


def reward_apart(dice):
    class Broken(dice):
        def step(self, action):
            observation, reward, *rest = super().step(action)
            return observation, reward + 1, *rest

    return Broken


def goes_on_after_the_end(dice):
    class Broken(dice):
        def step(self, action):
            if self._episode is not None and self._episode.over:
                self._episode.over = False
            return super().step(action)

    return Broken


def mutates_after_the_end(dice):
    class Broken(dice):
        def step(self, action):
            if self.state:
                self.state["log"].append("called")
            return super().step(action)

    return Broken


def never_ends(dice):
    class Broken(dice):
        def step(self, action):
            if self._episode is not None:
                self._episode.turn = 0
            return super().step(action)

    return Broken


def one_info(dice):
    class Broken(dice):
        def reset(self, **kwargs):
            observation, info = super().reset(**kwargs)
            self.info = info
            return observation, info

        def step(self, action):
            *result, info = super().step(action)
            self.info.update(info)
            return *result, self.info

    return Broken


def closes_once(dice):
    class Broken(dice):
        def close(self):
            if self.state is None:
                raise RuntimeError("already closed")
            super().close()

    return Broken


def copies(dice):
    class Broken(dice):
        def __copy__(self):
            return self

    return Broken


def chokes(dice):
    class Broken(dice):
        def no_call(self, content):
            return content.encode("ascii").decode()

    return Broken


def obeys_truncated(dice):
    class Broken(dice):
        def respond(self, message):
            return super().respond(Message(message.content, message.tool_calls))

    return Broken


def merges_replies(dice):
    class Broken(dice):
        def respond(self, message):
            replies = super().respond(message)
            return replies if isinstance(replies, str) else replies[:1]

    return Broken


def impossible_tool(dice):
    class Broken(dice):
        @property
        def tools(self):
            def refuse(arguments):
                raise ToolError("never")

            return tuple(dataclasses.replace(spec, validate=refuse) for spec in super().tools)

    return Broken


def peeking_player(dice):
    class Broken(dice):
        def random_valid(self, rng):
            self.state["left"] -= 1
            return super().random_valid(rng)

    return Broken


def invalid_random_valid(dice):
    class Broken(dice):
        def random_valid(self, rng):
            return call("roll", count=50)

    return Broken


def poor_expert(dice):
    class Broken(dice):
        def expert(self, rng):
            return call("history")

    return Broken


def approximates(dice):
    class Broken(dice):
        def snapshot(self, *, require=("memory",)):
            return super().snapshot()

    return Broken


def wrong_words(dice):
    class Broken(dice):
        calls = "sometimes"

    return Broken


def random_restore(dice):
    class Broken(dice):
        def restore(self, snapshot, *, reseed=None):
            super().restore(snapshot)
            if reseed is not None:
                self.np_random = np.random.default_rng()

    return Broken


def thin_snapshot(dice):
    class Broken(dice):
        """The payload is the live state."""

        def capture(self):
            return self.state, copy.copy(self._episode)

        def reinstate(self, payload):
            self.state, episode = payload
            self._episode = copy.copy(episode)

    return Broken


def no_options(dice):
    class Broken(dice):
        def reset(self, *, seed=None):
            return super().reset(seed=seed)

    return Broken


def steps_before_reset(dice):
    class Broken(dice):
        def step(self, action):
            if self._episode is None:
                self.reset(seed=0)
            return super().step(action)

    return Broken


def snapshot_draws(dice):
    class Broken(dice):
        def capture(self):
            self.np_random.random()
            return super().capture()

    return Broken


def snapshot_holds_a_function(dice):
    class Broken(dice):
        def capture(self):
            payload = super().capture()
            return lambda: payload

        def reinstate(self, payload):
            super().reinstate(payload())

    return Broken


BROKEN = [
    (no_options, Rule.GYMNASIUM),
    (steps_before_reset, Rule.STEP_BEFORE_RESET),
    (snapshot_draws, Rule.SNAPSHOT_PURE),
    (snapshot_holds_a_function, Rule.SNAPSHOT_PICKLES),
    (shared_state, Rule.STEP_DETERMINISM),
    (shared_task, Rule.TASK_UNCHANGED),
    (siblings_only, Rule.SIBLINGS),
    (global_random, Rule.PRIVATE_RNG),
    (global_random, Rule.GLOBAL_RNG_UNTOUCHED),
    (global_numpy, Rule.PRIVATE_RNG),
    (seeds_global, Rule.GLOBAL_RNG_UNTOUCHED),
    (counter_outside, Rule.SNAPSHOT_RESTORE),
    (counter_outside, Rule.SNAPSHOT_ELSEWHERE),
    (own_generator, Rule.SNAPSHOT_RESTORE),
    (ignores_seed, Rule.SAME_SEED),
    (nan_in_info, Rule.JSON_SAFE),
    (numpy_in_info, Rule.JSON_SAFE),
    (no_cost, Rule.INFO_SCHEMA),
    (early_success, Rule.SUCCESS_AT_END),
    (integer_success, Rule.SUCCESS_AT_END),
    (reward_apart, Rule.REWARD),
    (goes_on_after_the_end, Rule.STEP_AFTER_END),
    (mutates_after_the_end, Rule.STEP_AFTER_END),
    (never_ends, Rule.TURN_LIMIT),
    (one_info, Rule.RETURNED_DATA),
    (closes_once, Rule.CLOSE_TWICE),
    (copies, Rule.NO_SHALLOW_COPY),
    (chokes, Rule.MALFORMED_ACTIONS),
    (obeys_truncated, Rule.TRUNCATED_MESSAGE),
    (merges_replies, Rule.ONE_REPLY_PER_CALL),
    (impossible_tool, Rule.TOOLS_CALLABLE),
    (peeking_player, Rule.HINTS_PURE),
    (invalid_random_valid, Rule.RANDOM_VALID),
    (poor_expert, Rule.EXPERT_SOLVES),
    (approximates, Rule.SNAPSHOT_REFUSES),
    (wrong_words, Rule.DECLARATIONS),
    (random_restore, Rule.RESEED),
    (thin_snapshot, Rule.SNAPSHOT_IMMUTABLE),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN, ids=[f"{b.__name__}-{r.slug}" for b, r in BROKEN])
def test_a_broken_env_fails_by_name(broken, rule, dice):
    with pytest.raises(ConformanceError) as caught:
        check_env(broken(dice))
    assert f"  {rule.slug}: {rule.value}\n" in str(caught.value)


def test_every_rule_is_seen_broken():
    elsewhere = {Rule.RUNS, Rule.SNAPSHOT_STACK, Rule.TOOL_SCHEMAS}
    assert {rule for _, rule in BROKEN} | elsewhere == set(Rule)


def test_only_the_broken_rule_is_reported(dice):
    with pytest.raises(ConformanceError, match=r"^Broken breaks 1 rule:\n  reward: ") as caught:
        check_env(reward_apart(dice))
    assert "is not the sum of reward_terms {" in str(caught.value)


def test_messages_show_the_offending_values(dice):
    report = check_env(counter_outside(dice), report=lambda finding: None)
    detail = next(f.detail for f in report.findings if f.rule == "snapshot-restore")
    assert detail.startswith("seed 0, before and after restoring turn 0, turn 1: observation differs: ")
    assert '"turn 1" != "turn 7"' in detail


def test_a_wrapper_that_forgets_is_found(dice):
    class Forgetful(gymnasium.Wrapper):
        """Its counter lives outside of the wrapper, so that no snapshot can have it."""

        count = 0

        def step(self, action):
            Forgetful.count += 1
            observation, *rest = self.env.step(action)
            return f"{observation} {Forgetful.count}", *rest

    with pytest.raises(ConformanceError, match="snapshot-stack"):
        check_env(Forgetful(dice()))


def test_an_env_that_cannot_run_breaks_one_rule_and_the_rest_is_not_checked(dice):
    class Crash(dice):
        def begin(self, task, rng):
            raise ZeroDivisionError("no bricks")

    report = check_env(Crash, report=lambda finding: None)
    assert [f.rule for f in report.broken] == ["runs"]
    assert report.broken[0].detail == "raised ZeroDivisionError: no bricks"
    assert report.findings[-1].detail == "not checked, because runs is broken"


def test_a_schema_that_promises_too_much_is_found(dice):
    class Broken(dice):
        @tool
        def strict(self, word: str) -> str:
            """Take a word."""
            return word

        @property
        def tools(self):
            *others, strict = super().tools
            return *others, type(strict)(
                strict.name,
                strict.description,
                {"type": "object", "required": ["word"]},
                strict.function,
                strict.validate,
            )

    report = check_env(Broken, report=lambda finding: None)
    assert "tool-schemas" in [f.rule for f in report.broken]


# --- async, reports, bad input ------------------------------------------------------------------------------------


class Slow(AsyncToolEnv):
    """A coroutine tool that draws."""

    tasks = TaskSet.from_rows({"train": [{"goal": 3}]})
    max_turns = 6

    def begin(self, task, rng):
        self.state = {"sum": 0}
        return "Go."

    @tool
    async def add(self, most: int) -> int:
        """Add something."""
        await asyncio.sleep(0)
        self.state["sum"] += int(self.np_random.integers(max(most, 1)))
        return self.state["sum"]

    def judge(self):
        return Outcome(self.state["sum"] > 3)


class SlowReplay(Slow):
    """The same, restored by re-execution."""

    snapshot_by = "replay"


@pytest.mark.parametrize("cls", [Slow, SlowReplay])
def test_async_envs_are_checked(cls):
    report = check_env(cls)
    assert {f.rule: f.detail for f in report.findings}["gymnasium"] == "the env is async"


def test_a_broken_async_env_fails():
    class Broken(Slow):
        def begin(self, task, rng):
            self.count = 0
            return super().begin(task, rng)

        async def arespond(self, message):
            self.count += 1
            return f"{self.count}"

    with pytest.raises(ConformanceError, match="snapshot-restore"):
        check_env(Broken)


def test_an_async_env_is_not_checked_inside_of_a_running_loop():
    async def inside():
        check_env(Slow)

    with pytest.raises(BadInput, match="in another thread"):
        asyncio.run(inside())


def test_a_report_is_called_for_each_finding_and_nothing_is_raised(dice):
    seen = []
    report = check_env(counter_outside(dice), report=seen.append)
    assert seen == report.findings
    assert not report.ok
    with pytest.raises(ConformanceError):
        report.raise_on_failure()


def test_reports_and_errors_pickle():
    report = CheckReport("x", [Finding("siblings", False, "1 != 2")])
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(AssertionError) as caught:
        report.raise_on_failure()
    assert isinstance(caught.value, AgentGymError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("check", "error", "message"),
    [
        (lambda: check_env("agentgym/Countdwn-v0"), UnknownName, "did you mean 'agentgym/Countdown-v0'"),
        (lambda: check_env(gymnasium.make("CartPole-v1")), BadInput, "CartPoleEnv is not an agentgym.Env"),
        (lambda: check_env("CartPole-v1"), BadInput, "CartPoleEnv is not an agentgym.Env"),
        (lambda: check_env("agentgym/Countdown-v0", seeds=()), BadInput, "needs seeds"),
        (lambda: check_env("agentgym/Countdown-v0", steps=0), BadInput, "at least one step"),
    ],
)
def test_bad_input(check, error, message):
    with pytest.raises(error, match=message):
        check()


def test_the_malformed_messages_are_malformed():
    assert "" in MALFORMED
    assert max(map(len, MALFORMED)) >= 100_000
    assert any("\ud800" in text for text in MALFORMED)
    assert any("<|im_end|>" in text for text in MALFORMED)
