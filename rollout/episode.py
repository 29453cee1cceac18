"""Playing one continuation: restore its anchor, then policy and env in turn, until the episode ends."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentgym import seeding
from agentgym.errors import BadInput, DeadlineExceeded, InvalidReward, PolicyError, ReplayDivergence, SnapshotError
from agentgym.messages import ChatMessage, Message
from agentgym.rollout import records
from agentgym.rollout.columns import pack_ids
from agentgym.rollout.deadlines import Watchdog
from agentgym.rollout.grove import ByReset, Job
from agentgym.rollout.hosts import Host, HostPool, StepResult
from agentgym.rollout.journal import Journal
from agentgym.rollout.ledger import Entry
from agentgym.rollout.policies.base import Completion, FinishReason, Policy, Sampling
from agentgym.rollout.renderers.base import Renderer
from agentgym.rollout.types import Failure, StopReason
from agentgym.stack import StackSnapshot

_ENV_FAILURES: tuple[tuple[type[Exception], Failure], ...] = (
    (DeadlineExceeded, Failure.ENV_TIMEOUT),
    (InvalidReward, Failure.INVALID_REWARD),
    (ReplayDivergence, Failure.REPLAY_DIVERGENCE),
    (SnapshotError, Failure.SNAPSHOT_ERROR),
)


FOREIGN = (Exception, SystemExit, asyncio.CancelledError)
"""What code of envs and engines may raise; see `foreign`."""
_MAX_ERROR_CHARS = 2000
_INFO = ("success", "messages", "tool_calls", "reward_terms", "cost")


def foreign(error: BaseException) -> BaseException:
    """Return what an env or an engine raised; raise it again if it is this rollout that is being cancelled."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error
    return error


