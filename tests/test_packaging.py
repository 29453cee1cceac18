"""What is installed: every package, its data, and nothing under a generic top-level name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
FOLDERS = {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}


def packages_on_disk() -> set[str]:
    """Import name of every folder of the package that has an `__init__.py`."""
    found = set()
    for folder, package in FOLDERS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([package, *init.parent.relative_to(ROOT / folder).parts]))
    return found


def shipped_files() -> set[str]:
    """Path in the wheel of every module and data file of the package."""
    suffixes = {".py", ".html", ".css", ".js", ".json", ".jinja", ".safetensors", ".typed"}
    return {
        str(Path(*package.split("."), path.relative_to(ROOT / folder)))
        for folder, package in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in suffixes
    }


def test_every_package_is_listed():
    assert set(SETUPTOOLS["packages"]) == packages_on_disk()


def test_every_module_is_in_a_package():
    lost = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert lost == []


@pytest.mark.parametrize("name", [*sorted(set(FOLDERS) - {"agentgym"}), "cli", "tests", "bench"])
def test_nothing_generic_is_importable_at_top_level(name, tmp_path):
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.strip() == "None"


def test_wheel_holds_every_file_under_its_import_name(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=source, timeout=50)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert shipped_files() - names == set()
    assert {name.split("/")[0] for name in names} == {"agentgym"}
