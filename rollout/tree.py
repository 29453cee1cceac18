"""The rollout tree: a flat, append-only arena of turns.

One `Tree` holds all episodes of one group (one dispatch of one task). A node is one turn: the policy's message and
the env's answer to it. Nodes are numbered in the order in which they were added; node 0 is the root.

Each node stores only what its turn added: first the **sampled** tokens (mask 1, with their behaviour log-probs), then
the **reply** tokens that template and env appended (mask 0: closers, separator, observation, next generation prompt).
The root has no sampled tokens; its reply is the prompt. This deviates from the order of the design ("context, then
sampled") so that siblings share their parent's observation physically: it is stored, prefilled and counted once,
however many continuations start there. The concatenation of all deltas on a path is unchanged by that.

Memory is linear: about 130 bytes for each node, 8 for each sampled token (id and log-prob) and 4 for each reply token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from agentgym.errors import AlignmentError, BadInput, InvalidReward, PolicyError
from agentgym.messages import ChatMessage
from agentgym.rollout import records
from agentgym.rollout.columns import NONE, Columns, Floats, Ints, TokenIds, pack_ids, pack_logprobs
from agentgym.rollout.policies.base import FinishReason, Sampling
from agentgym.rollout.types import Failure, Status, StopReason

JUDGED = frozenset({StopReason.TERMINATED, StopReason.MAX_TURNS})
"""Stop reasons with which the env itself ended the episode, so that its reward is complete."""


class Tree(Columns):
    """All turns of one group.

    Columns are public, parallel and indexed by node (`tree.depth[node]`); read them, and change them only through
    the methods. `N` is the number of nodes.

    Args:
        task_id: the task's id.
        level: name of its difficulty level.
        group: id of the group, unique within the run and made by the runner (never from text).
        index: position of the tree within its step.
        prompt_ids: tokens of the rendered prompt, generation prompt included.
        step: the step that it belongs to.
        messages: the initial messages, for exports that need text.
        tools: the tool schemas, for the same.
        sampling: how its tokens are drawn, where a node does not say otherwise.

    Attributes:
        parent: `[N]` int32, `NONE` for the root.
        ordinal: `[N]` int32, number of the node among its parent's continuations. The ordinals from the root, written
            `0.0.2`, are the node's path; the root's is empty.
        depth: `[N]` int32, 0 for the root.
        origin: `[N]` int32, anchor at which the continuation that made the node started.
        n_sampled: `[N]` int32, number of sampled tokens.
        n_reply: `[N]` int32, number of reply tokens.
        status: `[N]` how it stands.
        stop: `[N]` why the episode ended here; `None` but for leaves.
        success: `[N]` binary outcome of a leaf, `None` where it is unknown.
        reward: `[N]` float64, the env's reward of this turn.
        propensity: `[N]` float64, probability with which the allocator chose the leaf's anchor.
        policy_version: `[N]` int32.
        finish: `[N]` why the engine stopped; `None` for the root and for failures.
        prefilled: `[N]` int32, prompt tokens that were computed for this turn.
        cached: `[N]` int32, prompt tokens that came from a prefix cache.
        attempt: `[N]` uint16, retries before this one.
        sampling: `[N]` uint16, index into `samplings`.
        reset: `[N]` 1 where the reply is a whole re-rendered prompt that does not extend the path: a new training
            row starts there. The root is one.
        samplings: the distinct `Sampling`s in use.
        failure: node -> what failed.
        error: node -> message of the failure.
        texts: node -> text of the policy's message (`text` has a default).
        answers: node -> messages of the env's answer (`replies` has a default).
        tool_calls: node -> one record for each call.
        reward_terms: node -> named terms of the reward.
        cost: node -> the episode's tool cost after this turn, where it is not 0.
        source: node -> one byte for each sampled token, where some were not sampled freely (0: sampled).
        snapshots: node -> the env's state after this turn, until `release`.
    """

    def __init__(
        self,
        task_id: str,
        level: str,
        group: str,
        index: int,
        prompt_ids: TokenIds,
        *,
        step: int = 0,
        messages: Sequence[ChatMessage] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
    ) -> None:
        super().__init__()
        self.task_id, self.level, self.group, self.index, self.step = task_id, level, group, index, step
        self.messages, self.tools = list(messages), list(tools)
        self.samplings = [sampling or Sampling()]
        self._leaves: list[int] | None = None
        self._append(NONE, 0, 0, sampled=array("i"), logprobs=array("f"), reply=pack_ids(prompt_ids))
        self.reset[0] = self._anchor[0] = 1

    # --- growing ----------------------------------------------------------------------------------------------

    def add(
        self,
        parent: int,
        *,
        ordinal: int,
        origin: int,
        token_ids: TokenIds,
        logprobs: Sequence[float] | Floats,
        reply_ids: TokenIds = (),
        finish: FinishReason = FinishReason.STOP,
        reward: float = 0.0,
        policy_version: int = 0,
        prefilled: int = 0,
        cached: int = 0,
        attempt: int = 0,
        sampling: Sampling | None = None,
        reset: bool = False,
        restorable: bool = False,
        snapshot: object | None = None,
        message: str | None = None,
        reply: Sequence[ChatMessage] | None = None,
        tool_calls: Sequence[dict[str, Any]] | None = None,
        reward_terms: Mapping[str, float] | None = None,
        cost: float = 0.0,
        source: bytes | None = None,
    ) -> int:
        """Add a turn and return its node index. Nothing is changed when it raises.

        Args:
            parent: the node it continues. It must be open.
            ordinal: number among the parent's continuations (>= 0).
            origin: anchor of the continuation: the parent itself, or the parent's own origin.
            token_ids: sampled tokens, `[T]`. Empty only where a limit left no room to sample.
            logprobs: their behaviour log-probs, `[T]`.
            reply_ids: tokens that template and env appended, `[O]`; they may come later, by `extend_reply`.
            finish: why the engine stopped.
            reward: the env's reward of this turn.
            policy_version: version of the weights.
            prefilled: prompt tokens that were computed.
            cached: prompt tokens that were found in a prefix cache.
            attempt: retries before this one.
            sampling: how the tokens were drawn, where it is not the tree's default.
            reset: the reply is a whole re-rendered prompt.
            restorable: a continuation can start after this turn (implied by `snapshot`).
            snapshot: the env's state after this turn.
            message: text of the policy's message.
            reply: messages of the env's answer.
            tool_calls: one record for each call of the message.
            reward_terms: named terms of the reward.
            cost: the episode's tool cost so far.
            source: one byte for each sampled token; 0: sampled freely.

        Raises:
            AlignmentError: `token_ids`, `logprobs` and `source` differ in length.
            PolicyError: a log-prob is NaN or infinite.
            InvalidReward: the reward is NaN or infinite.
            BadInput: no such parent, a parent that is a leaf or failed, an ordinal that is taken, a wrong origin.
        """
        after = self._place(parent, ordinal, origin, attempt, failed=False)
        sampled, scores = self._checked(parent, ordinal, token_ids, logprobs, source)
        if not math.isfinite(reward):
            raise InvalidReward(f"node {self._child_name(parent, ordinal)}: reward {reward}")
        node = self._append(
            parent,
            ordinal,
            origin,
            finish=finish,
            sampled=sampled,
            logprobs=scores,
            reply=pack_ids(reply_ids),
            reward=reward,
            version=policy_version,
            prefilled=prefilled,
            cached=cached,
            attempt=attempt,
            sampling=0 if sampling is None else self._intern(sampling),
        )
        self._link(parent, node, after)
        self.reset[node], self._anchor[node] = reset, restorable
        if message is not None:
            self.texts[node] = message
        if reply is not None:
            self.answers[node] = list(reply)
        if snapshot is not None:
            self.snapshots[node] = snapshot
        if source is not None:
            self.source[node] = source
        if tool_calls:
            self.tool_calls[node] = list(tool_calls)
        if reward_terms:
            self.reward_terms[node] = dict(reward_terms)
        if cost:
            self.cost[node] = cost
        return node

    def fail(
        self,
        parent: int,
        *,
        ordinal: int,
        origin: int,
        failure: Failure,
        attempt: int = 0,
        message: str = "",
        token_ids: TokenIds = (),
        logprobs: Sequence[float] | Floats = (),
        policy_version: int = 0,
        prefilled: int = 0,
        cached: int = 0,
    ) -> int:
        """Record that infrastructure failed on a turn after `parent`, and return the node of the failure.

        Another attempt may use the same ordinal. Tokens that were sampled before it failed are kept so that they
        count as spent; they are in no training row.

        Raises:
            AlignmentError: `token_ids` and `logprobs` differ in length.
            PolicyError: a log-prob is NaN or infinite.
            BadInput: as `add` does, or this attempt is recorded already.
        """
        after = self._place(parent, ordinal, origin, attempt, failed=True)
        sampled, scores = self._checked(parent, ordinal, token_ids, logprobs, None)
        node = self._append(
            parent,
            ordinal,
            origin,
            status=Status.FAILED,
            sampled=sampled,
            logprobs=scores,
            reply=array("i"),
            version=policy_version,
            prefilled=prefilled,
            cached=cached,
            attempt=attempt,
        )
        self._link(parent, node, after)
        self.failure[node], self.error[node] = failure, message
        return node

    def end(self, node: int, stop: StopReason, *, success: bool | None = None, propensity: float = 1.0) -> None:
        """Make `node` a leaf: the episode ended here.

        Args:
            node: an open node that nothing continues.
            stop: why.
            success: binary outcome; `None` where it is unknown.
            propensity: probability with which the allocator chose the anchor of this continuation.

        Raises:
            BadInput: the node has ended, has failed or has children; a propensity outside of (0, 1].
        """
        if self.status[node] is not Status.OPEN or self.children(node):
            state = "has children" if self.status[node] is Status.OPEN else f"is {self.status[node]}"
            raise BadInput(f"node {self._name(node)} cannot become a leaf: it {state}")
        if not 0 < propensity <= 1:
            raise BadInput(f"leaf {self._name(node)}: propensity must be in (0, 1], got {propensity}")
        self.status[node], self.stop[node], self.success[node] = Status.LEAF, stop, success
        self.propensity[node] = propensity
        self._leaves = None

    def extend_reply(
        self, node: int, ids: TokenIds, *, messages: Sequence[ChatMessage] = (), reset: bool = False
    ) -> None:
        """Append reply tokens to a node that nothing continues yet.

        Args:
            node: an open node or a leaf.
            ids: tokens, `[O]`.
            messages: what they render, appended to the env's answer.
            reset: the reply is a whole re-rendered prompt. Only for a node without reply tokens.

        Raises:
            BadInput: the node failed, has children (they saw the old context), or has a reply that `reset` would void.
        """
        if self.status[node] is Status.FAILED or self._last_child[node] != NONE:
            raise BadInput(f"the reply of node {self._name(node)} cannot grow: it failed or has children")
        if reset and self.n_reply[node]:
            raise BadInput(f"node {self._name(node)} has {self.n_reply[node]} reply tokens already: it cannot reset")
        self._extend_reply(node, pack_ids(ids))
        if messages:
            self.answers.setdefault(node, []).extend(messages)
        self.reset[node] |= reset

    def release(self) -> None:
        """Let go of all snapshots. `restorable` keeps saying where there was one."""
        for node in self.snapshots:
            self._anchor[node] = 1
        self.snapshots.clear()

    # --- reading ----------------------------------------------------------------------------------------------

    @property
    def prompt_ids(self) -> Ints:
        """Tokens of the prompt, `[P]` int32."""
        return self.reply_ids(0)

    @property
    def leaves(self) -> Sequence[int]:
        """All leaves, scored or not, in path order. Failed attempts are not among them."""
        if self._leaves is None:
            self._leaves = [node for node in self.walk() if self.status[node] is Status.LEAF]
        return self._leaves

    @property
    def failed(self) -> list[int]:
        """Nodes of failed attempts, in path order."""
        return [node for node in self.walk(failed=True) if node in self.failure] if self.failure else []

    @property
    def tips(self) -> list[int]:
        """Open nodes that nothing continues, in path order: where a killed run was cut off."""
        return [node for node in self.walk() if self.status[node] is Status.OPEN and not self.children(node)]

    def is_leaf(self, node: int) -> bool:
        """Whether the episode ended at `node`."""
        return self.status[node] is Status.LEAF

    def scored(self, leaf: int) -> bool:
        """Whether a leaf has an outcome: a known success, or the reward of an episode that the env ended itself."""
        return self.success[leaf] is not None or self.stop[leaf] in JUDGED

    def captured(self, node: int) -> bool:
        """Whether the env's state after this turn was captured (that of the root always is)."""
        return self._anchor[node] != 0 or node in self.snapshots

    def restorable(self, node: int) -> bool:
        """Whether a continuation can start at `node`: its state was captured and it is open."""
        return self.status[node] is Status.OPEN and self.captured(node)

    def success_counts(self, node: int = 0) -> tuple[int, int]:
        """Number of successful and of unsuccessful leaves below `node`; those of unknown success are in neither."""
        leaves = self.leaves if node == 0 else [n for n in self.walk(node) if self.status[n] is Status.LEAF]
        outcomes = [self.success[leaf] for leaf in leaves]
        return outcomes.count(True), outcomes.count(False)

    def text(self, node: int) -> str:
        """Text of the policy's message; empty where none was recorded."""
        return self.texts.get(node, "")

    def replies(self, node: int) -> list[ChatMessage]:
        """Messages of the env's answer; empty where none were recorded."""
        return self.answers.get(node, [])

    def context(self, node: int) -> list[int]:
        """Every token that an engine must be given to continue from `node`: the path since the last reset."""
        nodes = self._since_reset(node)
        tokens: list[int] = self.reply_ids(nodes[0]).tolist()
        for part in nodes[1:]:
            tokens.extend(self.tokens(part).tolist())
        return tokens

    def context_length(self, node: int) -> int:
        """`len(context(node))`, without building it."""
        nodes = self._since_reset(node)
        return sum(self.n_reply[n] for n in nodes) + sum(self.n_sampled[n] for n in nodes[1:])

    def sampled_on_path(self, node: int) -> int:
        """Number of sampled tokens from the root to `node`, both included."""
        return sum(self.n_sampled[n] for n in self.path(node))

    def canonical(self) -> list[Any]:
        """JSON-safe content, equal for equal trees whatever order their nodes were added in.

        The records of the journal in path order, without what depends on timing (clocks, cache hits).
        """
        found = [records.tree(self)]
        for node in self.walk(failed=True):
            if self.status[node] is Status.FAILED:
                found.append(records.failed(self, node))
            elif node:
                found.append(records.node(self, node))
            if self.status[node] is Status.LEAF:
                found.append(records.leaf(self, node))
        return [records.timeless(record) for record in found]

    # --- inside -----------------------------------------------------------------------------------------------

    def _since_reset(self, node: int) -> list[int]:
        nodes = [node]
        while not self.reset[node]:
            node = self.parent[node]
            nodes.append(node)
        nodes.reverse()
        return nodes

    def _name(self, node: int) -> str:
        return f"{self.path_key(node) or 'root'} of {self.group}"

    def _child_name(self, parent: int, ordinal: int) -> str:
        above = self.path_key(parent)
        return f"{above}.{ordinal} of {self.group}" if above else f"{ordinal} of {self.group}"

    def _intern(self, sampling: Sampling) -> int:
        if sampling not in self.samplings:
            self.samplings.append(sampling)
        return self.samplings.index(sampling)

    def _checked(
        self,
        parent: int,
        ordinal: int,
        token_ids: TokenIds,
        logprobs: Sequence[float] | Floats,
        source: bytes | None,
    ) -> tuple[array[int], array[float]]:
        """Pack sampled tokens and log-probs, or say which node is wrong and how."""
        if len(token_ids) != len(logprobs) or (source is not None and len(source) != len(token_ids)):
            marks = "" if source is None else f" and {len(source)} source marks"
            raise AlignmentError(
                f"node {self._child_name(parent, ordinal)}: "
                f"{len(token_ids)} token ids but {len(logprobs)} log-probs{marks}"
            )
        scores = pack_logprobs(logprobs)
        if not math.isfinite(sum(scores)):
            raise PolicyError(f"node {self._child_name(parent, ordinal)}: a log-prob is NaN or infinite")
        return pack_ids(token_ids), scores

    def _place(self, parent: int, ordinal: int, origin: int, attempt: int, *, failed: bool) -> int:
        """Check where a new child goes and return the sibling that it comes before."""
        if not 0 <= parent < len(self.parent):
            raise BadInput(f"{self.group} has no node {parent}: it has {len(self.parent)} nodes")
        if self.status[parent] is not Status.OPEN:
            raise BadInput(f"node {self._name(parent)} is {self.status[parent]}: nothing can be added below it")
        if ordinal < 0 or not 0 <= attempt < 1 << 16:
            raise BadInput(f"below {self._name(parent)}: ordinal {ordinal} and attempt {attempt} must be >= 0")
        if origin not in (parent, self.origin[parent]):
            raise BadInput(
                f"node {self._child_name(parent, ordinal)}: its origin must be the parent {parent} "
                f"or the parent's origin {self.origin[parent]}, not {origin}"
            )
        return self._sibling_after(parent, ordinal, attempt, failed=failed)
