"""Speed of the Triton kernels on one CUDA device, against a copy and against plain torch.

First the kernels' streams are compared with the reference's, and decoded values bit for bit, into memory that was
poisoned. Then, over more input sets than the L2 cache holds: wall time of a call, as Python sees it, of many calls back
to back with one synchronisation at their end (decoding waits for its verdict in every call); and the device's own time,
kernel by kernel, from torch's profiler. Bandwidth counts the input read once and the output written once, and its share
is of a copy between two tensors of 1 GiB in the same run, read and written.

Run:  python benchmarks/bench_codec_gpu.py [--out benchmarks/results/codec_gpu_<hardware>_<yyyymm>.md]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from harness import describe, need_gpu

from tahq.quant import Codec, get_codec

BF16, FP32 = torch.bfloat16, torch.float32
SMALL, LARGE = (2, 1024, 1600), (4, 4096, 4096)
CASES = [
    ("tah", SMALL, BF16),
    ("tah", SMALL, FP32),
    ("tah", LARGE, BF16),
    ("tah", LARGE, FP32),
    ("fixed", SMALL, BF16),
    ("fixed", LARGE, BF16),
    ("fixed:bits=6", LARGE, BF16),
    ("eden", SMALL, BF16),
    ("eden", LARGE, BF16),
    ("wf", SMALL, BF16),
    ("wf", LARGE, BF16),
]
OUTLIER_SHARE = 0.02
"""Of tiles of 64, as on the boundaries of a trained GPT-2 small."""
CACHE_NBYTES = 256 << 20
"""Input sets together exceed this, several times the L2 cache."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds a call, and those of each kernel on the device."""

    wall_ms: float
    host_ms: float
    kernels_ms: dict[str, float]

    @property
    def device_ms(self) -> float:
        return sum(self.kernels_ms.values())


@dataclass(frozen=True, slots=True)
class Row:
    """One codec, shape and type."""

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
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
    """Streams and values equal the reference's, whatever was in memory before.

    Of two tiles whose entropies lie within rounding of each other either may get the higher number of bits. Energies of
    `eden` and `wf` decide over steps, too.
    """
    reference = get_codec(spec, backend="reference")
    expected = reference.encode(x)
    with poisoned_memory():
        got = codec.encode(x)
        values = codec.decode(got, x.shape, x.dtype)
    assert torch.equal(values, reference.decode(got, x.shape, x.dtype)), f"{spec}: decoded values differ"
    differs = (values != reference.decode(expected, x.shape, x.dtype)).view(-1, 64).any(dim=1)
    limit = 1e-3 if codec.spec.name in ("eden", "wf") else 1e-4
    assert differs.float().mean() <= limit, f"{spec}: {int(differs.sum())} of {len(differs)} tiles are coded otherwise"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory that nobody has initialised holds 0xAA."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty


