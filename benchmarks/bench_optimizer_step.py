"""Time of an optimizer's step against the bytes that it must move, as a share of a copy's bandwidth.

Parameters have the shapes of a Llama's of that many. Each weight is read and written, each gradient read, each state
read and written: that many bytes, counted from the tensors at hand. A copy is measured in the same run, of the same
tensors and of one large one; shares are of the faster. All optimizers step in turn, round after round, on the same
weights and gradients, with states of their own; a figure is the median of the rounds. *Alone*: one step, launched on
an idle device. *In a row*: four, as behind backward passes, where launching is hidden. States are many times the L2
cache.

Run:  python benchmarks/bench_optimizer_step.py [--parameters 1e9] [--rounds 9] [--layouts] [--out FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch
from harness import describe
from optimizer_rows import BF16, FP32, OTHER_PACKAGES, Entry, entries, llama_shapes, make_parameters, state_nbytes
from torch.nn import Parameter

IN_A_ROW = 4
LAYOUTS = ((512, 256), (1024, 256), (2048, 256), (4096, 256), (512, 128), (1024, 128), (2048, 512))
"""Elements of a program, and of a warp, of the kernel of `adamw8bit`."""


@dataclass(slots=True)
class Row:
    """One optimizer: its bytes, and milliseconds of a step in each round."""

    name: str
    weights: str
    num_parameters: int
    moved_nbytes: int
    state_nbytes: int
    alone_ms: list[float] = field(default_factory=list)
    in_a_row_ms: list[float] = field(default_factory=list)

    def bandwidth(self, times_ms: list[float]) -> float:
        """Bytes a second of the median step."""
        return self.moved_nbytes / statistics.median(times_ms) * 1e3


def milliseconds(call: Callable[[], object], device: torch.device, count: int = 1) -> float:
    """Of one of `count` calls in a row, from an idle device to an idle device."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


def copy_bandwidth(parameters: list[Parameter], device: torch.device, rounds: int) -> dict[str, float]:
    """Bytes a second, read and written: of copies of all gradients, one by one, and of one tensor as large."""
    sources = [parameter.grad for parameter in parameters if parameter.grad is not None]
    targets = [torch.empty_like(source) for source in sources]
    flat = torch.cat([source.flatten() for source in sources])
    other = torch.empty_like(flat)

    def each() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    found = {}
    for name, copy in (("each", each), ("one", lambda: other.copy_(flat))):
        copy()
        median_ms = statistics.median(milliseconds(copy, device, IN_A_ROW) for _ in range(rounds))
        found[name] = 2 * flat.nbytes / median_ms * 1e3
    return found


def layout_entries() -> Iterator[tuple[Entry, tuple[int, int]]]:
    """`adamw8bit` with each of the layouts of its kernel."""
    (plain,) = (entry for entry in entries(torch.device("cuda")) if entry.name == "adamw8bit")
    for layout in LAYOUTS:
        yield Entry(f"adamw8bit, {layout[0]} a program, {layout[1]} a warp", plain.build), layout


def with_layout(step: Callable[[], object], layout: tuple[int, int]) -> Callable[[], object]:
    """A step with another layout of the kernel."""
    from tahq.memory.adam import kernels as adamw_triton

    def stepped() -> None:
        kept = adamw_triton.ELEMENTS, adamw_triton.ELEMENTS_PER_WARP
        adamw_triton.ELEMENTS, adamw_triton.ELEMENTS_PER_WARP = layout
        try:
            step()
        finally:
            adamw_triton.ELEMENTS, adamw_triton.ELEMENTS_PER_WARP = kept

    return stepped


def prepare(entry: Entry, parameters: list[Parameter]) -> tuple[Row, Callable[[], object]]:
    """The optimizer after two steps, which compile kernels and make states, and its row."""
    optimizer = entry.build(parameters)
    for _ in range(2):
        optimizer.step()
    weights = sum(parameter.nbytes for parameter in parameters)
    gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    states = state_nbytes(optimizer)
    count = sum(parameter.numel() for parameter in parameters)
    name = str(entry.dtype).removeprefix("torch.")
    return Row(entry.name, name, count, 2 * weights + gradients + 2 * states, states), optimizer.step


