"""Views of trees: a branch as aligned token arrays, the children of a node, all trees of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from agentgym.errors import AlignmentError, BadInput
from agentgym.rollout.columns import Floats, Ints
from agentgym.rollout.tree import Tree
from agentgym.rollout.types import StopReason

if TYPE_CHECKING:
    import networkx

Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Row:
    """One token sequence that the engine saw and continued: what one training row is made of.

    Attributes:
        token_ids: `[L]` int32, prompt and response.
        sampled_mask: `[L]` bool, true where the policy sampled the token.
        logprobs: `[L]` float32, behaviour log-probs; 0 where the mask is false.
        versions: `[L]` int32, policy version; -1 where the mask is false.
        node_ids: `[L]` int32, node that the token belongs to.
        n_prompt: length of the prompt. The response is the rest; unless it is empty, it ends with a sampled token.

    Raises:
        AlignmentError: the arrays differ in length, or the prompt has a sampled token.
    """

    token_ids: Ints
    sampled_mask: Bools
    logprobs: Floats
    versions: Ints
    node_ids: Ints
    n_prompt: int

    def __post_init__(self) -> None:
        lengths = [len(self.token_ids), *map(len, (self.sampled_mask, self.logprobs, self.versions, self.node_ids))]
        if len(set(lengths)) > 1 or self.n_prompt > lengths[0]:
            raise AlignmentError(f"a row's columns have lengths {lengths}, its prompt has length {self.n_prompt}")
        if self.sampled_mask[: self.n_prompt].any():
            raise AlignmentError("a row's prompt has sampled tokens")

    @property
    def prompt_ids(self) -> Ints:
        """`[P]` int32."""
        return self.token_ids[: self.n_prompt]

    @property
    def response_ids(self) -> Ints:
        """`[L - P]` int32, sampled tokens and observations."""
        return self.token_ids[self.n_prompt :]

    def head(self, length: int) -> Row:
        """The first `length` tokens, which must contain the prompt."""
        return Row(
            self.token_ids[:length],
            self.sampled_mask[:length],
            self.logprobs[:length],
            self.versions[:length],
            self.node_ids[:length],
            self.n_prompt,
        )

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return int(self.sampled_mask.sum())

    @property
    def n_total(self) -> int:
        """Number of tokens, the prompt included."""
        return len(self.token_ids)

    @property
    def n_observation(self) -> int:
        """Number of tokens of the response that were not sampled."""
        return self.n_total - self.n_prompt - self.n_sampled


class Branch:
    """The path from the root to a node, as the engine saw it.

    Token arrays are aligned and end with the last sampled token: no engine saw the reply after it. On a path with
    resets they are those of all rows, one after the other.

    Args:
        tree: the arena.
        leaf: a leaf, or any other node that did not fail.
    """

    def __init__(self, tree: Tree, leaf: int) -> None:
        if leaf in tree.failure:
            raise BadInput(f"node {tree.path_key(leaf)} of {tree.group} is a failed attempt: it has no branch")
        self.tree, self.leaf, self.nodes = tree, leaf, tree.path(leaf)

    @cached_property
    def rows(self) -> Sequence[Row]:
        """The branch as rows: one, and one more for each reset before the last turn."""
        resets = [i for i, node in enumerate(self.nodes) if self.tree.reset[node]]
        bounds = zip(resets, [*resets[1:], len(self.nodes) - 1], strict=True)
        return [_row(self.tree, self.nodes[a : b + 1]) for a, b in bounds if b > a or len(self.nodes) == 1]

    @property
    def token_ids(self) -> Ints:
        """`[L]` int32, prompt and response."""
        return np.concatenate([row.token_ids for row in self.rows])

    @property
    def sampled_mask(self) -> Bools:
        """`[L]` bool, true where the policy sampled the token."""
        return np.concatenate([row.sampled_mask for row in self.rows])

    @property
    def logprobs(self) -> Floats:
        """`[L]` float32, behaviour log-probs; 0 where the mask is false."""
        return np.concatenate([row.logprobs for row in self.rows])

    @property
    def versions(self) -> Ints:
        """`[L]` int32, policy version; -1 where the mask is false."""
        return np.concatenate([row.versions for row in self.rows])

    @property
    def node_ids(self) -> Ints:
        """`[L]` int32, node that the token belongs to."""
        return np.concatenate([row.node_ids for row in self.rows])

    @property
    def prompt_ids(self) -> Ints:
        """`[P]` int32, the prompt at the root."""
        return self.tree.prompt_ids

    @property
    def response_ids(self) -> Ints:
        """`[L - P]` int32, what follows the prompt."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def n_turns(self) -> int:
        """Number of policy messages."""
        return sum(self.tree.n_sampled[node] > 0 for node in self.nodes)

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(self.tree.n_sampled[node] for node in self.nodes)

    @property
    def n_observation(self) -> int:
        """Number of tokens of the responses that were not sampled."""
        return sum(row.n_observation for row in self.rows)

    @property
    def n_total(self) -> int:
        """Number of tokens of all rows, prompts included."""
        return sum(row.n_total for row in self.rows)

    @property
    def rewards(self) -> list[float]:
        """Raw reward of each turn, as the env gave it."""
        return [self.tree.reward[node] for node in self.nodes[1:]]

    @property
    def reward(self) -> float | None:
        """Sum of the rewards on the path; `None` for a leaf without an outcome."""
        return sum(self.rewards) if self.tree.scored(self.leaf) else None

    @property
    def reward_terms(self) -> dict[str, float]:
        """Named terms of the reward, summed over the path."""
        terms: Counter[str] = Counter()
        for node in self.nodes:
            for name, value in self.tree.reward_terms.get(node, {}).items():
                terms[name] += value  # type: ignore[assignment]  # a Counter adds floats as well
        return dict(terms)

    @property
    def success(self) -> bool | None:
        """Binary outcome, `None` where it is unknown."""
        return self.tree.success[self.leaf]

    @property
    def stop(self) -> StopReason | None:
        """Why the episode ended; `None` if it has not."""
        return self.tree.stop[self.leaf]


