"""Branches as conversations: rows for supervised fine-tuning and for preference learning."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from agentgym.errors import BadInput
from agentgym.messages import parse_message
from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Branch, Forest, SiblingGroup


class Limits(Protocol):
    """What rows are wanted (`agentgym.rollout.export.Selection`)."""

    @property
    def run(self) -> str:
        """Name of the run."""
        ...

    @property
    def counts(self) -> Counter[str]:
        """Where to count what is left out."""
        ...

    def fits(self, tokens: int) -> bool:
        """Whether a row of that many tokens is short enough."""
        ...


def sft_rows(forest: Forest, chosen: Limits) -> Iterator[dict[str, Any]]:
    """Yield `messages` and `tools` for each successful leaf.

    A conversation ends with the policy's last message. Length is that of the branch in tokens.

    Raises:
        BadInput: the run was recorded without texts.
    """
    for key in ("unsuccessful", "overlong_dropped"):
        chosen.counts[key] += 0
    for branch in forest.leaves:
        tree = branch.tree
        if branch.success is not True:
            chosen.counts["unsuccessful"] += 1
        elif not chosen.fits(branch.n_total):
            chosen.counts["overlong_dropped"] += 1
        else:
            yield {
                **_about(chosen.run, tree),
                "leaf": tree.path_key(branch.leaf),
                "messages": [*_opening(tree), *conversation(tree, branch.nodes[1:])],
                "tools": tree.tools,
            }


def pair_rows(forest: Forest, chosen: Limits) -> Iterator[dict[str, Any]]:
    """Yield `prompt`, `chosen` and `rejected` at each node whose continuations differ in success.

    A continuation counts by its own leaf (`SiblingGroup.own_leaf`). At each node the first successful one is paired
    with the first unsuccessful one, the second with the second and so on: each is in one pair at most.

    Raises:
        BadInput: the run was recorded without texts.
    """
    for key in ("unsuccessful", "overlong_dropped"):
        chosen.counts[key] += 0
    for tree in forest.trees:
        chosen.counts["unsuccessful"] += sum(tree.success[leaf] is not True for leaf in tree.leaves)
        for node in tree.walk():
            group = SiblingGroup(tree, node)
            if len(group) < 2:
                continue
            leaves = [leaf for child in group.children if (leaf := group.own_leaf(child)) is not None]
            good = [leaf for leaf in leaves if tree.success[leaf] is True]
            bad = [leaf for leaf in leaves if tree.success[leaf] is False]
            for better, worse in zip(good, bad, strict=False):
                if chosen.fits(max(Branch(tree, better).n_total, Branch(tree, worse).n_total)):
                    yield _pair(chosen.run, tree, node, better, worse)
                else:
                    chosen.counts["overlong_dropped"] += 1


def conversation(tree: Tree, nodes: Sequence[int], *, closed: bool = True) -> list[dict[str, Any]]:
    """Return the messages of consecutive turns.

    Args:
        tree: the arena.
        nodes: the turns, the root not included. Turns for which a limit left no token are skipped.
        closed: leave out the env's answer to the last turn, which no policy saw.

    Raises:
        BadInput: a turn was recorded without its text.
    """
    messages: list[dict[str, Any]] = []
    nodes = [node for node in nodes if tree.n_sampled[node]]
    for node in nodes:
        if node not in tree.texts:
            raise BadInput(f"node {tree.path_key(node)} of {tree.group} was recorded without its text")
        messages.append(_assistant(tree.texts[node]))
        if not closed or node != nodes[-1]:
            messages.extend(dict(message) for message in tree.replies(node))
    return messages


def _assistant(text: str) -> dict[str, Any]:
    """Return an assistant message in the OpenAI form; a text whose calls cannot be read stays a text."""
    message = parse_message(text)
    if not message.tool_calls or any(call.problem is not None for call in message.tool_calls):
        return {"role": "assistant", "content": text}
    calls = [
        {
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in message.tool_calls
    ]
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def _pair(run: str, tree: Tree, node: int, better: int, worse: int) -> dict[str, Any]:
    before = tree.path(node)[1:]
    return {
        **_about(run, tree),
        "node": tree.path_key(node),
        "prompt": [*_opening(tree), *conversation(tree, before, closed=False)],
        "chosen": conversation(tree, tree.path(better)[len(before) + 1 :]),
        "rejected": conversation(tree, tree.path(worse)[len(before) + 1 :]),
        "chosen_leaf": tree.path_key(better),
        "rejected_leaf": tree.path_key(worse),
        "tools": tree.tools,
    }


def _about(run: str, tree: Tree) -> dict[str, Any]:
    return {"run": run, "group": tree.group, "task": tree.task_id, "level": tree.level}


def _opening(tree: Tree) -> list[dict[str, Any]]:
    if not tree.messages:
        raise BadInput(f"tree {tree.group} was recorded without its first messages")
    return [dict(message) for message in tree.messages]
