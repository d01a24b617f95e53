"""Bytes per parameter that each optimizer keeps, counted from its tensors after two steps.

    python benchmarks/bench_optimizer_memory.py [--output benchmarks/results/optimizer_memory_<yyyymm>.md]

Parameters have the shapes of a Llama. A hundredth of a 1B model's layers shows the same figures, except for the share
of embeddings and norms.
"""

import argparse
from collections.abc import Iterator

import torch
from harness import Table, main
from optimizer_rows import ARGUMENTS, entries, llama_shapes, make_parameters, state_nbytes

FP32_TOTAL = 16
"""Bytes per parameter of AdamW with everything in fp32."""


def rows(options: argparse.Namespace) -> Iterator[list[object]]:
    device, shapes = torch.device(options.device), llama_shapes(options.parameters)
    for entry in entries(device):
        parameters = make_parameters(shapes, entry.dtype, device)
        optimizer = entry.build(parameters)
        for _ in range(2):
            optimizer.step()
        states = state_nbytes(optimizer) / sum(parameter.numel() for parameter in parameters)
        size, dtype = entry.dtype.itemsize, str(entry.dtype).removeprefix("torch.")
        total = 2 * size + states
        yield [entry.name, dtype, size, size, f"{states:.3f}", f"{total:.3f}", f"{total / FP32_TOTAL:.1%}"]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = ("optimizer", "weights", "weight", "gradient", "states", "together", "of fp32 AdamW")
    yield Table(columns, rows(options), f"{options.parameters:,.0f} parameters; bytes per parameter.")


if __name__ == "__main__":
    main(__doc__, tables, {**ARGUMENTS, "--parameters": {"type": float, "default": 3e8}})
