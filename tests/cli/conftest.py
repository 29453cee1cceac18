"""Running the command line in this process and in others, in an empty folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gymnasium.envs.registration import registry

import agentgym as ag
from agentgym.cli.main import run


@dataclass(frozen=True)
class Done:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON value that stdout must consist of."""
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def scripted() -> tuple[str, ...]:
    """Options of a policy without a model. Its tokens are bytes: a call has about 100 of them."""
    return ("--policy", "scripted", "--max-tokens", "400")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process."""

    def call(*args: object) -> Done:
        capsys.readouterr()
        code = run([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


def _hear_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command in a process of its own; none outlives the test."""
    children: list[subprocess.Popen[str]] = []

    def call(*args: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "agentgym.cli.main", *map(str, args)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        children.append(subprocess.Popen(command, preexec_fn=_hear_interrupts, **pipes))
        return children[-1]

    yield call
    for child in children:
        child.kill()
        child.communicate()


@pytest.fixture
def finish() -> Callable[[subprocess.Popen[str]], Done]:
    """Wait for a process."""

    def wait(child: subprocess.Popen[str]) -> Done:
        out, err = child.communicate(timeout=50)
        return Done(child.returncode, out, err)

    return wait


class Fragile(ag.ToolEnv):
    """Fails at the first step of a share of its tasks, by task index."""

    tasks = ag.TaskSet.generated(lambda rng, _: {"n": int(rng.integers(1 << 30))}, sizes={"train": 100, "test": 10})
    calls = "inline"
    broken = 0

    def begin(self, task, rng):
        self.state = int(task.id.rpartition("/")[2])
        return "Press the button."

    @ag.tool
    def press(self) -> str:
        """Press the button."""
        if self.state % 4 < self.broken:
            raise RuntimeError("the button fell off")
        self.finish()
        return "Pressed."

    def judge(self):
        return ag.Outcome(success=True)


@pytest.fixture
def fragile() -> Iterator[Callable[[int], str]]:
    """Register an env that fails on so many of four tasks, and return its id."""

    def make(broken: int) -> str:
        ag.register("test/Fragile-v0", type("Fragile", (Fragile,), {"broken": broken}))
        return "test/Fragile-v0"

    yield make
    registry.pop("test/Fragile-v0", None)