def time_calls(call: Callable[[int], object], count: int, repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds a call: until all are done, and until all are launched."""
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


def time_kernels(call: Callable[[int], object], count: int) -> dict[str, float]:
    """Milliseconds a call of everything that runs on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(count):
            call(number)
        torch.cuda.synchronize()
    averages = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    return {event.key: event.self_device_time_total / 1e3 / count for event in averages}


def measure(call: Callable[[int], object], count: int) -> Measured:
    call(0)
    wall_ms, host_ms = time_calls(call, count)
    return Measured(wall_ms, host_ms, time_kernels(call, min(count, 20)))


def run_case(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> Row:
    codec, reference = get_codec(spec, backend="triton"), get_codec(spec, backend="reference")
    xs = [activations(shape, dtype, 0)]
    while len(xs) * xs[0].nbytes < CACHE_NBYTES:
        xs.append(activations(shape, dtype, len(xs)))
    check(spec, codec, xs[0])
    bufs = [codec.encode(x) for x in xs]
    num_sets, count = len(xs), 200 if shape == SMALL else 30
    encode = measure(lambda number: codec.encode(xs[number % num_sets]), count)
    decode = measure(lambda number: codec.decode(bufs[number % num_sets], shape, dtype), count)
    both_ms, _ = time_calls(lambda number: codec.decode(codec.encode(xs[number % num_sets]), shape, dtype), count)
    slow = max(3, count // 20)
    reference.decode(reference.encode(xs[0]), shape, dtype)
    reference_ms = (
        time_calls(lambda number: reference.encode(xs[number % num_sets]), slow, 1)[0],
        time_calls(lambda number: reference.decode(bufs[number % num_sets], shape, dtype), slow, 1)[0],
    )
    return Row(spec, shape, dtype, xs[0].nbytes + bufs[0].nbytes, encode, decode, both_ms, reference_ms)


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a copy on the device."""
    source = torch.empty(1 << 28, dtype=FP32, device="cuda").uniform_()
    target = torch.empty_like(source)
    target.copy_(source)
    wall_ms, _ = time_calls(lambda number: target.copy_(source), 20)
    return 2 * source.nbytes / (wall_ms / 1e3)


def name_of(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP32: "fp32"}[dtype]


def share(row: Row, time_ms: float, bandwidth: float) -> str:
    return f"{row.nbytes / (time_ms / 1e3) / bandwidth:.0%}"


def table(rows: list[Row], bandwidth: float) -> list[str]:
    lines = [
        "| codec | shape | type | encode, wall (device) ms | decode, wall (device) ms | together, wall ms "
        "| encode, of copy: wall (device) | decode, of copy: wall (device) | times as fast as torch |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        encode, decode = row.encode, row.decode
        ratios = (row.reference_ms[0] / encode.wall_ms, row.reference_ms[1] / decode.wall_ms)
        shares = [
            f"{share(row, each.wall_ms, bandwidth)} ({share(row, each.device_ms, bandwidth)})"
            for each in (encode, decode)
        ]
        lines.append(
            f"| {row.spec} | {list(row.shape)} | {name_of(row.dtype)} "
            f"| {encode.wall_ms:.4f} ({encode.device_ms:.4f}) | {decode.wall_ms:.4f} ({decode.device_ms:.4f}) "
            f"| {row.both_wall_ms:.4f} | {' | '.join(shares)} | {ratios[0]:.0f}, {ratios[1]:.0f} |"
        )
    return lines


def kernel_table(rows: list[Row]) -> list[str]:
    lines = [
        "| codec | shape | type | call | launched after, ms | kernels, ms on the device |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        for call, measured in (("encode", row.encode), ("decode", row.decode)):
            kernels = ", ".join(f"{name} {ms:.4f}" for name, ms in measured.kernels_ms.items())
            where = f"{row.spec} | {list(row.shape)} | {name_of(row.dtype)}"
            lines.append(f"| {where} | {call} | {measured.host_ms:.4f} | {kernels} |")
    return lines


def report(rows: list[Row], bandwidth: float) -> str:
    lines = [
        "# Codecs on a GPU",
        "",
        f"{describe()}. `python benchmarks/bench_codec_gpu.py`",
        "",
        f"A copy of 1 GiB moves {bandwidth / 1e12:.2f} TB/s, read and written. One tile in {1 / OUTLIER_SHARE:.0f} has "
        "an outlier. Before, streams and values were compared with the reference's.",
        "",
        *table(rows, bandwidth),
        "",
        *kernel_table(rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "codec_gpu_h200_202611.md")
    arguments = parser.parse_args()
    need_gpu()
    bandwidth = copy_bandwidth()
    rows = []
    for case in CASES:
        rows.append(run_case(*case))
        torch.cuda.empty_cache()
        print("\n".join(table(rows[-1:], bandwidth)[2:] + kernel_table(rows[-1:])[2:]), flush=True)
    text = report(rows, bandwidth)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
