"""Blocks of a model by what their backward computes again: bytes that a micro-batch keeps, and time.

    python benchmarks/bench_recompute.py [--output benchmarks/results/recompute_<hardware>_<yyyymm>.md]
    python benchmarks/bench_recompute.py --device cuda --dtype bf16 --hidden 4096 --tokens 8192

Forward and backward of `--blocks` blocks as transformers computes them, at each level of `memory.recompute`. *Kept*: by
`saved_by_slice`, which tests compare with what is kept, per block; on a GPU also the peak of the allocator above
weights and their gradients. Repetitions of all levels in turn; times are medians, relative to the median without
recomputation.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import get_args

import torch
from bench_head import DTYPES, peak_nbytes
from harness import Table, main, medians_in_turn, need_gpu

from tahq.memory.config import EXACTLY_STORED, Recompute
from tahq.memory.recompute import recompute
from tahq.memory.saved_tensors import MicroBatchShape, saved_by_slice
from tahq.memory.stored_slice import build_slice
from tahq.models.config import ModelConfig
from tahq.models.deferred_gradients import sharing_weight_copies
from tahq.models.keyed_dropout import RandomContext
from tahq.models.model_spec import ModelSpec, load_spec
from tahq.models.partition import BlockRange

SAMPLES = 4
LEVELS: tuple[Recompute, ...] = get_args(Recompute)


def step_of(spec: ModelSpec, blocks: BlockRange, level: Recompute, options: argparse.Namespace) -> Callable[[], None]:
    """One forward and backward."""
    device, dtype = torch.device(options.device), DTYPES[options.dtype]
    module = build_slice(spec, blocks, seed=0, device=device, random=RandomContext(0)).train()
    recompute(module, level)
    shape = SAMPLES, options.tokens // SAMPLES, options.hidden
    draw = torch.Generator(device).manual_seed(0)
    x = torch.randn(shape, generator=draw, device=device).requires_grad_()
    flowing = torch.randn(shape, generator=draw, device=device)

    def step() -> None:
        with sharing_weight_copies(), torch.autocast(device.type, dtype, enabled=dtype is torch.bfloat16):
            y = module(x)
        y.backward(flowing)

    step()  # so that gradients are there
    return step


def rows(family: str, options: argparse.Namespace) -> Iterator[list[str]]:
    """One row per level."""
    device = torch.device(options.device)
    sizes = {"num_layers": options.blocks + 2, "hidden_size": options.hidden, "num_heads": options.hidden // 64}
    seq_len = options.tokens // SAMPLES
    spec = load_spec(ModelConfig(family=family, **sizes), vocab_size=256, seq_len=seq_len)
    blocks, bf16 = BlockRange(1, options.blocks + 1, options.blocks + 2), options.dtype == "bf16"
    steps = {level: step_of(spec, blocks, level, options) for level in LEVELS}
    peaks = {level: peak_nbytes(step, device) for level, step in steps.items()} if device.type == "cuda" else {}
    times_ms = medians_in_turn(steps, device, options.repeats)
    for level in LEVELS:
        stored = EXACTLY_STORED.get(level, ())
        shape = MicroBatchShape(SAMPLES, seq_len, bf16, device.type == "cuda", recompute=level, stored_layers=stored)
        kept = saved_by_slice(spec, blocks, shape) / options.blocks
        ms, relative = times_ms[level], times_ms[level] / times_ms["none"]
        peak = [f"{peaks[level] / 2**20:,.0f}"] if peaks else []
        tensor = 2 * options.tokens * options.hidden
        yield [
            level,
            f"{kept / 2**20:,.1f}",
            f"{kept / tensor:.1f}",
            *peak,
            f"{ms:,.1f}",
            f"{relative:.2f}",
        ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu(options.device)
    peak = ["peak, MiB"] if options.device == "cuda" else []
    columns = ("level", "kept, MiB", "in U", *peak, "ms", "time")
    for family in ("gpt2", "llama"):
        heading = f"{family}, hidden size {options.hidden:,}, {options.tokens:,} tokens, {options.dtype}"
        yield Table(columns, rows(family, options), "U: a bf16 tensor [tokens, hidden size].", heading=heading)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--device": {"default": "cpu", "help": "cpu or cuda"},
            "--dtype": {"choices": sorted(DTYPES), "default": "fp32", "help": "of the products"},
            "--hidden": {"type": int, "default": 512, "help": "channels"},
            "--blocks": {"type": int, "default": 2},
            "--tokens": {"type": int, "default": 1024, "help": f"of {SAMPLES} samples"},
        },
        repeats=9,
    )
