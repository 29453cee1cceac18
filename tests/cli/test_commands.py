"""What each command prints, and its exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import agentgym
from agentgym import registry
from agentgym.cli import keys
from agentgym.cli.main import app
from agentgym.cli.rollout import default_folder, rollout
from agentgym.rollout.allocators import allocator_names
from agentgym.rollout.config import RunConfig
from agentgym.rollout.export import FORMATS
from agentgym.rollout.report import summarise
from agentgym.rollout.views import Forest

ROOT = Path(__file__).resolve().parents[2]
COUNTDOWN = "agentgym/Countdown-v0"
COMMANDS = [command.callback.__name__ for command in app.registered_commands]
INSPECT_KEYS = {
    *("trees", "leaves", "nodes", "success", "effective_ratio", "zero_advantage_groups"),
    *("sampled_tokens", "prefilled_tokens", "saved_prefill_tokens", "env_steps", "restores"),
    *("failures", "stop_reasons", "wall_seconds"),
}


@pytest.fixture
def small(cli, scripted):
    """A finished run in `small/`."""
    done = cli("rollout", COUNTDOWN, *scripted, "--allocator", "trace", "--tasks", 3, "--budget", 9, "--out", "small")
    assert done.code == 0, done.err
    return "small"


def test_the_contract_names_these_commands():
    assert set(COMMANDS) >= {"envs", "rollout", "inspect", "view", "export", "check", "methods"}


@pytest.mark.parametrize("command", COMMANDS)
def test_help(cli, command):
    done = cli(command, "--help")
    assert done.code == 0
    assert f"agentgym {command}" in done.out
    assert done.err == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command):
    assert f"agentgym {command}" in (ROOT / "README.md").read_text()


def test_version(cli):
    assert cli("--version").out == f"{agentgym.__version__}\n"


def test_help_loads_nothing_heavy(tmp_path):
    code = (
        "import sys; from agentgym.cli.main import run; run(['--help']); "
        "print(*sorted({'torch', 'transformers', 'tokenizers', 'pyarrow', 'bm25s', 'pydantic', 'mcp', 'yaml'} "
        "& set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert done.stderr == "\n"


def test_envs(cli):
    found = cli("envs", "--json").json["envs"]
    assert [entry["id"] for entry in found] == registry.env_ids()
    [countdown] = [entry for entry in found if entry["id"] == COUNTDOWN]
    assert countdown["snapshots"] == {"cover": ["memory"], "by": "state"}
    assert countdown["splits"]["train"] >= 1000
    assert sum(countdown["levels"].values()) == pytest.approx(1)
    assert [tool["name"] for tool in countdown["tools"]] == ["combine", "submit"]
    text = cli("envs").out
    for entry in found:
        assert f"{entry['id']}  {entry['summary']}" in text


def test_envs_lists_the_others_when_one_cannot_be_loaded(cli):
    agentgym.register("test/Broken-v0", "no.such.module:Env")
    try:
        found = {entry["id"]: entry["error"] for entry in cli("envs", "--json").json["envs"]}
        assert found.pop("test/Broken-v0") == "ModuleNotFoundError: No module named 'no'"
        assert set(found.values()) == {None}
        assert "test/Broken-v0  cannot be loaded: ModuleNotFoundError" in cli("envs").out
    finally:
        registry.registry.pop("test/Broken-v0")


def test_methods(cli):
    found = cli("methods", "--json").json["methods"]
    assert [entry["name"] for entry in found] == allocator_names()
    for entry in found:
        one = cli("methods", entry["name"], "--json").json
        assert one == entry
        text = cli("methods", entry["name"]).out
        assert " ".join(entry["equations"].split()) in " ".join(text.split())
        for key in ("summary", "family", "source"):
            assert one[key] in text
            assert one[key] in cli("methods").out
        for option in entry["options"]:
            assert f"{option['name']} ({option['type']})" in text


def test_check_passes(cli):
    done = cli("check", COUNTDOWN)
    assert (done.code, done.err) == (0, "")
    assert "ok      snapshot-restore: " in done.out
    report = cli("check", COUNTDOWN, "--json").json
    assert report["ok"] is True
    assert all(rule["ok"] is not False for rule in report["rules"])


def test_check_names_the_broken_rule(cli, fragile):
    env = fragile(4)
    done = cli("check", env)
    assert done.code == 1
    assert "BROKEN  runs: " in done.out
    assert "the button fell off" in done.out
    done = cli("check", env, "--json")
    assert done.code == 1
    [runs] = [rule for rule in done.json["rules"] if rule["rule"] == "runs"]
    assert runs["ok"] is False


@pytest.mark.parametrize("env", ["agentgym/Countdown-v0", "agentgym/Blocksworld-v0", "agentgym/SearchQA-v0"])
def test_rollout_prints_one_json_object_and_nothing_else(spawn, finish, scripted, env):
    args = ["--allocator", "random-tree", "--tasks", 2, "--budget", 12, "-o", "chains=2", "--max-turns", 6]
    done = finish(spawn("rollout", env, *scripted, *args, "--out", "x", "--json"))
    assert (done.code, done.err) == (0, "")
    assert list(done.json)[-1] == "out"
    assert set(done.json) >= INSPECT_KEYS
    assert done.json["out"] == "x"
    assert done.json["trees"] == 2
    assert 0 < done.json["leaves"] <= 12
    assert done.json == {**summarise("x"), "out": "x"}


def test_rollout_and_inspect_as_tables(cli, small):
    done = cli("inspect", small)
    assert done.code == 0
    for key in INSPECT_KEYS - {"failures", "stop_reasons"}:
        assert key in done.out


def test_inspect_as_json(cli, small):
    done = cli("inspect", small, "--json")
    assert done.json == summarise(small)
    assert set(done.json) >= INSPECT_KEYS
    assert done.err == ""


def test_resume_of_a_finished_run_changes_nothing(cli, small, scripted):
    args = ["rollout", COUNTDOWN, *scripted, "--allocator", "trace", "--tasks", 3, "--budget", 9, "--out", small]
    journal = Path(small, "journal.jsonl").read_bytes()
    first = cli("inspect", small, "--json")
    again = cli(*args, "--resume", "--json")
    assert again.code == 0
    assert again.json == {**first.json, "out": small}
    assert Path(small, "journal.jsonl").read_bytes() == journal


@pytest.mark.parametrize("format", FORMATS)
def test_export(cli, small, format):
    done = cli("export", small, "--format", format, "--out", "data/rows", "--max-tokens", 100_000)
    assert done.code == 0
    assert done.out == "data/rows\n"
    assert "rows: " in done.err
    assert Path("data/rows").is_file()
    counts = cli("export", small, "--format", format, "--out", "data/rows", "--json")
    assert counts.json["leaves"] == 9
    assert (counts.json["out"], counts.json["format"]) == ("data/rows", format)


def test_export_limits_rows(cli, small):
    done = cli("export", small, "--format", "jsonl", "--out", "r", "--max-tokens", 1, "--overlong", "drop", "--json")
    assert done.json["overlong_dropped"] == 9
    assert Path("r").read_bytes() == b""


def test_too_many_failures_exit_1_with_the_rest_saved(cli, scripted, fragile):
    args = ["rollout", fragile(1), *scripted, "--tasks", 8, "--budget", 16, "-o", "n=2", "--retries", 1]
    done = cli(*args, "--out", "x", "--json")
    assert done.code == 1
    assert "4 rollouts failed for good (25.0%; 5.0% are allowed): env_error" in done.err
    assert done.json["leaves"] == 12
    assert done.json["failures"] == {"env_error": 8}
    assert cli(*args, "--out", "x", "--resume").code == 1
    assert cli(*args, "--out", "y", "--allow-failed", 0.25).code == 0


def test_nothing_but_failures_exit_3(cli, scripted, fragile):
    done = cli("rollout", fragile(4), *scripted, "--tasks", 8, "--budget", 32, "-o", "n=4", "--out", "x")
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("error: all ")
    assert "the button fell off" in done.err
    assert "Traceback" not in done.err


def test_damaged_journal_exits_3(cli, small):
    journal = Path(small, "journal.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([lines[0], b"{broken}\n", *lines[2:]]))
    done = cli("inspect", small)
    assert (done.code, done.out) == (3, "")
    assert "line 2" in done.err


def test_a_fault_of_ours_exits_3_with_a_traceback(cli, small, monkeypatch):
    def boom(_):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("agentgym.rollout.report.summarise", boom)
    done = cli("inspect", small)
    assert (done.code, done.out) == (3, "")
    assert "Traceback" in done.err
    assert done.err.endswith("ZeroDivisionError: ours\n")


def test_every_key_of_the_configuration_is_an_option_and_states_its_default():
    parameters = inspect.signature(rollout, eval_str=True).parameters
    fields = {field.name: field for field in dataclasses.fields(RunConfig)}
    assert set(parameters) - set(fields) == {"context", "config", "out", "resume", "as_json"}
    assert set(fields) <= set(parameters)
    for name, field in fields.items():
        assert parameters[name].default is None
        option = parameters[name].annotation.__metadata__[0]
        if field.default is not dataclasses.MISSING and field.default is not None:
            assert option.show_default == str(field.default), name


def test_the_command_line_wins_over_yaml(cli, scripted):
    Path("run.yaml").write_text(
        f"env: {COUNTDOWN}\npolicy: scripted\nmax_tokens: 400\nallocator: random-tree\nseed: 5\ntasks: 2\nbudget: 20\n"
        "allocator_options: {chains: 3, nodes: 1}\nlevel: null\n"
    )
    done = cli("rollout", "--config", "run.yaml", "--seed", 6, "-o", "nodes=2", "--json")
    assert done.code == 0, done.err
    assert done.json["out"] == "runs/Countdown-v0-random-tree-6"
    config = json.loads(Path(done.json["out"], "manifest.json").read_text())["config"]
    assert (config["seed"], config["tasks"], config["policy"]) == (6, 2, "scripted")
    assert config["allocator_options"] == {"chains": 3, "nodes": 2}


def test_default_folder_is_a_plain_name():
    plan = RunConfig(env="a:b/Till-v0", allocator="shop.alloc:Flip", seed=3)
    assert str(default_folder(plan)) == "runs/Till-v0-Flip-3"
    assert str(default_folder(RunConfig(env="x/..v1 \n-v0"))) == "runs/..v1--v0-uniform-0"


def test_values_of_pairs_are_read_as_yaml():
    texts = ["a=4", "b=null", "c=cpu", "d=x=y", "e=", "f=true", "g=0.5", "h=[1, 2]"]
    assert keys.pairs("-o", texts) == {
        "a": 4, "b": None, "c": "cpu", "d": "x=y", "e": "", "f": True, "g": 0.5, "h": [1, 2],
    }  # fmt: skip
    assert keys.pairs("-o", None) == {}


def test_progress_is_drawn_on_a_terminal_only(cli, scripted, monkeypatch):
    args = ["rollout", COUNTDOWN, *scripted, "--tasks", 1, "--budget", 2, "-o", "n=2"]
    assert cli(*args, "--out", "a").err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert "leaves" in cli(*args, "--out", "b").err


def test_forest_is_what_the_journal_says(small):
    assert Forest.load(small).n_leaves == summarise(small)["leaves"] == 9
