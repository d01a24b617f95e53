"""Codecs on one CPU thread, beside a copy of the same bytes: `reference` (torch) and `cpu` (numba).

    python benchmarks/bench_codec.py [--output benchmarks/results/codec_cpu_<hardware>_<yyyymm>.md]

A tensor of [2, 1024, 1600], a micro-batch of GPT2-XL: Gaussian, one tile in fifty with an outlier. Every round runs
every case once, so that other load on the machine hits all alike; medians over the rounds. A copy is `copy_` of the
decoded tensor's bytes into existing memory; a decoder's output is fresh memory. First use is timed in processes of
their own, without and with numba's cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from harness import Table, main

from tahq.quant import get_codec

SHAPE = (2, 1024, 1600)
NUM_ELEMENTS = torch.Size(SHAPE).numel()
SPECS = ("tah", "fixed:bits=6", "fixed:bits=8", "fixed:bits=8,round=stochastic", "eden", "wf")
RAW = {torch.float32: "raw:dtype=fp32", torch.bfloat16: "raw:dtype=bf16"}
FIRST_USED = ("tah", "fixed", "eden", "wf")
COPY, REFERENCE = "copy", "reference"
FIRST_USE = """
import sys, time, torch
from tahq.quant import get_codec
x = torch.randn(2, 8, 128)
start = time.perf_counter()
for spec in sys.argv[1:]:
    codec = get_codec(spec, backend="cpu")
    codec.decode(codec.encode(x), x.shape)
print(time.perf_counter() - start)
"""


class Case(NamedTuple):
    """One row of the table; `copy` has no codec."""

    spec: str
    direction: str
    dtype: torch.dtype
    backend: str


def cases() -> Iterator[Case]:
    for dtype, raw in RAW.items():
        yield Case("", "", dtype, COPY)
        for spec in (raw, *SPECS):
            for direction in ("encode", "decode"):
                for backend in (REFERENCE,) if spec == raw else (REFERENCE, "cpu"):
                    yield Case(spec, direction, dtype, backend)


def work(case: Case, x: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """The call that is timed."""
    if case.backend == COPY:
        return lambda: target.copy_(x)
    codec = get_codec(case.spec, backend=case.backend)
    if case.direction == "encode":
        return lambda: codec.encode(x, key=1)
    buf = codec.encode(x, key=1)
    return lambda: codec.decode(buf, SHAPE, x.dtype, key=1)


def measure(rounds: int) -> dict[Case, float]:
    """Seconds of each case, the median over the rounds."""
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    x.view(-1, 64)[::50, 0] = 12.0
    inputs = {dtype: x.to(dtype) for dtype in RAW}
    targets = {dtype: torch.zeros_like(each) for dtype, each in inputs.items()}
    jobs = {case: work(case, inputs[case.dtype], targets[case.dtype]) for case in cases()}
    times_s: dict[Case, list[float]] = {case: [] for case in jobs}
    for number in range(rounds + 1):
        for case, job in jobs.items():
            start = time.perf_counter()
            job()
            if number:  # the first round compiles
                times_s[case].append(time.perf_counter() - start)
    return {case: statistics.median(found) for case, found in times_s.items()}


def rows(seconds: dict[Case, float]) -> Iterator[list[str]]:
    for case, taken in seconds.items():
        copy_s = seconds[Case("", "", case.dtype, COPY)]
        reference_s = seconds.get(case._replace(backend=REFERENCE), taken)
        yield [
            f"`{case.spec}`" if case.spec else "copy of the tensor",
            case.direction,
            str(case.dtype).removeprefix("torch."),
            case.backend,
            f"{taken * 1e3:.2f}",
            f"{NUM_ELEMENTS / taken / 1e6:,.0f}",
            f"{taken / copy_s:.1f}",
            f"{reference_s / taken:.1f}" if case.backend == "cpu" else "",
        ]


def first_use() -> str:
    """Encode and decode a small tensor with each codec in a new process: compiling, then from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST_USE, *FIRST_USED]
        cold_s, warm_s = (
            float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        )
    return (
        f"First use of {', '.join(FIRST_USED)}, encoding and decoding, in a new process: {cold_s:.1f} s when the "
        f"kernels must be compiled, {warm_s:.2f} s from numba's cache; both with the import of numba."
    )


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    torch.set_num_threads(1)
    columns = ("codec", "", "input and output", "backend", "ms", "million elements/s", "× copy's time")
    yield Table(
        (*columns, "× faster than reference"),
        rows(measure(options.repeats)),
        f"Tensor {list(SHAPE)}, {NUM_ELEMENTS:,} elements; medians of {options.repeats} rounds.",
    )
    yield first_use()


if __name__ == "__main__":
    main(__doc__, tables, repeats=15)
