"""SearchQA: corpus, metrics, tasks, play, snapshots."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym import seeding, stack
from agentgym.envs._corpus import SCHEMA, Corpus, corpus, names, plain_words, relations
from agentgym.envs._qa_metrics import exact_match, f1_score, normalize_answer
from agentgym.envs.searchqa import HOPS, SearchQA
from agentgym.errors import EpisodeOver
from agentgym.messages import Message, call, format_message
from agentgym.tasks import Task

ID = "agentgym/SearchQA-v0"
LEVELS = tuple(HOPS)


def started(task: str | int = "train/h2/0", **kwargs: Any) -> SearchQA:
    env = SearchQA(**kwargs)
    env.reset(seed=0, options={"task": task})
    return env


def play(env: SearchQA, mover: str, seed: int) -> dict[str, Any]:
    rng = seeding.rng(seed, mover)
    while True:
        _, _, terminated, truncated, info = env.step(getattr(env, mover)(rng))
        assert all(record["ok"] for record in info["tool_calls"])
        assert len(info["tool_calls"]) == 1
        if terminated or truncated:
            return info


# --- corpus -------------------------------------------------------------------------------------------------------


def test_corpus_is_the_same_everywhere():
    world = corpus()
    queries = [f"{d.entity} {topic}" for d in world.documents[::37] for topic in d.facts] + ["mayor", "river seat"]
    found = [world.search(world.terms(query), 4) for query in queries]
    text = json.dumps([[(d.title, d.text) for d in world.documents], found])
    assert hashlib.blake2b(text.encode(), digest_size=8).hexdigest() == "4b5c56184bff2f2e"


def test_corpus_size_and_closed_vocabulary():
    documents = corpus().documents
    assert 3000 <= len(documents) <= 5000
    assert len(corpus().facts) == len(set(names())) == 600
    assert len(set(relations())) == len(relations()) == 16
    used = set(re.findall(r"\w+", " ".join(f"{d.title} {d.text}" for d in documents)))
    assert used <= {*names(), *relations(), *plain_words()}
    assert {len(name) for name in names()} == {6}  # equal lengths: no name is a part of another
    assert not [name for name in names() if any(word in name.lower() for word in relations())]


def test_every_fact_is_typed_and_stands_in_exactly_one_document():
    world = corpus()
    stated = [(d.entity, relation, value) for d in world.documents for relation, value in d.facts.items()]
    assert len(stated) == len({(entity, relation) for entity, relation, _ in stated})
    assert sorted(stated) == sorted((e, r, v) for e, facts in world.facts.items() for r, v in facts.items())
    for entity, relation, value in stated:
        assert world.kinds[value] == SCHEMA[world.kinds[entity]][relation]
        assert value != entity
        document = world.documents[world.home[entity, relation]]
        assert f"{entity} {relation} is {value}." in document.text
        assert value not in document.title


def test_expert_queries_find_the_document_but_not_always_first():
    world = corpus()
    ranks = [world.search(world.terms(f"{e} {r}"), 4).index(n) for (e, r), n in world.home.items()]
    assert max(ranks) < 4  # every fact is found (`index` would have raised)
    assert 0.35 < ranks.count(0) / len(ranks) < 0.65


def test_search_breaks_ties_by_document_number_and_ignores_unknown_words():
    world = corpus()
    found = world.search(["mayor"], 50)
    index_scores = world._index.get_scores(["mayor"]).round(4)
    assert found == sorted(found, key=lambda n: (-index_scores[n], n))
    assert len({index_scores[n] for n in found}) < len(found)  # there were ties
    assert world.search([], 4) == []
    name = names()[0]
    assert world.terms(f"The {name.upper()}'s MAYOR, {name} quux is?") == [name, "mayor"]


def test_building_prints_nothing_and_repeats_exactly(capfd):
    fresh = Corpus()
    assert fresh.search(["mayor"], 20) == corpus().search(["mayor"], 20)
    assert fresh.documents == corpus().documents
    assert capfd.readouterr() == ("", "")


# --- metrics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "em", "f1"),
    [
        ("Kelvox", "Kelvox", True, 1.0),
        ("  the KELVOX. ", "Kelvox", True, 1.0),
        ("An a the", "", True, 1.0),
        ("", "", True, 1.0),
        ("", "Kelvox", False, 0.0),
        ("Kelvox", "", False, 0.0),
        ("Tilmen", "Kelvox", False, 0.0),
        ("It is Kelvox", "Kelvox", False, 0.5),
        ("Kelvox Kelvox", "Kelvox", False, 2 / 3),
        ("one two three four five Kelvox", "Kelvox", False, 2 / 7),
        ("cat sat on the mat", "a cat on a mat", False, 6 / 7),
        ("Kel-vox", "kelvox", True, 1.0),
        ("ant", "an t", False, 0.0),
    ],
)
def test_metrics(answer: str, truth: str, em: bool, f1: float):
    assert exact_match(answer, truth) is em
    assert f1_score(answer, truth) == pytest.approx(f1)
    assert f1_score(truth, answer) == pytest.approx(f1)


def test_normalize_answer():
    assert normalize_answer(" The  a-b,\tC\n(an) theory!") == "ab c theory"


# --- tasks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_questions_follow_a_path_of_facts_without_shortcuts(level: str):
    for index in range(60):
        data = SearchQA.tasks.task("validation", index, level).data
        path, chain = data["path"], data["relations"]
        assert len(chain) == HOPS[level] == len(path) - 1
        assert [corpus().facts[e][r] for e, r in zip(path[:-1], chain, strict=True)] == path[1:]
        assert len(set(path)) == len(path)
        assert len(set(chain)) == len(chain)
        assert data["answer"] == path[-1]
        assert data["question"] == " of ".join([*reversed(chain), data["start"]]) + " ?"


def test_splits_are_disjoint():
    seen = {
        split: {SearchQA.tasks.task(split, i, level).data["question"] for level in LEVELS for i in range(150)}
        for split in ("train", "validation", "test")
    }
    assert not seen["train"] & seen["validation"]
    assert not seen["train"] & seen["test"]
    assert not seen["validation"] & seen["test"]


def test_sizes_and_levels():
    assert SearchQA.tasks.sizes == {"train": 8000, "validation": 1000, "test": 1000}
    assert SearchQA.tasks.levels == LEVELS
    assert started("test/h5/999").turn_limit(SearchQA.tasks.by_id("test/h5/999")) == 17


# --- play ---------------------------------------------------------------------------------------------------------


def test_gymnasium_accepts_it():
    check_env(gymnasium.make(ID).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("level", LEVELS)
def test_expert_solves_it_in_two_turns_a_hop_and_an_answer(level: str):
    env = SearchQA(split="validation", level=level)
    for index in range(50):
        env.reset(seed=index, options={"task": index})
        info = play(env, "expert", index)
        assert info["success"] is True
        assert info["reward_terms"] == {"success": 1.0, "f1": pytest.approx(0.1), "hops": pytest.approx(0.1)}
        assert env.snapshot().turn == 2 * HOPS[level] + 1


@pytest.mark.parametrize("level", LEVELS)
def test_random_valid_is_valid_and_seldom_right(level: str):
    env = SearchQA(level=level)
    wins = 0
    for index in range(40):
        env.reset(seed=index, options={"task": index})
        wins += play(env, "random_valid", index)["success"]
    assert wins <= 12


def test_expert_recovers_after_mistakes():
    env = SearchQA(split="validation", max_turns=1000)
    for index in range(60):
        env.reset(seed=index, options={"task": index})
        rng = seeding.rng(index, "mistakes")
        for _ in range(int(rng.integers(12))):
            move = env.random_valid(rng)
            if move.tool_calls[0].name != "answer":
                env.step(move)
            env.step(["nonsense", call("read", result=9), call("search", query="mayor")][rng.integers(3)])
        hops_left = HOPS[env.task.level] - len(env.state.hops)
        turn = env.snapshot().turn
        assert play(env, "expert", index)["success"] is True
        assert env.snapshot().turn - turn <= 2 * hops_left + 1


def test_texts_of_an_episode():
    env = SearchQA()
    asked = {"question": "mayor of seat of Kilzok ?", "relations": ["seat", "mayor"], "start": "Kilzok"}
    task = Task("validation/h2/0", "h2", {**asked, "path": ["Kilzok", "Bamgex", "Pimbus"], "answer": "Pimbus"})
    assert env.reset(seed=0, options={"task": task})[0] == ("Question: mayor of seat of Kilzok ?\nLast search: none")
    tail = "\nQuestion: mayor of seat of Kilzok ?\nLast search: Kilzok seat"
    assert env.step(call("search", query="Kilzok seat"))[0] == (
        "1 Kilzok gossip\n2 Kilzok seat founder\n3 Kilzok letters\n4 Kilzok weather music" + tail
    )
    assert env.step(call("read", result=1))[0] == "People ask for Kilzok seat. Kilzok seat is not named." + tail
    assert env.step(call("read", result=5))[0] == "Error: there is no such result. Valid: 1 to 4." + tail
    assert env.step(call("read", result=2))[0] == "Kilzok seat is Bamgex. Kilzok founder is Lomtus." + tail
    observation, reward, terminated, truncated, info = env.step(call("answer", text="Bamgex"))
    assert (observation, terminated, truncated, info["success"]) == ("Answered.", True, False, False)
    assert info["reward_terms"] == {"success": 0.0, "f1": 0.0, "hops": 0.05}
    assert reward == 0.05


def test_tool_schemas():
    shapes = {t.name: {k: v["type"] for k, v in t.parameters["properties"].items()} for t in SearchQA().tools}
    assert shapes == {"search": {"query": "string"}, "read": {"result": "integer"}, "answer": {"text": "string"}}


@pytest.mark.parametrize("result", [0, -1, 5, 10**30])
def test_read_of_an_unknown_result_is_answered(result: int):
    env = started()
    assert "Search first" in env.step(call("read", result=result))[0]
    env.step(env.expert(seeding.rng(0)))
    observation, *_, info = env.step(call("read", result=result))
    assert observation.startswith("Error: there is no such result. Valid: 1 to 4.\nQuestion: ")
    assert info["tool_calls"][0]["ok"] is False


@pytest.mark.parametrize(
    "query", ["", " ", "of is the", "quux xyzzy", "x" * 10_240, "\x00\x1b[31m\u202e", "<|im_end|>", "\ud800", "😀"]
)
def test_useless_queries_are_answered_and_change_nothing(query: str):
    env = started()
    env.step(env.expert(seeding.rng(0)))
    before = env.state.terms, env.state.results
    observation, _, terminated, truncated, info = env.step(call("search", query=query))
    assert observation.startswith("Error: ")
    assert not any(character in observation for character in "\x00\x1b\u202e<\ud800")
    assert info["tool_calls"][0]["ok"] is False
    assert (env.state.terms, env.state.results) == before
    assert not terminated
    assert not truncated


def test_observations_echo_only_words_of_the_corpus():
    env = started()
    start = env.state.entities[0]
    observation = env.step(call("search", query=f"<|im_end|>{start.upper()}\x00MAYOR quux\n"))[0]
    assert observation.endswith(f"\nLast search: {start} mayor")


def test_malformed_and_missing_calls_restate_the_question_once():
    env = started("train/h5/0")
    for text in ["", "hello", "<tool_call>\n{", '<tool_call>\n{"name": "find"}\n</tool_call>', "<tool_call>[]"]:
        assert env.step(text)[0].count("\nQuestion: ") == 1
    search = format_message(call("search", query=f"{env.state.entities[0]} mayor"))
    _, _, _, _, info = env.step(search + search)
    assert [("Question: " in m["content"]) for m in info["messages"]] == [False, True]
    assert env.step(Message(truncated=True))[0].count("\nQuestion: ") == 1


def test_search_read_and_answer_in_one_message():
    env = started("train/h1/0")
    rng = seeding.rng(0)
    first = env.expert(rng)
    with_probe = started("train/h1/0")
    with_probe.step(first)
    read = with_probe.expert(rng)
    answer = call("answer", text=f"It is {env.task.data['answer']}!")
    _, _, terminated, _, info = env.step(Message(tool_calls=(*first.tool_calls, *read.tool_calls, *answer.tool_calls)))
    assert terminated
    assert info["success"] is True
    assert info["reward_terms"]["f1"] == pytest.approx(0.05)


@pytest.mark.parametrize("text", ["", "\x00", "the", "word " * 5000])
def test_odd_answers_are_wrong_answers(text: str):
    _, reward, terminated, _, info = started().step(call("answer", text=text))
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_turn_limit_ends_without_answer():
    env = started("train/h1/3")
    ends = [env.step("...")[2:4] for _ in range(5)]
    assert ends == [(False, False)] * 4 + [(False, True)]


def test_step_after_the_end_and_before_reset():
    env = SearchQA()
    for act in (lambda: env.step("x"), lambda: env.expert(seeding.rng(0)), lambda: env.random_valid(seeding.rng(0))):
        with pytest.raises(EpisodeOver):
            act()
    env = started()
    env.step(call("answer", text="x"))
    with pytest.raises(EpisodeOver):
        env.step(call("answer", text="x"))


def test_two_envs_do_not_disturb_each_other():
    alone, first, second = started("train/h3/0"), started("train/h3/0"), started("train/h3/5")
    rng = seeding.rng(0)
    for _ in range(7):
        expected = alone.step(alone.expert(rng))
        assert first.step(first.expert(rng)) == expected
        second.step(second.expert(rng))
    assert second.task != first.task


# --- snapshots ----------------------------------------------------------------------------------------------------

QUERIES = st.one_of(
    st.builds("{} {}".format, st.sampled_from(names()[:20]), st.sampled_from(relations())), st.text(max_size=20)
)
ACTIONS = st.one_of(
    st.sampled_from(["expert", "random_valid"]),
    st.builds(lambda q: call("search", query=q), QUERIES),
    st.builds(lambda n: call("read", result=n), st.integers(-1, 6)),
    st.builds(lambda t: call("answer", text=t), st.text(max_size=8)),
    st.text(max_size=30),
    st.text(max_size=20).map("<tool_call>{}</tool_call>".format),
)


def advance(env: gymnasium.Env[Any, Any], action: Any) -> tuple[Any, ...]:
    core = env.unwrapped
    if action in ("expert", "random_valid"):
        action = getattr(core, action)(core.np_random)  # draws from the generator that a snapshot must cover
    return env.step(action)


def run(env: gymnasium.Env[Any, Any], actions: list[Any]) -> list[Any]:
    steps = []
    for action in actions:
        steps.append(advance(env, action))
        if steps[-1][2] or steps[-1][3]:
            break
    return steps


@settings(max_examples=40)
@given(before=st.lists(ACTIONS, max_size=4), after=st.lists(ACTIONS, min_size=1, max_size=6), seed=st.integers(0, 99))
def test_snapshot_then_the_same_actions_give_the_same_episode(before: list[Any], after: list[Any], seed: int):
    env = gymnasium.make(ID, max_episode_steps=5)
    env.reset(seed=seed)
    for action in before:
        here = stack.snapshot(env)
        step = advance(env, action)
        if step[2] or step[3]:  # go on from just before the end
            stack.restore(env, here)
            break
    saved = stack.snapshot(env)
    other = gymnasium.make(ID, max_episode_steps=5)
    other.reset(seed=seed + 1)
    first = json.dumps(run(env, after))
    stack.restore(env, saved)
    assert json.dumps(run(env, after)) == first
    stack.restore(other, saved)
    assert json.dumps(run(other, after)) == first


def test_snapshot_holds_the_episode_and_not_the_corpus():
    env = started("train/h5/1")
    rng = seeding.rng(0)
    for _ in range(10):
        env.step(env.expert(rng))
    assert env.snapshot().nbytes < 2000
