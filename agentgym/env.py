"""The env contract: Gymnasium's `reset` and `step` at the level of text, and `snapshot`, `restore`, `fork`."""

from __future__ import annotations

import hashlib
import math
import pickle
import string
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, TypeAlias

import gymnasium
import numpy as np

from agentgym import seeding
from agentgym.errors import BadInput, EpisodeOver, InvalidReward, ReplayDivergence, SnapshotError, UnsupportedSnapshot
from agentgym.messages import ChatMessage, Message, parse_message
from agentgym.seeding import Rng
from agentgym.tasks import Task, TaskSet
from agentgym.tools import ToolSpec

Action: TypeAlias = str | Message
CallMode: TypeAlias = Literal["inline", "thread", "affine", "async"]
SnapshotKind: TypeAlias = Literal["state", "fork", "layers", "replay"]
Coverage: TypeAlias = Literal["memory", "files", "processes", "external"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended.

    Attributes:
        success: the binary outcome that allocators, filters and reports read; `None` when it cannot be said.
        reward: named terms of the final (shaped) reward; their sum is the reward of the last step. By default
            `{"success": 1.0 or 0.0}`, or nothing when `success` is `None`.
    """

    success: bool | None
    reward: Mapping[str, float] = field(default_factory=dict)

    def terms(self) -> dict[str, float]:
        """Return the reward terms with the default applied."""
        if self.reward or self.success is None:
            return dict(self.reward)
        return {"success": float(self.success)}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that later observations of an episode depend on, at one moment.

    Opaque: made by `Env.snapshot`, read by `Env.restore` of any env of the same class. Immutable, so one snapshot
    can be restored any number of times, in any instance, concurrently.

    Attributes:
        env: qualified class name of the env that made it.
        how: the mechanism.
        covers: what is captured.
        task: the episode's task.
        turn: number of steps taken.
        payload: the captured state (`state`: pickled bytes; `replay`: a `Recording`).
        rng: state of the env's private random generator.
    """

    env: str
    how: SnapshotKind
    covers: frozenset[str]
    task: Task
    turn: int
    payload: Any
    rng: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes of what this snapshot alone keeps in memory."""
        return len(self.payload) if isinstance(self.payload, bytes) else len(pickle.dumps(self.payload))


@dataclass(frozen=True, slots=True)
class Recording:
    """Payload of a `replay` snapshot.

    Attributes:
        seed: the seed of `reset`.
        first: digest of the first observation.
        entries: for each step the pickled action and the digest of its observation; an integer stands for a
            `restore(..., reseed=integer)` at that place.
    """

    seed: int
    first: str
    entries: tuple[tuple[bytes, str] | int, ...]


@dataclass(slots=True)
class _Episode:
    """Counters and limits of the running episode: the part of the state that the base class owns."""

    turn: int = 0
    limit: int = 0
    over: bool = False
    ended: bool = False
    cost: float = 0.0
    observation: str = ""
    success: bool | None = None
    terms: dict[str, float] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)


class TextSpace(gymnasium.Space[Any]):
    """The space of texts (observations) or of texts and messages (actions), of any length and script."""

    def __init__(self, *, messages: bool = False) -> None:
        self._messages = messages
        super().__init__(shape=None, dtype=None)

    def contains(self, x: Any) -> bool:
        """Whether `x` is a text, or a `Message` where messages are allowed."""
        return isinstance(x, str) or (self._messages and isinstance(x, Message))

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return a random printable text of 1 to 40 characters."""
        picks = self.np_random.integers(len(string.printable), size=self.np_random.integers(1, 41))
        return "".join(string.printable[i] for i in picks)

    @property
    def is_np_flattenable(self) -> bool:
        """Texts have no fixed-size array form."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TextSpace) and other._messages == self._messages

    __hash__ = None  # type: ignore[assignment]  # spaces are mutable (they hold a generator)


class Env(gymnasium.Env[str, Action]):
    """An episode of text: the policy writes messages, the env answers with messages.

    Subclasses implement `begin`, `respond` and `judge`, and keep everything that changes during an episode in
    `self.state` (any picklable value) and in `self.np_random`. Then seeding, limits, the info schema, snapshots
    and forks come from this class. `agentgym.testing.check_env` proves it.

    Args:
        split: the split that tasks are drawn from.
        level: a difficulty level of the task set, or `None` for its default mix.
        max_turns: most steps of an episode, or `None` for the class's own.
        render_mode: `"ansi"` or `None`.

    Attributes:
        tasks: the task set (class attribute of each subclass).
        instructions: system prompt; empty for none.
        touches: where the state of an episode lives, of `memory`, `files`, `processes`, `external`. A snapshot that
            does not cover all of it is refused.
        covers: what a snapshot captures, of `memory`, `files`, `processes`, `external`.
        snapshot_by: `state` pickles `self.state`; `replay` re-executes the recorded actions and compares digests
            of the observations; `fork` and `layers` are for envs that override `capture` and `reinstate`.
        calls: how a runner may call it: `inline` (cheap and pure: called in the event loop), `thread` (in a worker
            thread), `affine` (always in the same thread), `async` (has `astep` and so on, see `AsyncEnv`).
    """

    tasks: ClassVar[TaskSet]
    instructions: ClassVar[str] = ""
    max_turns: ClassVar[int] = 32
    touches: ClassVar[frozenset[str]] = frozenset({"memory"})
    covers: ClassVar[frozenset[str]] = frozenset({"memory"})
    snapshot_by: ClassVar[SnapshotKind] = "state"
    calls: ClassVar[CallMode] = "thread"
    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  (declared so by gymnasium.Env)

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments, so that `fork` can make more of the same."""
        env = super().__new__(cls)
        missing = [n for n in ("begin", "respond", "judge") if hasattr(getattr(cls, n), "__isabstractmethod__")]
        if missing:
            raise BadInput(f"{cls.__name__} has to define {', '.join(missing)}")
        env._made_with = (args, kwargs)
        return env

    def __init__(
        self,
        *,
        split: str = "train",
        level: str | None = None,
        max_turns: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.tasks.size(split)
        if level is not None and level not in self.tasks.mix:
            self.tasks.task(split, 0, level)
        if max_turns is not None and max_turns < 1:
            raise BadInput(f"max_turns must be >= 1, got {max_turns}")
        self.split, self.level, self.render_mode = split, level, render_mode
        self._limit = max_turns
        self.observation_space = TextSpace()
        self.action_space = TextSpace(messages=True)
        self.state: Any = None
        self.task: Task | None = None
        self._episode: _Episode | None = None
        self._recording = Recording(0, "", ())
        self._entries: list[tuple[bytes, str] | int] = []
        self._said = b""

    # --- what a subclass writes -------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, task: Task, rng: Rng) -> str | Sequence[ChatMessage]:
        """Set `self.state` for `task` and return the first user message (or several messages)."""

    @abstractmethod
    def respond(self, message: Message) -> str | Sequence[ChatMessage]:
        """Act on a policy message and return the answer (a user message, or several messages).

        Call `finish()` to end the episode, `add_reward(name, value)` for rewards of this turn.
        """

    @abstractmethod
    def judge(self) -> Outcome:
        """Return the outcome; called once, when the episode ends by `finish` or by the turn limit."""

    def turn_limit(self, task: Task) -> int:
        """Most steps of an episode of `task` (when the constructor was not given `max_turns`)."""
        return self.max_turns

    def most_turns(self, task: Task) -> int:
        """Most steps of an episode of `task`, with the constructor's `max_turns` applied."""
        return self._limit or self.turn_limit(task)

    def expert(self, rng: Rng) -> Message | None:
        """Return a good next message, or `None` where the env ships no expert."""
        return None

    def random_valid(self, rng: Rng) -> Message | None:
        """Return a random message that the env accepts as valid, or `None` where it cannot say."""
        return None

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools that the policy may call."""
        return ()

    def finish(self) -> None:
        """End the episode with this step."""
        self._live().ended = True

    def add_reward(self, name: str, value: float) -> None:
        """Add a term to this turn's reward."""
        terms = self._live().terms
        terms[name] = terms.get(name, 0.0) + value

    # --- Gymnasium --------------------------------------------------------------------------------------------

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: seeds the env's private generator. `None` keeps the generator running.
            options: `{"task": id or index or Task}` picks the task; otherwise the generator draws one.

        Returns:
            The first observation, and `info` with the same keys as in `step`.
        """
        return self._started(self._reset(seed, options))

    def step(self, action: Action) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Answer one policy message.

        Args:
            action: the message, parsed, or as text with `<tool_call>` blocks.

        Returns:
            `(observation, reward, terminated, truncated, info)`. `info` always has the keys `success` (`bool` or
            `None`, set at the end), `reward_terms`, `tool_calls` (one record for each call of this turn: `name`,
            `ok`, `error`), `cost` (of the episode so far), `messages` (the observation as chat messages), `task`
            and `level`.

        Raises:
            EpisodeOver: before `reset` and after the end.
            InvalidReward: a reward term is NaN or infinite.
        """
        return self._after(self.respond(self._before(action)))

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._episode = None
        self.state = None

    def render(self) -> str | None:
        """Return the last observation (`render_mode="ansi"`)."""
        return self._episode.observation if self._episode is not None and self.render_mode == "ansi" else None

    # --- snapshots --------------------------------------------------------------------------------------------

    def snapshot(self, *, require: Iterable[str] | None = None) -> Snapshot:
        """Capture the episode as it is now.

        Args:
            require: what must be captured, of `memory`, `files`, `processes`, `external`; by default all that the
                env says it `touches`.

        Raises:
            UnsupportedSnapshot: something required is not covered, or the state cannot be captured.
            EpisodeOver: no episode is running and none has ended.
        """
        missing = (self.touches if require is None else frozenset(require)) - self.covers
        if missing:
            lacking, has = ", ".join(sorted(missing)), ", ".join(sorted(self.covers)) or "nothing"
            raise UnsupportedSnapshot(f"{type(self).__name__} cannot snapshot {lacking}; it covers {has}")
        if self._episode is None or self.task is None:
            raise EpisodeOver("there is nothing to snapshot: call reset first")
        return Snapshot(
            _class_name(self),
            self.snapshot_by,
            self.covers,
            self.task,
            self._episode.turn,
            self.capture(),
            self.np_random.bit_generator.state,
        )

    def restore(self, snapshot: Snapshot, *, reseed: int | None = None) -> None:
        """Go back to `snapshot`; afterwards the same actions give the same observations and rewards.

        Args:
            snapshot: made by an env of the same class.
            reseed: give this branch randomness of its own.

        Raises:
            SnapshotError: the snapshot was made by another class.
            ReplayDivergence: (`replay` only) a re-executed action gave another observation.
        """
        self._check_class(snapshot)
        self.task = snapshot.task
        self.reinstate(snapshot.payload)
        self._set_rng(snapshot, reseed)

    def fork(self, count: int) -> list[Self]:
        """Return `count` independent envs in the same state as this one."""
        here = self.snapshot()
        children = [self._twin() for _ in range(count)]
        for child in children:
            child.restore(here)
        return children

    def capture(self) -> Any:
        """Return the payload of a snapshot. Overridden by envs whose `snapshot_by` is `fork` or `layers`."""
        if self.snapshot_by == "replay":
            return replace(self._recording, entries=tuple(self._entries))
        try:
            return pickle.dumps((self.state, self._episode), protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UnsupportedSnapshot(f"the state of {type(self).__name__} cannot be pickled: {error}") from error

    def reinstate(self, payload: Any) -> None:
        """Set the state from a payload made by `capture`."""
        if self.snapshot_by != "replay":
            self.state, self._episode = pickle.loads(payload)
            return
        self.reset(seed=payload.seed, options={"task": self.task})
        self._compare(payload.first)
        for entry in payload.entries:
            if isinstance(entry, int):
                self._reseed(entry)
            else:
                self.step(pickle.loads(entry[0]))
                self._compare(entry[1])

    def __copy__(self) -> Self:
        """Refuse: a shallow copy would share the state of the episode."""
        raise SnapshotError(f"{type(self).__name__} cannot be copied; use env.fork(n), or snapshot and restore")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent env in the same state."""
        return self.fork(1)[0] if self._episode is not None else self._twin()

    # --- inside -----------------------------------------------------------------------------------------------

    def _twin(self) -> Self:
        args, kwargs = self._made_with
        twin = type(self)(*args, **kwargs)
        twin.spec = self.spec
        return twin

    def _check_class(self, snapshot: Snapshot) -> None:
        if snapshot.env != _class_name(self):
            raise SnapshotError(f"a snapshot of {snapshot.env} cannot be restored in {_class_name(self)}")

    def _set_rng(self, snapshot: Snapshot, reseed: int | None) -> None:
        if reseed is None:
            self.np_random.bit_generator.state = snapshot.rng
        else:
            self._reseed(reseed)

    def _reseed(self, seed: int) -> None:
        self.np_random = seeding.rng(seed)
        if self.snapshot_by == "replay":
            self._entries.append(seed)

    def _compare(self, digest: str) -> None:
        """Raise `ReplayDivergence` unless the last observation has this digest."""
        if self._episode is None or _digest(self._episode.observation) != digest:
            turn = self._episode.turn if self._episode else 0
            shown = self._episode.observation[:200] if self._episode else ""
            raise ReplayDivergence(f"{type(self).__name__}: replayed turn {turn} gave another observation: {shown!r}")

    def _live(self) -> _Episode:
        if self._episode is None:
            raise EpisodeOver("no episode is running: call reset first")
        if self._episode.over:
            raise EpisodeOver("the episode is over: call reset or restore before the next step")
        return self._episode

    def _reset(self, seed: int | None, options: dict[str, Any] | None) -> str | Sequence[ChatMessage]:
        unknown = set(options or ()) - {"task"}
        if unknown:
            raise BadInput(f"unknown reset options {sorted(unknown)}; the only one is 'task'")
        if self.snapshot_by == "replay" and seed is None:
            seed = int(self.np_random.integers(2**63 - 1))
        super().reset(seed=seed)
        self.task = self._pick((options or {}).get("task"))
        self._recording, self._entries = Recording(seed or 0, "", ()), []
        self._episode = _Episode(limit=self.most_turns(self.task))
        return self.begin(self.task, self.np_random)

    def _started(self, message: str | Sequence[ChatMessage]) -> tuple[str, dict[str, Any]]:
        observation, info = self._observe(message)
        if self.snapshot_by == "replay":
            self._recording = replace(self._recording, first=_digest(observation))
        return observation, info

    def _pick(self, choice: Any) -> Task:
        # Drawn in any case, and as 64 bits: `begin` gets the same randomness whether the task was chosen or drawn.
        drawn = int(self.np_random.integers(2**63))
        if isinstance(choice, Task):
            return choice
        if isinstance(choice, str):
            return self.tasks.by_id(choice)
        if choice is None:
            choice = drawn % self.tasks.size(self.split)
        if not isinstance(choice, int | np.integer):
            raise BadInput(f"options['task'] must be a task id, an index or a Task, not {type(choice).__name__}")
        return self.tasks.task(self.split, int(choice), self.level)

    def _before(self, action: Action) -> Message:
        episode = self._live()
        episode.terms, episode.calls = {}, []
        if self.snapshot_by == "replay":
            self._said = pickle.dumps(action)
        return action if isinstance(action, Message) else parse_message(action)

    def _after(self, reply: str | Sequence[ChatMessage]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        episode = self._live()
        episode.turn += 1
        terminated = episode.ended
        truncated = not terminated and episode.turn >= episode.limit
        if terminated or truncated:
            outcome = self.judge()
            episode.success = outcome.success
            for name, value in outcome.terms().items():
                self.add_reward(name, value)
            episode.over = True
        reward = math.fsum(episode.terms.values())
        if not math.isfinite(reward):
            task = self.task.id if self.task else None
            raise InvalidReward(f"{type(self).__name__}, task {task}: reward terms {episode.terms}")
        observation, info = self._observe(reply)
        if self.snapshot_by == "replay":
            self._entries.append((self._said, _digest(observation)))
        return observation, reward, terminated, truncated, info

    def _observe(self, reply: str | Sequence[ChatMessage]) -> tuple[str, dict[str, Any]]:
        episode, task = self._episode, self.task
        if episode is None or task is None:
            raise EpisodeOver("no episode is running: call reset first")
        messages: list[ChatMessage] = [{"role": "user", "content": reply}] if isinstance(reply, str) else list(reply)
        episode.observation = "\n".join(m["content"] for m in messages)
        info = {
            "success": episode.success,
            "reward_terms": episode.terms,
            "tool_calls": episode.calls,
            "cost": episode.cost,
            "messages": messages,
            "task": task.id,
            "level": task.level,
        }
        return episode.observation, info

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]


def _class_name(env: Env) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
