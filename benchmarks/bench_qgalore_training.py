"""Q-GaLore in training: the loss of a Llama against AdamW on real text, and the use of rounding and lazy searches.

    python benchmarks/bench_qgalore_training.py [--size 60M] [--steps 600] [--text stdlib] [--output FILE.md]

Variants train one after the other from the same random weights, on the same batches in the same order:

- `adamw`: fp32 weights and moments, its own learning rate;
- `galore`: fp32 throughout, a search every `gap` steps;
- `qgalore`: INT8 weights, INT4 projections, 8-bit moments, lazy searches;
- `qgalore, every gap`: searches are not lazy; the share of searches that laziness makes is counted against it;
- `qgalore, nearest`: weights rounded to nearest.

`gap` is a fiftieth of the steps, as 200 is of the paper's 10,000 for 60 million parameters; searches are randomised.
Learning rates warm up over a tenth of the steps and fall to a tenth by a cosine; both defaults are untuned. Updates are
those of a stage: norms, clipping, COMMIT. One H200, 60M, bytes, 600 steps of 16 K tokens: some four minutes. Curves are
kept beside the result file; call the script again to continue.
"""

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_qgalore_memory import SIZES
from harness import Table, append_row, main, read_rows, rows_path, say

from tahq.comm.link.frame import Purpose
from tahq.data.batches import BatchSource
from tahq.data.config import DataConfig
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.memory.galore.qgalore import build_low_rank_slice, low_rank_weights
from tahq.memory.stored_slice import build_slice
from tahq.models.keyed_dropout import RandomContext
from tahq.models.loss import summed_cross_entropy
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.optimizer import low_rank_settings
from tahq.pipeline.update import StageUpdate

SEED = 1
BATCH, SEQ_LEN = 64, 256
LAST_STEPS, CURVE_STEP = 50, 10
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw"},
    "qgalore": {"optimizer": "qgalore"},
    "qgalore, nearest": {"optimizer": "qgalore", "qgalore": {"rounding": "nearest"}},
    "qgalore, every gap": {"optimizer": "qgalore", "qgalore": {"lazy": False}},
    "galore": {"optimizer": "galore"},
}


