"""The configuration of a run: one frozen record, the same keys in Python, in YAML and in the manifest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pydantic

from agentgym.errors import BadInput, UnknownName
from agentgym.rollout.ledger import Amount
from agentgym.rollout.policies.base import Sampling


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run does.

    Attributes:
        env: registered env id.
        env_options: further constructor arguments of the env.
        split: split of the task set.
        level: difficulty level, or `None` for the env's default mix.
        max_turns: most turns of an episode, or `None` for the env's own limit.
        policy: `tiny`, `scripted`, or the folder of a Hugging Face model.
        policy_options: options of the policy, e.g. `{"device": "cuda"}`.
        allocator: name of an allocator, or `module:Class`.
        allocator_options: its options, e.g. `{"continuations": 2}`.
        tasks: number of tasks; each becomes one tree.
        first_task: index of the first task; indices wrap around at the end of the split.
        step_tasks: tasks of one step (the allocator distributes the budget within a step, predictors learn
            between steps).
        budget: most leaves of the whole run.
        budget_tokens: most sampled tokens of the whole run, or `None`.
        budget_env_steps: most env steps of the whole run, or `None`.
        seed: the run seed; every random stream is derived from it.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus mass; 1 keeps the full support.
        top_k: most probable tokens kept; 0 keeps all.
        max_tokens: most sampled tokens of one message.
        max_context: most tokens of prompt plus completion, or `None` for the policy's own.
        max_episode_tokens: most sampled tokens of one episode, or `None`.
        max_empty: consecutive empty messages after which an episode is stopped.
        concurrency: continuations in flight.
        retries: how often a failed rollout is taken up again, in a fresh env.
        env_deadline: seconds that one call of a threaded or async env may take.
        policy_deadline: seconds that one message may take.
        allow_failed: share of failed rollouts above which a finished run counts as bad (exit code 1).
    """

    env: str
    env_options: Mapping[str, Any] = field(default_factory=dict)
    split: str = "train"
    level: str | None = None
    max_turns: int | None = None
    policy: str = "tiny"
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    allocator: str = "uniform"
    allocator_options: Mapping[str, Any] = field(default_factory=dict)
    tasks: int = 16
    first_task: int = 0
    step_tasks: int = 32
    budget: int = 128
    budget_tokens: int | None = None
    budget_env_steps: int | None = None
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    max_context: int | None = None
    max_episode_tokens: int | None = None
    max_empty: int = 3
    concurrency: int = 64
    retries: int = 2
    env_deadline: float = 60.0
    policy_deadline: float = 600.0
    allow_failed: float = 0.05

    def __post_init__(self) -> None:
        for name in ("tasks", "step_tasks", "budget", "max_empty", "concurrency", "max_tokens"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be >= 1, got {getattr(self, name)}")
        for name in ("max_turns", "max_context", "max_episode_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadInput(f"{name} must be >= 1 or null, got {value}")
        for name in ("first_task", "retries"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} must be >= 0, got {getattr(self, name)}")
        for name in ("env_deadline", "policy_deadline"):
            if not getattr(self, name) > 0:
                raise BadInput(f"{name} must be > 0 seconds, got {getattr(self, name)}")
        if not 0 <= self.allow_failed <= 1:
            raise BadInput(f"allow_failed must be in [0, 1], got {self.allow_failed}")
        self.sampling()
        self.limits()

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> RunConfig:
        """Build a config from plain values, as read from YAML.

        Raises:
            UnknownName: a key that does not exist, with the nearest valid one.
            BadInput: a value of the wrong type or out of range.
        """
        known = [f.name for f in dataclasses.fields(cls)]
        for key in given:
            if key not in known:
                raise UnknownName.of("key", key, known)
        try:
            return _adapter().validate_python(dict(given))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            if isinstance(cause := first.get("ctx", {}).get("error"), BadInput):
                raise cause from None
            where = ".".join(map(str, first["loc"]))
            raise BadInput(f"{where}: {first['msg']}, got {first['input']!r}") from None

    def to_mapping(self) -> dict[str, Any]:
        """Return the config as plain values for YAML, JSON and the manifest."""
        return dataclasses.asdict(self)

    def sampling(self) -> Sampling:
        """Return the sampling parameters of one message."""
        return Sampling(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, max_tokens=self.max_tokens)

    def limits(self) -> Amount:
        """Return the budget of the whole run."""
        return Amount.limits(
            {"leaves": self.budget, "sampled_tokens": self.budget_tokens, "env_steps": self.budget_env_steps}
        )

    def steps(self) -> list[range]:
        """Return the task numbers of each step."""
        size = self.step_tasks
        return [range(at, min(at + size, self.tasks)) for at in range(0, self.tasks, size)]

    @property
    def episode_tokens(self) -> float:
        """Most sampled tokens of one episode (infinite without a limit)."""
        return math.inf if self.max_episode_tokens is None else self.max_episode_tokens


@cache
def _adapter() -> pydantic.TypeAdapter[RunConfig]:
    """Return what validates plain values; building it takes 10 ms."""
    return pydantic.TypeAdapter(RunConfig)
