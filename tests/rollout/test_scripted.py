"""The scripted policy: counter-based, exact at its limits; the random caller knows every schema."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import Literal

import lab
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentgym as ag
from agentgym.env import Outcome
from agentgym.errors import BadInput
from agentgym.rollout.policies import make_policy
from agentgym.rollout.policies.base import FinishReason, Policy, Sampling
from agentgym.rollout.policies.scripted import ScriptedPolicy, Situation, random_caller
from agentgym.rollout.renderers.bytes import BytesRenderer

RENDERER = BytesRenderer()
HELLO: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]


def generate(policy, prompt=None, seed=0, draft=None, **sampling):
    ids = RENDERER.prompt(HELLO) if prompt is None else prompt
    return asyncio.run(policy.generate(ids, Sampling(**sampling), seed=seed, stop=RENDERER.stop_ids, draft=draft))


def test_it_is_a_policy():
    assert isinstance(ScriptedPolicy(lab.talk, RENDERER), Policy)
    assert make_policy("scripted")[0].describe()["name"] == "scripted"


def test_a_message_ends_with_the_stop_token():
    done = generate(ScriptedPolicy(lambda _: "Hi.", RENDERER, logprob=-0.5))
    assert RENDERER.decode(done.token_ids) == "Hi.<|im_end|>"
    assert done.finish_reason is FinishReason.STOP
    assert list(done.logprobs) == [-0.5] * 4
    assert done.prefilled + done.cached == len(RENDERER.prompt(HELLO))


@given(seed=st.integers(0, 2**63 - 1))
def test_what_it_says_depends_on_the_seed_alone(seed):
    policy = ScriptedPolicy(lab.talk, RENDERER)
    other = ScriptedPolicy(lab.talk, RENDERER)
    assert generate(policy, seed=seed) == generate(policy, seed=seed) == generate(other, seed=seed)


def test_a_limit_cuts_and_says_so():
    policy = ScriptedPolicy(lambda _: "Hello to you.", RENDERER)
    cut = generate(policy, max_tokens=5)
    assert (RENDERER.decode(cut.token_ids), cut.finish_reason) == ("Hello", FinishReason.LENGTH)
    whole = generate(policy, max_tokens=14)
    assert whole.finish_reason is FinishReason.STOP


def test_the_context_cuts_too_and_a_full_one_is_an_error():
    prompt = RENDERER.prompt(HELLO)
    cut = generate(ScriptedPolicy(lambda _: "Hello.", RENDERER, max_context=len(prompt) + 2))
    assert (RENDERER.decode(cut.token_ids), cut.finish_reason) == ("He", FinishReason.LENGTH)
    for size in (len(prompt), 10):
        with pytest.raises(BadInput, match="no room"):
            generate(ScriptedPolicy(lambda _: "Hello.", RENDERER, max_context=size))


def test_a_draft_is_the_beginning():
    done = generate(ScriptedPolicy(lambda _: "Hello.", RENDERER), draft=[*b"Help"])
    assert RENDERER.decode(done.token_ids) == "Helpo.<|im_end|>"


def test_a_situation_knows_the_conversation():
    ids = RENDERER.prompt(HELLO)
    first = Situation(ids, RENDERER, 1)
    assert (first.turn, first.observation) == (0, "user\nHello.<|im_end|>\n")
    spoken = RENDERER.message("Hi.")
    ids = ids + spoken + RENDERER.reply([{"role": "tool", "content": "7"}], last=spoken[-1])
    second = Situation(ids, RENDERER, 1)
    assert second.turn == 1
    assert "7" in second.observation


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Many(ag.ToolEnv):
    """Tools of all kinds; a call that does not fit its schema is an error in the answer."""

    tasks = lab.lengths(1)
    calls = "inline"

    def begin(self, task, rng):
        self.state = 0
        return "Call."

    @ag.tool
    def mixed(
        self,
        name: str,
        how: Literal["fast", "slow"],
        colour: Colour,
        tags: list[str],
        many: int | None = None,
        deep: dict[str, int] | None = None,
        share: float = 0.5,
        sure: bool = False,
    ) -> str:
        """Take all sorts. Args: name: a. how: b. colour: c. tags: d. many: e. deep: f. share: g. sure: h."""
        self.state += 1
        return "ok"

    @ag.tool
    def nothing(self) -> str:
        """Take nothing."""
        self.state += 1
        return "ok"

    def judge(self):
        return Outcome(self.state == 6)


def test_the_random_caller_fits_every_schema():
    forest = lab.run(Many, policy=lab.Around(script=random_caller), max_turns=6, max_tokens=2000)
    assert {leaf.success for leaf in forest.leaves} == {True}
    names = {call["name"] for tree in forest.trees for calls in tree.tool_calls.values() for call in calls}
    assert names == {"mixed", "nothing"}


def test_the_random_caller_speaks_where_there_is_nothing_to_call():
    text = random_caller(Situation(RENDERER.prompt(HELLO), RENDERER, 3))
    assert text.tool_calls == ()
    assert text.content.isalpha()