def report(rows: list[Row], copies: dict[str, float], heading: str) -> str:
    copied = max(copies.values())
    lines = [
        "# A step of the optimizer",
        "",
        heading,
        "",
        f"A copy of all gradients, one by one, moves {copies['each'] / 1e12:.3f} TB/s, read and written; of one tensor "
        f"as large, {copies['one'] / 1e12:.3f}. Shares are of {copied / 1e12:.3f}; medians of "
        f"{len(rows[0].alone_ms)} rounds (least–most).",
        "",
        "| optimizer | weights | bytes of state a parameter | bytes moved a parameter "
        "| in a row, ms | share | alone, ms | share |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        per = [f"{number / row.num_parameters:.2f}" for number in (row.state_nbytes, row.moved_nbytes)]
        times = [
            f"{statistics.median(each):.3f} ({min(each):.3f}–{max(each):.3f}) | {row.bandwidth(each) / copied:.1%}"
            for each in (row.in_a_row_ms, row.alone_ms)
        ]
        lines.append(f"| {row.name} | {row.weights} | {' | '.join([*per, *times])} |")
    return "\n".join(lines) + "\n"


def packages() -> str:
    """Versions of the other packages whose optimizers are measured."""
    names = sorted({package for package, _, _ in OTHER_PACKAGES.values() if find_spec(package) is not None})
    return "".join(f", {name} {version(name)}" for name in names)


Steps = list[tuple[Row, Callable[[], object]]]


def prepared(arguments: argparse.Namespace, parameters: dict[torch.dtype, list[Parameter]]) -> Steps:
    """What is to be measured, ready to step; what cannot step is told, and left out."""
    device = torch.device(arguments.device)
    chosen = layout_entries() if arguments.layouts else ((entry, None) for entry in entries(device))
    steps: Steps = []
    for entry, layout in chosen:
        if arguments.only and not any(part in entry.name for part in arguments.only):
            continue
        try:
            row, step = prepare(entry, parameters[entry.dtype])
            step = with_layout(step, layout) if layout else step
            step()
        except Exception as error:  # one of others' may not go with this torch: the rest is measured all the same
            print(f"{entry.name}: left out: {type(error).__name__}: {error}", flush=True)
            continue
        steps.append((row, step))
        print(f"{entry.name}: {row.state_nbytes / row.num_parameters:.3f} bytes of state a parameter", flush=True)
    return steps


def write(arguments: argparse.Namespace, rows: list[Row], copies: dict[str, float], heading: str) -> str:
    text = report(rows, copies, heading)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    numbers = {"heading": heading, "copies": copies, "rows": [asdict(row) for row in rows]}
    arguments.out.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="*", help="parts of names of the optimizers to measure")
    parser.add_argument("--layouts", action="store_true", help="layouts of adamw8bit's kernel instead of optimizers")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizer_step_h200_202611.md")
    arguments = parser.parse_args()
    device, shapes = torch.device(arguments.device), llama_shapes(arguments.parameters)
    parameters = {dtype: make_parameters(shapes, dtype, device) for dtype in (FP32, BF16)}
    copies = copy_bandwidth(parameters[FP32], device, arguments.rounds)
    print({name: f"{found / 1e12:.3f} TB/s" for name, found in copies.items()}, flush=True)
    steps = prepared(arguments, parameters)
    rows = [row for row, _ in steps]
    count = sum(parameter.numel() for parameter in parameters[FP32])
    command = "`python benchmarks/bench_optimizer_step.py`"
    heading = f"{describe()}{packages()}. {count:,} parameters in {len(shapes)} tensors. {command}"
    for number in range(arguments.rounds):
        for row, step in steps:
            row.alone_ms.append(milliseconds(step, device))
            row.in_a_row_ms.append(milliseconds(step, device, IN_A_ROW))
        text = write(arguments, rows, copies, heading)
        times = ", ".join(f"{row.name} {row.in_a_row_ms[-1]:.2f} ms" for row in rows)
        print(f"round {number + 1}: {times}", flush=True)
    print(text)


if __name__ == "__main__":
    main()
