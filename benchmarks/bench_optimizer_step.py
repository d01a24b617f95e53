"""Time of an optimizer's step against the bytes that it must move, as a share of a copy's bandwidth.

    python benchmarks/bench_optimizer_step.py [--output benchmarks/results/optimizer_step_<hardware>_<yyyymm>.md]

Parameters have the shapes of a Llama. Each weight is read and written, each gradient read, each state read and written:
these bytes are counted from the tensors. A copy is measured in the same run, of the same tensors and of one large
tensor; shares are of the faster. All optimizers step in turn, round after round, on the same weights and gradients,
with states of their own; medians over the rounds. *Alone*: one step, launched on an idle device. *In a row*: four, as
behind backward passes, where launching is hidden. States are many times the L2 cache.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec

import torch
from harness import Table, main, milliseconds, say
from optimizer_rows import ARGUMENTS, OTHER_PACKAGES, Entry, entries, llama_shapes, make_parameters, state_nbytes
from torch.nn import Parameter

IN_A_ROW = 4


@dataclass(slots=True)
class Row:
    """One optimizer: its bytes, and milliseconds of a step in each round."""

    name: str
    weights: str
    num_parameters: int
    moved_nbytes: int
    state_nbytes: int
    step: Callable[[], object]
    alone_ms: list[float] = field(default_factory=list)
    in_a_row_ms: list[float] = field(default_factory=list)

    def cells(self, copied: float) -> Iterator[str]:
        """`copied`: bytes per second of a copy."""
        yield from (self.name, self.weights)
        yield from (f"{number / self.num_parameters:.2f}" for number in (self.state_nbytes, self.moved_nbytes))
        for times_ms in (self.in_a_row_ms, self.alone_ms):
            median_ms = statistics.median(times_ms)
            yield f"{median_ms:.3f} ({min(times_ms):.3f}–{max(times_ms):.3f})"
            yield f"{self.moved_nbytes / median_ms * 1e3 / copied:.1%}"


def copy_bandwidth(parameters: list[Parameter], device: torch.device, rounds: int) -> tuple[float, float]:
    """Bytes per second, read and written: of copies of all gradients, one by one, and of one tensor as large."""
    sources = [parameter.grad for parameter in parameters if parameter.grad is not None]
    targets = [torch.empty_like(source) for source in sources]
    flat = torch.cat([source.flatten() for source in sources])
    other = torch.empty_like(flat)

    def each() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    def bandwidth(copy: Callable[[], object]) -> float:
        copy()
        median_ms = statistics.median(milliseconds(copy, device, IN_A_ROW) for _ in range(rounds))
        return 2 * flat.nbytes / median_ms * 1e3

    return bandwidth(each), bandwidth(lambda: other.copy_(flat))


def prepare(entry: Entry, parameters: list[Parameter]) -> Row:
    """The optimizer after two steps, which compile kernels and make states."""
    optimizer = entry.build(parameters)
    for _ in range(2):
        optimizer.step()
    weights = sum(parameter.nbytes for parameter in parameters)
    gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    states = state_nbytes(optimizer)
    count = sum(parameter.numel() for parameter in parameters)
    dtype = str(entry.dtype).removeprefix("torch.")
    return Row(entry.name, dtype, count, 2 * weights + gradients + 2 * states, states, optimizer.step)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    device, shapes = torch.device(options.device), llama_shapes(options.parameters)
    parameters = {dtype: make_parameters(shapes, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    each, one = copy_bandwidth(parameters[torch.float32], device, options.repeats)
    rows = []
    for entry in entries(device):
        if options.only and not any(part in entry.name for part in options.only):
            continue
        try:
            rows.append(prepare(entry, parameters[entry.dtype]))
        except Exception as error:  # another package's optimizer may not work with this torch: measure the rest
            say(f"{entry.name}: left out: {type(error).__name__}: {error}")
    for number in range(options.repeats):
        for row in rows:
            row.alone_ms.append(milliseconds(row.step, device))
            row.in_a_row_ms.append(milliseconds(row.step, device, IN_A_ROW))
        say(f"round {number + 1}: {', '.join(f'{row.name} {row.in_a_row_ms[-1]:.2f} ms' for row in rows)}")
    packages = sorted({package for package, *_ in OTHER_PACKAGES.values() if find_spec(package) is not None})
    caption = (
        f"{rows[0].num_parameters:,} parameters in {len(shapes)} tensors"
        f"{''.join(f', {name} {version(name)}' for name in packages)}. A copy of all gradients, one by one, moves "
        f"{each / 1e12:.3f} TB/s, read and written; of one tensor as large, {one / 1e12:.3f}. Shares are of the "
        f"faster; medians of {options.repeats} rounds (least–most)."
    )
    columns = ("optimizer", "weights", "bytes of state per parameter", "bytes moved per parameter")
    columns += ("in a row, ms", "share", "alone, ms", "share")
    yield Table(columns, (list(row.cells(max(each, one))) for row in rows), caption)


if __name__ == "__main__":
    only = {"--only": {"nargs": "*", "help": "parts of names of the optimizers to measure"}}
    main(__doc__, tables, {**ARGUMENTS, **only}, repeats=9)
