"""Closed lists: how a node stands, why an episode stopped, why a rollout failed."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """How a node stands."""

    OPEN = "open"
    """The episode goes on from here (or did: the node has children)."""
    LEAF = "leaf"
    """The episode ended here; `StopReason` says why."""
    FAILED = "failed"
    """Infrastructure failed here; `Failure` says how. Never a reward, in no group statistic."""


class StopReason(StrEnum):
    """Why an episode ended. Limits are checked in the order of this list."""

    TERMINATED = "terminated"
    """The env ended the episode (it was solved, answered or lost)."""
    MAX_TURNS = "max_turns"
    """The env's (or a `TimeLimit` wrapper's) limit on steps: Gymnasium's `truncated`."""
    EMPTY_MESSAGE = "empty_message"
    """The policy wrote nothing but a stop token `max_empty` times in a row."""
    CONTEXT_LIMIT = "context_limit"
    """No room is left in the policy's context (or the run's `max_context`) for another token."""
    TOKEN_LIMIT = "token_limit"
    """The episode's own limit on sampled tokens (`max_episode_tokens`)."""
    BUDGET = "budget"
    """The ledger has no tokens or env steps left for another turn."""


class Failure(StrEnum):
    """What failed, when a rollout could not be completed."""

    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt leaves no room in the context for a message. Not tried again."""
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    INVALID_REWARD = "invalid_reward"
    SNAPSHOT_ERROR = "snapshot_error"
    REPLAY_DIVERGENCE = "replay_divergence"
    POLICY_ERROR = "policy_error"
    POLICY_TIMEOUT = "policy_timeout"
