"""How fast the codecs are on one CPU thread, beside a copy of the same bytes: `reference` (torch) and `cpu` (numba).

A tensor of [2, 1024, 1600], a micro-batch of GPT2-XL: Gaussian, one tile in fifty with an outlier, as activations have
them. Every round runs every case once, so that what else the machine does hits all alike; medians over the rounds. A
copy is `copy_` of the decoded tensor's bytes into memory that is there; a decoder's output is fresh memory, whose
pages the system has yet to give, and its time counts. First use is timed in processes of their own, without and with
numba's cache.

Predicted before the first run of this script, from kernels timed one by one on a busy machine: tah encodes fp32 at 360
million elements/s (2.8 ns an element: 0.2 for the magnitudes, 0.9 for the entropies, 1.5 to transform, round and pack)
and decodes 1,200 (0.7 ns, and the pages); bf16 is 10 % slower to encode, for each reading converts again. 8 times the
reference to encode and 4 to 6 to decode, the reference's decoder having no temporaries to make but one. fixed:bits=8
encodes at 1,200 (a division and two readings), decodes at 2,000; bits=6 at 800 and 1,300. Compilation takes 13 s.

`eden` and `wf` were added later; expected from tests of their kernels: 300 and 170 million elements/s to encode, 550
and 650 to decode, and compilation of all four in 30 s.

Run:  python benchmarks/bench_codec.py [--output benchmarks/results/codec_cpu_<hardware>_<yyyymm>.md]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import describe

from tahq.quant import get_codec

SHAPE = (2, 1024, 1600)
SPECS = ("tah", "fixed:bits=6", "fixed:bits=8", "fixed:bits=8,round=stochastic", "eden", "wf")
RAW = {torch.float32: "raw:dtype=fp32", torch.bfloat16: "raw:dtype=bf16"}
FIRST_USED = ("tah", "fixed", "eden", "wf")
DIRECTIONS = ("encode", "decode")
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


@dataclass(frozen=True)
class Case:
    """One row of the table; `copy` has no codec."""

    spec: str
    direction: str
    dtype: torch.dtype
    backend: str


def activations(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SHAPE, generator=generator)
    tiles = x.view(-1, 64)
    tiles[::50, 0] = 12.0
    return x.to(dtype)


def work(case: Case, x: torch.Tensor, room: torch.Tensor) -> Callable[[], object]:
    """What is timed."""
    if case.backend == COPY:
        return lambda: room.copy_(x)
    codec = get_codec(case.spec, backend=case.backend)
    if case.direction == "encode":
        return lambda: codec.encode(x, key=1)
    buf = codec.encode(x, key=1)
    return lambda: codec.decode(buf, SHAPE, x.dtype, key=1)


def cases() -> list[Case]:
    found = []
    for dtype, raw in RAW.items():
        found.append(Case("", "", dtype, COPY))
        found += [Case(raw, direction, dtype, REFERENCE) for direction in DIRECTIONS]
        for spec in SPECS:
            found += [Case(spec, way, dtype, backend) for way in DIRECTIONS for backend in (REFERENCE, "cpu")]
    return found


def measure(rounds: int) -> dict[Case, float]:
    """Seconds of each case, the median over the rounds."""
    inputs = {dtype: activations(dtype) for dtype in RAW}
    rooms = {dtype: torch.zeros_like(x) for dtype, x in inputs.items()}
    jobs = {case: work(case, inputs[case.dtype], rooms[case.dtype]) for case in cases()}
    times_s: dict[Case, list[float]] = {case: [] for case in jobs}
    for each in range(rounds + 1):
        for case, job in jobs.items():
            start = time.perf_counter()
            job()
            if each:  # the first round compiles
                times_s[case].append(time.perf_counter() - start)
    return {case: statistics.median(found) for case, found in times_s.items()}


def row(case: Case, seconds: dict[Case, float]) -> str:
    taken = seconds[case]
    million_a_second = torch.Size(SHAPE).numel() / taken / 1e6
    copy = seconds[Case("", "", case.dtype, COPY)]
    reference = seconds.get(Case(case.spec, case.direction, case.dtype, REFERENCE), taken)
    gain = "" if case.backend in (COPY, REFERENCE) else f"{reference / taken:.1f}"
    dtype = str(case.dtype).removeprefix("torch.")
    codec = f"`{case.spec}` | {case.direction}" if case.spec else "copy of the tensor |"
    times = f"{taken * 1e3:.2f} | {million_a_second:,.0f} | {taken / copy:.1f} | {gain}"
    return f"| {codec} | {dtype} | {case.backend} | {times} |"


def first_use_seconds() -> tuple[float, float]:
    """Encoding and decoding a small tensor with each codec in a new process: compiling, then from the cache."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", FIRST_USE, *FIRST_USED]
        cold, warm = (
            float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        )
    return cold, warm


REPORT = """# Codecs on one CPU thread

{machine}. `python benchmarks/bench_codec.py --rounds {rounds}`

Tensor {shape}, {num_elements:,} elements; medians of {rounds} rounds. What was expected stands in the script's head.

| codec | | input and output | backend | ms | million elements/s | × copy's time | × faster than reference |
|---|---|---|---|---|---|---|---|
{rows}

First use of {first_used}, encoding and decoding, in a new process: {cold_s:.1f} s where the kernels must be compiled,
{warm_s:.2f} s from numba's cache. The import of numba is in both.
"""


def report(seconds: dict[Case, float], first_use: tuple[float, float], rounds: int) -> str:
    return REPORT.format(
        machine=describe(),
        rounds=rounds,
        first_used=", ".join(FIRST_USED),
        shape=list(SHAPE),
        num_elements=torch.Size(SHAPE).numel(),
        rows="\n".join(row(case, seconds) for case in seconds),
        cold_s=first_use[0],
        warm_s=first_use[1],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results/codec_cpu_epyc2_202611.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report(measure(options.rounds), first_use_seconds(), options.rounds)
    options.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
