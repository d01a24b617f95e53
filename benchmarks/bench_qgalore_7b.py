"""Pre-training steps of a Llama of 7 billion parameters on one GPU: Q-GaLore under 16 GB, against GaLore.

Each variant is a process of its own: real model slices, low-rank weights and the fused update, as a stage of one
micro-batch has them. Weights are random, made layer by layer in the form they are trained in; parameters that are not
covered, and the residual stream, are bf16; blocks are computed again in the backward. Tokens are random: what a
step takes does not depend on them.

- `qgalore`: INT8 weights, INT4 projections, 8-bit moments; the allocator capped so that the process is below 14.9 GiB;
- `galore8`: bf16 weights and projections, 8-bit moments (the paper's 8-bit GaLore);
- `galore`: bf16 weights and projections, fp32 moments.

The process's memory is what nvidia-smi says of the whole device less what was in use before it began, sampled every
50 ms by a process of its own. Throughput is of the median step after the first two: the first one searches all
subspaces (randomised), compiles kernels and is given apart. No weight decay, as GaLore is trained.

Run:  python benchmarks/bench_qgalore_7b.py [--steps 8] [--variants qgalore,galore8,galore] [--out FILE]
One H200: about a minute a variant. Lines are printed, and the file is written, after each variant.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from device_memory import DeviceMemory
from harness import describe, need_gpu
from torch.utils.checkpoint import checkpoint

from tahq.comm.link.frame import Purpose
from tahq.memory.galore.low_rank_weight import LowRankSettings
from tahq.memory.galore.qgalore import cover, low_rank_weights
from tahq.models.config import ModelConfig
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange
from tahq.models.slice import ModelSlice, Parts
from tahq.pipeline.chunk import StepShape
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.gradients import summed_cross_entropy
from tahq.pipeline.update.optimizer import low_rank_settings
from tahq.pipeline.update.update import StageUpdate

GIB = 2**30
LIMIT_GIB = 14.9
"""16 GB."""
CONTEXT_GIB = 0.9
"""Left for what the process takes outside torch's allocator: context, kernels, libraries' own workspaces."""
VARIANTS = {
    "qgalore": {"optimizer": "qgalore", "qgalore": {}},
    "galore8": {"optimizer": "galore", "qgalore": {"weights": "bf16", "projections": "bf16", "states": "int8"}},
    "galore": {"optimizer": "galore", "qgalore": {"weights": "bf16", "projections": "bf16"}},
}
WARM_STEPS = 2
LOSS_SAMPLES = 4
"""Whose logits are in fp32 at a time."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant: seconds of its steps, and what it took."""

    variant: str
    parameters: int
    step_s: list[float]
    allocated_gib: float
    reserved_gib: float
    process_gib: float
    tokens: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s[WARM_STEPS:])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.median_s


def training_of(variant: str, arguments: argparse.Namespace) -> TrainingConfig:
    keys = VARIANTS[variant]
    return TrainingConfig(
        steps=arguments.steps,
        global_batch=arguments.batch,
        micro_batch=arguments.batch,
        clip_norm=None,
        non_finite="halt",
        lr=1e-4,
        weight_decay=0.0,
        optimizer=keys["optimizer"],
        # the whole model is cast to bf16, embedding and head with it: they are ordinary parameters here
        qgalore={**keys["qgalore"], "fused": True, "svd": "randomised", "ends": "fp32"},
    )


def spec_of(arguments: argparse.Namespace) -> ModelSpec:
    model = ModelConfig(
        family="llama",
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_heads=arguments.heads,
        intermediate_size=arguments.inner,
    )
    return load_spec(model, vocab_size=arguments.vocab, seq_len=arguments.seq_len)


