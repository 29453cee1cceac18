"""Task sets: seeded, disjoint between splits, addressed by id."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import BadInput, UnknownName
from agentgym.tasks import Task, TaskSet

SIZES = {"train": 300, "validation": 60, "test": 60}


def numbers(rng, level):
    """So few contents that splits would overlap by chance."""
    return {"level": level, "n": int(rng.integers(200))}


def content(tasks, split):
    return {json.dumps(tasks.task(split, i).data, sort_keys=True) for i in range(tasks.size(split))}


@given(st.integers(2, 60), st.integers(1, 5))
@settings(max_examples=20)
def test_splits_are_disjoint(spread, splits):
    names = [f"s{i}" for i in range(splits)]
    tasks = TaskSet.generated(lambda rng, level: {"n": int(rng.integers(spread + 100))}, sizes=dict.fromkeys(names, 25))
    every = [content(tasks, name) for name in names]
    assert sum(map(len, every)) == len(set().union(*every))


def test_a_key_keeps_tasks_apart_that_differ_in_what_is_hidden():
    tasks = TaskSet.generated(
        lambda rng, level: {"n": int(rng.integers(300)), "hidden": float(rng.random())},
        sizes={"train": 80, "test": 80},
        key=lambda data: data["n"],
    )
    seen = {s: {tasks.task(s, i).data["n"] for i in range(80)} for s in ("train", "test")}
    assert not seen["train"] & seen["test"]


def test_tasks_are_made_on_demand_and_always_equal():
    make = lambda: TaskSet.generated(numbers, sizes=SIZES, mix=["easy", "hard"])  # noqa: E731
    first, second = make(), make()
    late = second.task("test", 59)
    assert [first.task("test", i) for i in range(60)][59] == late
    assert first.by_id(late.id) == late
    assert late.split == "test"


def test_the_default_mix_follows_the_shares():
    tasks = TaskSet.generated(numbers, sizes={"train": 2000}, mix={"easy": 0.7, "hard": 0.3, "never": 0.0})
    counts = Counter(tasks.level_of(i) for i in range(2000))
    assert 1300 < counts["easy"] < 1500
    assert counts["never"] == 0
    assert tasks.levels == ("easy", "hard", "never")
    assert tasks.task("train", 3, "never").level == "never"


def test_an_index_may_have_any_level():
    tasks = TaskSet.generated(numbers, sizes=SIZES, mix=["easy", "hard"])
    assert tasks.task("train", 0, "easy").id == "train/easy/0"
    assert tasks.task("train", 0, "hard").data["level"] == "hard"


def test_rows():
    tasks = TaskSet.from_rows({"train": [{"q": 1}, {"q": 2}], "test": [{"q": 3}]})
    assert tasks.task("test", 0) == Task("test/default/0", "default", {"q": 3})
    assert pickle.loads(pickle.dumps(tasks.task("train", 1))).data == {"q": 2}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskSet.from_rows({}), "at least one task"),
        (lambda: TaskSet.from_rows({"train": []}), "at least one task"),
        (lambda: TaskSet.generated(numbers, sizes={"a/b": 1}), "must not contain '/'"),
        (lambda: TaskSet.generated(numbers, sizes=SIZES, mix={"a": 0.5}), "sum to 1"),
        (lambda: TaskSet.generated(numbers, sizes=SIZES, mix={"a": 1.5, "b": -0.5}), "must be >= 0"),
        (lambda: TaskSet.generated(numbers, sizes=SIZES, mix=[]), "sum to 1"),
    ],
)
def test_bad_task_sets(make, message):
    with pytest.raises(BadInput, match=message):
        make()


def test_bad_addresses_name_what_is_valid():
    tasks = TaskSet.generated(numbers, sizes=SIZES, mix=["easy", "hard"])
    with pytest.raises(UnknownName, match="did you mean 'train'"):
        tasks.task("trian", 0)
    with pytest.raises(UnknownName, match="did you mean 'hard'"):
        tasks.task("train", 0, "hrd")
    with pytest.raises(BadInput, match="300 tasks"):
        tasks.task("train", 300)
    with pytest.raises(BadInput, match="out of range"):
        tasks.task("train", -1)
    for task_id in ("train", "train/easy/x", "train/easy/-1", ""):
        with pytest.raises(BadInput, match="split/level/index"):
            tasks.by_id(task_id)


def test_a_generator_that_cannot_fill_a_split_says_so():
    tasks = TaskSet.generated(lambda rng, level: {"always": "equal"}, sizes={"train": 1, "test": 1})
    with pytest.raises(BadInput, match="gave no task of split"):
        [tasks.task(split, 0) for split in ("train", "test")]
