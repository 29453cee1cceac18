"""The policy seam: token ids in, token ids and log-probs out. Text never crosses it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from agentgym.errors import AlignmentError, BadInput


class FinishReason(StrEnum):
    """Why the engine stopped generating."""

    STOP = "stop"
    """A stop token was sampled. It is the last sampled token and is trained."""
    LENGTH = "length"
    """`max_tokens` were sampled, or the model's context was full."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are valid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 keeps the full support, which importance weights need.
        top_k: number of most probable tokens kept; 0 keeps all.
        max_tokens: most tokens of one message (>= 1).
        top_logprobs: number m of most probable tokens whose RAW log-probs (temperature 1, no truncation) are
            returned at each position; 0 returns none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadInput(f"temperature must be >= 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top_p must be in (0, 1], got {self.top_p}")
        for name in ("top_k", "top_logprobs"):
            if getattr(self, name) < 0:
                raise BadInput(f"{name} must be >= 0, got {getattr(self, name)}")
        if self.max_tokens < 1:
            raise BadInput(f"max_tokens must be >= 1, got {self.max_tokens}")

    @property
    def full_support(self) -> bool:
        """Whether every token could have been sampled (what importance weights need)."""
        return self.top_p == 1.0 and self.top_k == 0 and self.temperature > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request produced.

    Attributes:
        token_ids: the sampled tokens, `[T]`, a sampled stop token included.
        logprobs: behaviour log-probs, `[T]`: log-probability of each sampled token under the exact distribution
            that it was drawn from (after temperature, top-k and top-p; at temperature 0, of the untempered softmax).
        finish_reason: why generation stopped.
        policy_version: version of the weights, set by whoever loads them (0 for a fresh policy).
        prefilled: prompt tokens that were computed for this request.
        cached: prompt tokens that came from a prefix cache. `prefilled + cached == len(prompt_ids)`.
        top_logprobs: per position the m most probable `(token_id, raw log-prob)`, most probable first; or `None`.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: FinishReason
    policy_version: int = 0
    prefilled: int = 0
    cached: int = 0
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise AlignmentError(f"{len(self.token_ids)} token ids but {len(self.logprobs)} log-probs in a completion")


@runtime_checkable
class Policy(Protocol):
    """What generates. Implementations are safe to call concurrently from one event loop."""

    name: str
    """Short name for manifests, e.g. `tiny`."""
    max_context: int
    """Most tokens of prompt plus completion."""

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        seed: int,
        stop: Sequence[int] = (),
        draft: Sequence[int] | None = None,
        affinity: str = "",
    ) -> Completion:
        """Continue `prompt_ids`.

        Args:
            prompt_ids: everything before the new tokens, `[P]`, used verbatim.
            sampling: how to draw. `max_tokens` is never exceeded; `len(prompt_ids) + max_tokens` may exceed
                `max_context`, then generation ends with `LENGTH` at the context's end.
            seed: seed of this request. Equal (prompt, sampling, seed, weights) give equal tokens whatever else runs.
            stop: token ids that end the message.
            draft: tokens to start the completion with, taken as if sampled (their log-probs are computed), or `None`.
            affinity: requests with equal keys share prefixes; engines with replicas route by it.

        Raises:
            BadInput: the prompt leaves no room in the context.
            PolicyError: the engine failed.
        """
        ...

    def describe(self) -> dict[str, object]:
        """JSON-safe facts for the manifest: name, model digest, dtype, versions, log-prob mode."""
        ...

    async def aclose(self) -> None:
        """Release the engine. Idempotent."""
        ...