class RolloutFailure(Exception):
    """Infrastructure failed during a turn. Internal: `Player` turns it into a failed node.

    Args:
        kind: what failed.
        cause: the exception.
        completion: what was sampled in this turn before it failed, so that it is counted.
    """

    def __init__(self, kind: Failure, cause: BaseException, completion: Completion | None = None) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}"[:_MAX_ERROR_CHARS])
        self.kind = kind
        self.completion = completion or Completion((), (), FinishReason.ABORT)

    @classmethod
    def of_env(cls, error: BaseException, completion: Completion | None = None) -> RolloutFailure:
        """Build the failure of an env call. Raises `error` again if it is this rollout that is being cancelled."""
        error = foreign(error)
        kind = next((kind for error_type, kind in _ENV_FAILURES if isinstance(error, error_type)), Failure.ENV_ERROR)
        return cls(kind, error, completion)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all rollouts of a run share.

    Attributes:
        seed: the run seed.
        policy: generates.
        renderer: messages to tokens and back.
        pool: env hosts.
        sampling: how a message is sampled.
        max_context: most tokens of prompt plus completion.
        max_episode_tokens: most sampled tokens of one episode, over the whole path.
        max_empty: consecutive empty messages that end an episode.
        retries: how often a failed rollout is taken up again.
        policy_deadline: seconds for one message.
        keep_snapshots: keep a snapshot of every turn until the step ends.
        journal: where nodes are written, or `None`.
        counters: `env_steps`, `restores`, `replayed_steps`, and `unstarted`: continuations that the budget left
            nothing for.
    """

    seed: int
    policy: Policy
    renderer: Renderer
    pool: HostPool
    sampling: Sampling
    max_context: int
    max_episode_tokens: float = math.inf
    max_empty: int = 3
    retries: int = 2
    policy_deadline: float = 600.0
    keep_snapshots: bool = False
    journal: Journal | None = None
    counters: Counter[str] = field(default_factory=Counter)


class Player:
    """Plays continuations. Stateless but for what `Setting` holds."""

    def __init__(self, setting: Setting) -> None:
        self._s = setting
        self._watchdog = Watchdog("a message", setting.policy_deadline)

    async def play(self, job: Job, caps: Entry) -> None:
        """Play `job` to its end; what it produced is in the tree and in the journal when this returns.

        A failure is taken up again from the last good node in a fresh env, `retries` times.

        Args:
            job: the continuation.
            caps: the most tokens and env steps that it may spend.
        """
        host: Host | None = None
        try:
            while job.end is None:
                try:
                    if host is None:
                        host = self._acquire()
                        await self._enter(host, job)
                    if job.end is None:
                        await self._turn(host, job, caps)
                except RolloutFailure as failure:
                    self._record_failure(job, failure)
                    if host is not None:
                        await self._s.pool.discard(host)
                        host = None
        except asyncio.CancelledError:
            if host is not None:
                await self._s.pool.discard(host)
            raise
        if host is not None:
            self._s.pool.release(host)

    # --- reaching the anchor ----------------------------------------------------------------------------------

    def _acquire(self) -> Host:
        try:
            return self._s.pool.acquire()
        except FOREIGN as error:  # boundary: the env's constructor
            raise RolloutFailure.of_env(error) from error

    async def _enter(self, host: Host, job: Job) -> None:
        """Bring the env to `job.at`: by snapshot, else by replaying recorded actions from the nearest one."""
        tree, grove = job.grove.tree, job.grove
        replay: list[int] = []
        node = job.at
        while node != 0 and node not in tree.snapshots:
            replay.append(node)
            node = tree.parent[node]
        saved = tree.snapshots.get(node, grove.start)
        try:
            if isinstance(saved, ByReset):
                await self._reset(host, job, saved.seed)
            elif isinstance(saved, StackSnapshot):
                await host.restore(saved)
                self._s.counters["restores"] += 1
            else:
                raise SnapshotError(f"node {tree.path_key(node)} holds a {type(saved).__name__}, not a snapshot")
            for child in reversed(replay):
                if tree.parent[child] == tree.origin[child]:
                    await self._reseed(host, job, tree.path_key(child))
                await self._replay(host, job, child)
            if job.at == job.anchor:
                await self._reseed(host, job, job.key)
        except FOREIGN as error:  # boundary: the env's code
            raise RolloutFailure.of_env(error) from error

    async def _reset(self, host: Host, job: Job, seed: int) -> None:
        opening = (await host.reset(job.grove.task, seed))["messages"]
        recorded = job.grove.tree.messages[-len(opening) :]
        if not _same(opening, recorded):
            raise ReplayDivergence(f"the same reset gave {opening!r}, recorded was {recorded!r}")

    async def _reseed(self, host: Host, job: Job, key: str) -> None:
        """Give the continuation whose first node is `key` its own env randomness."""
        await host.reseed(seeding.derive(self._s.seed, "env", *job.grove.path(key)))

    async def _replay(self, host: Host, job: Job, node: int) -> None:
        tree = job.grove.tree
        message = self._parse(tree.sampled_ids(node).tolist(), tree.finish[node])
        _, _, terminated, truncated, info = await host.step(message)
        self._s.counters["replayed_steps"] += 1
        if not _same(info["messages"], tree.answers[node]):
            raise ReplayDivergence(
                f"replaying node {tree.path_key(node)} gave {info['messages']!r}, recorded was {tree.answers[node]!r}"
            )
        if terminated or truncated:  # the run was killed between the records of the last turn and of the leaf
            self._over(job, terminated, info["success"], new=False)

    # --- one turn ---------------------------------------------------------------------------------------------

    async def _turn(self, host: Host, job: Job, caps: Entry) -> None:
        stop, sampling = self._room(job, caps)
        if stop is not None:
            self._stop_short(job, stop)
            return
        completion = await self._generate(job, sampling)
        message = self._parse(completion.token_ids, completion.finish_reason)
        try:
            self._s.counters["env_steps"] += 1
            result = await host.step(message)
            _check_answer(result)
            over = result[2] or result[3]
            saved = await host.snapshot() if self._s.keep_snapshots and not over else None
        except FOREIGN as error:  # boundary: the env's code
            raise RolloutFailure.of_env(error, completion) from error
        self._add(job, completion, message, result, saved, sampling)

    def _room(self, job: Job, caps: Entry) -> tuple[StopReason | None, Sampling]:
        """Check the limits in the order of `StopReason` and return what the next message may use."""
        usual, tree = self._s.sampling, job.grove.tree
        context = self._s.max_context - len(job.tokens)
        episode = self._s.max_episode_tokens
        if episode < math.inf:
            episode -= tree.sampled_on_path(job.at)
        budget = caps.tokens - job.sampled
        if job.empty >= self._s.max_empty:
            return StopReason.EMPTY_MESSAGE, usual
        if context < 1:
            return StopReason.CONTEXT_LIMIT, usual
        if episode < 1:
            return StopReason.TOKEN_LIMIT, usual
        if budget < 1 or job.steps >= caps.steps:
            return StopReason.BUDGET, usual
        most = int(min(context, episode, budget, usual.max_tokens))
        return None, usual if most == usual.max_tokens else replace(usual, max_tokens=most)

    async def _generate(self, job: Job, sampling: Sampling) -> Completion:
        grove, s = job.grove, self._s
        seed = seeding.derive(s.seed, "policy", *grove.path(job.key, job.attempt))
        request = s.policy.generate(
            job.tokens, sampling, seed=seed, stop=s.renderer.stop_ids, affinity=grove.tree.group
        )
        try:
            completion = await self._watchdog.run(request)
            _check_completion(completion, sampling)
        except DeadlineExceeded as error:
            raise RolloutFailure(Failure.POLICY_TIMEOUT, error) from error
        except FOREIGN as error:  # boundary: the engine's code
            raise RolloutFailure(Failure.POLICY_ERROR, foreign(error)) from error
        return completion

    def _parse(self, token_ids: Sequence[int], finish: FinishReason | None) -> Message:
        return self._s.renderer.parse(token_ids, truncated=finish is not FinishReason.STOP)

    # --- recording --------------------------------------------------------------------------------------------

    def _add(
        self,
        job: Job,
        completion: Completion,
        message: Message,
        result: StepResult,
        saved: StackSnapshot | None,
        sampling: Sampling,
    ) -> None:
        """Append the turn to the tree and to the journal, and end the episode where the env says so."""
        tree, (_, reward, terminated, truncated, info) = job.grove.tree, result
        over = terminated or truncated
        text = self._text(completion)
        reply, reset = ([], False) if over else self._reply(job, completion, text, info["messages"])
        node = tree.add(
            job.at,
            ordinal=job.next_ordinal,
            origin=job.anchor,
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            reply_ids=reply,
            finish=completion.finish_reason,
            reward=reward,
            policy_version=completion.policy_version,
            prefilled=completion.prefilled,
            cached=completion.cached,
            attempt=job.attempt,
            sampling=sampling,
            reset=reset,
            snapshot=saved,
            message=text,
            reply=info["messages"],
            tool_calls=info["tool_calls"],
            reward_terms=info["reward_terms"],
            cost=info["cost"],
        )
        job.advance(node)
        if over:
            self._over(job, terminated, info["success"], new=True)
            return
        job.tokens = reply if reset else [*job.tokens, *completion.token_ids, *reply]
        if self._s.journal is not None:
            self._s.journal.write(records.node(tree, node))

    def _reply(
        self, job: Job, completion: Completion, text: str, messages: Sequence[ChatMessage]
    ) -> tuple[list[int], bool]:
        """Render the env's answer; where the template changes earlier turns, the whole conversation (a new row)."""
        truncated = completion.finish_reason is not FinishReason.STOP
        reply = self._s.renderer.reply(messages, last=completion.token_ids[-1], truncated=truncated)
        if reply is not None:
            return reply, False
        spoken: list[ChatMessage] = [{"role": "assistant", "content": text}, *messages]
        return self._s.renderer.prompt(job.grove.conversation(job.at) + spoken, self._s.pool.tools), True

    def _text(self, completion: Completion) -> str:
        """Return the message's text, for people and for text exports; never encoded again."""
        ids = completion.token_ids
        return self._s.renderer.decode(ids[:-1] if ids[-1] in self._s.renderer.stop_ids else ids)

    def _stop_short(self, job: Job, stop: StopReason) -> None:
        """End the episode by a limit of the run. A continuation that never sampled gets an empty, unscored leaf."""
        if job.at != job.anchor:
            self._end(job, stop, None if stop is StopReason.BUDGET else False, new=False)
            return
        node = job.grove.tree.add(
            job.anchor, ordinal=job.ordinal, origin=job.anchor, token_ids=(), logprobs=(), attempt=job.attempt
        )
        job.advance(node)
        self._end(job, stop, None, new=True)

    def _over(self, job: Job, terminated: bool, success: bool | None, *, new: bool) -> None:
        """End the episode because the env did."""
        self._end(job, StopReason.TERMINATED if terminated else StopReason.MAX_TURNS, success, new=new)

    def _end(self, job: Job, stop: StopReason, success: bool | None, *, new: bool) -> None:
        tree = job.grove.tree
        tree.end(job.at, stop, success=success, propensity=job.propensity)
        job.end = job.at
        if self._s.journal is not None:
            events = [records.node(tree, job.at)] if new else []
            self._s.journal.write(*events, records.leaf(tree, job.at))

    def _record_failure(self, job: Job, failure: RolloutFailure) -> None:
        tree, completion = job.grove.tree, failure.completion
        node = tree.fail(
            job.at,
            ordinal=job.next_ordinal,
            origin=job.anchor,
            failure=failure.kind,
            attempt=job.attempt,
            message=str(failure),
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            policy_version=completion.policy_version,
            prefilled=completion.prefilled,
            cached=completion.cached,
        )
        job.fail(node)
        if job.failures > self._s.retries:
            job.end = node
        if self._s.journal is not None:
            self._s.journal.write(records.failed(tree, node))


def _same(messages: Sequence[ChatMessage], recorded: Sequence[ChatMessage]) -> bool:
    """Whether messages are the recorded ones, as far as a journal can tell."""
    return messages == recorded or records.timeless({"m": messages}) == records.timeless({"m": recorded})


def _check_completion(completion: Completion, sampling: Sampling) -> None:
    """Raise `PolicyError` or `BadInput` for what the tree could not take."""
    if not 1 <= len(completion.token_ids) <= sampling.max_tokens:
        raise PolicyError(
            f"the engine returned {len(completion.token_ids)} tokens, 1 to {sampling.max_tokens} were asked for"
        )
    if not math.isfinite(sum(completion.logprobs)):
        raise PolicyError("a log-prob is NaN or infinite")
    pack_ids(completion.token_ids)


def _check_answer(result: StepResult) -> None:
    """Raise for what the tree could not take: a wrapper around the env may answer anything."""
    _, reward, _, _, info = result
    if not math.isfinite(reward):
        raise InvalidReward(f"reward {reward}")
    missing = [key for key in _INFO if key not in info]
    if missing:
        raise BadInput(f"info lacks {', '.join(missing)}")