def training_of(variant: str, options: argparse.Namespace) -> TrainingConfig:
    keys = VARIANTS[variant]
    lr = options.lr if variant == "adamw" else options.low_rank_lr
    low_rank = {"gap": max(1, options.steps // 50), **keys.get("qgalore", {})}
    return TrainingConfig(
        steps=options.steps,
        global_batch=options.batch,
        micro_batch=options.batch,
        lr=lr,
        min_lr=lr / 10,
        lr_schedule="cosine",
        warmup_steps=options.steps // 10,
        weight_decay=0.0,
        optimizer=keys["optimizer"],
        qgalore=low_rank,
    )


def build(spec: ModelSpec, training: TrainingConfig, device: torch.device) -> ModelSlice:
    blocks, random = BlockRange(0, spec.num_layers, spec.num_layers), RandomContext(SEED)
    settings = low_rank_settings(training, SEED)
    if settings is None:
        return build_slice(spec, blocks, seed=SEED, device=device, random=random).train()
    return build_low_rank_slice(spec, blocks, settings, seed=SEED, device=device, random=random).train()


def run(variant: str, spec: ModelSpec, batches: BatchSource, options: argparse.Namespace) -> dict[str, Any]:
    device, training = torch.device(options.device), training_of(variant, options)
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()
    model = build(spec, training, device)
    weights = low_rank_weights(model)
    update = StageUpdate(training, model.canonical_parameters(), model.is_decayed, options.steps, None, weights)
    losses, times_s = [], []
    for step in range(options.steps):
        begin_s = time.perf_counter()
        losses.append(one_step(model, update, batches, training, step, device))
        times_s.append(time.perf_counter() - begin_s)
        if step % 100 == 99:
            say(f"{variant}: step {step + 1}, loss {statistics.fmean(losses[-CURVE_STEP:]):.4f}")
    blocks = [losses[first : first + CURVE_STEP] for first in range(0, len(losses), CURVE_STEP)]
    return {
        "variant": variant,
        "loss": statistics.fmean(losses[-LAST_STEPS:]),
        "curve": [round(statistics.fmean(block), 4) for block in blocks],
        "searches": sum(weight.subspace.num_searches for weight in weights.values() if weight.subspace is not None),
        "step_ms": 1e3 * statistics.median(times_s),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0,
    }


def one_step(
    model: ModelSlice,
    update: StageUpdate,
    batches: BatchSource,
    training: TrainingConfig,
    step: int,
    device: torch.device,
) -> float:
    """PREPARE's norms, the coordinator's factor, COMMIT; the step's mean loss."""
    batch = batches.train(step)
    update.begin(step)
    tokens, labels = (each.to(device) for each in batch.micro_batch(0))
    model.random.at(step, 0, 0, int(Purpose.TRAIN))
    with torch.autocast(device.type, torch.bfloat16):
        logits = model(tokens)
    loss = summed_cross_entropy(logits, labels) / batch.num_tokens
    loss.backward()
    norm = math.sqrt(math.fsum(update.squared_norms()))
    if math.isfinite(norm):
        update.apply(step, 1.0 if training.clip_norm is None else min(1.0, training.clip_norm / (norm + 1e-12)))
    else:
        update.discard()
    return float(loss.detach())


def draw(results: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for result in results:
        steps = [CURVE_STEP * (index + 1) for index in range(len(result["curve"]))]
        axes.plot(steps, result["curve"], label=result["variant"], linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.legend()
    figure.savefig(path)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    data = DataConfig(text=options.text, tokenizer=options.tokenizer, seq_len=SEQ_LEN)
    tokenizer = load_tokenizer(data)
    size = next(size for size in SIZES if size.name == options.size)
    spec = load_spec(size.model(options.shrink), vocab_size=tokenizer.vocab_size, seq_len=SEQ_LEN)
    dataset = load_dataset(data, tokenizer)
    batches = BatchSource(dataset, seed=SEED, global_batch=options.batch, micro_batch=options.batch)
    path = rows_path(options)
    found = {row["variant"]: row for row in read_rows(path)}
    for variant in options.variants:
        if variant not in found:
            found[variant] = run(variant, spec, batches, options)
            append_row(path, found[variant])
    results = [found[variant] for variant in options.variants]
    base = found["adamw"]["loss"] if "adamw" in found else math.nan
    numbers = ((each, f"{each['loss']:.4f}", f"{each['loss'] - base:+.4f}") for each in results)
    yield Table(
        ("variant", "loss", "above adamw", "searches", "step, ms", "peak, GiB"),
        (
            [each["variant"], loss, above, each["searches"], f"{each['step_ms']:.1f}", f"{each['peak_gib']:.2f}"]
            for each, loss, above in numbers
        ),
        f"A Llama of {options.size} (vocabulary {spec.vocab_size}), text {' '.join(options.text)}, {options.batch} × "
        f"{SEQ_LEN} tokens per step; learning rates {options.lr:g} and {options.low_rank_lr:g}; a search at most every "
        f"{max(1, options.steps // 50)} steps. Loss: mean of the last {LAST_STEPS} steps.",
    )
    if {"qgalore", "qgalore, every gap"} <= found.keys():
        share = found["qgalore"]["searches"] / max(1, found["qgalore, every gap"]["searches"])
        yield f"Lazy searches: {100 * share:.1f} % of those at every gap (paper: 36.2 %)."
    if options.output:
        draw(results, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--size": {"choices": [size.name for size in SIZES], "default": "60M"},
            "--shrink": {"type": int, "default": 1, "help": "divide all sizes by this, to try the script"},
            "--steps": {"type": int, "default": 600},
            "--batch": {"type": int, "default": BATCH},
            "--lr": {"type": float, "default": 1e-3, "help": "learning rate of adamw"},
            "--low-rank-lr": {"type": float, "default": 1e-2, "help": "learning rate of the other variants"},
            "--text": {"nargs": "+", "default": ["stdlib"]},
            "--tokenizer": {"default": "bytes"},
            "--variants": {"nargs": "+", "choices": list(VARIANTS), "default": list(VARIANTS)},
            "--device": {"default": "cuda"},
        },
    )
