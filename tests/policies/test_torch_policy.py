"""The torch policy: correctness against the plain forward pass, batching, sharing, determinism, faults."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from agentgym.errors import BadInput, PolicyError
from agentgym.rollout.policies.base import Completion, FinishReason, Policy, Sampling
from agentgym.rollout.policies.torch_policy import TorchPolicy
from agentgym.seeding import derive, rng

T = TypeVar("T")
VOCAB = 97
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def small(seed: int = 0, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, **changes}))


def ids(count: int, *path: int | str) -> list[int]:
    tokens: list[int] = rng(0, "test", *path).integers(0, VOCAB, count).tolist()
    return tokens


def with_policy(play: Callable[[TorchPolicy], Awaitable[T]], model: PreTrainedModel | None = None, **options: Any) -> T:
    async def session() -> T:
        policy = TorchPolicy(model or small(), **options)
        try:
            return await asyncio.wait_for(play(policy), 60)
        finally:
            await policy.aclose()

    return asyncio.run(session())


def one(prompt: Sequence[int], how: Sampling, model: PreTrainedModel | None = None, **call: Any) -> Completion:
    return with_policy(lambda policy: policy.generate(prompt, how, **{"seed": 0, **call}), model)


def plain_logprobs(model: PreTrainedModel, prompt: list[int], tokens: Sequence[int], temperature: float) -> list[float]:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + list(tokens)])).logits[0].double() / temperature
    lines = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    picked: list[float] = lines.gather(-1, torch.tensor(list(tokens)).unsqueeze(-1))[:, 0].tolist()
    return picked


async def started(policy: TorchPolicy) -> None:
    """Wait until the engine thread has begun to compute."""
    while not policy.stats().steps:  # noqa: ASYNC110 (the engine offers no event)
        await asyncio.sleep(0.001)


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": small,
    "qwen2-gqa": lambda: small(num_attention_heads=4, num_key_value_heads=2),
    "qwen2-eager": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, attn_implementation="eager")),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=128)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=32, sliding_window=128)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=2, n_positions=256)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(**{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"})
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_are_those_of_the_plain_forward_pass(name: str) -> None:
    torch.manual_seed(1)
    model = MODELS[name]()
    prompts = [ids(length, name, length) for length in (1, 17, 60)]
    how = Sampling(temperature=0.8, max_tokens=8)

    async def play(policy: TorchPolicy) -> list[Completion]:
        return await asyncio.gather(*(policy.generate(p, how, seed=i) for i, p in enumerate(prompts)))

    for prompt, done in zip(prompts, with_policy(play, model), strict=True):
        assert list(done.logprobs) == pytest.approx(plain_logprobs(model, prompt, done.token_ids, 0.8), abs=1e-4)


def test_greedy_equals_generate() -> None:
    model, prompt = small(), ids(20, "greedy")
    done = one(prompt, Sampling(temperature=0, max_tokens=12), model)
    plain = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None
    )
    assert list(done.token_ids) == plain[0, 20:].tolist()


@pytest.mark.parametrize(
    "model",
    [
        BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2)),
        MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)),
    ],
    ids=["alibi", "state-space"],
)
def test_a_model_that_cannot_be_run_correctly_is_refused_before_work(model: PreTrainedModel) -> None:
    with pytest.raises(BadInput, match=type(model).__name__):
        TorchPolicy(model)


def test_it_is_a_policy() -> None:
    assert isinstance(TorchPolicy(small()), Policy)


# -- determinism


def workload(concurrency: int, **options: Any) -> list[tuple[Any, ...]]:
    """104 two-turn episodes (208 requests) with shared prefixes, mixed sampling, in a shuffled order."""
    system = ids(40, "system")
    prompts = [system + ids(3 + 5 * task, "task", task) for task in range(13) for _ in range(8)]
    order = rng(0, "order", concurrency).permutation(len(prompts)).tolist()

    async def play(policy: TorchPolicy) -> list[tuple[Any, ...]]:
        gate = asyncio.Semaphore(concurrency)
        results: dict[int, tuple[Any, ...]] = {}

        async def episode(index: int) -> None:
            async with gate:
                how = Sampling(max_tokens=2 + index % 5, top_logprobs=index % 3, top_p=0.9 if index % 4 == 0 else 1.0)
                first = await policy.generate(prompts[index], how, seed=derive(1, index), stop=(5, 6))
                after = [*prompts[index], *first.token_ids, *ids(9, "observation", index % 16)]
                draft = (3, 4) if index % 6 == 0 else None
                second = await policy.generate(after, how, seed=derive(2, index), draft=draft)
            results[index] = tuple(
                (tuple(c.token_ids), tuple(c.logprobs), c.finish_reason, c.top_logprobs) for c in (first, second)
            )

        await asyncio.gather(*(episode(i) for i in order))
        return [results[i] for i in range(len(prompts))]

    return with_policy(play, **options)


def test_tokens_and_logprobs_are_equal_at_concurrency_1_and_64() -> None:
    """208 requests: equal ids and float32-equal log-probs whatever the batch, the order and the cache."""
    wide = workload(64)
    assert wide == workload(1)
    assert wide == workload(64, cache_bytes=100_000)
    assert wide == workload(7, cache_bytes=0)


def test_other_seed_other_tokens() -> None:
    prompt, how = ids(10), Sampling(max_tokens=20)
    assert one(prompt, how, seed=1).token_ids != one(prompt, how, seed=2).token_ids


# -- the shared cache


def test_eight_samples_of_one_prompt_prefill_it_once() -> None:
    prompt = ids(60)

    async def play(policy: TorchPolicy) -> list[Completion]:
        return await asyncio.gather(*(policy.generate(prompt, Sampling(max_tokens=4), seed=i) for i in range(8)))

    done = with_policy(play)
    assert sorted(c.prefilled for c in done) == [1] * 7 + [60]
    assert all(c.prefilled + c.cached == 60 for c in done)


def test_continuation_and_branch_reuse_the_path_and_other_tasks_the_system_prompt() -> None:
    system, how = ids(50, "system"), Sampling(max_tokens=5)

    async def play(policy: TorchPolicy) -> tuple[Completion, ...]:
        first = await policy.generate([*system, 1, 2], how, seed=0)
        path = [*system, 1, 2, *first.token_ids]
        deeper = await policy.generate([*path, 7, 8], how, seed=1)
        branch = await policy.generate([*path[:-2], 9], how, seed=2)
        other = await policy.generate(system + [3] * 30, how, seed=3)
        stats = policy.stats()
        done = (first, deeper, branch, other)
        assert stats.requests == 4
        assert (stats.prefilled_tokens, stats.cached_tokens) == (
            sum(c.prefilled for c in done),
            sum(c.cached for c in done),
        )
        assert stats.sampled_tokens == 20
        assert stats.cache_bytes > 0
        return done

    first, deeper, branch, other = with_policy(play)
    assert (first.cached, first.prefilled) == (0, 52)
    assert deeper.cached == 52 + 4, "all but the last sampled token, whose keys were never computed"
    assert branch.cached == 52 + 3
    assert other.cached == 50


def test_cache_stays_within_its_bytes() -> None:
    async def play(policy: TorchPolicy) -> None:
        for i in range(6):
            await policy.generate(ids(80, i), Sampling(max_tokens=3), seed=i)
        stats = policy.stats()
        assert stats.cache_bytes <= 200_000
        assert stats.evictions > 0

    with_policy(play, cache_bytes=200_000)


# -- ends


def test_stop_token_is_kept_and_ends_the_message() -> None:
    prompt = ids(8)
    free = one(prompt, Sampling(max_tokens=10), seed=4)
    stop = free.token_ids[3]
    done = one(prompt, Sampling(max_tokens=10), seed=4, stop=(VOCAB - 1, stop))
    end = list(free.token_ids).index(stop) + 1
    assert (list(done.token_ids), done.finish_reason) == (list(free.token_ids)[:end], FinishReason.STOP)


def test_max_tokens_and_the_end_of_the_context_are_length() -> None:
    short = one(ids(8), Sampling(max_tokens=3))
    assert (len(short.token_ids), short.finish_reason) == (3, FinishReason.LENGTH)
    full = one(ids(250), Sampling(max_tokens=50))
    assert (len(full.token_ids), full.finish_reason) == (6, FinishReason.LENGTH)


def test_long_prompts_are_prefilled_in_pieces() -> None:
    model, prompt = small(max_position_embeddings=4096), ids(2100)
    done = one(prompt, Sampling(max_tokens=2), model)
    assert list(done.logprobs) == pytest.approx(plain_logprobs(model, prompt, done.token_ids, 1.0), abs=1e-4)


# -- drafts and top log-probs


def test_draft_is_taken_as_if_sampled() -> None:
    model, prompt = small(), ids(12)
    free = one(prompt, Sampling(max_tokens=9), model, seed=6)
    done = one(prompt, Sampling(max_tokens=9), model, seed=6, draft=free.token_ids[:4])
    assert (done.token_ids, done.logprobs) == (free.token_ids, free.logprobs)
    other = one(prompt, Sampling(max_tokens=9, top_k=1), model, draft=[11, 12])
    assert (list(other.token_ids[:2]), len(other.token_ids)) == ([11, 12], 9)
    assert list(other.logprobs[:2]) == pytest.approx(plain_logprobs(model, prompt, [11, 12], 1.0), abs=1e-4)


def test_stop_token_and_limit_inside_a_draft() -> None:
    stopped = one(ids(12), Sampling(max_tokens=9), draft=[1, 2, 3], stop=(2,))
    assert (list(stopped.token_ids), stopped.finish_reason) == ([1, 2], FinishReason.STOP)
    cut = one(ids(12), Sampling(max_tokens=2), draft=[1, 2, 3])
    assert (list(cut.token_ids), cut.finish_reason) == ([1, 2], FinishReason.LENGTH)


def test_top_logprobs_on_request_only() -> None:
    done = one(ids(12), Sampling(temperature=0, max_tokens=3, top_logprobs=4))
    assert done.top_logprobs is not None
    assert [len(top) for top in done.top_logprobs] == [4, 4, 4]
    assert [top[0] for top in done.top_logprobs] == list(zip(done.token_ids, done.logprobs, strict=True))
    assert one(ids(12), Sampling(max_tokens=3)).top_logprobs is None


# -- faults


def test_failing_model_fails_its_requests_and_the_engine_lives() -> None:
    model = small()
    forward, calls = model.forward, 0

    def flaky(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return forward(*args, **kwargs)

    async def play(policy: TorchPolicy) -> None:
        model.forward = flaky  # type: ignore[method-assign]
        jobs = (policy.generate(ids(9, i), Sampling(max_tokens=6), seed=i) for i in range(3))
        failed = await asyncio.gather(*jobs, return_exceptions=True)
        assert all(isinstance(f, PolicyError) and "out of memory" in str(f) for f in failed)
        good = await policy.generate(ids(9), Sampling(max_tokens=6), seed=0)
        assert len(good.token_ids) == 6

    with_policy(play, model)


def test_logits_that_are_not_finite_are_a_policy_error() -> None:
    model = small()

    async def play(policy: TorchPolicy) -> None:
        with torch.no_grad():
            model.lm_head.weight[3, 0] = float("nan")
        with pytest.raises(PolicyError, match="not finite"):
            await policy.generate(ids(5), Sampling(max_tokens=3), seed=0)

    with_policy(play, model)


def test_cancelling_frees_the_slot() -> None:
    async def play(policy: TorchPolicy) -> Completion:
        endless = asyncio.create_task(policy.generate(ids(5), Sampling(max_tokens=200), seed=0))
        await started(policy)
        endless.cancel()
        with pytest.raises(asyncio.CancelledError):
            await endless
        done = await policy.generate(ids(5), Sampling(max_tokens=2), seed=0)
        assert policy.stats().requests == 1
        return done

    assert len(with_policy(play, max_batch=1).token_ids) == 2


def test_more_requests_than_slots() -> None:
    async def play(policy: TorchPolicy) -> list[Completion]:
        return await asyncio.gather(
            *(policy.generate(ids(5 + i, i), Sampling(max_tokens=3), seed=i) for i in range(11))
        )

    assert [len(c.token_ids) for c in with_policy(play, max_batch=3)] == [3] * 11


def test_close_is_idempotent_fails_what_runs_and_refuses_more() -> None:
    async def play(policy: TorchPolicy) -> None:
        running = asyncio.create_task(policy.generate(ids(5), Sampling(max_tokens=200), seed=0))
        await started(policy)
        await policy.aclose()
        await policy.aclose()
        with pytest.raises(PolicyError, match="closed"):
            await running
        with pytest.raises(PolicyError, match="closed"):
            await policy.generate(ids(5), Sampling(), seed=0)

    with_policy(play)


def test_one_policy_serves_several_event_loops_in_turn() -> None:
    policy = TorchPolicy(small())
    first, second = (asyncio.run(policy.generate(ids(7), Sampling(max_tokens=4), seed=0)) for _ in range(2))
    asyncio.run(policy.aclose())
    assert (first.token_ids, first.logprobs) == (second.token_ids, second.logprobs)


@pytest.mark.parametrize(
    ("prompt", "draft", "message"),
    [
        ([], None, "must have 1..255 tokens"),
        ([0] * 256, None, "must have 1..255 tokens"),
        ([0, VOCAB], None, f"prompt token id {VOCAB} is outside the vocabulary 0..{VOCAB - 1}"),
        ([0], [-1], "draft token id -1"),
    ],
)
def test_bad_requests_are_refused(prompt: list[int], draft: list[int] | None, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        one(prompt, Sampling(), draft=draft)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch must be >= 1"),
        ({"max_context": 999}, r"max_context must be in 2\.\.256"),
        ({"threads": 0}, "threads must be >= 1"),
        ({"cache_bytes": -1}, "cache_bytes must be >= 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        TorchPolicy(small(), **options)


# -- loading and weights


def test_loads_a_folder_and_describes_it(tmp_path: Path) -> None:
    model = small()
    model.save_pretrained(tmp_path / "mini")
    loaded, direct = TorchPolicy.load(tmp_path / "mini", device="cpu"), TorchPolicy(model)
    facts = loaded.describe()
    assert json.loads(json.dumps(facts)) == facts
    assert (facts["name"], facts["dtype"], facts["device"], facts["logprob_mode"]) == (
        "mini",
        "float32",
        "cpu",
        "processed",
    )
    assert facts["model_digest"] == direct.describe()["model_digest"]
    assert facts["max_context"] == 256
    assert facts["row_exact"] is True


def test_unreadable_model_folders_are_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        TorchPolicy.load(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"no config\.json"):
        TorchPolicy.load(tmp_path)
    small().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(BadInput, match="cannot load the model"):
        TorchPolicy.load(tmp_path)


def test_unknown_device_is_bad_input() -> None:
    with pytest.raises(BadInput, match="unknown device 'gpu0'"):
        TorchPolicy.load(small(), device="gpu0")


def test_new_weights_wait_for_running_requests_and_empty_the_cache(tmp_path: Path) -> None:
    new = small(seed=1)
    new.save_pretrained(tmp_path)
    prompt, how = ids(30), Sampling(max_tokens=40)
    by_old, by_new = list(one(prompt, how).token_ids), list(one(prompt, how, small(seed=1)).token_ids)

    async def play(policy: TorchPolicy) -> None:
        before = policy.describe()["model_digest"]
        running = asyncio.create_task(policy.generate(prompt, how, seed=0))
        await started(policy)
        swap = asyncio.create_task(policy.load_weights(tmp_path, version=3))
        await asyncio.sleep(0)
        old = await running
        await swap
        assert old.policy_version == 0
        assert list(old.token_ids) == by_old
        done = await policy.generate(prompt, how, seed=0)
        assert (done.policy_version, policy.policy_version, done.cached) == (3, 3, 0)
        assert list(done.token_ids) == by_new
        assert policy.describe()["model_digest"] != before

    with_policy(play)


def test_weights_that_do_not_fit_are_bad_input() -> None:
    async def play(policy: TorchPolicy) -> None:
        state = small().state_dict()
        broken = {
            "missing: model.norm.weight": {k: v for k, v in state.items() if k != "model.norm.weight"},
            "unknown: extra": {**state, "extra": torch.zeros(1)},
            "of another shape: model.norm.weight": {**state, "model.norm.weight": torch.zeros(3)},
        }
        for message, weights in broken.items():
            with pytest.raises(BadInput, match=message):
                await policy.load_weights(weights, version=1)
        assert policy.policy_version == 0

    with_policy(play)


def test_tied_weights_may_come_once() -> None:
    model = small(tie_word_embeddings=True)

    async def play(policy: TorchPolicy) -> None:
        state = {k: v for k, v in small(2, tie_word_embeddings=True).state_dict().items() if k != "lm_head.weight"}
        await policy.load_weights(state, version=1)

    with_policy(play, model)
    assert torch.equal(model.lm_head.weight, small(2, tie_word_embeddings=True).lm_head.weight)


@pytest.mark.parametrize("module", ["torch", "transformers"])
def test_missing_library_names_the_extra(module: str) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from agentgym.errors import MissingExtra\n"
        "try:\n    import agentgym.rollout.policies.torch_policy\n"
        "except MissingExtra as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == f"{module!r} is not installed; run: pip install 'agentgym-trees[torch]'"


def test_the_process_thread_setting_is_left_alone() -> None:
    before = torch.get_num_threads()
    one(ids(5), Sampling(max_tokens=2))
    assert torch.get_num_threads() == before
