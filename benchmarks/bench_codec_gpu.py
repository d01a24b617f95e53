"""Codecs on a GPU: speed of the Triton kernels against a copy and against plain torch.

    python benchmarks/bench_codec_gpu.py [--output benchmarks/results/codec_gpu_<hardware>_<yyyymm>.md]

First the kernels' streams are compared with the reference's, and decoded values bit for bit. Then, over more input sets
than the L2 cache holds: the wall time of a call as Python sees it, of many calls back to back with one synchronisation
at the end (decoding waits for its verdict in every call); and the device's own time, kernel by kernel, from torch's
profiler. Bandwidth counts the input read once and the output written once; its share is of a copy between two tensors
of 1 GiB in the same run, read and written.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from harness import Table, main, need_gpu, say

from tahq.quant import Codec, get_codec

SMALL, LARGE = (2, 1024, 1600), (4, 4096, 4096)
CASES = [
    *product(("tah",), (SMALL, LARGE), (torch.bfloat16, torch.float32)),
    *product(("fixed", "eden", "wf"), (SMALL, LARGE), (torch.bfloat16,)),
    ("fixed:bits=6", LARGE, torch.bfloat16),
]
OUTLIER_SHARE = 0.02
"""Of tiles of 64, as on the boundaries of a trained GPT-2 small."""
CACHE_NBYTES = 256 << 20
"""Input sets together exceed this, several times the L2 cache."""
Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds per call until all are done, until all are launched, and of each kernel on the device."""

    wall_ms: float
    host_ms: float
    kernels_ms: dict[str, float]

    @property
    def device_ms(self) -> float:
        return sum(self.kernels_ms.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One codec, shape and type."""

    name: tuple[str, str, str]
    nbytes: int
    encode: Measured
    decode: Measured
    both_wall_ms: float
    reference_ms: tuple[float, float]


def activations(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian values, with one far outlier in some tiles of 64."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda", dtype=dtype)
    tiles = x.view(-1, 64)
    tiles[torch.rand(len(tiles), generator=generator, device="cuda") < OUTLIER_SHARE, seed % 64] = 12.0
    return x


def check(spec: str, codec: Codec, x: torch.Tensor) -> None:
    """Streams and values equal the reference's.

    Of two tiles whose entropies lie within rounding of each other, either may get the higher number of bits. Energies
    of `eden` and `wf` decide over steps, too.
    """
    reference = get_codec(spec, backend="reference")
    expected = reference.encode(x)
    got = codec.encode(x)
    values = codec.decode(got, x.shape, x.dtype)
    assert torch.equal(values, reference.decode(got, x.shape, x.dtype)), f"{spec}: decoded values differ"
    differs = (values != reference.decode(expected, x.shape, x.dtype)).view(-1, 64).any(dim=1)
    limit = 1e-3 if codec.spec.name in ("eden", "wf") else 1e-4
    assert differs.float().mean() <= limit, f"{spec}: {int(differs.sum())} of {len(differs)} tiles are coded otherwise"


def time_calls(call: Call, count: int, repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds per call: until all are done, and until all are launched."""
    walls, hosts = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(count):
            call(number)
        launched = time.perf_counter()
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - start) * 1e3 / count)
        hosts.append((launched - start) * 1e3 / count)
    return statistics.median(walls), statistics.median(hosts)


def measure(call: Call, count: int) -> Measured:
    call(0)
    wall_ms, host_ms = time_calls(call, count)
    traced = min(count, 20)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(traced):
            call(number)
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    return Measured(wall_ms, host_ms, {event.key: event.self_device_time_total / 1e3 / traced for event in events})


def run_case(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> Row:
    codec, reference = get_codec(spec, backend="triton"), get_codec(spec, backend="reference")
    xs = [activations(shape, dtype, 0)]
    while len(xs) * xs[0].nbytes < CACHE_NBYTES:
        xs.append(activations(shape, dtype, len(xs)))
    check(spec, codec, xs[0])
    bufs = [codec.encode(x) for x in xs]

    def encoding(by: Codec) -> Call:
        return lambda number: by.encode(xs[number % len(xs)])

    def decoding(by: Codec) -> Call:
        return lambda number: by.decode(bufs[number % len(xs)], shape, dtype)

    count = 200 if shape == SMALL else 30
    encode, decode = measure(encoding(codec), count), measure(decoding(codec), count)
    both_ms, _ = time_calls(lambda number: codec.decode(codec.encode(xs[number % len(xs)]), shape, dtype), count)
    reference.decode(reference.encode(xs[0]), shape, dtype)
    slow = [time_calls(call(reference), max(3, count // 20), 1)[0] for call in (encoding, decoding)]
    name = (spec, str(list(shape)), {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype])
    say(f"{name}: encode {encode.wall_ms:.4f} ms, decode {decode.wall_ms:.4f} ms")
    return Row(name, xs[0].nbytes + bufs[0].nbytes, encode, decode, both_ms, (slow[0], slow[1]))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(1 << 28, device="cuda").uniform_()
    target = torch.empty_like(source)
    target.copy_(source)
    wall_ms, _ = time_calls(lambda number: target.copy_(source), 20)
    return 2 * source.nbytes / (wall_ms / 1e3)


def cells(row: Row, bandwidth: float) -> list[str]:
    def share(time_ms: float) -> str:
        return f"{row.nbytes / (time_ms / 1e3) / bandwidth:.0%}"

    both = (row.encode, row.decode)
    return [
        *row.name,
        *(f"{each.wall_ms:.4f} ({each.device_ms:.4f})" for each in both),
        f"{row.both_wall_ms:.4f}",
        *(f"{share(each.wall_ms)} ({share(each.device_ms)})" for each in both),
        ", ".join(f"{slow / each.wall_ms:.0f}" for slow, each in zip(row.reference_ms, both, strict=True)),
    ]


def kernel_rows(rows: list[Row]) -> Iterator[list[str]]:
    for row in rows:
        for call, measured in (("encode", row.encode), ("decode", row.decode)):
            kernels = ", ".join(f"{name} {ms:.4f}" for name, ms in measured.kernels_ms.items())
            yield [*row.name, call, f"{measured.host_ms:.4f}", kernels]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    need_gpu()
    bandwidth = copy_bandwidth()
    rows = [run_case(*case) for case in CASES]
    caption = (
        f"A copy of 1 GiB moves {bandwidth / 1e12:.2f} TB/s, read and written. One tile in {1 / OUTLIER_SHARE:.0f} has "
        "an outlier. Streams and values were compared with the reference's before."
    )
    columns = ("codec", "shape", "type", "encode, wall (device) ms", "decode, wall (device) ms", "together, wall ms")
    columns += ("encode, of copy: wall (device)", "decode, of copy: wall (device)", "times as fast as torch")
    yield Table(columns, (cells(row, bandwidth) for row in rows), caption)
    columns = ("codec", "shape", "type", "call", "launched after, ms", "kernels, ms on the device")
    yield Table(columns, kernel_rows(rows))


if __name__ == "__main__":
    main(__doc__, tables)
