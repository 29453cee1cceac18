"""The pages of docs/: their code runs, what they say it prints is what it prints, their tables match the code.

A page's ```python blocks run in order in one namespace, in a temporary folder. A block that needs a network or a GPU
starts with ```{.python .no-run}. `<!-- output -->` before a ```text block: that is what the code block above it prints.
`<!-- names: X -->` before a table: the names in its first column are those of X in the code, in the same order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import re
from pathlib import Path

import pytest
from gymnasium.envs.registration import registry as gymnasium_registry

import agentgym as ag
from agentgym.rollout import allocators, export, journal, policies, predictors, records, report
from agentgym.rollout.allocators.base import Event, Watch
from agentgym.rollout.config import RunConfig
from agentgym.rollout.manifest import FREE_ON_RESUME
from agentgym.rollout.policies.base import Completion
from agentgym.rollout.policies.scripted import ScriptedPolicy
from agentgym.rollout.renderers.bytes import BytesRenderer
from agentgym.rollout.types import Failure, StopReason
from agentgym.testing import Rule

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OUTPUT = re.compile(r"^<!-- output -->\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def rows(text, mark):
    """The rows of the table after a mark: lists of cells."""
    lines = text.split(f"<!-- {mark} -->\n", 1)[1].splitlines()
    table = lines[2 : next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]


def quoted(cell):
    return re.findall(r"`([^`]+)`", cell)


def names(text, mark):
    """All names in the first column of a table."""
    return [name for row in rows(text, mark) for name in quoted(row[0])]


@pytest.fixture
def _clean(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(gymnasium_registry)
    yield
    for env_id in set(gymnasium_registry) - before:
        del gymnasium_registry[env_id]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
@pytest.mark.usefixtures("_clean")
def test_every_block_runs(path):
    text = path.read_text(encoding="utf-8")
    namespace, printed = {"__name__": path.stem}, []
    for block in BLOCK.finditer(text):
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]  # so that a traceback shows the page's line
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(code, str(path), "exec", dont_inherit=True), namespace)
        printed.append((block.end(), out.getvalue()))
    for said in OUTPUT.finditer(text):
        assert said[1] == [out for end, out in printed if end < said.start()][-1]


def test_there_are_pages_with_code():
    assert {"index", "environments", "shipped-envs", "rollouts", "allocators", "policies", "architecture"} <= {
        path.stem for path in PAGES
    }
    assert all("```python no-run" not in path.read_text() for path in PAGES)  # mkdocs would not see a code block


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small run folder."""
    folder = tmp_path_factory.mktemp("docs") / "run"
    options = {"allocator": "random-tree", "allocator_options": {"nodes": 4}, "tasks": 8, "budget": 80}
    ag.rollout("agentgym/Countdown-v0", policy="scripted", max_tokens=200, level="n3", out=folder, **options)
    return folder


def policy_options():
    source = inspect.getsource(policies.make_policy)
    return re.findall(r'"(\w+)"', re.search(r"valid = \(([^)]*)\)", source)[1])


TABLES = {
    ("rollouts", "stop reasons"): lambda: [str(reason) for reason in StopReason],
    ("rollouts", "failures"): lambda: [str(failure) for failure in Failure],
    ("rollouts", "config"): lambda: [field.name for field in dataclasses.fields(RunConfig)],
    ("rollouts", "token columns"): lambda: export.schema().names,
    ("allocators", "watches"): lambda: [str(watch) for watch in Watch],
    ("allocators", "events"): lambda: [str(event) for event in Event],
    ("allocators", "predictors"): lambda: list(predictors.predictors()),
    ("policies", "policies"): lambda: list(policies.POLICIES),
    ("policies", "policy options"): policy_options,
    ("policies", "completion"): lambda: [field.name for field in dataclasses.fields(Completion)],
    ("environments", "rules"): lambda: [rule.slug for rule in Rule],
}


@pytest.mark.parametrize(("where", "mark"), TABLES, ids=lambda value: value.replace(" ", "-"))
def test_tables_match_the_code(where, mark):
    assert names(page(where), f"names: {mark}") == TABLES[where, mark]()


def test_defaults_of_the_configuration():
    stated = {quoted(row[0])[0]: row[1] for row in rows(page("rollouts"), "names: config")}
    assert stated.pop("env") == "(required)"
    defaults = dataclasses.asdict(RunConfig(env="x"))
    assert stated == {key: f"`{json.dumps(defaults[key])}`" for key in stated}


