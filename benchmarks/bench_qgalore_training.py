"""Loss of a Llama under Q-GaLore against AdamW on real text, with what stochastic rounding and lazy searches are for.

Variants, one after the other, from the same random weights, on the same batches in the same order:

- `adamw`: fp32 weights and moments, its own rate;
- `galore`: fp32 throughout, a search every `gap` steps;
- `qgalore`: INT8 weights, INT4 projections, 8-bit moments, lazy searches; and of it
- `qgalore, every gap`: searches are not lazy; against it the share of searches that laziness makes is counted;
- `qgalore, nearest`: weights rounded to nearest.

`gap` is a fiftieth of the steps, as 200 is of the paper's 10,000 for 60 million parameters; searches are randomised
unless `--svd exact`, which takes minutes more on a GPU. Rates warm up over a tenth of the steps and fall to a tenth by
a cosine; the two that are the defaults here, for AdamW and for the others, were not searched for. Updates are those of
a stage: norms, clipping, COMMIT. The result is the mean loss of the last 50 steps.

Run:  python benchmarks/bench_qgalore_training.py [--size 60M] [--steps 600] [--text stdlib] [--tokenizer FOLDER]
One H200, 60M, bytes, 600 steps of 16 K tokens: some four minutes. Curves are appended to OUT.jsonl after each variant;
with `--keep`, what is there already is reported too, as of runs with the same arguments on other devices.
"""

import argparse
import json
import math
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_qgalore_memory import SIZES
from harness import describe

from tahq.comm.link.frame import Purpose
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, Parts, build_slice
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import summed_cross_entropy
from tahq.pipeline.update.optimizer import low_rank_settings
from tahq.pipeline.update.update import StageUpdate

SEED = 1
LAST_STEPS, CURVE_STEP = 50, 10
VARIANTS: dict[str, dict[str, object]] = {
    "adamw": {"optimizer": "adamw"},
    "qgalore": {"optimizer": "qgalore"},
    "qgalore, nearest": {"optimizer": "qgalore", "qgalore": {"rounding": "nearest"}},
    "qgalore, every gap": {"optimizer": "qgalore", "qgalore": {"lazy": False}},
    "galore": {"optimizer": "galore"},
}


@dataclass(frozen=True, slots=True)
class Result:
    """One variant's run: its curve (means of ten steps), its loss, and what it took."""

    variant: str
    loss: float
    curve: list[float]
    searches: int
    step_ms: float
    peak_gib: float
    machine: str


def training_of(variant: str, arguments: argparse.Namespace) -> TrainingConfig:
    keys = dict(VARIANTS[variant])
    low_rank = {"gap": gap_of(arguments), "svd": arguments.svd, **keys.pop("qgalore", {})}  # type: ignore[dict-item]
    lr = arguments.lr if variant == "adamw" else arguments.low_rank_lr
    return TrainingConfig(
        steps=arguments.steps,
        global_batch=arguments.batch,
        micro_batch=arguments.batch // arguments.micro_batches,
        lr=lr,
        min_lr=lr / 10,
        lr_schedule="cosine",
        warmup_steps=arguments.steps // 10,
        weight_decay=0.0,
        qgalore=low_rank,
        **keys,
    )


