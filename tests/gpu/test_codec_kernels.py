"""The codecs' Triton kernels on a CUDA device against the reference, on the CPU and on the same device.

Every spec and dtype is compiled anew, about a second a kernel: there are few of them here, and each is given
many tensors. `tests/quant/test_codecs_triton.py` runs more specs, in the interpreter. Streams of `eden` and `wf` may
differ where sums round differently next to a border, in few tiles; decoded values may not.
"""

import random
from itertools import product

import pytest
import torch
from support.agreement import compare
from support.kernel_checks import (
    awkward,
    check_decoding,
    check_no_wait_and_no_compiler,
    check_round_trip,
    damaged,
    poison,
)
from support.tile_agreement import as_bits, check_allocation, fixture_tensors, gaussians, sinking
from support.tile_agreement import check as check_tiles

from tahq.quant import CodecSpec, get_codec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEY = 2**63 + 5
# Spec, dtype, shape: as many groups, bits, types, ways to allocate and paddings as these compilations hold. (Bits are
# no constant of a kernel of `eden` or `wf`.)
CASES = [
    ("tah", BF16, (2, 1024, 1600)),
    ("tah", FP32, (3, 7, 100)),
    ("tah:group=8,tau=0,low=2,high=8,int4=1/3", FP32, (2, 50, 72)),
    ("tah:group=256,alloc=token,select=low,tau=0.99,high=5", FP16, (3, 20, 1000)),
    ("tah:group=16,adaptive=off,low=2,high=3", BF16, (2, 9, 104)),
    ("fixed", BF16, (2, 1024, 1600)),
    ("fixed:bits=6,group=32", FP32, (3, 7, 100)),
    ("fixed:bits=13,group=256,round=stochastic", FP16, (2, 5, 1024)),
    ("fixed:bits=2,group=8", FP32, (2, 9, 40)),
    ("eden", BF16, (2, 1024, 1600)),
    ("eden:bits=4/3,group=8", FP32, (2, 50, 72)),
    ("eden:bits=5.5,group=32", FP16, (3, 7, 100)),
    ("eden:bits=8", BF16, (2, 9, 768)),
    ("wf", BF16, (2, 1024, 1600)),
    ("wf:bits=1.2,group=8", FP32, (2, 50, 72)),
    ("wf:bits=7,group=32,center=off", FP16, (3, 7, 100)),
    ("wf:bits=2.5", BF16, (2, 9, 768)),
    ("wf:bits=4,group=256", FP32, (2, 100, 1000)),
]
every_case = pytest.mark.parametrize(("spec", "dtype", "shape"), CASES, ids=str)


def is_gaussian(spec: str) -> bool:
    return spec.startswith(("eden", "wf"))


def scaled(x: torch.Tensor, power: int) -> torch.Tensor:
    """x, whose largest magnitude becomes 2^power."""
    return ((x / x.abs().max()).double() * 2.0**power).float()


