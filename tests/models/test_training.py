"""What `tiny` is trained with: traces, batches, the shared prefix, a short run and its evaluation."""

import itertools
import re

import pytest
import torch
import transformers

from agentgym import seeding
from agentgym.messages import parse_message
from agentgym.rollout.models import batches, train_tiny
from agentgym.rollout.models.batches import CONTEXT_WEIGHT, BatchMaker, background, encode_trace
from agentgym.rollout.models.evaluate import MIX, evaluate, table
from agentgym.rollout.models.shared_prefix import hidden_states
from agentgym.rollout.models.traces import TraceMaker
from agentgym.rollout.policies import TINY, make_policy
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

ENVS = [source.env_id for source in train_tiny.SOURCES]
EACH_ENV = pytest.mark.parametrize("env_id", ENVS)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def renderer():
    return Qwen3Renderer(TINY)


@EACH_ENV
def test_traces_are_won_and_depend_on_the_seed_only(env_id):
    maker = TraceMaker(env_id, mistakes=0.3)
    traces = [maker.draw(seeding.rng(1, i)) for i in range(12)]
    again = TraceMaker(env_id, mistakes=0.3).draw(seeding.rng(1, 3))
    assert list(traces[3].texts) == list(again.texts)
    turns = [turn for trace in traces for turn in trace.turns]
    assert any(turn.mistake for turn in turns)
    assert all(parse_message(turn.text).tool_calls[0].problem is None for turn in turns if not turn.mistake)


@EACH_ENV
def test_mistakes_have_no_weight_and_the_expert_has_all(env_id, renderer):
    trace = TraceMaker(env_id, mistakes=0.4).draw(seeding.rng(2))
    ids, weights = encode_trace(trace, renderer, 4000)
    assert len(ids) == len(weights)
    assert set(weights) <= {0.0, CONTEXT_WEIGHT, 1.0}
    trained = [i for i, w in zip(ids, weights, strict=True) if w == 1.0]
    assert trained == [i for turn in trace.turns if not turn.mistake for i in renderer.message(turn.text)]


def test_long_traces_are_cut_after_a_turn(renderer):
    trace = TraceMaker(ENVS[0], levels={"n8": 1.0}, mistakes=0.0).draw(seeding.rng(3))
    ids, _ = encode_trace(trace, renderer, 300)
    assert len(ids) <= 300
    assert ids == encode_trace(trace, renderer, 4000)[0][: len(ids)]


def test_batches_are_repeatable_and_come_from_the_background_equal():
    makers = [BatchMaker(source, TINY, tokens=600, seed=5) for source in train_tiny.SOURCES]
    stream = background(makers, [2, 0, 0])
    indices, made = next(stream)
    stream.close()
    assert indices == [2, 0, 0]
    for maker, index, batch in zip(makers, indices, made, strict=True):
        again = maker.pool(index)[0]
        assert (batch.ids == again.ids).all()
        assert (batch.weights == again.weights).all()
        assert batch.ids.size <= 600 or len(batch.ids) == 1


def test_words_of_a_small_set_are_renamed_in_half_of_the_rows(renderer):
    source = next(s for s in train_tiny.EASY if s.few)
    colours = {renderer.tokenizer.token_to_id(word) for word in source.few}
    rows = [row for i in range(3) for b in BatchMaker(source, TINY, tokens=600, seed=1).pool(i) for row in b.ids]
    kept = [bool(colours & set(row.tolist())) for row in rows]
    assert 0.3 < sum(kept) / len(kept) < 0.7
    renamed = renderer.decode(rows[kept.index(False)].tolist())
    assert set(re.findall("goal ([A-Z][a-z]{5}) ", renamed)) <= set(re.findall("([A-Z][a-z]{5}) on", renamed))


def test_shared_prefix_equals_the_plain_forward_pass_with_its_gradients(renderer):
    torch.manual_seed(0)
    model = train_tiny.make_model(renderer, hidden=64, layers=2, mlp=96)
    prefix, rows = torch.randint(0, 1000, (7,)), torch.randint(0, 1000, (3, 11))
    shared = hidden_states(model, prefix, rows)
    shared.square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    whole = torch.cat([prefix.expand(3, -1), rows], 1)
    plain = model.model(input_ids=whole, use_cache=False)[0][:, 7:]
    plain.square().sum().backward()
    assert torch.allclose(shared, plain, atol=1e-5)
    for ours, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.allclose(ours, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_short_run_saves_a_model_and_is_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "TOKENIZER_TRACES", 20)
    monkeypatch.setattr(train_tiny, "BATCH_TOKENS", 1200)
    monkeypatch.setattr(train_tiny, "REPORT_EVERY", 1)
    monkeypatch.setattr(batches, "_POOL", 3)

    monkeypatch.setattr(train_tiny, "monotonic", itertools.count().__next__)

    def run(seconds, resume):
        made = train_tiny.begin(tmp_path, seed=0, hidden=32, layers=1, mlp=32)
        if resume:
            made.restore()
        train_tiny.train(made, seconds / 60, seed=0, save_every=0.1)
        return made.progress

    first, second = run(8, resume=False), run(12, resume=True)
    assert (first.steps, second.steps) == (6, 8)
    assert (tmp_path / "minute-000" / "training.json").is_file()
    assert re.search(r"nats/exact: [\d.]+/[\d.]+  [\d.]+/[\d.]+  [\d.]+/[\d.]+", capsys.readouterr().err)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert model.dtype == torch.bfloat16
    assert model.config.vocab_size == Qwen3Renderer(tmp_path / "final").vocab_size


@pytest.mark.parametrize(("until", "sources"), train_tiny.PHASES)
def test_sources_are_levels_of_their_envs(until, sources):
    assert 0 < until <= 1
    assert sum(source.share for source in sources) == pytest.approx(1)
    for source in sources:
        TraceMaker(source.env_id, levels=source.levels).draw(seeding.rng(0))
        assert sum(source.levels.values()) == pytest.approx(1)


@EACH_ENV
def test_evaluation_reports_each_level_and_the_mix(env_id):
    policy, renderer = make_policy("scripted")
    rows = evaluate(policy, renderer, env_id, tasks=2, samples=2, split="validation", seed=0)
    again = evaluate(policy, renderer, env_id, tasks=2, samples=2, split="validation", seed=0)
    assert rows == again
    assert [row.level for row in rows][-1] == MIX
    assert sum(row.share for row in rows[:-1]) == pytest.approx(1)
    assert all(0 <= value <= 1 for row in rows for value in (row.success, row.invalid, row.mixed, row.random))
    assert table(rows).count("\n") == len(rows) + 1
