"""Train `tiny`, the small policy that ships with agentgym, from scratch on expert traces.

    python -m agentgym.rollout.models.train_tiny --out runs/tiny --minutes 60 --seed 0 --threads 1

The traces are successful episodes of the expert in which some turns are mistakes: those are not imitated, the
recovery from them is. The learning rate follows the clock, so that a run of any length ends with a full decay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from torch.nn import functional as F

from agentgym import seeding
from agentgym.rollout.models.batches import CONTEXT_WEIGHT, Batch, BatchMaker, Source, background
from agentgym.rollout.models.shared_prefix import hidden_states
from agentgym.rollout.models.tiny_tokenizer import build_tokenizer, save_tokenizer
from agentgym.rollout.models.traces import TraceMaker
from agentgym.rollout.renderers.qwen3 import Qwen3Renderer

COLOURS = ("red", "blue", "green", "black", "white", "pink", "gray", "gold", "brown", "violet")
SOURCES = (
    Source("agentgym/Countdown-v0", 0.5, {"n3": 0.4, "n4": 0.4, "n5": 0.1, "n6": 0.05, "n7": 0.0, "n8": 0.05}),
    Source(
        "agentgym/Blocksworld-v0",
        0.15,
        {"b3": 0.2, "b4": 0.3, "b5": 0.25, "b6": 0.15, "b8": 0.07, "b10": 0.03},
        few=COLOURS,
    ),
    Source("agentgym/SearchQA-v0", 0.35, {"h1": 0.25, "h2": 0.3, "h3": 0.2, "h4": 0.15, "h5": 0.1}),
)
EASY = (
    Source("agentgym/Countdown-v0", 0.5, {"n3": 0.7, "n4": 0.3}),
    Source("agentgym/Blocksworld-v0", 0.15, {"b3": 0.7, "b4": 0.3}, few=COLOURS),
    Source("agentgym/SearchQA-v0", 0.35, {"h1": 0.4, "h2": 0.4, "h3": 0.2}),
)
PHASES = ((0.5, EASY), (1.0, SOURCES))
"""`(until which share of the time, what is learned)`. Few things to choose from make copying quick to discover."""
_Architecture: Any = transformers.Qwen2ForCausalLM
_Generation: Any = transformers.GenerationConfig
HIDDEN, LAYERS, HEAD_SIZE, MLP = 128, 4, 32, 384
MAX_CONTEXT = 4096
BATCH_TOKENS = 6144
"""Of a step; each env gets its share."""
PEAK_RATE, WARM_UP_STEPS, FLAT, LAST_RATE = 2e-3, 100, 0.5, 0.03
TOKENIZER_TRACES = 1500
HELD_OUT_POOLS = 2
CONTEXT_KEPT = 0.25
"""Share of the context targets whose loss is computed, at a weight that keeps its expectation."""
REPORT_EVERY = 100


@dataclass(slots=True)
class Progress:
    """What a checkpoint holds besides weights and optimiser."""

    steps: int = 0
    tokens: int = 0
    pools: list[int] = field(default_factory=lambda: [0] * len(SOURCES))
    seconds: float = 0.0


def make_model(renderer: Qwen3Renderer, *, hidden: int = HIDDEN, layers: int = LAYERS, mlp: int = MLP) -> Any:
    """Return a fresh Qwen2 model for the renderer's tokenizer, float32."""
    config = transformers.Qwen2Config(
        vocab_size=renderer.vocab_size,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(renderer.stop_ids),
        pad_token_id=renderer.stop_ids[1],
    )
    return _Architecture(config)


def save_model(model: Any, source: Path, folder: Path) -> None:
    """Write a Hugging Face folder with bfloat16 weights; the tokenizer files are copied from `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    half = _Architecture(model.config).to(torch.bfloat16)
    half.load_state_dict(state)
    stop = list(model.config.eos_token_id)
    half.generation_config = _Generation(
        do_sample=True, temperature=1.0, eos_token_id=stop, pad_token_id=model.config.pad_token_id
    )
    half.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((source / name).read_bytes())


def loss_of(model: Any, batch: Batch, keep: torch.Generator) -> torch.Tensor:
    """Return the weighted mean loss of a batch in nats, `[]`.

    Args:
        model: a Qwen2 model.
        batch: rows of one env.
        keep: draws the context targets to compute (`CONTEXT_KEPT` of them).
    """
    ids = torch.from_numpy(batch.ids)
    weights = torch.from_numpy(batch.weights)[:, 1:]
    kept = torch.rand(weights.shape, generator=keep) < CONTEXT_KEPT
    weights = torch.where(weights == CONTEXT_WEIGHT, weights * kept / CONTEXT_KEPT, weights)
    rows, columns = weights.nonzero(as_tuple=True)
    hidden = hidden_states(model, torch.from_numpy(batch.prefix), ids[:, :-1])[rows, columns]
    losses = F.cross_entropy(model.lm_head(hidden), ids[rows, columns + 1], reduction="none")
    chosen = weights[rows, columns]
    return (losses * chosen).sum() / chosen.sum()


@torch.no_grad()
def held_out(model: Any, batches: Sequence[Batch]) -> tuple[float, float]:
    """Return the loss of the expert's tokens (nats) and the share of turns that greedy decoding repeats."""
    nats, tokens, exact, turns = 0.0, 0, 0, 0
    for batch in batches:
        ids = torch.from_numpy(batch.ids)
        ours = torch.from_numpy(batch.weights)[:, 1:] == 1
        hidden = hidden_states(model, torch.from_numpy(batch.prefix), ids[:, :-1])
        log_probs = model.lm_head(hidden).log_softmax(-1)
        targets = ids[:, 1:]
        nats -= float(log_probs.gather(-1, targets[..., None])[..., 0][ours].sum())
        tokens += int(ours.sum())
        right = log_probs.argmax(-1) == targets
        for row in range(len(ids)):
            for turn in _runs(ours[row].tolist()):
                exact += bool(right[row, turn].all())
                turns += 1
    return nats / tokens, exact / turns


