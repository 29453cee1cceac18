"""The rules of the conformance suite, and what is reported about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from agentgym.errors import AgentGymError

if TYPE_CHECKING:
    from agentgym.testing.probe import Probe


class Rule(Enum):
    """The rules, each with its statement."""

    DECLARATIONS = "`covers`, `snapshot_by` and `calls` have valid values"
    RUNS = "an episode runs without an exception"
    GYMNASIUM = "gymnasium.utils.env_checker.check_env accepts the env"
    SAME_SEED = "an equal seed gives an equal first observation: again, in another instance, and among other resets"
    STEP_DETERMINISM = "an equal seed and equal actions give equal observations, rewards, flags and infos"
    PRIVATE_RNG = "nobody else's draws from `random` or `numpy.random` change the episode"
    GLOBAL_RNG_UNTOUCHED = "the env neither draws from nor seeds `random` and `numpy.random`"
    HINTS_PURE = "asking `expert` or `random_valid` changes nothing"
    SNAPSHOT_RESTORE = "snapshot, steps, restore, and the same steps give equal results, random generator included"
    SNAPSHOT_PURE = "taking a snapshot changes nothing"
    SNAPSHOT_ELSEWHERE = "a snapshot restored in another instance gives equal results"
    SNAPSHOT_IMMUTABLE = "steps after a snapshot do not change it: it can be restored again"
    SNAPSHOT_PICKLES = "a snapshot survives pickling"
    SNAPSHOT_STACK = "agentgym.stack restores the wrappers too: as many steps are left as were before"
    SNAPSHOT_REFUSES = "a snapshot that must cover more than the env declares raises UnsupportedSnapshot"
    SIBLINGS = "forks do not see each other: interleaved, each gives what it gives alone"
    RESEED = "restoring with equal `reseed` gives equal results"
    NO_SHALLOW_COPY = "copy.copy raises SnapshotError"
    STEP_BEFORE_RESET = "a step before reset raises EpisodeOver"
    STEP_AFTER_END = "a step after the end raises EpisodeOver and changes nothing"
    TURN_LIMIT = "an episode of empty messages ends within the turn limit"
    CLOSE_TWICE = "close can be called twice"
    JSON_SAFE = "observations and infos are strict JSON in UTF-8: no NaN, no NumPy values, no lone surrogates"
    INFO_SCHEMA = "info has the documented keys and types from the first observation on"
    REWARD = "the reward is a finite float, the sum of `reward_terms`"
    SUCCESS_AT_END = "`success` is None before the end, and True, False or None at the end"
    RETURNED_DATA = "what reset and step returned is not changed by later steps"
    TASK_UNCHANGED = "an episode does not change the data of its task"
    TOOL_SCHEMAS = "every tool has a name, a description and a valid JSON schema of an object"
    TOOLS_CALLABLE = "every tool accepts the arguments that its schema allows"
    MALFORMED_ACTIONS = "malformed messages are answered, raise nothing and execute no tool"
    ONE_REPLY_PER_CALL = "each call of a message gets exactly one `tool` message and one record"
    TRUNCATED_MESSAGE = "a truncated message executes no tool"
    EXPERT_SOLVES = "the expert solves the task, where there is an expert"
    RANDOM_VALID = "messages of `random_valid` are accepted as valid, where it gives any"

    @property
    def slug(self) -> str:
        """The rule's name in reports, e.g. `private-rng`."""
        return self.name.lower().replace("_", "-")


class ConformanceError(AgentGymError, AssertionError):
    """An env breaks rules of the contract; the message lists them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result for one rule.

    Attributes:
        rule: its name.
        ok: `None` when the rule does not apply or could not be checked.
        detail: the offending values, or why the rule was not checked.
    """

    rule: str
    ok: bool | None
    detail: str = ""


@dataclass(slots=True)
class CheckReport:
    """What `check_env` found, in the order of `Rule`."""

    env: str
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no rule is broken."""
        return not self.broken

    @property
    def broken(self) -> list[Finding]:
        """The findings of broken rules."""
        return [finding for finding in self.findings if finding.ok is False]

    def raise_on_failure(self) -> None:
        """Raise `ConformanceError` when a rule is broken."""
        if self.ok:
            return
        statements = {rule.slug: rule.value for rule in Rule}
        lines = [f"  {f.rule}: {statements[f.rule]}\n    {f.detail}" for f in self.broken]
        rules = "1 rule" if len(lines) == 1 else f"{len(lines)} rules"
        raise ConformanceError("\n".join([f"{self.env} breaks {rules}:", *lines]))


class BrokenRule(Exception):
    """The rule under check is broken; the text shows the offending values."""


class NotChecked(Exception):
    """The rule under check does not apply; the text says why."""


Check: TypeAlias = "Callable[[Probe], None]"
CHECKS: dict[Rule, Check] = {}


def checks(rule: Rule) -> Callable[[Check], Check]:
    """Register the check of a rule."""

    def add(check: Check) -> Check:
        CHECKS[rule] = check
        return check

    return add