def build(spec: ModelSpec, settings: LowRankSettings, device: torch.device) -> ModelSlice:
    """The whole model with random weights; no two covered ones are in memory in fp32 at once."""
    model = ModelSlice(spec, Parts.of(BlockRange(0, spec.num_layers, spec.num_layers)), RandomContext(0))
    model.bfloat16()  # on the meta device still
    for weight in cover(model, settings, device).values():
        weight.storage.assign(torch.empty(weight.shape, device=device).normal_(0.0, 0.02))
    model.materialise(device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.ndim == 1 else parameter.normal_(0.0, 0.02)
    model.checkpoint_blocks = True
    return model.train()


def run_variant(variant: str, arguments: argparse.Namespace) -> None:
    """In a process of its own: prints a JSON line a step, then one with the totals."""
    device = torch.device(arguments.device)
    is_cuda = device.type == "cuda"
    if is_cuda and variant == "qgalore":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((LIMIT_GIB - CONTEXT_GIB) * GIB / total)
    training, spec = training_of(variant, arguments), spec_of(arguments)
    settings = low_rank_settings(training, 0)
    assert settings is not None
    begin_s = time.perf_counter()
    model = build(spec, settings, device)
    shape = StepShape(1, arguments.batch, arguments.seq_len, spec.hidden_size)
    weights = low_rank_weights(model)
    update = StageUpdate(
        training, model.canonical_parameters(), model.is_decayed, arguments.steps, None, weights, shape
    )
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    say(event="built", seconds=time.perf_counter() - begin_s, allocated_gib=allocated_gib(is_cuda))
    for step in range(arguments.steps):
        begin_s = time.perf_counter()
        loss = one_step(model, update, step, shape, arguments.vocab, device)
        say(event="step", step=step, seconds=time.perf_counter() - begin_s, loss=loss, gib=allocated_gib(is_cuda))
    searches = sum(weight.subspace.num_searches for weight in weights.values() if weight.subspace is not None)
    say(
        event="done",
        parameters=sum(p.numel() for p in model.parameters()) + sum(weight.numel() for weight in weights.values()),
        searches=searches,
        allocated_gib=torch.cuda.max_memory_allocated() / GIB if is_cuda else 0.0,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB if is_cuda else 0.0,
    )


def one_step(
    model: ModelSlice, update: StageUpdate, step: int, shape: StepShape, vocab: int, device: torch.device
) -> float:
    """Forward, and a backward that updates; the mean loss, read at the end, so that the device has finished."""
    generator = torch.Generator(device).manual_seed(step)
    tokens = torch.randint(0, vocab, (shape.micro_batch, shape.seq_len + 1), generator=generator, device=device)
    update.begin(step)
    model.random.at(step, 0, 0, int(Purpose.TRAIN))
    loss = loss_of(model(tokens[:, :-1]), tokens[:, 1:].contiguous())
    count = shape.micro_batch * shape.seq_len
    (loss / (count / shape.gradient_scale)).backward()
    norms = update.squared_norms()  # as PREPARE reads them
    assert all(norm == norm for norm in norms)
    update.apply(step, 1.0)
    mean = float(loss.detach()) / count
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return mean


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The summed loss of a few samples at a time, whose logits in fp32 are made again in the backward."""
    parts = zip(logits.split(LOSS_SAMPLES), labels.split(LOSS_SAMPLES), strict=True)
    losses = [checkpoint(summed_cross_entropy, *part, use_reentrant=False) for part in parts]
    return torch.stack(losses).sum()


def allocated_gib(is_cuda: bool) -> float:
    return torch.cuda.memory_allocated() / GIB if is_cuda else 0.0


def say(**numbers: object) -> None:
    print(json.dumps(numbers), flush=True)


def measure(variant: str, arguments: argparse.Namespace) -> Row:
    """Run a variant in a process of its own, with the driver's figures taken beside it."""
    command = [sys.executable, __file__, "--child", variant, *child_arguments(arguments)]
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    step_s: list[float] = []
    done: dict[str, float] = {}
    with DeviceMemory() as memory:
        time.sleep(1.0)
        before = memory.samples_mib
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert child.stdout is not None
        for line in child.stdout:
            print(f"{variant}: {line}", end="", flush=True)
            if not line.startswith("{"):
                continue
            numbers = json.loads(line)
            if numbers["event"] == "step":
                step_s.append(numbers["seconds"])
            if numbers["event"] == "done":
                done = numbers
        if child.wait() or not done:
            raise SystemExit(f"{variant} ended with status {child.returncode}")
        used = memory.samples_mib
    process_gib = (max(used) - min(before)) / 1024 if used and before else 0.0
    return Row(
        variant,
        int(done["parameters"]),
        step_s,
        done["allocated_gib"],
        done["reserved_gib"],
        process_gib,
        arguments.batch * arguments.seq_len,
    )


def child_arguments(arguments: argparse.Namespace) -> list[str]:
    names = ("steps", "batch", "seq_len", "layers", "hidden", "heads", "inner", "vocab", "device")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]


def report(rows: list[Row], arguments: argparse.Namespace) -> str:
    where = describe() if arguments.device == "cuda" else "CPU"
    lines = [
        "# Q-GaLore: a Llama of 7 billion parameters in 16 GB",
        "",
        f"{where}. `python benchmarks/bench_qgalore_7b.py --steps {arguments.steps}`",
        "",
        f"{rows[0].parameters / 1e9:.2f} billion parameters, batch {arguments.batch}, sequences of "
        f"{arguments.seq_len}, fused backward, blocks computed again.",
        "",
        "| variant | process, GiB (nvidia-smi) | torch reserved, GiB | torch allocated, GiB | step, s "
        "| first step with all searches, s | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.variant} | {row.process_gib:.2f} | {row.reserved_gib:.2f} | {row.allocated_gib:.2f} "
        f"| {row.median_s:.3f} | {row.step_s[0]:.1f} | {row.tokens_per_s:,.0f} |"
        for row in rows
    ]
    quantised = next((row for row in rows if row.variant == "qgalore"), None)
    for row in rows:
        if quantised is not None and row is not quantised:
            loss = 1 - quantised.tokens_per_s / row.tokens_per_s
            lines += ["", f"Throughput of qgalore against {row.variant}: {100 * loss:.1f} % lower (paper: 14.6 %)."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variants", default="qgalore,galore8,galore")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--inner", type=int, default=11008)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "qgalore_7b_h200_202611.md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    need_gpu(arguments.device)
    if arguments.child:
        run_variant(arguments.child, arguments)
        return
    rows: list[Row] = []
    for variant in arguments.variants.split(","):
        rows.append(measure(variant, arguments))
        text = report(rows, arguments)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
