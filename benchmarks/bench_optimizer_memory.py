"""Bytes a parameter that each optimizer keeps, counted from the tensors that it has after two steps.

Parameters have the shapes of a Llama's of that many, weights and gradients their own bytes beside. On the CPU a
hundredth of a 1B model's layers shows the same figures but for the share of embeddings and norms.

Run:  python benchmarks/bench_optimizer_memory.py [--parameters 3e8] [--device cuda] [--out FILE]
"""

import argparse
from pathlib import Path

import torch
from harness import describe
from optimizer_rows import entries, llama_shapes, make_parameters, state_nbytes

COLUMNS = ("optimizer", "weights", "weight", "gradient", "states", "together", "of fp32 AdamW")
FP32_TOTAL = 16
"""Bytes a parameter of AdamW with everything in fp32."""


def line(name: str, dtype: torch.dtype, states: float) -> str:
    """A row of the table; `states` in bytes a parameter."""
    total = 2 * dtype.itemsize + states
    cells = (name, str(dtype).removeprefix("torch."), dtype.itemsize, dtype.itemsize, f"{states:.3f}", f"{total:.3f}")
    return f"| {' | '.join(map(str, cells))} | {total / FP32_TOTAL:.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=3e8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizer_memory_202611.md")
    arguments = parser.parse_args()
    device, shapes = torch.device(arguments.device), llama_shapes(arguments.parameters)
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for entry in entries(device):
        parameters = make_parameters(shapes, entry.dtype, device)
        optimizer = entry.build(parameters)
        for _ in range(2):
            optimizer.step()
        count = sum(parameter.numel() for parameter in parameters)
        lines.append(line(entry.name, entry.dtype, state_nbytes(optimizer) / count))
        print(lines[-1], flush=True)
        heading = f"{describe()}. {count:,} parameters in {len(shapes)} tensors. Bytes a parameter."
        command = "`python benchmarks/bench_optimizer_memory.py`"
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text("\n".join(["# What optimizers keep", "", f"{heading} {command}", "", *lines]) + "\n")


if __name__ == "__main__":
    main()
