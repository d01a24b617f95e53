"""Q-GaLore: a Llama of 7 billion parameters in 16 GB; pre-training steps on one GPU, against GaLore.

    python benchmarks/bench_qgalore_7b.py [--steps 8] [--output benchmarks/results/qgalore_7b_<hardware>_<yyyymm>.md]

Each variant is a process of its own with real model slices, low-rank weights and the fused update, as a stage with one
micro-batch has them; all but the first are the benchmark's own loop. Weights are random, made layer by layer in the
form they are trained in; parameters that are not covered, and the residual stream, are bf16; blocks are recomputed in
the backward. Tokens are random: the cost of a step does not depend on them.

- `tahq-launch`: the same model by launch/examples/llama_7b_qgalore.yaml, of which all else keeps its default;
- `qgalore-fp32`: `qgalore` with what that run has: an fp32 residual stream under autocast, the loss in one piece;
- `qgalore`: INT8 weights, INT4 projections, 8-bit moments; the allocator capped so that the process is below 14.9 GiB;
- `galore8`: bf16 weights and projections, 8-bit moments (the paper's 8-bit GaLore);
- `galore`: bf16 weights and projections, fp32 moments.

The process's memory is what nvidia-smi reports for the device minus what was in use before, sampled every 50 ms.
Throughput is of the median step after the first two. The first one compiles kernels and searches all subspaces
(randomised), which `tahq-launch` spreads over steps; it is listed apart. No weight decay, as GaLore is trained. One
H200: about a minute per variant.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from bench_launched_memory import Sample, sampled
from harness import Table, launch, main, need_gpu, say
from torch.utils.checkpoint import checkpoint

from tahq.comm.link.frame import Purpose
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import cover, low_rank_weights
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.loss import summed_cross_entropy
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, Parts
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.engine import StepShape
from tahq.pipeline.optimizer import low_rank_settings
from tahq.pipeline.update import StageUpdate

GIB = 2**30
LIMIT_GIB = 14.9
"""16 GB."""
CONTEXT_GIB = 0.9
"""Left for memory outside torch's allocator: context, kernels, libraries' workspaces."""
LAUNCHED, AS_LAUNCHED = "tahq-launch", "qgalore-fp32"
VARIANTS: dict[str, dict[str, Any]] = {
    LAUNCHED: {},
    AS_LAUNCHED: {"optimizer": "qgalore", "qgalore": {}},
    "qgalore": {"optimizer": "qgalore", "qgalore": {}},
    "galore8": {"optimizer": "galore", "qgalore": {"weights": "bf16", "projections": "bf16", "states": "int8"}},
    "galore": {"optimizer": "galore", "qgalore": {"weights": "bf16", "projections": "bf16"}},
}
MODELS = {
    "7b": ModelConfig(family="llama", num_layers=32, hidden_size=4096, num_heads=32, intermediate_size=11008),
    "tiny": ModelConfig(family="llama", num_layers=2, hidden_size=256, num_heads=4, intermediate_size=512),
}
BATCHES = {"7b": 16, "tiny": 2}
VOCAB, SEQ_LEN = 32000, 256
EXAMPLE = Path(__file__).parents[1] / "launch" / "examples" / "llama_7b_qgalore.yaml"
WARM_STEPS = 2
LOSS_SAMPLES = 4
"""Samples whose logits are in fp32 at a time."""


# -- a variant, in a process of its own ---------------------------------------------------------------


def build(spec: ModelSpec, settings: LowRankSettings, device: torch.device, *, bf16: bool) -> ModelSlice:
    """The whole model with random weights; no two covered weights are in memory in fp32 at once."""
    model = ModelSlice(spec, Parts.of(BlockRange(0, spec.num_layers, spec.num_layers)), RandomContext(0))
    if bf16:
        model.bfloat16()  # still on the meta device
    for weight in cover(model, settings, device).values():
        weight.storage.assign(torch.empty(weight.shape, device=device).normal_(0.0, 0.02))
    model.materialise(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    model.checkpoint_blocks = True
    return model.train()


def run_variant(variant: str, size: str, steps: int, device: torch.device) -> None:
    """Print a JSON line per step, then one with the totals."""
    is_cuda = device.type == "cuda"
    if is_cuda and variant == "qgalore":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((LIMIT_GIB - CONTEXT_GIB) * GIB / total)
    keys = VARIANTS[variant]
    training = TrainingConfig(
        steps=steps,
        global_batch=BATCHES[size],
        micro_batch=BATCHES[size],
        clip_norm=None,
        non_finite="halt",
        lr=1e-4,
        weight_decay=0.0,
        optimizer=keys["optimizer"],
        # the whole model is cast to bf16, embedding and head included: they are ordinary parameters here
        qgalore={**keys["qgalore"], "fused": True, "ends": "fp32"},
    )
    spec = load_spec(MODELS[size], vocab_size=VOCAB, seq_len=SEQ_LEN)
    settings = low_rank_settings(training, 0)
    assert settings is not None
    is_bf16 = variant != AS_LAUNCHED
    model = build(spec, settings, device, bf16=is_bf16)
    shape = StepShape(1, BATCHES[size], SEQ_LEN, spec.hidden_size)
    weights = low_rank_weights(model)
    update = StageUpdate(
        training, model.canonical_parameters(), model.is_decayed, steps, None, weights, shape.gradient_scale
    )
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    for step in range(steps):
        begin_s = time.perf_counter()
        loss = one_step(model, update, step, shape, device, is_bf16)
        print(json.dumps({"step_s": time.perf_counter() - begin_s, "loss": loss}), flush=True)
    totals = {
        "parameters": sum(p.numel() for p in model.parameters()) + sum(weight.numel() for weight in weights.values()),
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if is_cuda else 0.0,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if is_cuda else 0.0,
    }
    print(json.dumps(totals), flush=True)


def one_step(
    model: ModelSlice, update: StageUpdate, step: int, shape: StepShape, device: torch.device, is_bf16: bool
) -> float:
    """Forward, and a backward that updates; the mean loss, read at the end, so that the device has finished."""
    generator = torch.Generator(device).manual_seed(step)
    tokens = torch.randint(0, VOCAB, (shape.micro_batch, shape.seq_len + 1), generator=generator, device=device)
    update.begin(step)
    model.random.at(step, 0, 0, int(Purpose.TRAIN))
    labels = tokens[:, 1:].contiguous()
    with torch.autocast(device.type, torch.bfloat16, enabled=not is_bf16):
        logits = model(tokens[:, :-1])
        loss = loss_of(logits, labels) if is_bf16 else summed_cross_entropy(logits, labels)
    count = shape.micro_batch * shape.seq_len
    (loss / (count / shape.gradient_scale)).backward()
    assert all(norm == norm for norm in update.squared_norms())  # as PREPARE reads them
    update.apply(step, 1.0)
    mean = float(loss.detach()) / count
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return mean


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The summed loss of a few samples at a time, whose logits in fp32 are recomputed in the backward."""
    parts = zip(logits.split(LOSS_SAMPLES), labels.split(LOSS_SAMPLES), strict=True)
    losses = [checkpoint(summed_cross_entropy, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum()


# -- the table -----------------------------------------------------------------------------------------


def measure(variant: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[float]]:
    """Run a variant; its totals, with `process_gib` from the driver, and the seconds of its steps."""
    watch = sampled() if options.device != "cpu" else nullcontext(list[Sample]())
    with watch as samples:
        before = [card_gib for _, card_gib, _ in samples]
        totals, step_s = _launched() if variant == LAUNCHED else _in_a_process(variant, options)
    process_gib = max(card_gib for _, card_gib, _ in samples) - min(before) if before else 0.0
    return {**totals, "process_gib": process_gib}, step_s


def _launched() -> tuple[dict[str, Any], list[float]]:
    run = launch(EXAMPLE)
    say(f"{run.output}\nthe first step was done after {run.first_step_s:.1f} s")
    return {}, run.step_times_s()


def _in_a_process(variant: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[float]]:
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, __file__, "--variant", variant, options.model, str(options.steps), options.device]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert child.stdout is not None
    rows = []
    for line in child.stdout:
        say(f"{variant}: {line.rstrip()}")
        rows += [json.loads(line)] if line.startswith("{") else []
    if child.wait():
        sys.exit(f"{variant} ended with status {child.returncode}")
    return rows[-1], [row["step_s"] for row in rows[:-1]]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    found, rows, count = {}, [], BATCHES[options.model]
    for variant in options.variants:
        totals, step_s = measure(variant, options)
        median_s = statistics.median(step_s[WARM_STEPS:])
        found[variant] = count * SEQ_LEN / median_s
        memory = [
            f"{totals[name]:.2f}" if name in totals else "" for name in ("process_gib", "reserved_gib", "allocated_gib")
        ]
        rows.append([variant, *memory, f"{median_s:.3f}", f"{step_s[0]:.1f}", f"{found[variant]:,.0f}"])
    columns = ("variant", "process, GiB (nvidia-smi)", "torch reserved, GiB", "torch allocated, GiB", "step, s")
    caption = f"Batch {count}, sequences of {SEQ_LEN}, fused backward, blocks recomputed."
    yield Table((*columns, "first step, s", "tokens/s"), rows, caption)
    if LAUNCHED in found and AS_LAUNCHED in found:
        yield f"tahq-launch against {AS_LAUNCHED}: {found[LAUNCHED] / found[AS_LAUNCHED]:.3f} of its tokens/s."
    for variant, rate in found.items():
        if variant.startswith("galore") and "qgalore" in found:
            lower = 100 * (1 - found["qgalore"] / rate)
            yield f"Throughput of qgalore against {variant}: {lower:.1f} % lower (paper: 14.6 %)."


if __name__ == "__main__":
    if sys.argv[1:2] == ["--variant"]:
        run_variant(sys.argv[2], sys.argv[3], int(sys.argv[4]), torch.device(sys.argv[5]))
    else:
        main(
            __doc__,
            tables,
            {
                "--variants": {"nargs": "+", "choices": list(VARIANTS), "default": list(VARIANTS)},
                "--model": {"choices": list(MODELS), "default": "7b"},
                "--steps": {"type": int, "default": 8},
                "--device": {"default": "cuda"},
            },
        )
