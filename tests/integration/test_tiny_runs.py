"""The embedded model in the shipped envs, end to end: same trees at any concurrency, log-probs that are the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentgym as ag
from agentgym.rollout import journal
from agentgym.rollout.policies import TINY
from agentgym.rollout.policies.torch_policy import TorchPolicy
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer
from agentgym.rollout.tree import Tree
from agentgym.rollout.views import Branch, Forest

torch = pytest.importorskip("torch")
ENVS = ["agentgym/Countdown-v0", "agentgym/Blocksworld-v0", "agentgym/SearchQA-v0"]


def run(env: str, concurrency: int, out: Path) -> Forest:
    """Grow trees with a fresh policy, so that no prefix cache is shared between runs."""
    policy = TorchPolicy.load(TINY, name="tiny", threads=1)
    keys = {"tasks": 3, "step_tasks": 2, "budget": 18, "seed": 5, "max_tokens": 40, "concurrency": concurrency}
    return ag.rollout(env, policy=policy, renderer=Qwen3Renderer(TINY), allocator="trace", out=out, **keys)


@pytest.mark.parametrize("env", ENVS)
def test_concurrency_changes_nothing(env: str, tmp_path: Path) -> None:
    one, many = run(env, 1, tmp_path / "one"), run(env, 64, tmp_path / "many")
    assert one.n_leaves == many.n_leaves == 18
    assert [tree.canonical() for tree in one.trees] == [tree.canonical() for tree in many.trees]
    assert journal.timeless(tmp_path / "one") == journal.timeless(tmp_path / "many")
    assert any(tree.origin[leaf] for tree in many.trees for leaf in tree.leaves)  # there were branches


@pytest.mark.parametrize("env", ENVS)
def test_logprobs_of_branches_are_those_of_the_model(env: str, tmp_path: Path) -> None:
    """Engine against a plain forward pass over the whole path: at most 1e-4 apart at every sampled token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for tree in run(env, 64, tmp_path / "run").trees:
        for leaf in tree.leaves:
            branch = Branch(tree, leaf)
            ids = torch.tensor(branch.token_ids.astype("int64"))[None]
            with torch.inference_mode():
                scores = torch.log_softmax(model(ids).logits[0, :-1].double(), -1)
            mine = torch.tensor(branch.logprobs[1:]).double()
            plain = scores.gather(-1, ids[0, 1:, None])[:, 0]
            mask = torch.tensor(branch.sampled_mask[1:]).bool()
            assert (mine - plain)[mask].abs().max() < 1e-4


def test_the_engine_saw_exactly_what_the_tree_says(tmp_path: Path) -> None:
    policy, renderer = TorchPolicy.load(TINY, threads=1), Qwen3Renderer(TINY)
    seen: list[list[int]] = []
    generate = policy.generate

    async def spy(prompt_ids, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(list(prompt_ids))
        return await generate(prompt_ids, *args, **kwargs)

    policy.generate = spy  # type: ignore[method-assign]
    keys = {"tasks": 2, "budget": 12, "max_tokens": 40}
    forest = ag.rollout("agentgym/SearchQA-v0", policy=policy, renderer=renderer, allocator="trace", **keys)
    sent = [tree.context(tree.parent[n]) for tree in forest.trees for n in sampled_nodes(tree)]
    assert sorted(map(json.dumps, seen)) == sorted(map(json.dumps, sent))


def sampled_nodes(tree: Tree) -> list[int]:
    """Nodes whose message was sampled."""
    return [node for node in range(1, tree.n_nodes) if tree.n_sampled[node]]
