"""`agentgym rollout`: every key of `RunConfig` as an option and in YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from agentgym.cli import keys
from agentgym.cli.output import AsJson, emit, note, show
from agentgym.errors import BadInput

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentgym.rollout.config import RunConfig
    from agentgym.rollout.runner import Progress
    from agentgym.rollout.views import Forest

TASKS, POLICY, ALLOCATION, LIMITS, FAULTS = "Tasks", "Policy and sampling", "Allocation and budget", "Limits", "Faults"
_PAIRS = {"env_options": "--env-option", "policy_options": "--policy-option", "allocator_options": "--allocator-option"}


def rollout(
    context: typer.Context,
    env: Annotated[str | None, typer.Argument(help="Env id; may stand in --config.", metavar="ENV")] = None,
    config: Annotated[Path | None, Option(help="YAML file with the same keys; the command line wins.")] = None,
    out: Annotated[Path | None, Option(help="Run folder.", show_default="runs/ENV-ALLOCATOR-SEED")] = None,
    resume: Annotated[bool, Option("--resume", help="Continue the run in the folder.")] = False,
    as_json: AsJson = False,
    # --- every key of RunConfig; its defaults are stated here for the help only, and `None` means "not given"
    env_options: Annotated[
        list[str] | None, Option("--env-option", help="key=value for the env's constructor.", rich_help_panel=TASKS)
    ] = None,
    split: Annotated[str | None, Option(help="Split.", show_default="train", rich_help_panel=TASKS)] = None,
    level: Annotated[str | None, Option(help="Level.", show_default="the env's mix", rich_help_panel=TASKS)] = None,
    tasks: Annotated[
        int | None, Option(help="Tasks; each becomes a tree.", show_default="16", rich_help_panel=TASKS)
    ] = None,
    first_task: Annotated[
        int | None, Option(help="Index of the first task.", show_default="0", rich_help_panel=TASKS)
    ] = None,
    step_tasks: Annotated[
        int | None, Option(help="Tasks of one step.", show_default="32", rich_help_panel=TASKS)
    ] = None,
    seed: Annotated[
        int | None, Option(help="Every random stream derives from it.", show_default="0", rich_help_panel=TASKS)
    ] = None,
    policy: Annotated[
        str | None,
        Option(help="tiny, scripted or a model folder.", show_default="tiny", rich_help_panel=POLICY),
    ] = None,
    policy_options: Annotated[
        list[str] | None, Option("--policy-option", help="key=value, e.g. device=cuda.", rich_help_panel=POLICY)
    ] = None,
    temperature: Annotated[
        float | None, Option(help="0 is greedy.", show_default="1.0", rich_help_panel=POLICY)
    ] = None,
    top_p: Annotated[float | None, Option(help="Nucleus mass.", show_default="1.0", rich_help_panel=POLICY)] = None,
    top_k: Annotated[
        int | None, Option(help="Most probable tokens kept; 0: all.", show_default="0", rich_help_panel=POLICY)
    ] = None,
    max_tokens: Annotated[
        int | None, Option(help="Sampled tokens of one message.", show_default="128", rich_help_panel=POLICY)
    ] = None,
    allocator: Annotated[
        str | None,
        Option(help="See `agentgym methods`; or module:Class.", show_default="uniform", rich_help_panel=ALLOCATION),
    ] = None,
    allocator_options: Annotated[
        list[str] | None,
        Option("--allocator-option", "-o", help="key=value, e.g. continuations=2.", rich_help_panel=ALLOCATION),
    ] = None,
    budget: Annotated[
        int | None, Option(help="Leaves of the whole run.", show_default="128", rich_help_panel=ALLOCATION)
    ] = None,
    budget_tokens: Annotated[
        int | None, Option(help="Sampled tokens of the run.", show_default="no limit", rich_help_panel=ALLOCATION)
    ] = None,
    budget_env_steps: Annotated[
        int | None, Option(help="Env steps of the run.", show_default="no limit", rich_help_panel=ALLOCATION)
    ] = None,
    max_turns: Annotated[
        int | None, Option(help="Turns of an episode.", show_default="the env's", rich_help_panel=LIMITS)
    ] = None,
    max_context: Annotated[
        int | None, Option(help="Tokens of prompt plus reply.", show_default="the policy's", rich_help_panel=LIMITS)
    ] = None,
    max_episode_tokens: Annotated[
        int | None, Option(help="Sampled tokens of an episode.", show_default="no limit", rich_help_panel=LIMITS)
    ] = None,
    max_empty: Annotated[
        int | None, Option(help="Consecutive empty messages.", show_default="3", rich_help_panel=LIMITS)
    ] = None,
    concurrency: Annotated[
        int | None, Option(help="Continuations in flight.", show_default="64", rich_help_panel=LIMITS)
    ] = None,
    retries: Annotated[
        int | None, Option(help="Retries of a failed rollout.", show_default="2", rich_help_panel=FAULTS)
    ] = None,
    env_deadline: Annotated[
        float | None, Option(help="Seconds for one env call.", show_default="60.0", rich_help_panel=FAULTS)
    ] = None,
    policy_deadline: Annotated[
        float | None, Option(help="Seconds for one message.", show_default="600.0", rich_help_panel=FAULTS)
    ] = None,
    allow_failed: Annotated[
        float | None, Option(help="Failed share above which to exit 1.", show_default="0.05", rich_help_panel=FAULTS)
    ] = None,
) -> None:
    """Grow rollout trees: a policy plays tasks of an env, and an allocator decides where to branch."""
    from agentgym.rollout.api import rollout as run
    from agentgym.rollout.report import summarise, table
    from agentgym.rollout.views import Forest

    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would break ours, and pipes
    plan = _plan(context.params)
    folder = out or default_folder(plan)
    try:
        with _progress(plan) as progress:
            run(plan, out=folder, resume=resume, progress=progress)
    except KeyboardInterrupt:
        if folder.is_dir():
            note(f"saved: {folder}; continue with --resume")
        raise
    forest = Forest.load(folder)  # not what `run` returned: the journal knows what earlier processes spent
    summary = {**summarise(forest), "out": str(folder)}
    emit(summary) if as_json else show(table({key: value for key, value in summary.items() if key != "out"}))
    if not as_json:
        print(folder)
    _judge(forest, plan.allow_failed)


def default_folder(plan: RunConfig) -> Path:
    """Return the run folder for a run without `--out`, e.g. `runs/SearchQA-v0-trace-0`."""
    name = f"{plan.env.rpartition('/')[2]}-{plan.allocator.rpartition(':')[2]}-{plan.seed}"
    return Path("runs") / re.sub(r"[^\w.-]+", "-", name)


def lost_rollouts(forest: Forest) -> int:
    """Number of rollouts that failed for good: failed attempts after which no other attempt went on."""
    return sum(
        tree.child(parent, ordinal) is None
        for tree in forest.trees
        for parent, ordinal in {(tree.parent[node], tree.ordinal[node]) for node in tree.failure}
    )


def _plan(params: dict[str, Any]) -> RunConfig:
    """Build the configuration from the file and the command line."""
    from agentgym.rollout.config import RunConfig

    given = {field.name: params[field.name] for field in fields(RunConfig) if params[field.name] is not None}
    for key, option in _PAIRS.items():
        if texts := given.pop(key, None):
            given[key] = keys.pairs(option, texts)
    file = {} if params["config"] is None else keys.read_yaml(params["config"])
    whole = keys.merged(file, given)
    if not whole.get("env"):
        raise BadInput("which env? Name it (agentgym rollout ENV, see agentgym envs) or put `env: ...` into --config")
    return RunConfig.from_mapping(whole)


@contextmanager
def _progress(plan: RunConfig) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on stderr, where stderr is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("leaves"),
        TextColumn("success {task.fields[success]}"),
        TextColumn("failed {task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        line = bar.add_task(plan.env.rpartition("/")[2], total=plan.budget, success="-", failed=0)

        def update(now: Progress) -> None:
            success = f"{now.successes / now.leaves:.0%}" if now.leaves else "-"
            bar.update(line, completed=now.leaves, success=success, failed=now.failed)

        yield update


def _judge(forest: Forest, allowed: float) -> None:
    """Exit with 1 when a larger share of the rollouts than is allowed failed for good."""
    lost = lost_rollouts(forest)
    share = lost / max(1, lost + forest.n_leaves)
    if share > allowed:
        kinds = sorted({str(kind) for tree in forest.trees for kind in tree.failure.values()})
        note(f"{lost} rollouts failed for good ({share:.1%}; {allowed:.1%} are allowed): {', '.join(kinds)}")
        raise typer.Exit(1)
