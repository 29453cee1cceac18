"""The front door: `import agentgym` is cheap, its names are real, and unknown names are explained."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import agentgym
import agentgym.rollout

HEAVY = ("docker", "mcp", "pyarrow", "ray", "tokenizers", "torch", "transformers", "verl", "vllm")


def python(code: str, cwd: Path) -> str:
    """Run `code` in a fresh interpreter that sees nothing but installed packages."""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=cwd, timeout=50)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_nothing_heavy(tmp_path):
    code = f"import agentgym, sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    assert python(code, tmp_path) == ""


@pytest.mark.parametrize("name", agentgym.__all__)
def test_every_exported_name_exists(name):
    assert getattr(agentgym, name) is not None
    assert name in dir(agentgym)


def test_type_checkers_see_the_same_names_as_the_interpreter():
    tree = ast.parse(inspect.getsource(agentgym))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname: node.module for node in imports for alias in node.names}
    seen |= {"errors": "agentgym.errors", "rollout": "agentgym.rollout"}  # both are modules
    assert seen == agentgym._EXPORTS


def test_unknown_name_names_the_nearest():
    with pytest.raises(AttributeError, match="did you mean 'register'"):
        agentgym.registre  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'zzzzzz'$"):
        agentgym.zzzzzz  # noqa: B018
    with pytest.raises(ImportError):
        from agentgym import qqqqqq  # noqa: F401


def test_version_is_the_installed_one():
    assert agentgym.__version__ == metadata.version("agentgym-trees")


def test_rollout_is_a_package_and_a_function(monkeypatch):
    api = ModuleType("agentgym.rollout.api")
    api.rollout = lambda *args, **kwargs: (args, kwargs)
    monkeypatch.setitem(sys.modules, "agentgym.rollout.api", api)
    assert agentgym.rollout("shop/Till-v0", seed=3) == (("shop/Till-v0",), {"seed": 3})
    assert agentgym.rollout is importlib.import_module("agentgym.rollout")


def test_rollout_is_callable_before_and_after_its_import(tmp_path):
    before = "import agentgym; print(callable(agentgym.rollout))"
    after = "import agentgym.rollout.policies.base; import agentgym; print(callable(agentgym.rollout))"
    assert [python(before, tmp_path), python(after, tmp_path)] == ["True", "True"]


@pytest.mark.parametrize("imports", ["agentgym, gymnasium", "gymnasium, agentgym"])
def test_gymnasium_finds_the_shipped_envs_whatever_is_imported_first(imports, tmp_path):
    """Gymnasium 1.0 dropped its plug-in entry points: an id is known only when its package has registered it."""
    code = f"import {imports}; print(gymnasium.spec('agentgym/Countdown-v0').id)"
    assert python(code, tmp_path) == "agentgym/Countdown-v0"
