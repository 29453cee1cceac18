"""The files of `tiny`: transformers loads them unchanged, with equal ids."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from agentgym import seeding
from agentgym.rollout.models.traces import TraceMaker
from agentgym.rollout.models.train_tiny import SOURCES
from agentgym.rollout.policies import TINY
from agentgym.rollout.renderers.chatml import CONTROL_TOKENS
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer


@pytest.fixture(scope="module")
def raw():
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture(scope="module")
def auto():
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model():
    return transformers.AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module")
def traces():
    makers = [TraceMaker(s.env_id, levels=s.levels, mistakes=0.3) for s in SOURCES]
    return [maker.draw(seeding.rng(7, i)) for maker in makers for i in range(40)]


def test_size_and_shape(model, raw):
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 12 * 2**20
    config = model.config
    assert (config.model_type, model.dtype) == ("qwen2", torch.bfloat16)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 4e6
    assert config.hidden_size // config.num_attention_heads >= 32
    assert config.vocab_size == raw.get_vocab_size()


def test_stop_tokens_are_declared(model):
    stop = list(Qwen3Renderer(TINY).stop_ids)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (stop, stop)


def test_auto_tokenizer_gives_the_ids_of_the_file(raw, auto, traces):
    texts = {text for trace in traces for text in trace.texts}
    texts |= {f"\n{text}\n" for text in texts}
    assert len(texts) > 1000
    assert [t for t in texts if raw.encode(t).ids != auto(t, add_special_tokens=False)["input_ids"]] == []
    assert [t for t in texts if auto.decode(raw.encode(t).ids) != t] == []


@settings(max_examples=200)
@given(text=st.text(max_size=60))
def test_auto_tokenizer_gives_the_ids_of_the_file_on_any_text(raw, auto, text):
    assert raw.encode(text).ids == auto(text, add_special_tokens=False)["input_ids"]


def test_chat_template_gives_the_ids_of_the_renderer(auto, traces):
    renderer = Qwen3Renderer(TINY)
    for trace in traces:
        messages = list(trace.opening)
        ids = renderer.prompt(messages, trace.tools)
        for turn in trace.turns:
            if "<tool_call>" in turn.text and "</tool_call>" not in turn.text:
                break
            messages += [{"role": "assistant", "content": turn.text}, *turn.answer]
            ids += renderer.message(turn.text) + renderer.reply(turn.answer, last=renderer.stop_ids[0])
        schemas = [tool.schema for tool in trace.tools]
        assert ids == auto.apply_chat_template(
            messages, tools=schemas, add_generation_prompt=True, tokenize=True, return_dict=False
        )


def test_what_is_copied_is_one_token(raw, traces):
    for trace in traces:
        for turn in trace.turns:
            if not turn.mistake:
                call = json.loads(turn.text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
                for value in call["arguments"].values():
                    assert len(raw.encode(str(value)).ids) == 1 + 2 * str(value).count(" ")
    assert all(len(raw.encode(str(n)).ids) == 1 for n in range(201))
    assert raw.encode("1120").tokens != raw.encode("112 0").tokens


def test_control_tokens_are_special(raw):
    special = {t.content for t in raw.get_added_tokens_decoder().values() if t.special}
    assert special == set(CONTROL_TOKENS)


def test_prompts_are_short(traces):
    renderer = Qwen3Renderer(TINY)
    assert max(len(renderer.prompt(t.opening, t.tools)) for t in traces) <= 250


def test_greedy_generation_ends_with_a_stop_token(traces):
    renderer = Qwen3Renderer(TINY)
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    prompt = torch.tensor([renderer.prompt(traces[0].opening, traces[0].tools)])
    out = model.generate(prompt, do_sample=False, max_new_tokens=32)
    assert int(out[0, -1]) in renderer.stop_ids
    call = renderer.parse(out[0, prompt.shape[1] :].tolist()).tool_calls[0]
    assert call.problem is None
