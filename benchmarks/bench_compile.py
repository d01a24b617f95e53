"""Blocks by torch.compile: the time of a step and the losses, beside those without

    python benchmarks/bench_compile.py [--output benchmarks/results/compile_<hardware>_<yyyymm>.md]
    python benchmarks/bench_compile.py --device cuda --precision bf16 --layers 12 --hidden 1600 --seq-len 1024

The only stage of a run, as a worker builds and computes it, with `training.compile` and without; steps of both in turn,
of the same batches. *First*: seconds until blocks are compiled. *Step*: median of the steps after the first three.
*Same losses*: steps whose losses have the same bits as without; the largest difference, nats per token.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from harness import Table, main, milliseconds
from option_training import only_stage, train_step

from tahq.config.cluster import ClusterConfig
from tahq.config.stage_estimate import with_memory_choices
from tahq.data.batches import BatchSource
from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.models.keyed_dropout import RandomContext
from tahq.pipeline.stage import Stage
from tahq.worker.assembly import chunk_module, resolved_spec, use_repeatable_kernels

SETTLE = 3
SIZES = {
    "--family": {"default": "gpt2"},
    "--layers": {"type": int, "default": 4},
    "--hidden": {"type": int, "default": 256},
    "--seq-len": {"type": int, "default": 256},
    "--micro-batch": {"type": int, "default": 2},
    "--global-batch": {"type": int, "default": 4},
    "--precision": {"default": "fp32", "choices": ["fp32", "bf16", "fp16"]},
    "--device": {"default": "cpu"},
    "--threads": {"type": int, "default": 1},
}


def stage_of(options: argparse.Namespace, *, compiles: bool) -> Stage:
    """The stage, with its model and data."""
    heads, steps = max(1, options.hidden // 64), SETTLE + options.repeats
    sizes: dict[str, Any] = {"num_layers": options.layers, "hidden_size": options.hidden, "num_heads": heads}
    batches = {"global_batch": options.global_batch, "micro_batch": options.micro_batch}
    training = {"steps": steps, "precision": options.precision, "compile": compiles, **batches}
    sections = {"model": {"family": options.family, **sizes}, "data": {"text": "stdlib", "seq_len": options.seq_len}}
    given = ClusterConfig.model_validate({**sections, "training": training, "pipeline": {"stages": 1}})
    tokenizer, device = load_tokenizer(given.data), torch.device(options.device)
    spec = resolved_spec(given, tokenizer.vocab_size)
    config = with_memory_choices(given, spec)
    module = chunk_module(config, spec, 0, device=device, random=RandomContext(0))
    dataset = load_dataset(config.data, tokenizer)
    return only_stage(config, module, BatchSource(dataset, seed=0, **batches), device)


def rows(options: argparse.Namespace) -> Iterator[list[object]]:
    """One row without, one with."""
    stages, losses, times_ms, first_s = {}, {False: [], True: []}, {False: [], True: []}, {}
    for compiles in (False, True):
        stages[compiles] = stage_of(options, compiles=compiles)
        begin_s = time.perf_counter()
        stages[compiles].prepare()
        first_s[compiles] = time.perf_counter() - begin_s
    for step in range(SETTLE + options.repeats):
        for compiles, stage in stages.items():
            times_ms[compiles].append(
                milliseconds(lambda: losses[compiles].append(train_step(stage, step)), torch.device(options.device))  # noqa: B023
            )
    medians_ms = {compiles: statistics.median(each[SETTLE:]) for compiles, each in times_ms.items()}
    for compiles, ms in medians_ms.items():
        pairs = list(zip(losses[False], losses[compiles], strict=True))
        same, largest = sum(a == b for a, b in pairs), max(abs(a - b) for a, b in pairs)
        ratio = f"{medians_ms[False] / ms:.2f}"
        ends = [f"{losses[compiles][step]:.4f}" for step in (0, -1)]
        yield [
            compiles,
            f"{first_s[compiles]:.1f}",
            f"{ms:,.1f}",
            ratio,
            *ends,
            f"{same}/{len(pairs)}",
            f"{largest:.1e}",
        ]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """The comparison."""
    torch.set_num_threads(options.threads)
    if options.device != "cpu":
        use_repeatable_kernels(options.device)
    columns = (
        "compiled",
        "first s",
        "step ms",
        "times as fast",
        "first loss",
        "last",
        "same losses",
        "largest difference",
    )
    yield Table(columns, rows(options), f"{options.family}, {options.layers} blocks of {options.hidden}")


if __name__ == "__main__":
    main(__doc__, tables, SIZES, repeats=15)
