"""The engine thread: continuous batching of many requests over one model."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from dataclasses import dataclass, field

import torch
from torch import Tensor

from agentgym.errors import PolicyError
from agentgym.rollout.policies.base import Completion, FinishReason, Sampling
from agentgym.rollout.policies.kv_cache import PrefixTrie, common_prefix
from agentgym.rollout.policies.sampler import sample
from agentgym.rollout.policies.torch_runner import ModelRunner

_log = logging.getLogger(__name__)
_SHARE_FROM = 16
"""A request waits for another's prefill if it can then reuse at least this many more tokens."""
_MOST_HOLDS = 4
"""... at most this often (the prefill may be evicted before it can be reused)."""


@dataclass(slots=True, eq=False)
class Request:
    """One `generate` call inside the engine.

    Attributes:
        prompt: prompt token ids, `[P]`.
        sampling: how to draw.
        stop: token ids that end the message.
        draft: tokens to take first.
        uniform: the numbers that draw the tokens, `[room]`.
        future: resolved on its own event loop.
    """

    prompt: list[int]
    sampling: Sampling
    stop: frozenset[int]
    draft: tuple[int, ...]
    uniform: list[float]
    future: asyncio.Future[Completion]
    cancelled: bool = False
    cached: int = 0
    holds: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)

    @property
    def computed(self) -> int:
        """Tokens whose keys and values are in the slot once the first token was drawn."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def forced(self) -> int | None:
        """The draft token at the present position."""
        at = len(self.tokens)
        return self.draft[at] if at < len(self.draft) else None

    def finish(self) -> FinishReason | None:
        """Why the request is over, or `None`."""
        if self.tokens[-1] in self.stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.tokens) >= len(self.uniform) else None


@dataclass(slots=True)
class Counters:
    """Running totals of the engine."""

    requests: int = 0
    prefilled: int = 0
    cached: int = 0
    sampled: int = 0
    steps: int = 0


class Engine:
    """One daemon thread that owns the model, its slots and the prefix trie.

    Each round: take new requests, admit what fits (longest cached prefix copied, suffixes prefilled together), then
    one decode step for everything that runs. Active requests occupy the slots `0..B` without holes.
    """

    def __init__(
        self, runner: ModelRunner, trie: PrefixTrie, *, max_batch: int, prefill_tokens: int, threads: int | None
    ) -> None:
        """Make an engine; its thread starts with the first request.

        Args:
            runner: the model.
            trie: where keys and values of finished paths are kept.
            max_batch: most requests that run at a time.
            prefill_tokens: most prompt tokens (padding included) of one prefill pass; one request may exceed it.
            threads: torch threads to set, or `None` to leave the process's setting alone.
        """
        self._runner, self._trie = runner, trie
        self._max_batch, self._prefill_tokens, self._threads = max_batch, prefill_tokens, threads
        self.version = 0
        self.counters = Counters()
        self._inbox: deque[Request] = deque()
        self._waiting: list[Request] = []
        self._active: list[Request] = []
        self._done: list[tuple[Request, Completion | PolicyError]] = []
        self._swaps: deque[tuple[Mapping[str, Tensor], int, ThreadFuture[None]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped: str | None = None

    # -- called from event loops

    def submit(self, request: Request) -> None:
        """Queue a request. All requests of one event-loop tick reach the engine together.

        Raises:
            PolicyError: the engine was closed or died.
        """
        self._start()
        self._inbox.append(request)
        request.future.get_loop().call_soon(self._wake.set)

    def abort(self, request: Request) -> None:
        """Free the request's slot as soon as the running step ends."""
        request.cancelled = True
        self._wake.set()

    def swap(self, state: Mapping[str, Tensor], version: int) -> ThreadFuture[None]:
        """Queue new weights: running requests end with the old ones, waiting requests start with the new ones."""
        self._start()
        done: ThreadFuture[None] = ThreadFuture()
        self._swaps.append((state, version, done))
        self._wake.set()
        return done

    def close(self) -> threading.Thread | None:
        """Refuse further requests, fail those in flight; returns the thread to join, if it ever ran."""
        with self._lock:
            self._stopped = self._stopped or "it was closed"
            self._wake.set()
            return self._thread

    def _start(self) -> None:
        with self._lock:
            if self._stopped is not None:
                raise PolicyError(f"the torch engine takes no more requests: {self._stopped}")
            if self._thread is None:
                self._thread = threading.Thread(target=self._main, name="agentgym-torch", daemon=True)
                self._thread.start()

    # -- the engine thread

    def _main(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            with torch.inference_mode():
                while self._stopped is None:
                    if not (self._active or self._waiting or self._inbox or self._swaps):
                        self._wake.wait()
                    self._wake.clear()
                    self._round()
        except Exception as error:  # boundary: whatever happens, no caller may wait for ever
            _log.exception("the torch engine died")
            self._stopped = f"it died of {type(error).__name__}: {error}"
        with self._lock:
            self._stopped = self._stopped or "it was closed"
        self._fail_all()

    def _round(self) -> None:
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        self._waiting = [r for r in self._waiting if not r.cancelled]
        self._retire([r.cancelled for r in self._active])
        if self._swaps:
            if not self._active:
                self._swap_weights()
        else:
            self._admit()
        if self._active:
            self._decode()
        self._deliver()

    def _admit(self) -> None:
        """Prefill waiting requests until all run, the slots are full or nothing more can start."""
        while self._waiting and len(self._active) < self._max_batch:
            group = self._choose()
            self._waiting = [r for r in self._waiting if r not in group]
            self._prefill(group)

    def _choose(self) -> list[Request]:
        """Pick the requests of one prefill pass, first come first served.

        A request that shares a longer prefix with one already picked than with the trie is held back until that
        prefix has been computed.
        """
        group: list[Request] = []
        longest = 0
        for request in self._waiting:
            if len(self._active) + len(group) >= self._max_batch:
                break
            cached = min(self._trie.lookup(request.prompt).length, len(request.prompt) - 1)
            if request.holds < _MOST_HOLDS and self._trie.max_bytes > 0:
                shared = max((common_prefix(other.prompt, request.prompt) for other in group), default=0)
                if shared >= cached + _SHARE_FROM:
                    request.holds += 1
                    continue
            longest = max(longest, len(request.prompt) - cached)
            if group and longest * (len(group) + 1) > self._prefill_tokens:
                break
            request.cached = cached
            group.append(request)
        return group

    def _prefill(self, group: list[Request]) -> None:
        first = len(self._active)
        slots = self._runner.slots
        try:
            slots.reserve(first + len(group), max(len(r.prompt) for r in group))
            for slot, request in enumerate(group, first):
                match = self._trie.lookup(request.prompt[: len(request.prompt) - 1])
                request.cached = match.length
                slots.load(slot, match.spans)
            suffixes = [r.prompt[r.cached :] for r in group]
            logits = self._runner.prefill(first, suffixes, [r.cached for r in group])
            for slot, request in enumerate(group, first):
                self._keep(slot, request.prompt)
            self._active += group
            self._draw(logits, group)
        except Exception as error:  # boundary: the model's code; the requests of this pass fail, the engine lives
            self._fail(group, error)
            return
        self.counters.steps += 1
        self.counters.prefilled += sum(len(r.prompt) - r.cached for r in group)
        self.counters.cached += sum(r.cached for r in group)
        self._retire([r.finish() is not None for r in self._active])

    def _decode(self) -> None:
        active = self._active
        try:
            logits = self._runner.decode([r.tokens[-1] for r in active], [r.computed for r in active])
            self._draw(logits, active)
        except Exception as error:  # boundary: the model's code; the requests of this step fail, the engine lives
            self._fail(list(active), error)
            return
        self.counters.steps += 1
        self._retire([r.finish() is not None for r in active])

    def _draw(self, logits: Tensor, requests: Sequence[Request]) -> None:
        drawn = sample(
            logits,
            [r.sampling for r in requests],
            [r.uniform[len(r.tokens)] for r in requests],
            [r.forced for r in requests],
        )
        bad = [r for r, logprob in zip(requests, drawn.logprobs, strict=True) if math.isnan(logprob)]
        for request, token, logprob, top in zip(requests, drawn.tokens, drawn.logprobs, drawn.tops, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            if request.sampling.top_logprobs:
                request.tops.append(top)
        if bad:
            self._fail(bad, ValueError("the model returned logits that are not finite"))

    def _keep(self, slot: int, path: list[int]) -> None:
        self._trie.insert(path, lambda start, stop: self._runner.slots.read(slot, start, stop))

    def _retire(self, over: Sequence[bool]) -> None:
        """Take finished requests off their slots and close the holes with the last ones."""
        if not any(over):
            return
        for slot, (request, ended) in enumerate(zip(self._active, over, strict=True)):
            if ended and not request.cancelled:
                self._keep(slot, request.prompt + request.tokens[:-1])
                self._complete(request)
        self._compact([not ended for ended in over])

    def _compact(self, stay: Sequence[bool]) -> None:
        left = sum(stay)
        holes = [slot for slot in range(left) if not stay[slot]]
        movers = [slot for slot in range(left, len(stay)) if stay[slot]]
        for hole, mover in zip(holes, movers, strict=True):
            request = self._active[mover]
            self._runner.slots.move(mover, hole, request.computed)
            self._active[hole] = request
        del self._active[left:]

    def _complete(self, request: Request) -> None:
        self.counters.requests += 1
        self.counters.sampled += len(request.tokens)
        completion = Completion(
            token_ids=request.tokens,
            logprobs=request.logprobs,
            finish_reason=request.finish() or FinishReason.ABORT,
            policy_version=self.version,
            prefilled=len(request.prompt) - request.cached,
            cached=request.cached,
            top_logprobs=request.tops if request.sampling.top_logprobs else None,
        )
        self._done.append((request, completion))

    def _fail(self, requests: Sequence[Request], cause: Exception) -> None:
        """Fail requests, whether they are active already or not."""
        for request in requests:
            error = PolicyError(f"the model failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            self._done.append((request, error))
        self._compact([r not in requests for r in self._active])

    def _swap_weights(self) -> None:
        state, version, done = self._swaps.popleft()
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._runner.swap(state)
        except Exception as error:  # boundary: handed to the caller of load_weights
            done.set_exception(error)
            return
        self._trie.clear()
        self.version = version
        done.set_result(None)

    def _fail_all(self) -> None:
        left = [*self._active, *self._waiting, *self._inbox]
        self._active, self._waiting = [], []
        self._done += [(r, PolicyError(f"the torch engine stopped: {self._stopped}")) for r in left]
        for _, _, done in self._swaps:
            if done.set_running_or_notify_cancel():
                done.set_exception(PolicyError(f"the torch engine stopped: {self._stopped}"))
        self._deliver()

    def _deliver(self) -> None:
        """Hand results over, one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Completion | PolicyError]]] = {}
        for request, result in self._done:
            by_loop.setdefault(request.future.get_loop(), []).append((request, result))
        self._done = []
        for loop, results in by_loop.items():
            try:
                loop.call_soon_threadsafe(_resolve, results)
            except RuntimeError:
                _log.debug("an event loop closed before %d results reached it", len(results))


def _resolve(results: Sequence[tuple[Request, Completion | PolicyError]]) -> None:
    for request, result in results:
        if request.future.done():
            continue
        if isinstance(result, PolicyError):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)