def tensors(dtype: torch.dtype, shape) -> dict[str, torch.Tensor]:
    """What a codec may meet, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(shape, generator=generator)
    spiky = gaussian.clone()
    spiky[torch.rand(shape, generator=generator) < 0.01] *= 20
    made = {"gaussian": gaussian, "spiky": spiky, "awkward": awkward(shape).clamp(-6e4, 6e4)}
    made["tokens of different energies"] = gaussians(shape, 1)
    made["far from 0"] = 1000 + gaussian.abs() * 0.1
    made["zeros"], made["constant"] = torch.zeros(shape), torch.full(shape, -3.5)
    made["few values"] = (gaussian * 2).round() / 2
    bad = awkward(shape, seed=1).clamp(-6e4, 6e4)
    bad.view(-1)[torch.randint(bad.numel(), (4,), generator=generator)] = torch.tensor(
        [torch.nan, torch.inf, -torch.inf, torch.nan]
    )
    made["not finite"] = bad
    powers = {FP32: (-149, -140, -126, -60, 64, 100, 127), BF16: (-130, -60, 100, 127), FP16: (-24, -14, 15)}
    for power in powers[dtype]:
        made[f"2^{power}"] = scaled(awkward(shape, seed=2), power)
    if gaussian.numel() > 1 << 20:  # the reference takes its time on the CPU
        made = {name: made[name] for name in ("gaussian", "spiky", "few values", "not finite")}
    limit = torch.finfo(dtype).max
    return {name: torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype) for name, x in made.items()}


def check(spec: str, x: torch.Tensor) -> None:
    """A tile that takes another width takes it from another; ties at the border move with the level of a tile."""
    if not is_gaussian(spec):
        check_round_trip(spec, x.cuda(), key=KEY)
        return
    counted = check_tiles(spec, x, KEY, "triton", [x.dtype])
    assert counted.widths + counted.scales + counted.codes <= 4 + counted.num_tiles // 500, counted
    assert counted.means == 0
    assert spec.startswith("wf") or counted.largest_step <= 1


@every_case
def test_streams_and_values_agree_with_the_references(spec, dtype, shape):
    for name, x in tensors(dtype, shape).items():
        try:
            check(spec, x)
        except AssertionError as error:
            raise AssertionError(f"{spec}, {name}: {error}") from error


def test_activations_gradients_and_subnormal_steps():
    for x in fixture_tensors().values():
        check("eden:bits=3", x)
        check("wf", x)
    for spec, dtype in product(("eden:bits=6", "wf:bits=6,group=256"), (FP32, BF16)):
        check_tiles(spec, sinking(3), KEY, "triton", [dtype])


@every_case
def test_the_reference_on_the_device_agrees_and_reads_the_same(spec, dtype, shape):
    x = tensors(dtype, shape)["spiky"].cuda()
    ours, theirs = get_codec(spec, backend="triton"), get_codec(spec, backend="reference")
    streams = [codec.encode(x, key=7) for codec in (ours, theirs)]
    if not is_gaussian(spec):
        compare(CodecSpec.parse(spec), x.cpu(), streams[1].cpu(), streams[0].cpu())
    for buf in streams:
        values = [codec.decode(buf, shape, dtype, key=7) for codec in (ours, theirs)]
        assert torch.equal(as_bits(values[0]), as_bits(values[1]))


@every_case
def test_every_byte_is_written_without_waiting_or_compiling_again(spec, dtype, shape, monkeypatch):
    codec, x = get_codec(spec, backend="triton"), tensors(dtype, shape)["spiky"].cuda()
    expected = codec.encode(x, key=KEY)
    values = codec.decode(expected, shape, dtype, key=KEY)
    with monkeypatch.context() as patch:
        poison(patch)
        for _ in range(3):
            assert torch.equal(codec.encode(x, key=KEY), expected)
            assert torch.equal(as_bits(codec.decode(expected, shape, dtype, key=KEY)), as_bits(values))
    check_no_wait_and_no_compiler(codec, x, monkeypatch)


@pytest.mark.parametrize(
    "shape", [(1, 64), (1, 1, 8), (9, 3, 128), (2, 300, 1600), (1, 1200, 128), (70, 2, 64), (5,)], ids=str
)
@pytest.mark.parametrize("spec", ["tah", "eden", "wf"])
def test_other_shapes_of_the_same_kernels(spec, shape):
    check(spec, tensors(BF16, shape)["spiky"])


@pytest.mark.parametrize(
    ("shape", "num_distinct"), [((2, 2100, 1024), None), ((1, 2200, 2048), None), ((1, 600, 4096), 3)]
)
def test_large_samples_are_selected_by_counting(shape, num_distinct):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=BF16)
    if num_distinct:
        x = x[:, :, : 64 * num_distinct].repeat(1, 1, -(-shape[2] // (64 * num_distinct)))[:, :, : shape[2]]
    check_round_trip("tah", x.cuda())


@pytest.mark.parametrize("count", [1, 4096, 70001, 600000])
@pytest.mark.parametrize("spread", [1, 9, 255])
def test_bits_are_allocated_as_by_the_reference(spread, count):
    generator = torch.Generator().manual_seed(count)
    levels = torch.randint(spread, (count,), generator=generator, dtype=torch.int32) + (510 - spread)
    for budget in (count, 5 * count // 2, 8 * count - 1, 8 * count):
        check_allocation(levels, max(budget, count))


@pytest.mark.parametrize("spec", ["tah", "fixed:bits=6,group=32", "eden:bits=2.5,group=32", "wf:bits=2.5,group=32"])
def test_damaged_streams_are_refused_as_the_reference_refuses_them(spec):
    shape, rng = (3, 7, 100), random.Random(3)
    x = awkward(shape)
    x[1, 2, 99] = torch.nan
    buf = get_codec(spec, backend="triton").encode(x.cuda()).cpu()
    for _ in range(300):
        check_decoding(spec, damaged(buf, rng), shape, FP32, CUDA)
    for seed in range(30):
        noise = torch.randint(256, buf.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        noise[:16] = buf[:16]
        check_decoding(spec, noise, shape, FP32, CUDA)


@pytest.mark.parametrize("spec", ["tah", "eden", "wf"])
def test_kernels_run_on_the_callers_stream(spec):
    codec, stream = get_codec(spec, backend="triton"), torch.cuda.Stream()
    x = tensors(BF16, (2, 1024, 1600))["gaussian"].cuda()
    expected = codec.encode(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later = x + 0
        buf = codec.encode(later)
    stream.synchronize()
    assert torch.equal(buf, expected)


def test_tensors_and_buffers_may_lie_anywhere():
    codec = get_codec("tah", backend="triton")
    x = tensors(BF16, (9, 3, 128))["spiky"].cuda()
    buf = codec.encode(x)
    backing = torch.zeros(x.numel() + 1, dtype=BF16, device=CUDA)
    backing[1:] = x.flatten()
    assert torch.equal(codec.encode(backing[1:].view(x.shape)), buf)
    assert torch.equal(codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1)), buf)
    moved = torch.zeros(buf.numel() + 1, dtype=torch.uint8, device=CUDA)
    moved[1:] = buf
    assert torch.equal(codec.decode(moved[1:], x.shape, BF16), codec.decode(buf, x.shape, BF16))
