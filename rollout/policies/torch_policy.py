"""The `torch` policy: any Hugging Face causal LM on CPU or CUDA, with continuous batching and a shared KV cache."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentgym.errors import BadInput, MissingExtra

try:
    import torch
    import transformers
except ImportError as error:
    raise MissingExtra.of((error.name or "torch").partition(".")[0], "torch") from error

from agentgym.rollout.policies.base import Completion, Sampling
from agentgym.rollout.policies.kv_cache import PrefixTrie
from agentgym.rollout.policies.sampler import uniforms
from agentgym.rollout.policies.torch_engine import Engine, Request
from agentgym.rollout.policies.torch_load import context_limit, digest, load_model, on_device, pick_device, pick_dtype
from agentgym.rollout.policies.torch_runner import ModelRunner

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_PREFILL_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class PolicyStats:
    """Totals since the policy was made.

    Attributes:
        requests: completed requests.
        prefilled_tokens: prompt tokens that were computed.
        cached_tokens: prompt tokens that came from the prefix cache.
        sampled_tokens: tokens of completions, draft tokens included.
        cache_bytes: bytes of keys and values in the prefix cache now.
        evictions: spans dropped to keep the cache's bound.
        steps: prefill passes and decode steps.
    """

    requests: int
    prefilled_tokens: int
    cached_tokens: int
    sampled_tokens: int
    cache_bytes: int
    evictions: int
    steps: int


class TorchPolicy:
    """A `Policy` that runs a Hugging Face causal LM in this process.

    Requests are batched continuously by one engine thread. Keys and values are kept in a radix trie by token path:
    siblings share their prefix, a continuation after a branch reuses the path up to it, equal system prompts are
    computed once. Only the last prompt token is always computed.

    On CPU a request's tokens and log-probs do not depend, bit for bit, on the batch, the order of arrival or the
    cache, if `describe()["row_exact"]` is true (see `torch_rows`; with `threads=1` larger models are exact too). On
    CUDA they may differ in the last bits of a log-prob and, rarely, in a token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str | None = None,
        max_batch: int = 64,
        cache_bytes: int = 1 << 30,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> None:
        """Serve a model that is in memory already. It is put in eval mode and must not be used meanwhile.

        Args:
            model: a decoder with key/value attention in all layers.
            name: short name for manifests; the model's type by default.
            max_batch: most requests that run at a time.
            cache_bytes: bound of the prefix cache in bytes; 0 turns it off.
            max_context: most tokens of prompt plus completion; the model's own limit by default.
            threads: sets torch's number of threads (process-wide); `None` leaves it alone.

        Raises:
            BadInput: an argument is out of range, or the model cannot be run by this engine.
        """
        if max_batch < 1:
            raise BadInput(f"max_batch must be >= 1, got {max_batch}")
        if threads is not None and threads < 1:
            raise BadInput(f"threads must be >= 1, got {threads}")
        self.name = name or str(model.config.model_type)
        self.max_context = context_limit(model, max_context)
        self._trie = PrefixTrie(cache_bytes)
        self._runner = ModelRunner(model)
        self._engine = Engine(
            self._runner, self._trie, max_batch=max_batch, prefill_tokens=_PREFILL_TOKENS, threads=threads
        )
        self._digest: tuple[int, str] | None = None

    @classmethod
    def load(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        name: str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        max_batch: int = 64,
        cache_bytes: int = 1 << 30,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> TorchPolicy:
        """Load a model folder (or take a model in memory) onto a device.

        Args:
            model: a folder in Hugging Face format, or a model, which is moved and cast in place.
            name: short name for manifests; the folder's name by default.
            device: `"cpu"`, `"cuda"`, `"cuda:N"`; `None` takes CUDA if there is one.
            dtype: of the weights, e.g. `"float32"`; `None` is float32 on CPU and bfloat16 on CUDA.
            max_batch: see `__init__`.
            cache_bytes: see `__init__`.
            max_context: see `__init__`.
            threads: see `__init__`.

        Raises:
            BadInput: the folder cannot be read as a model, or an argument is out of range.
        """
        target = pick_device(device)
        wanted = pick_dtype(dtype, target)
        if isinstance(model, str | Path):
            name = name or Path(model).expanduser().resolve().name
            loaded = load_model(model, target, wanted)
        else:
            loaded = on_device(model, target, wanted)
        return cls(
            loaded, name=name, max_batch=max_batch, cache_bytes=cache_bytes, max_context=max_context, threads=threads
        )

    @property
    def policy_version(self) -> int:
        """Version of the weights in use."""
        return self._engine.version

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
        """Continue `prompt_ids`; see `Policy.generate`. Cancelling the call frees its slot.

        The i-th token of a completion is drawn by a number that depends on `(seed, i)` only. Draft tokens are
        forwarded one a step and count towards `max_tokens`; their log-probs are those of the tempered distribution
        without truncation. A stop token in the draft ends the message there.

        Raises:
            BadInput: the prompt is empty, leaves no room in the context, or a token id is out of range.
            PolicyError: the model failed, or the policy was closed.
        """
        prompt, forced = [int(t) for t in prompt_ids], tuple(int(t) for t in draft or ())
        self._check("prompt", prompt)
        self._check("draft", forced)
        if not 0 < len(prompt) < self.max_context:
            raise BadInput(f"a prompt must have 1..{self.max_context - 1} tokens (max_context - 1), got {len(prompt)}")
        room = min(sampling.max_tokens, self.max_context - len(prompt))
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = Request(prompt, sampling, frozenset(stop), forced, uniforms(seed, room), future)
        self._engine.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.abort(request)
            raise

    def _check(self, what: str, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self._runner.vocab):
            bad = next(t for t in ids if not 0 <= t < self._runner.vocab)
            raise BadInput(f"{what} token id {bad} is outside the vocabulary 0..{self._runner.vocab - 1}")

    async def load_weights(self, weights: Mapping[str, Tensor] | str | Path, *, version: int) -> None:
        """Replace the weights; the prefix cache is emptied.

        Requests that run end with the old weights, requests that arrive meanwhile wait and get the new ones.

        Args:
            weights: a state dict, or a model folder in Hugging Face format.
            version: the `policy_version` of completions from now on.

        Raises:
            BadInput: the weights do not fit the model, or the folder cannot be read.
            PolicyError: the policy was closed.
        """
        if isinstance(weights, str | Path):
            weights = load_model(weights, torch.device("cpu"), self._runner.model.dtype).state_dict()
        self._runner.check_state(weights)
        await asyncio.wrap_future(self._engine.swap(weights, version))

    def stats(self) -> PolicyStats:
        """Return the totals so far."""
        c = self._engine.counters
        return PolicyStats(
            c.requests, c.prefilled, c.cached, c.sampled, self._trie.nbytes, self._trie.evictions, c.steps
        )

    def describe(self) -> dict[str, object]:
        """Return JSON-safe facts for the manifest. The digest is of the weights now in use."""
        model, version = self._runner.model, self.policy_version
        if self._digest is None or self._digest[0] != version:
            self._digest = (version, digest(model))
        return {
            "policy": "torch",
            "name": self.name,
            "model_class": type(model).__name__,
            "model_digest": self._digest[1],
            "policy_version": version,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "logprob_mode": "processed",
            "max_context": self.max_context,
            "row_exact": self._runner.exact,
        }

    async def aclose(self) -> None:
        """Stop the engine; requests in flight fail with `PolicyError`. Idempotent."""
        thread = self._engine.close()
        if thread is not None:
            await asyncio.to_thread(thread.join)
