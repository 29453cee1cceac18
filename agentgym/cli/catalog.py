"""What there is: `envs`, `methods`, and `check`, which proves that an env keeps the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentgym.cli.output import AsJson, emit
from agentgym.errors import BadInput

if TYPE_CHECKING:
    from agentgym.testing import CheckReport, Finding

_MARKS = {True: "ok", False: "BROKEN", None: "-"}


def envs(as_json: AsJson = False) -> None:
    """List the registered envs: what they are about, levels, splits, tools, and what their snapshots cover."""
    from agentgym import registry

    found = [_env(env_id) for env_id in registry.env_ids()]
    if as_json:
        emit({"envs": found})
        return
    for entry in found:
        print("\n".join(_env_lines(entry)))


def _env(env_id: str) -> dict[str, Any]:
    """Describe an env, JSON-safe. One that cannot be loaded says why under `error`: the others are still listed."""
    from agentgym import registry
    from agentgym.env import Env

    try:
        env = registry.make(env_id).unwrapped
        if not isinstance(env, Env):
            raise BadInput(f"{type(env).__name__} is not an agentgym.Env")
        found = {
            "id": env_id,
            "summary": _first_line(env),
            "snapshots": {"cover": sorted(env.covers), "by": env.snapshot_by},
            "levels": dict(env.tasks.mix),
            "splits": dict(env.tasks.sizes),
            "tools": [{"name": spec.name, "signature": spec.signature} for spec in env.tools],
            "error": None,
        }
        env.close()
    except Exception as error:  # boundary: an installed package's env
        return {"id": env_id, "error": f"{type(error).__name__}: {error}"}
    return found


def _first_line(env: object) -> str:
    import inspect

    return (inspect.getdoc(type(env)) or "").partition("\n")[0]


def _env_lines(entry: dict[str, Any]) -> Iterator[str]:
    if entry["error"] is not None:
        yield f"{entry['id']}  cannot be loaded: {entry['error']}"
        return
    snapshots = entry["snapshots"]
    yield f"{entry['id']}  {entry['summary']}"
    yield f"    snapshots  {', '.join(snapshots['cover']) or 'nothing'} (by {snapshots['by']})"
    yield f"    levels     {', '.join(f'{name} {share:.0%}' for name, share in entry['levels'].items())}"
    yield f"    splits     {', '.join(f'{name} {size:,}' for name, size in entry['splits'].items())}"
    yield f"    tools      {'; '.join(tool['signature'] for tool in entry['tools']) or 'none'}"


def methods(
    name: Annotated[str | None, typer.Argument(help="Name of an allocator, or module:Class.", metavar="NAME")] = None,
    as_json: AsJson = False,
) -> None:
    """List the methods that decide where rollouts branch; with NAME, its equations and options."""
    from agentgym.rollout import allocators

    if name is not None:
        found = allocators.describe(name)
        emit(found) if as_json else print("\n".join([*_method_facts(found), *_method_details(found)]))
        return
    every = [allocators.describe(known) for known in allocators.allocator_names()]
    if as_json:
        emit({"methods": every})
        return
    for found in every:
        print("\n".join(_method_facts(found)))


def _method_facts(found: dict[str, Any]) -> Iterator[str]:
    defaults = [f"{option['name']}={_shown(option['default'])}" for option in found["options"]]
    yield f"{found['name']}  {found['summary']}"
    yield f"    family   {found['family']}"
    yield f"    source   {found['source']}"
    yield f"    needs    {_needs(found)}"
    yield f"    options  {', '.join(defaults) or 'none'}"


def _method_details(found: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield "Equations"
    yield from (f"    {line}" for line in found["equations"].splitlines())
    yield ""
    yield "Options (-o name=value)"
    for option in found["options"]:
        yield f"    {option['name']} ({option['type']}) = {_shown(option['default'])}: {option['meaning']}"


def _needs(found: dict[str, Any]) -> str:
    snapshots = "a snapshot of each turn" if found["snapshots"] else "no snapshots"
    watches = "never asked again" if found["watches"] == "nothing" else f"asked again after each {found['watches']}"
    return f"{snapshots}; {watches}"


def _shown(default: object) -> object:
    return "none" if default is None else default


def check(
    env: Annotated[str, typer.Argument(help="Registered env id.", metavar="ENV")],
    as_json: AsJson = False,
) -> None:
    """Check an env against every rule of the contract; exit 1 when one is broken."""
    from agentgym.testing import check_env

    report = check_env(env, report=_ignore if as_json else _print_finding)
    if as_json:
        emit({"env": env, "ok": report.ok, "rules": [_rule(finding) for finding in report.findings]})
    else:
        print(_verdict(env, report))
    if not report.ok:
        raise typer.Exit(1)


def _ignore(finding: Finding) -> None:
    pass


def _print_finding(finding: Finding) -> None:
    rule = _rule(finding)
    print(f"{_MARKS[finding.ok]:<7} {finding.rule}: {rule['statement']}", flush=True)
    if finding.detail:
        print(f"        {finding.detail}", flush=True)


def _rule(finding: Finding) -> dict[str, Any]:
    from agentgym.testing import Rule

    statement = next(rule.value for rule in Rule if rule.slug == finding.rule)
    return {"rule": finding.rule, "statement": statement, "ok": finding.ok, "detail": finding.detail}


def _verdict(env: str, report: CheckReport) -> str:
    if report.ok:
        return f"{env} conforms: {sum(f.ok is True for f in report.findings)} rules checked"
    return f"{env} breaks {len(report.broken)} of {len(report.findings)} rules: " + ", ".join(
        finding.rule for finding in report.broken
    )
