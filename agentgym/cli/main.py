"""The `agentgym` command: its subcommands, and the one place where exceptions become exit codes.

| code | meaning |
|---|---|
| 0 | done |
| 1 | finished, but too many rollouts failed, or `check` found a broken rule |
| 2 | bad input; nothing was done |
| 3 | systemic failure, a damaged journal, or a fault in agentgym itself |
| 130 | interrupted; everything finished is saved |
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from agentgym.cli import catalog, rollout, runs
from agentgym.errors import AgentGymError, BadInput

OK, FAILED, BAD_INPUT, SYSTEMIC = 0, 1, 2, 3

app = typer.Typer(
    name="agentgym",
    help="Multi-turn tool environments with mid-episode snapshots, feeding rollout trees for LLM RL.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    catalog.envs,
    rollout.rollout,
    runs.inspect,
    runs.view,
    runs.export,
    catalog.check,
    catalog.methods,
):
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        import agentgym

        print(agentgym.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run())


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see the module's table.

    Args:
        args: the arguments without the program's name; `sys.argv` by default.
    """
    try:
        return app(args, standalone_mode=False, prog_name="agentgym") or OK
    except typer.TyperException as usage:
        _explain_usage(usage)
        return BAD_INPUT
    except Exception as error:  # boundary: the process ends here
        return _explain(error)


def _explain_usage(error: typer.TyperException) -> None:
    """Print what is wrong with the arguments in one line; nothing for a bare `agentgym`, which printed its help."""
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    if message := error.format_message():
        print(f"error: {message}{hint}", file=sys.stderr)


def _explain(error: Exception) -> int:
    """Print an exception for people and return its exit code."""
    known = next((e for e in _parts(error) if isinstance(e, AgentGymError)), None)
    if known is None:
        traceback.print_exception(error)
        return SYSTEMIC
    print(f"error: {known}", file=sys.stderr)
    return BAD_INPUT if isinstance(known, BadInput) else SYSTEMIC


def _parts(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions inside of (nested) exception groups, as task groups raise them; else `error` itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _parts(part)
    else:
        yield error


if __name__ == "__main__":
    main()
