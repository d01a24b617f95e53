"""The Triton kernels of `eden` and `wf` on a CUDA device against the reference, on the CPU and on the same device.

Streams may differ where sums round differently next to a border, in few tiles; decoded values may not. As in
`test_codec_kernels.py`, few specs are compiled, and each is given many tensors; more of them run in the interpreter.
"""

import random

import pytest
import torch
from support.gaussian_kernels import check_allocation, check_kernels
from support.kernel_checks import as_words, awkward, check_decoding, check_no_wait_and_no_compiler, damaged
from support.tile_agreement import fixture_tensors, gaussians, sinking

from tahq.quant import get_codec

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
KEY = 2**63 + 5
# Bits are no constant of a kernel: specs of one group and dtype are compiled once.
CASES = [
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


def tensors(dtype: torch.dtype, shape) -> dict[str, torch.Tensor]:
    """What a codec may meet, on the CPU."""
    made = {"gaussian": gaussians(shape, 1), "awkward": awkward(shape), "off 0": gaussians(shape, 2) + 10}
    bad = gaussians(shape, 3)
    bad.view(-1)[[0, bad.numel() // 3, -1]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    made["not finite"] = bad
    if bad.numel() <= 1 << 20:  # the reference takes its time on the CPU
        made |= {"zeros": torch.zeros(shape), "constant": torch.full(shape, -3.5)}
        made |= {"few values": (gaussians(shape, 4) * 2).round() / 2}
        unit = gaussians(shape, 5).double()
        unit /= unit.abs().max()
        powers = {FP32: (-149, -140, -126, -60, 64, 127), BF16: (-130, -60, 127), FP16: (-24, -14, 15)}
        made |= {f"2^{power}": (unit * 2.0**power).float() for power in powers[dtype]}
    limit = torch.finfo(dtype).max
    return {name: torch.where(x.isfinite(), x.clamp(-limit, limit), x).to(dtype) for name, x in made.items()}


def check(spec: str, x: torch.Tensor) -> None:
    """A tile that takes another width takes it from another; ties at the border move with the level of a tile."""
    counted = check_kernels(spec, x, KEY, [x.dtype])
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


@pytest.mark.parametrize("spec", ["eden:bits=3", "wf"])
def test_activations_and_gradients(spec):
    for x in fixture_tensors().values():
        check(spec, x)


@pytest.mark.parametrize("spec", ["eden:bits=6", "wf:bits=6,group=256"])
def test_subnormal_steps_are_not_flushed(spec):
    for dtype in (FP32, BF16):
        check_kernels(spec, sinking(3), KEY, [dtype])


@every_case
def test_the_reference_on_the_device_reads_the_same(spec, dtype, shape):
    x = tensors(dtype, shape)["gaussian"].cuda()
    ours, theirs = get_codec(spec, backend="triton"), get_codec(spec, backend="reference")
    for buf in (ours.encode(x, key=7), theirs.encode(x, key=7)):
        values = [codec.decode(buf, shape, dtype, key=7) for codec in (ours, theirs)]
        assert torch.equal(as_words(values[0]), as_words(values[1]))


@every_case
def test_every_byte_is_written_and_encoding_is_deterministic(spec, dtype, shape, monkeypatch):
    codec, empty = get_codec(spec, backend="triton"), torch.empty
    x = tensors(dtype, shape)["gaussian"].cuda()
    expected = codec.encode(x, key=KEY)

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    for _ in range(5):
        assert torch.equal(codec.encode(x, key=KEY), expected)
    values = codec.decode(expected, shape, dtype, key=KEY)
    assert torch.equal(as_words(values), as_words(get_codec(spec).decode(expected, shape, dtype, key=KEY)))


@pytest.mark.parametrize("count", [1, 4096, 70001, 600000])
@pytest.mark.parametrize("spread", [1, 9, 255])
def test_bits_are_allocated_as_by_the_reference(spread, count):
    generator = torch.Generator().manual_seed(count)
    levels = torch.randint(spread, (count,), generator=generator, dtype=torch.int32) + (510 - spread)
    for budget in (count, 5 * count // 2, 8 * count - 1, 8 * count):
        check_allocation(levels, max(budget, count))


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("eden", (1, 70, 64)),
        ("eden:bits=3", (2, 2100, 1024)),
        ("wf", (1, 70, 64)),
        ("wf", (2, 2100, 1024)),
        ("wf", (5,)),
    ],
    ids=str,
)
def test_other_shapes_of_the_same_kernels(spec, shape):
    check(spec, gaussians(shape, 6).to(BF16))


@pytest.mark.parametrize(
    ("spec", "shape"), [("eden:bits=2.5,group=32", (3, 5, 96)), ("wf:bits=2.5,group=32", (3, 5, 90))]
)
def test_damaged_streams_are_refused_as_the_reference_refuses_them(spec, shape):
    rng, x = random.Random(3), gaussians(shape)
    x[1, 2, 89] = torch.nan
    buf = get_codec(spec, backend="triton").encode(x.cuda()).cpu()
    for _ in range(300):
        check_decoding(spec, damaged(buf, rng), shape, FP32, CUDA)
    for seed in range(30):
        noise = torch.randint(256, buf.shape, generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        noise[:16] = buf[:16]
        check_decoding(spec, noise, shape, FP32, CUDA)


@every_case
def test_encoding_does_not_synchronise_and_nothing_is_compiled_after_the_first_time(spec, dtype, shape, monkeypatch):
    x = tensors(dtype, shape)["gaussian"].cuda()
    check_no_wait_and_no_compiler(get_codec(spec, backend="triton"), x, monkeypatch)


@pytest.mark.parametrize("spec", ["eden", "wf"])
def test_kernels_run_on_the_callers_stream(spec):
    codec, stream = get_codec(spec, backend="triton"), torch.cuda.Stream()
    x = gaussians((2, 1024, 1600)).to(BF16).cuda()
    expected = codec.encode(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later = x + 0
        buf = codec.encode(later)
    stream.synchronize()
    assert torch.equal(buf, expected)
