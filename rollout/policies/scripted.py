"""A deterministic policy driven by a Python function: for tests, golden trees and dry runs. Instant and offline."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from agentgym import seeding
from agentgym.errors import BadInput
from agentgym.messages import Message, call, format_message
from agentgym.rollout.policies.base import Completion, FinishReason, Sampling
from agentgym.rollout.renderers.chatml import ChatMLRenderer
from agentgym.seeding import Rng
from agentgym.tool_env import random_arguments


@dataclass(frozen=True)
class Situation:
    """What a script may look at.

    Attributes:
        prompt_ids: everything so far, `[P]`.
        renderer: turns ids into text.
        seed: seed of this request; equal (run seed, task, path, attempt) give equal seeds.
    """

    prompt_ids: Sequence[int]
    renderer: ChatMLRenderer
    seed: int

    @cached_property
    def text(self) -> str:
        """The whole conversation as text, control tokens included."""
        return self.renderer.decode(self.prompt_ids)

    @cached_property
    def rng(self) -> Rng:
        """Randomness of this request (counter-based: it depends on `seed` only)."""
        return seeding.rng(self.seed)

    @property
    def turn(self) -> int:
        """Number of messages that the policy has written so far."""
        return self.text.count("<|im_start|>assistant") - 1

    @property
    def observation(self) -> str:
        """The last message that is not the policy's."""
        return self.text.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]


Script: TypeAlias = Callable[[Situation], str | Message]


class ScriptedPolicy:
    """Plays what a script says.

    The log-prob of each token is 0 (the script is deterministic given the seed), unless `logprob` says otherwise.

    Args:
        script: `situation -> message` (text with `<tool_call>` blocks, or a `Message`).
        renderer: encodes the message.
        max_context: most tokens of prompt plus completion.
        logprob: log-prob of each sampled token.
    """

    def __init__(
        self,
        script: Script,
        renderer: ChatMLRenderer,
        *,
        name: str = "scripted",
        max_context: int = 1 << 20,
        logprob: float = 0.0,
    ) -> None:
        self.name = name
        self.max_context = max_context
        self._script = script
        self._renderer = renderer
        self._logprob = logprob

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
        """Play one message; see `Policy.generate`."""
        said = self._script(Situation(prompt_ids, self._renderer, seed))
        ids = self._renderer.message(said if isinstance(said, str) else format_message(said))
        if draft is not None:
            ids = [*draft, *ids[len(draft) :]]
        room = min(sampling.max_tokens, self.max_context - len(prompt_ids))
        if room < 1:
            raise BadInput(f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_context}")
        reason = FinishReason.STOP if len(ids) <= room else FinishReason.LENGTH
        ids = ids[:room]
        return Completion(ids, [self._logprob] * len(ids), reason, prefilled=len(prompt_ids))

    def describe(self) -> dict[str, object]:
        """Return facts for the manifest."""
        return {"name": self.name, "class": type(self).__name__, "logprobs": "scripted"}

    async def aclose(self) -> None:
        """Nothing to release."""


def random_caller(situation: Situation) -> Message:
    """Call a random tool of those in the system prompt with random arguments that satisfy its schema."""
    listing = situation.text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    tools = [json.loads(line)["function"] for line in listing.splitlines()]
    if not tools:
        return Message("".join(chr(97 + c) for c in situation.rng.integers(0, 26, size=8)))
    tool = tools[int(situation.rng.integers(len(tools)))]
    return call(tool["name"], **random_arguments(tool["parameters"], situation.rng))
