"""Throughput of the `torch` policy against plain `model.generate`, and what the shared prefix cache saves.

    python bench/torch_policy.py [--model PATH] [--json FILE] [--concurrency 1 16 64]

Multi-turn episodes: a prompt of about 150 tokens, 6 turns of 12 sampled tokens, about 30 observation tokens between
turns. Baselines on the same model in the same run: (a) `model.generate` one episode at a time, (b) lock-step
left-padded `model.generate` over all episodes; both prefill the whole context anew each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agentgym.rollout.policies.base import Completion, Sampling
from agentgym.rollout.policies.kv_cache import common_prefix
from agentgym.rollout.policies.torch_load import vocab_size
from agentgym.rollout.policies.torch_policy import TorchPolicy
from agentgym.seeding import Rng, derive, rng

TURNS, SAMPLED = 6, 12
Plan = list[list[int]]
"""One episode: the prompt, then the observation after each turn but the last."""


def random_model() -> PreTrainedModel:
    """Return a random model of the shipped model's shape."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=160,
        num_hidden_layers=5,
        num_attention_heads=5,
        num_key_value_heads=5,
        intermediate_size=512,
        vocab_size=2600,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.08,
    )
    model: PreTrainedModel = Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]
    model.train(False)
    return model


def plans(count: int, vocab: int) -> list[Plan]:
    """Return `count` seeded episodes that share an 80-token system prompt."""
    stream = rng(0, "bench", count)
    system = _ids(stream, 80, vocab)
    return [
        [
            system + _ids(stream, int(stream.integers(55, 86)), vocab),
            *(_ids(stream, int(stream.integers(22, 39)), vocab) for _ in range(TURNS - 1)),
        ]
        for _ in range(count)
    ]


def _ids(stream: Rng, count: int, vocab: int) -> list[int]:
    ids: list[int] = stream.integers(0, vocab, count).tolist()
    return ids


async def run_policy(policy: TorchPolicy, episodes: list[Plan]) -> int:
    """Play all episodes concurrently; return the number of sampled tokens."""

    async def play(index: int, plan: Plan) -> int:
        context, count = [], 0
        for turn, given in enumerate(plan):
            context += given
            done = await policy.generate(context, Sampling(max_tokens=SAMPLED), seed=derive(0, index, turn))
            context += done.token_ids
            count += len(done.token_ids)
        return count

    return sum(await asyncio.gather(*(play(i, plan) for i, plan in enumerate(episodes))))


@torch.inference_mode()
def run_generate(model: PreTrainedModel, episodes: list[Plan]) -> int:
    """Play the episodes in lock step with left-padded `model.generate`; return the number of sampled tokens."""
    contexts: list[list[int]] = [[] for _ in episodes]
    count = 0
    for turn in range(TURNS):
        for context, plan in zip(contexts, episodes, strict=True):
            context += plan[turn]
        width = max(map(len, contexts))
        ids = torch.tensor([[0] * (width - len(c)) + c for c in contexts], device=model.device)
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts], device=model.device)
        generate: Any = model.generate
        output = generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            min_new_tokens=SAMPLED,
            max_new_tokens=SAMPLED,
            pad_token_id=0,
        )
        for context, row in zip(contexts, output[:, width:].tolist(), strict=True):
            context += row
            count += len(row)
    return count


def timed(play: Callable[[], int], repeats: int) -> float:
    """Return the best tokens per second of `repeats` runs."""
    best = 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        tokens = play()
        best = max(best, tokens / (time.perf_counter() - start))
    return best


async def policy_rate(model: PreTrainedModel, episodes: list[Plan], repeats: int) -> float:
    """Return the best tokens per second of the policy, a fresh one (empty cache) each run; loading is not timed."""
    best = 0.0
    for _ in range(repeats):
        policy = TorchPolicy(model)
        start = time.perf_counter()
        tokens = await run_policy(policy, episodes)
        best = max(best, tokens / (time.perf_counter() - start))
        await policy.aclose()
    return best


