"""What can be done with a run folder: `inspect`, `view`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from agentgym.cli.output import AsJson, emit, note, show

RunFolder: TypeAlias = Annotated[Path, typer.Argument(help="Run folder.", metavar="RUN")]


def inspect(run: RunFolder, as_json: AsJson = False) -> None:
    """Count what a run made and spent: leaves, success, effective ratio, tokens spent and saved, failures by kind."""
    from agentgym.rollout.report import summarise, table

    summary = summarise(run)
    emit(summary) if as_json else show(table(summary))


def view(
    run: RunFolder,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="RUN/view.html")] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the web browser.")] = False,
) -> None:
    """Write one self-contained HTML page to read a run: forest, trees, turns, tokens, log-probs. Prints its path."""
    from agentgym.rollout.viewer import write

    path = write(run, out)
    print(path)
    if open_it:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


def export(
    run: RunFolder,
    format: Annotated[str, typer.Option(help="jsonl, parquet, sft or pairs.", metavar="FORMAT")],
    out: Annotated[Path, typer.Option(help="File to write; it is replaced.")],
    max_tokens: Annotated[int | None, typer.Option(help="Longest row in tokens, prompt included.")] = None,
    overlong: Annotated[
        str, typer.Option(help="What happens to longer rows: drop or truncate.", metavar="WAY")
    ] = "drop",
    as_json: AsJson = False,
) -> None:
    """Write a data set. Prints how many rows were written, and what was left out and why."""
    from agentgym.rollout.export import export as write

    counts = write(run, format, out, max_tokens=max_tokens, overlong=overlong)
    if as_json:
        emit({"out": str(out), "format": format, **counts})
        return
    print(out)
    note(", ".join(f"{name.replace('_', ' ')}: {count:,}" for name, count in counts.items()))
