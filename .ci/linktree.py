"""Lay the package out under its import names in `.lint/`, by symbolic links.

Folders at the top level are subpackages of one import package (`envs/` is `agentgym.envs`, see
`[tool.setuptools.package-dir]`). mypy and import-linter find modules by their place in a tree, so they
get one: `.lint/agentgym/envs/countdown.py` links to `envs/countdown.py`.
"""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / ".lint"


def main() -> None:
    """Rebuild the tree. Folders are real, files are links: not every tool follows a linked folder."""
    mapping: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(TREE, ignore_errors=True)
    for package, folder in mapping.items():
        _link(ROOT / folder, TREE.joinpath(*package.split(".")))


def _link(source: Path, target: Path) -> None:
    for path in source.rglob("*"):
        if path.suffix in {".py", ".pyi", ".typed"} and path.is_file():
            link = target / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(path, link.parent))


if __name__ == "__main__":
    main()