def throughput(model: PreTrainedModel, count: int, repeats: int) -> dict[str, float]:
    """Measure the policy and both baselines on `count` concurrent episodes."""
    episodes = plans(count, vocab_size(model))
    singles = episodes[:4]
    run_generate(model, singles[:1])
    result = {
        "concurrency": float(count),
        "policy": asyncio.run(policy_rate(model, episodes, repeats)),
        "generate_one_by_one": timed(lambda: sum(run_generate(model, [plan]) for plan in singles), repeats),
        "generate_lock_step": timed(lambda: run_generate(model, episodes), repeats),
    }
    result["x_one_by_one"] = result["policy"] / result["generate_one_by_one"]
    result["x_lock_step"] = result["policy"] / result["generate_lock_step"]
    return result


async def tree_saving(model: PreTrainedModel, trees: int = 2) -> dict[str, float]:
    """Grow trees (8 siblings from one prompt, then 2 continuations from the middle turn of each); count prefill.

    The theoretical saving is, per request, its longest common prefix with any earlier prompt plus completion.
    """
    policy = TorchPolicy(model)
    vocab = vocab_size(model)
    stream = rng(0, "bench", "tree")
    seen: list[list[int]] = []
    total = possible = 0

    async def grow(contexts: list[list[int]], turns: int, label: str) -> list[list[int]]:
        nonlocal total, possible
        for turn in range(turns):
            done: list[Completion] = await asyncio.gather(
                *(
                    policy.generate(c, Sampling(max_tokens=SAMPLED), seed=derive(0, label, i, turn))
                    for i, c in enumerate(contexts)
                )
            )
            for context, completion in zip(contexts, done, strict=True):
                total += len(context)
                possible += max((common_prefix(context, other) for other in seen), default=0)
                seen.append(context + list(completion.token_ids))
            contexts = [c + list(d.token_ids) + _ids(stream, 30, vocab) for c, d in zip(contexts, done, strict=True)]
        return contexts

    for tree in range(trees):
        seen = []
        middle = await grow([_ids(stream, 150, vocab)] * 8, TURNS // 2, f"{tree}/roots")
        await grow(middle, TURNS // 2, f"{tree}/rest")
        for node, start in enumerate(middle):
            await grow([start] * 2, TURNS // 2, f"{tree}/{node}")
    stats = policy.stats()
    await policy.aclose()
    return {
        "prompt_tokens": total,
        "prefilled_tokens": stats.prefilled_tokens,
        "cached_share": stats.cached_tokens / total,
        "theoretical_share": possible / total,
    }


def report(rows: list[dict[str, float]], saving: dict[str, float]) -> None:
    """Print both tables."""
    console = Console()
    table = Table(title="sampled tokens per second, multi-turn episodes")
    for column in ("episodes", "torch policy", "(a) one by one", "(b) lock step", "vs (a)", "vs (b)"):
        table.add_column(column, justify="right")
    for r in rows:
        rates = [f"{r[k]:.0f}" for k in ("concurrency", "policy", "generate_one_by_one", "generate_lock_step")]
        table.add_row(*rates, f"{r['x_one_by_one']:.1f}x", f"{r['x_lock_step']:.1f}x")
    console.print(table)
    console.print(
        f"tree workload: {saving['prompt_tokens']} prompt tokens, {saving['prefilled_tokens']} prefilled; "
        f"cached {saving['cached_share']:.1%} of them, theoretically {saving['theoretical_share']:.1%}"
    )


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder; a random model of the shipped shape by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", default="bench/results/torch_policy.json", help="where the figures go")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=2, help="runs of each, the best counts")
    args = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(args.model) if args.model else random_model()
    model = model.to(args.device, torch.float32 if args.device == "cpu" else torch.bfloat16).eval()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    rows = [throughput(model, count, args.repeats) for count in args.concurrency]
    saving = asyncio.run(tree_saving(model))
    report(rows, saving)
    machine = {"cpus": os.cpu_count(), "machine": platform.machine(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    target = Path(args.json)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(
        json.dumps({"throughput": rows, "tree": saving, "machine": machine, "versions": versions}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