@dataclass(slots=True)
class Run:
    """A training run: everything that a checkpoint restores, and where it is kept."""

    out: Path
    model: Any
    optimizer: torch.optim.AdamW
    progress: Progress

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer files."""
        return self.out / "tokenizer"

    @property
    def checkpoint(self) -> Path:
        """What `--resume` reads."""
        return self.out / "checkpoint.pt"

    def restore(self) -> None:
        """Load the checkpoint, if there is one."""
        if self.checkpoint.is_file():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.progress = Progress(**saved["progress"])

    def save(self, name: str) -> None:
        """Write the model folder `name`, and the checkpoint in one piece."""
        folder = self.out / name
        save_model(self.model, self.tokenizer, folder)
        (folder / "training.json").write_text(json.dumps(asdict(self.progress)) + "\n")
        partial = self.checkpoint.with_suffix(".part")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "progress": asdict(self.progress)}, partial)
        partial.replace(self.checkpoint)

    def step(self, batches: Sequence[Batch], rate: float, keep: torch.Generator) -> float:
        """Update once with a batch of each source. Returns the loss, weighted by the sources' shares, in nats."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        total = 0.0
        for source, batch in zip(SOURCES, batches, strict=True):
            loss = source.share * loss_of(self.model, batch, keep)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.progress.steps += 1
        self.progress.tokens += sum(batch.ids.size for batch in batches)
        return total


def begin(out: Path, *, seed: int, hidden: int, layers: int, mlp: int) -> Run:
    """Return a fresh run; the tokenizer is trained unless `out` holds one."""
    torch.manual_seed(seed)
    folder = out / "tokenizer"
    if not (folder / "tokenizer.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        players = [(TraceMaker(s.env_id), seeding.rng(seed, "tokenizer", s.env_id)) for s in SOURCES]
        traces = [player.draw(rng) for player, rng in players for _ in range(TOKENIZER_TRACES)]
        save_tokenizer(build_tokenizer(traces), folder)
    model = make_model(Qwen3Renderer(folder), hidden=hidden, layers=layers, mlp=mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    return Run(out, model, optimizer, Progress())


def train(run: Run, minutes: float, *, seed: int, save_every: float) -> None:
    """Train until `minutes` of wall-clock time have passed in all, saving every `save_every` minutes."""
    probes = [_probe(source, run.tokenizer, seed) for source in SOURCES]
    keep = torch.Generator().manual_seed(seed)
    progress = run.progress
    started = monotonic() - progress.seconds
    next_save = progress.seconds + save_every * 60
    average = 0.0
    for until, sources in PHASES:
        makers = [BatchMaker(s, run.tokenizer, tokens=round(s.share * BATCH_TOKENS), seed=seed) for s in sources]
        with closing(background(makers, progress.pools)) as stream:
            for progress.pools, batches in stream:
                progress.seconds = monotonic() - started
                done = progress.seconds / 60 / minutes
                if done >= until:
                    break
                loss = run.step(batches, PEAK_RATE * _rate(progress.steps, done), keep)
                average = 0.98 * average + 0.02 * loss if average else loss
                if progress.steps % REPORT_EVERY == 0:
                    _report(run, average, probes)
                if progress.seconds >= next_save:
                    next_save += save_every * 60
                    run.save(f"minute-{round(progress.seconds / 60):03d}")
    run.save("final")
    _say(f"done: {progress.steps} steps, {progress.tokens / 1e6:.2f}M tokens; the model is in {run.out / 'final'}")


def _report(run: Run, loss: float, probes: Sequence[Sequence[Batch]]) -> None:
    p = run.progress
    per_env = "  ".join("{:.3f}/{:.2f}".format(*held_out(run.model, probe)) for probe in probes)
    _say(
        f"{p.steps} {p.seconds / 60:.1f} min {p.tokens / 1e6:.2f}M tokens {p.tokens / p.seconds:.0f}/s "
        f"loss {loss:.3f}  nats/exact: {per_env}"
    )


def _probe(source: Source, folder: Path, seed: int) -> list[Batch]:
    tokens = round(source.share * BATCH_TOKENS)
    maker = BatchMaker(source, folder, tokens=tokens, seed=seed, split="validation", mistakes=0.0)
    return [batch for index in range(HELD_OUT_POOLS) for batch in maker.pool(index)]


def _rate(step: int, done: float) -> float:
    decay = 1.0 if done < FLAT else max(LAST_RATE, (1 - done) / (1 - FLAT))
    return min(1.0, (step + 1) / WARM_UP_STEPS) * decay


def _runs(flags: Sequence[bool]) -> list[slice]:
    """Return the runs of true values as slices."""
    runs, start = [], 0
    for value, group in itertools.groupby(flags):
        length = sum(1 for _ in group)
        if value:
            runs.append(slice(start, start + length))
        start += length
    return runs


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(prog="python -m agentgym.rollout.models.train_tiny", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and model folders")
    parser.add_argument("--minutes", type=float, default=60, help="wall-clock time of the whole training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--save-every", type=float, default=5, help="minutes between model folders")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="hidden size, a multiple of 32")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--mlp", type=int, default=MLP, help="intermediate size")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    run = begin(args.out, seed=args.seed, hidden=args.hidden, layers=args.layers, mlp=args.mlp)
    if args.resume:
        run.restore()
    _say(
        f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f}M parameters, {run.model.config.vocab_size} tokens"
    )
    train(run, args.minutes, seed=args.seed, save_every=args.save_every)


if __name__ == "__main__":
    main()
