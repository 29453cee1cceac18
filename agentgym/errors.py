"""Every exception that agentgym raises.

    AgentGymError
    ├── BadInput (ValueError)            the caller's input is wrong; raised before any work starts
    │   ├── UnknownName (LookupError)    no such env, allocator, policy, key ...; names the nearest valid one
    │   ├── ConfigMismatch               a run folder belongs to another configuration
    │   └── MissingExtra (ImportError)   an optional dependency is not installed; names the pip extra
    ├── EpisodeOver (RuntimeError)       `step` after the episode ended
    ├── SnapshotError (RuntimeError)
    │   ├── UnsupportedSnapshot          the env cannot capture what was asked for
    │   └── ReplayDivergence             re-executing recorded actions gave other observations
    ├── ToolError                        raised BY a tool: becomes an observation, never a failure
    ├── InvalidReward (ValueError)       NaN or infinite reward
    ├── AlignmentError (ValueError)      token, mask and log-prob columns differ in length
    ├── PrefixMismatch (RuntimeError)    the engine ran other prompt tokens than it was given
    ├── TokenIdsUnavailable (RuntimeError)  an engine returned text where token ids are needed
    ├── PolicyError (RuntimeError)       the engine failed to generate
    ├── DeadlineExceeded (TimeoutError)  an env, tool or engine call took longer than its deadline
    ├── JournalError (RuntimeError)      the journal is damaged beyond its last line
    └── SystemicFailure (RuntimeError)   every rollout failed; carries the top reasons

All are picklable: they cross process boundaries in Ray and in worker pools.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentGymError(Exception):
    """Base of all agentgym exceptions."""


class BadInput(AgentGymError, ValueError):
    """The caller's input is wrong. Raised before any work starts (CLI exit code 2)."""


class UnknownName(BadInput, LookupError):
    """A name that is not known. The message names the nearest valid one."""

    @classmethod
    def of(cls, kind: str, name: object, valid: Iterable[str]) -> UnknownName:
        """Build the error for an unknown `name` of some `kind` ("env", "allocator", "key" ...)."""
        known = sorted(valid)
        near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else "nothing similar is known."
        listing = ", ".join(known) if len(known) <= 24 else f"{', '.join(known[:24])} and {len(known) - 24} more"
        return cls(f"unknown {kind} {name!r}: {hint} Valid: {listing or '(none)'}")


class ConfigMismatch(BadInput):
    """A run folder was made with another configuration; the message names the differing keys."""


class MissingExtra(BadInput, ImportError):
    """An optional dependency is missing."""

    @classmethod
    def of(cls, module: str, extra: str) -> MissingExtra:
        """Build the error for `module`, which `pip install "agentgym-trees[extra]"` would bring."""
        return cls(f"{module!r} is not installed; run: pip install 'agentgym-trees[{extra}]'")


class EpisodeOver(AgentGymError, RuntimeError):
    """`step` was called before `reset` or after the episode ended."""


class SnapshotError(AgentGymError, RuntimeError):
    """A snapshot could not be taken or restored."""


class UnsupportedSnapshot(SnapshotError):
    """The env cannot capture what was asked for. It never approximates."""


class ReplayDivergence(SnapshotError):
    """Re-executing the recorded actions gave an observation with another digest."""


class ToolError(AgentGymError):
    """Raised by a tool to tell the policy that its call cannot be done, and why.

    The text becomes the observation. Every other exception that leaves a tool is an infrastructure failure.
    """


class InvalidReward(AgentGymError, ValueError):
    """A reward was NaN or infinite. The leaf is unscored and in no group statistic."""


class AlignmentError(AgentGymError, ValueError):
    """Per-token columns differ in length."""


class PrefixMismatch(AgentGymError, RuntimeError):
    """The engine reports other prompt tokens than those that were sent."""


class TokenIdsUnavailable(AgentGymError, RuntimeError):
    """An engine returned text without token ids; training rows cannot be made from it."""


class PolicyError(AgentGymError, RuntimeError):
    """The engine failed to generate."""


class DeadlineExceeded(AgentGymError, TimeoutError):
    """A call took longer than its deadline. The message names the call and the deadline in seconds."""


class JournalError(AgentGymError, RuntimeError):
    """The journal is damaged somewhere else than in its last line."""


class SystemicFailure(AgentGymError, RuntimeError):
    """Every rollout failed (CLI exit code 3). The message lists the most frequent reasons."""