def test_rules_of_check_env_are_quoted():
    stated = {quoted(row[0])[0]: row[1] for row in rows(page("environments"), "names: rules")}
    assert stated == {rule.slug: rule.value for rule in Rule}


@pytest.mark.parametrize("name", allocators.allocator_names())
def test_options_of_allocators(name):
    stated = {quoted(row[0])[0]: quoted(row[1])[0] for row in rows(page("allocators"), f"options: {name}")}
    options = allocators.describe(name)["options"]
    assert stated == {o["name"]: "null" if o["default"] is None else str(o["default"]) for o in options}
    assert f"\n## {name}\n" in page("allocators")


@pytest.mark.parametrize("env_id", [env_id for env_id in ag.env_ids() if env_id.startswith("agentgym/")])
def test_tools_and_shares_of_shipped_envs(env_id):
    env = ag.make(env_id).unwrapped
    text = page("shipped-envs")
    stated = [f"{quoted(row[0])[0]}({quoted(row[1])[0]})" for row in rows(text, f"tools: {env_id}")]
    # A | in a cell has to be escaped on GitHub and must not be here, so the page writes "or".
    assert [line.replace(" or ", " | ") for line in stated] == [spec.signature for spec in env.tools]
    assert env.tasks.sizes == {"train": 8000, "validation": 1000, "test": 1000}
    section = text.split(f"<!-- tools: {env_id} -->")[1].split("\n## ")[0]
    missing = [level for level in env.tasks.levels if f"`{level}`" not in section]
    assert missing in ([], ["n6", "n7"])  # "`n5` to `n8` by name"


def test_report_keys(run):
    summary = report.summarise(run)
    assert names(page("rollouts"), "names: report") == list(summary)
    seven = list(summary)[:7]
    assert all(list(level) == seven for level in summary["levels"].values())


def test_journal_records(run):
    stated = {quoted(row[0])[0]: set(quoted(row[1])) for row in rows(page("rollouts"), "names: records")}
    table = re.findall(r"\| `(\w+)` \| (.*) \|", records.__doc__)
    told = {kind: set(" ".join(quoted(keys)).split()) for kind, keys in table if kind != "e"}
    assert stated.keys() == told.keys()
    for kind, keys in told.items():
        assert keys <= stated[kind]
    seen = [record for _, record in journal.scan(run)]
    assert {record["e"] for record in seen} == {"tree", "node", "leaf", "step", "end"}
    for record in seen:
        assert record.keys() - {"e", "t", "tree", "path"} <= stated[record["e"]]
        assert record["t"].keys() <= {"at", "pre", "hit", "seconds"}


@pytest.mark.parametrize(("format", "mark"), [("sft", "sft columns"), ("pairs", "pair columns")])
def test_keys_of_text_exports(format, mark, tmp_path):
    def solve(situation):
        """Submit any of the numbers, or make a new one of the first two."""
        numbers = [int(n) for n in re.findall(r"Numbers: ([\d ]+)", situation.observation)[-1].split()]
        target = int(re.findall(r"Target: (\d+)", situation.observation)[-1])
        if target in numbers or situation.rng.random() < 0.3:
            return ag.call("submit", number=target if target in numbers else numbers[0])
        a, b = (numbers[i] for i in situation.rng.permutation(len(numbers))[:2])
        return ag.call("combine", a=a, op="+-*/"[situation.rng.integers(4)], b=b)

    renderer = BytesRenderer()
    ag.rollout(
        "agentgym/Countdown-v0",
        policy=ScriptedPolicy(solve, renderer),
        renderer=renderer,
        allocator_options={"n": 64},
        tasks=1,
        budget=64,
        max_tokens=200,
        level="n3",
        out=tmp_path / "run",
    )
    export.export(tmp_path / "run", format, tmp_path / "rows.jsonl")
    first = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert sorted(names(page("rollouts"), f"names: {mark}")) == sorted(first)


def test_what_may_change_on_resume():
    sentence = page("rollouts").split("May differ: ")[1].split(". (")[0]
    assert set(quoted(sentence)) == FREE_ON_RESUME


def test_named_tests_exist():
    named = set(re.findall(r"`(test_\w+)`", page("architecture")))
    assert len(named) > 30
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = {name for source in sources for name in re.findall(r"^def (test_\w+)", source, re.MULTILINE)}
    assert named <= defined, sorted(named - defined)


def test_named_modules_exist():
    named = re.findall(r"^\| (`(?:agentgym|rollout)\.[^|]*) \|", page("architecture"), re.MULTILINE)
    for module in (name for cell in named for name in quoted(cell)):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__init__.py").is_file(), module
