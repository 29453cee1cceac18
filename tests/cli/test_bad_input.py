"""Bad input: exit code 2 before any work, the nearest valid name, nothing on disk, no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

COUNTDOWN = "agentgym/Countdown-v0"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def refused(done, *words: str) -> None:
    """Check that a command refused its input in one `error:` line that has these words."""
    assert (done.code, done.out) == (2, ""), done.err
    assert done.err.startswith("error: "), done.err
    assert len(done.err.splitlines()) == 1
    assert "Traceback" not in done.err
    for word in words:
        assert word in done.err


BAD = {
    "env": (["agentgym/Countdwn-v0"], "did you mean 'agentgym/Countdown-v0'?"),
    "allocator": ([COUNTDOWN, "--allocator", "trase"], "did you mean 'trace'?"),
    "allocator class": ([COUNTDOWN, "--allocator", "nowhere.at.all:Trace"], "nowhere"),
    "allocator option": ([COUNTDOWN, "--allocator", "trace", "-o", "continuation=2"], "did you mean 'continuations'?"),
    "allocator option type": ([COUNTDOWN, "--allocator", "trace", "-o", "cap=many"], "expected int, got 'many'"),
    "policy": ([COUNTDOWN, "--policy", "tinny"], "did you mean 'tiny'?"),
    "policy option": ([COUNTDOWN, "--policy", "scripted", "--policy-option", "device=cpu"], "device"),
    "level": ([COUNTDOWN, "--level", "n33"], "did you mean 'n3'?"),
    "split": ([COUNTDOWN, "--split", "trian"], "did you mean 'train'?"),
    "env option": ([COUNTDOWN, "--env-option", "colour=red"], "colour"),
    "no env": ([], "which env?"),
    "no tasks": ([COUNTDOWN, "--tasks", "0"], "tasks must be >= 1, got 0"),
    "no budget": ([COUNTDOWN, "--budget", "0"], "budget"),
    "small budget": (
        [COUNTDOWN, "--allocator", "trace", "--tasks", "2", "--budget", "5"],
        "the allocator 'trace' needs at least 6",
    ),
    "temperature": ([COUNTDOWN, "--temperature", "nan"], "temperature"),
    "share": ([COUNTDOWN, "--allow-failed", "2"], "allow_failed must be in [0, 1]"),
    "not a pair": ([COUNTDOWN, "-o", "continuations"], "key=value, got 'continuations'"),
    "twice": ([COUNTDOWN, "-o", "cap=4", "-o", "cap=5"], "'cap' is given twice"),
    "not readable": ([COUNTDOWN, "-o", "cap=[1"], "the value of 'cap' is not readable"),
    "resume of nothing": ([COUNTDOWN, "--policy", "scripted", "--resume"], "runs/Countdown-v0-uniform-0 is no run"),
    "config that is not there": (["--config", "nope.yaml"], "cannot read the configuration nope.yaml"),
    "not a number": ([COUNTDOWN, "--tasks", "many"], "'--tasks'"),
    "option": ([COUNTDOWN, "--alocator", "trace"], "--allocator", "agentgym rollout --help"),
}


@pytest.mark.parametrize("name", BAD)
def test_rollout_refuses_bad_input_before_any_work(cli, tmp_path, name):
    args, *words = BAD[name]
    refused(cli("rollout", *args), *words)
    assert everything(tmp_path) == {}


def test_rollout_refuses_without_traceback_in_a_process(spawn, finish):
    refused(finish(spawn("rollout", "agentgym/Countdwn-v0")), "did you mean 'agentgym/Countdown-v0'?")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (f"env: {COUNTDOWN}\ntaks: 4\n", "did you mean 'tasks'?"),
        (f"env: {COUNTDOWN}\ntasks: [4]\n", "tasks"),
        (f"env: {COUNTDOWN}\nallocator: trace\nallocator_options: {{cop: 4}}\n", "did you mean 'cap'?"),
        ("- a\n- b\n", "key: value"),
        ("env: [\n", "not valid YAML"),
        ("4: 5\n", "key: value"),
        ("", "which env?"),
    ],
    ids=["unknown key", "type", "allocator option", "list", "syntax", "number as key", "empty"],
)
def test_yaml_is_checked_like_the_command_line(cli, tmp_path, text, word):
    Path("run.yaml").write_text(text)
    before = everything(tmp_path)
    refused(cli("rollout", "--config", "run.yaml"), word)
    assert everything(tmp_path) == before


def test_a_model_folder_that_cannot_be_read(cli, tmp_path):
    Path("model").mkdir()
    refused(cli("rollout", COUNTDOWN, "--policy", "model"), "tokenizer.json")
    Path("model/tokenizer.json").write_text("{")
    refused(cli("rollout", COUNTDOWN, "--policy", "model"), "is not a tokenizer file")
    assert not Path("runs").exists()


def test_a_folder_with_another_run(cli, scripted, tmp_path):
    run = ["rollout", COUNTDOWN, *scripted, "--tasks", 2, "--budget", 4, "-o", "n=2", "--out", "x"]
    assert cli(*run).code == 0
    before = everything(tmp_path)
    refused(cli(*run), "x has a run already", "--resume")
    refused(cli(*run, "--resume", "--seed", 1), "config.seed: 0 in the folder, 1 now")
    assert everything(tmp_path) == before


def test_a_folder_that_cannot_be_made(cli, scripted, tmp_path):
    Path("x").write_text("")
    refused(cli("rollout", COUNTDOWN, *scripted, "--tasks", 1, "--budget", 8, "--out", "x/y"), "x/y")


@pytest.mark.parametrize("command", [["inspect"], ["view"], ["export", "--format", "jsonl", "--out", "rows.jsonl"]])
def test_what_is_no_run_folder(cli, tmp_path, command):
    refused(cli(*command, "nope"), "nope is no run folder")
    assert everything(tmp_path) == {}


def test_other_unknown_names(cli, tmp_path):
    refused(cli("export", "nope", "--format", "parket", "--out", "rows"), "did you mean 'parquet'?")
    refused(cli("methods", "trase"), "did you mean 'trace'?")
    refused(cli("check", "agentgym/Countdwn-v0"), "did you mean 'agentgym/Countdown-v0'?")
    refused(cli("rolout"), "rolout")
    refused(cli("export", "nope"), "--format")
    assert everything(tmp_path) == {}


def test_the_message_is_not_taken_for_markup(cli):
    refused(cli("rollout", "[red]x[/red]/Y-v0"), "[red]x[/red]")


def test_bare_command_prints_help(cli):
    done = cli()
    assert (done.code, done.err) == (2, "")
    assert "rollout" in done.out


def test_bad_config_is_reported_before_the_policy_is_loaded(cli, monkeypatch):
    def load(*_):
        raise AssertionError("loaded")

    monkeypatch.setattr("agentgym.rollout.api.make_policy", load)
    refused(cli("rollout", COUNTDOWN, "--tasks", "2", "--budget", "1", "-o", "n=1"), "needs at least 2")