class SiblingGroup:
    """The continuations of one node that did not fail, in the order of their ordinals."""

    def __init__(self, tree: Tree, node: int) -> None:
        self.tree, self.node, self.children = tree, node, tree.children(node)

    def __len__(self) -> int:
        return len(self.children)

    def own_leaf(self, child: int) -> int | None:
        """The leaf of the continuation that made `child`; `None` if it has none (cut off, or it failed).

        It is found by following the children with the same origin.
        """
        tree, node = self.tree, child
        while not tree.is_leaf(node):
            following = [c for c in tree.children(node) if tree.origin[c] == tree.origin[child]]
            if not following:
                return None
            node = following[0]
        return node

    @property
    def outcomes(self) -> list[bool | None]:
        """Success of each child's own continuation, `None` where it is unknown."""
        leaves = map(self.own_leaf, self.children)
        return [None if leaf is None else self.tree.success[leaf] for leaf in leaves]


class Forest:
    """All trees of a run.

    Args:
        trees: the trees.
        manifest: the run's manifest.
        counters: what the run spent apart from tokens: `env_steps`, `restores`, `replayed_steps`, `seconds`.
    """

    def __init__(
        self,
        trees: Sequence[Tree],
        manifest: Mapping[str, Any] | None = None,
        counters: Mapping[str, float] | None = None,
    ) -> None:
        self.trees, self.manifest, self.counters = list(trees), dict(manifest or {}), dict(counters or {})

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a run folder.

        Raises:
            BadInput: it has no journal.
            JournalError: the journal is damaged.
        """
        from agentgym.rollout import journal, manifest

        trees, counters = journal.project(folder)
        return cls(trees, manifest.read(folder), counters)

    @property
    def leaves(self) -> Iterator[Branch]:
        """All leaves as branches, by tree and path. Failed attempts are not among them."""
        return (Branch(tree, leaf) for tree in self.trees for leaf in tree.leaves)

    @property
    def n_leaves(self) -> int:
        """Number of leaves, scored or not."""
        return sum(len(tree.leaves) for tree in self.trees)

    @property
    def n_failed(self) -> int:
        """Number of failed attempts."""
        return sum(len(tree.failure) for tree in self.trees)

    def to_networkx(self) -> networkx.DiGraph[tuple[str, str]]:
        """Return one directed graph. Nodes are `(group, path)`, with text, status, reward and counts as attributes."""
        import networkx

        graph: networkx.DiGraph[tuple[str, str]] = networkx.DiGraph()
        for tree in self.trees:
            for node in tree.walk(failed=True):
                key = (tree.group, tree.path_key(node))
                graph.add_node(key, **_attributes(tree, node))
                if node:
                    graph.add_edge((tree.group, tree.path_key(tree.parent[node])), key)
        return graph


def _attributes(tree: Tree, node: int) -> dict[str, Any]:
    return {
        "task": tree.task_id,
        "depth": tree.depth[node],
        "status": tree.status[node],
        "stop": tree.stop[node],
        "success": tree.success[node],
        "reward": tree.reward[node],
        "n_sampled": tree.n_sampled[node],
        "n_reply": tree.n_reply[node],
        "text": tree.text(node),
    }


def _row(tree: Tree, nodes: Sequence[int]) -> Row:
    """Build the row that starts with the reply of `nodes[0]` and ends with the last sampled token."""
    while len(nodes) > 1 and not tree.n_sampled[nodes[-1]]:
        nodes = nodes[:-1]
    prompt, turns = tree.reply_ids(nodes[0]), nodes[1:]
    parts: list[Ints] = [prompt]
    lengths, logprobs = [len(prompt)], [np.zeros(len(prompt), np.float32)]
    versions, owners, masks = [-1], [nodes[0]], [False]
    for node in turns:
        reply = tree.reply_ids(node) if node != nodes[-1] else tree.reply_ids(node)[:0]
        parts += [tree.sampled_ids(node), reply]
        lengths += [tree.n_sampled[node], len(reply)]
        logprobs += [tree.logprobs(node), np.zeros(len(reply), np.float32)]
        versions += [tree.policy_version[node], -1]
        owners += [node, node]
        masks += [True, False]
    return Row(
        np.concatenate(parts),
        np.repeat(masks, lengths),
        np.concatenate(logprobs),
        np.repeat(np.array(versions, np.int32), lengths),
        np.repeat(np.array(owners, np.int32), lengths),
        len(prompt),
    )
