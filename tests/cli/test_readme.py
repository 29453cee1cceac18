"""The README's code runs, its commands work, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from gymnasium.envs.registration import registry

from agentgym import env_ids
from agentgym.rollout.allocators import allocator_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, block in BLOCKS if not kind for line in block.splitlines() if line.startswith("agentgym ")]


def test_the_python_code_runs_from_top_to_bottom(capsys):
    names: dict[str, object] = {"__name__": "readme"}
    try:
        for kind, block in BLOCKS:
            if kind == "python":
                exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    finally:
        registry.pop("shop/Till-v0", None)
    first, second = names["a"], names["b"]
    amount = names["env"].task.data["amount"]
    assert first[0] == f"{amount - 2} cents left."
    assert second[0] == f"{amount - 1} cents left."
    assert names["forest"].n_leaves > 12, "no failure was continued"
    assert any(leaf.tree.origin[leaf.leaf] for leaf in names["forest"].leaves)
    assert len(capsys.readouterr().out.splitlines()) > 4
    assert Path("runs/till/journal.jsonl").is_file()


def test_the_tour_works(cli, scripted):
    """With the scripted policy instead of the model, which has its own tests."""
    assert len(COMMANDS) > 5
    for line in COMMANDS:
        args = shlex.split(line)[1:]
        if "tiny" in args:
            args[args.index("--policy") : args.index("tiny") + 1] = scripted
        done = cli(*args)
        assert done.code == 0, f"{line}\n{done.err}"
    assert Path("a.html").is_file()
    assert Path("a.parquet").is_file()


@pytest.mark.parametrize("name", [*(i for i in env_ids() if i.startswith("agentgym/")), *allocator_names()])
def test_what_is_shipped_is_listed(name):
    assert f"| `{name}` |" in README


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(target):
    assert target.startswith("https://") or (ROOT / target).exists()


def test_make_targets_exist():
    targets = re.findall(r"^make (\w+)", README, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test", "setup"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