def gap_of(arguments: argparse.Namespace) -> int:
    return max(1, arguments.steps // 50)


def build(spec: ModelSpec, training: TrainingConfig, device: torch.device) -> ModelSlice:
    blocks, random = BlockRange(0, spec.num_layers, spec.num_layers), RandomContext(SEED)
    settings = low_rank_settings(training, SEED)
    if settings is None:
        return build_slice(spec, blocks, seed=SEED, device=device, random=random).train()
    return build_low_rank_slice(spec, blocks, settings, seed=SEED, device=device, random=random).train()


def run(variant: str, spec: ModelSpec, batches: BatchSource, arguments: argparse.Namespace) -> Result:
    device, training = torch.device(arguments.device), training_of(variant, arguments)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = build(spec, training, device)
    weights = low_rank_weights(model)
    update = StageUpdate(training, model.canonical_parameters(), model.is_decayed, arguments.steps, None, weights)
    losses, times_s = [], []
    for step in range(arguments.steps):
        begin_s = time.perf_counter()
        losses.append(one_step(model, update, batches, training, step, device))
        times_s.append(time.perf_counter() - begin_s)
        if step % 100 == 99:
            print(f"{variant}: step {step + 1}, loss {statistics.fmean(losses[-CURVE_STEP:]):.4f}", flush=True)
    blocks = [losses[first : first + CURVE_STEP] for first in range(0, len(losses), CURVE_STEP)]
    return Result(
        variant,
        statistics.fmean(losses[-LAST_STEPS:]),
        [round(statistics.fmean(block), 4) for block in blocks],
        sum(weight.subspace.num_searches for weight in weights.values() if weight.subspace is not None),
        1e3 * statistics.median(times_s),
        torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
        describe(),
    )


def one_step(
    model: ModelSlice,
    update: StageUpdate,
    batches: BatchSource,
    training: TrainingConfig,
    step: int,
    device: torch.device,
) -> float:
    """Micro-batches, PREPARE's norms, the coordinator's factor, COMMIT; the step's mean loss."""
    batch, total = batches.train(step), torch.zeros((), device=device)
    update.begin(step)
    for index in range(training.num_micro_batches):
        tokens, labels = (each.to(device) for each in batch.micro_batch(index))
        model.random.at(step, 0, index, int(Purpose.TRAIN))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(tokens)
        loss = summed_cross_entropy(logits, labels) / batch.num_tokens
        loss.backward()
        total += loss.detach()
    norm = math.sqrt(math.fsum(update.squared_norms()))
    if math.isfinite(norm):
        update.apply(step, 1.0 if training.clip_norm is None else min(1.0, training.clip_norm / (norm + 1e-12)))
    else:
        update.discard()
    return float(total)


def spec_of(arguments: argparse.Namespace, vocab_size: int) -> ModelSpec:
    size = next(size for size in SIZES if size.name == arguments.size)
    scale = arguments.shrink
    config = ModelConfig(
        family="llama",
        num_layers=max(1, size.layers // scale),
        hidden_size=size.hidden // scale,
        num_heads=max(1, size.heads // scale),
        intermediate_size=size.inner // scale,
    )
    return load_spec(config, vocab_size=vocab_size, seq_len=arguments.seq_len)


def report(results: list[Result], spec: ModelSpec, arguments: argparse.Namespace, num_parameters: int) -> str:
    by_name = {result.variant: result for result in results}
    base = by_name["adamw"].loss if "adamw" in by_name else math.nan
    lines = [
        "# Q-GaLore in training",
        "",
        f"{'; '.join(dict.fromkeys(result.machine for result in results))}. "
        f"`python benchmarks/bench_qgalore_training.py --size {arguments.size} --steps {arguments.steps}`",
        "",
        f"A Llama of {num_parameters / 1e6:.1f} million parameters (vocabulary {spec.vocab_size}), text "
        f"{' '.join(arguments.text)}, {arguments.batch} × {arguments.seq_len} tokens a step; rates {arguments.lr:g} "
        f"and {arguments.low_rank_lr:g}; a search at most every {gap_of(arguments)} steps.",
        "",
        "| variant | loss | above adamw | searches | step, ms | peak, GiB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each.variant} | {each.loss:.4f} | {each.loss - base:+.4f} | {each.searches} | {each.step_ms:.1f} "
        f"| {each.peak_gib:.2f} |"
        for each in results
    ]
    if {"qgalore", "qgalore, every gap"} <= by_name.keys():
        share = by_name["qgalore"].searches / max(1, by_name["qgalore, every gap"].searches)
        lines += ["", f"Lazy searches: {100 * share:.1f} % of those at every gap (paper: 36.2 %)."]
    return "\n".join(lines) + "\n"


def write_report(results: list[Result], spec: ModelSpec, arguments: argparse.Namespace, num_parameters: int) -> None:
    text = report(results, spec, arguments, num_parameters)
    arguments.out.write_text(text)
    print(text, flush=True)


def draw(results: list[Result], out: Path) -> None:
    """Curves, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        steps = [CURVE_STEP * (index + 1) for index in range(len(result.curve))]
        axes.plot(steps, result.curve, label=result.variant, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    figure.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=[size.name for size in SIZES], default="60M")
    parser.add_argument("--shrink", type=int, default=1, help="divide all sizes by this, to try the script")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--low-rank-lr", type=float, default=1e-2)
    parser.add_argument("--svd", choices=["exact", "randomised"], default="randomised")
    parser.add_argument("--text", nargs="+", default=["stdlib"])
    parser.add_argument("--tokenizer", default="bytes")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by semicolons")
    parser.add_argument("--keep", action="store_true", help="report variants that OUT.jsonl has already as well")
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "qgalore_training_h200_202611.md"
    )
    arguments = parser.parse_args()
    text = arguments.text[0] if len(arguments.text) == 1 else arguments.text
    data = DataConfig(text=text, tokenizer=arguments.tokenizer, seq_len=arguments.seq_len)
    tokenizer = load_tokenizer(data)
    spec = spec_of(arguments, tokenizer.vocab_size)
    batches = BatchSource(
        load_dataset(data, tokenizer),
        seed=SEED,
        global_batch=arguments.batch,
        micro_batch=arguments.batch // arguments.micro_batches,
    )
    meta = ModelSlice(spec, _whole(spec), RandomContext(0))
    num_parameters = sum(parameter.numel() for parameter in meta.parameters())
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.out.with_suffix(".jsonl")
    results = [Result(**json.loads(line)) for line in lines.read_text().splitlines()] if arguments.keep else []
    for variant in filter(None, arguments.variants.split(";")):
        results.append(run(variant, spec, batches, arguments))
        with lines.open("a") as file:
            file.write(json.dumps(asdict(results[-1])) + "\n")
        write_report(results, spec, arguments, num_parameters)
    write_report(results, spec, arguments, num_parameters)
    draw(results, arguments.out.with_suffix(".png"))


def _whole(spec: ModelSpec) -> Parts:
    return Parts.of(BlockRange(0, spec.num_layers, spec.num_layers))


if __name__ == "__main__":
    main()
