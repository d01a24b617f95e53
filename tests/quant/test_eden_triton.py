"""`eden`'s Triton kernels against the reference, in Triton's interpreter; on CUDA, tests/gpu/test_gaussian_kernels.py.

Also what `wf`'s kernels share with them: the allocation of bits, and where tiles begin.
"""

import math
import random

import pytest
import torch
from support.gaussian_kernels import check_allocation, check_kernels
from support.guarded_memory import GuardedMemory
from support.kernel_checks import awkward, check_decoding, damaged
from support.tile_agreement import gaussians, layout_of, of_all_sizes, sinking, with_not_finite

from tahq.errors import CodecError
from tahq.quant import bit_planes, get_codec
from tahq.quant.backends import interprets_triton
from tahq.quant.gaussian import bit_allocation, tile_stream

pytestmark = [
    pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"),
    # numpy reports what a device computes silently: 0·∞ behind the thresholds, whole numbers that wrap.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
KEY = 0xFEDCBA9876543210


@pytest.mark.parametrize(
    "spec",
    [
        "eden",
        "eden:bits=1",
        "eden:bits=4/3,group=8",
        "eden:bits=2.5,group=16",
        pytest.param("eden:bits=5.5,group=64", marks=pytest.mark.acceptance),
        pytest.param("eden:bits=7", marks=pytest.mark.acceptance),
        pytest.param("eden:bits=8,group=32", marks=pytest.mark.acceptance),
    ],
)
def test_streams_and_values_equal_the_references(spec):
    assert check_kernels(spec, gaussians((3, 100), seed=100), KEY).same_bytes


@pytest.mark.parametrize("shape", [(1,), (2, 333), (1, 3, 2, 40)], ids=str)
def test_other_shapes(shape):
    assert check_kernels("eden:bits=3", gaussians(shape), KEY, [torch.float32]).same_bytes


def test_differences_are_few():
    """A sum off by some units of 2^−24 moves a width, a scale or a code in about one tile of 10,000."""
    counted = check_kernels("eden:bits=3,group=32", gaussians((2, 20, 320), 1), KEY, [torch.float32])
    assert counted.share < 5e-3
    assert counted.largest_step <= 1


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**32, 2**63, 2**64 - 1])
def test_both_halves_of_the_key_count(key):
    assert check_kernels("eden", gaussians((2, 96)), key, [torch.float32]).same_bytes


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_it_is(dtype):
    assert check_kernels("eden:bits=3", gaussians((2, 3, 128)).to(dtype), KEY).same_bytes


@pytest.mark.acceptance
@pytest.mark.parametrize("spec", ["eden", "eden:bits=3,group=8"])
def test_magnitudes_of_every_size(spec):
    for x in of_all_sizes((1, 72), 2)[::2]:
        assert check_kernels(spec, x, KEY, [torch.float32]).same_bytes


@pytest.mark.acceptance
def test_values_that_are_equal_zero_or_far_apart():
    check_kernels("eden:bits=3,group=64", awkward((2, 4, 128)), KEY)
    check_kernels("eden:bits=4", sinking(3)[::5], KEY, [torch.float32])
    for value in (0.0, -0.0, 1.0, -3.5):
        assert check_kernels("eden:bits=1.5", torch.full((3, 64), value), KEY, [torch.float32]).same_bytes


@pytest.mark.parametrize("spec", ["eden", "eden:bits=7,group=16"])
def test_tiles_that_are_not_finite_spoil_only_themselves(spec):
    assert check_kernels(spec, with_not_finite(), KEY).same_bytes
    assert check_kernels(spec, torch.full((2, 64), math.nan), KEY, [torch.float32]).same_bytes


@pytest.mark.parametrize("count", [1, 7, 4096, 9001])
@pytest.mark.parametrize("kind", ["equal", "few", "many"])
def test_bits_are_allocated_as_by_the_reference(kind, count):
    """Over several blocks of tiles, whose ties are granted in order across their borders."""
    generator = torch.Generator().manual_seed(count)
    spread = {"equal": 1, "few": 9, "many": 255}[kind]
    levels = torch.randint(spread, (count,), generator=generator, dtype=torch.int32) + (510 - spread)
    for budget in {count, 5 * count // 2, 4 * count + 1, 8 * count - 1, 8 * count}:
        check_allocation(levels, min(max(budget, count), 8 * count))


def test_levels_at_both_ends_of_their_range():
    check_allocation(torch.tensor([0, 510, 0, 254, 510, 1, 0], dtype=torch.int32), 24)


def test_planes_before_a_tile_are_counted_over_many_programs():
    """Each of a decoder's programs counts those before its tiles for itself, 32,768 tiles at a time."""
    from tahq.quant.eden import triton as eden_triton
    from tahq.quant.gpu.gaussian import SLOTS

    layout = layout_of("eden:bits=2.5,group=8", (8750, 64))
    count = layout.tiling.num_tiles
    levels = torch.randint(200, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    width = bit_allocation.allocate(levels, layout.num_planes)
    buf = torch.zeros(layout.sections.nbytes, dtype=torch.uint8)
    packed = bit_planes.pack_numbers((width - 1).to(torch.uint8), tile_stream.WIDTH_BITS)
    layout.sections.view(buf, "width").copy_(packed)
    work = torch.full((SLOTS + count + 1,), -1, dtype=torch.int32)
    eden_triton._plan(layout.spec, layout.tiling).decode[0][1](buf, work)
    assert torch.equal(work[SLOTS:], torch.nn.functional.pad(width.cumsum(0, dtype=torch.int32), (1, 0)))
    assert work[1] == 0


def test_every_byte_is_written(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    for spec, shape in (("eden", (3, 100)), ("eden:bits=7.5,group=8", (3, 72)), ("eden:bits=1", (1, 64))):
        assert check_kernels(spec, gaussians(shape), KEY).same_bytes


def test_tensors_and_buffers_may_lie_anywhere():
    codec, x = get_codec("eden", backend="triton"), gaussians((4, 5, 64))
    buf = codec.encode(x, key=KEY)
    backing = torch.zeros(x.numel() + 1)
    backing[1:] = x.flatten()
    assert torch.equal(codec.encode(backing[1:].view(x.shape), key=KEY), buf)
    assert torch.equal(codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1), key=KEY), buf)
    moved = torch.zeros(buf.numel() + 1, dtype=torch.uint8)
    moved[1:] = buf
    assert torch.equal(codec.decode(moved[1:], x.shape, key=KEY), codec.decode(buf, x.shape, key=KEY))


# -- what a decoder refuses ----------------------------------------------------------------------------

SPEC, SHAPE = "eden:bits=2.5,group=32", (3, 5, 96)  # 45 tiles: one bit left over behind the widths


def test_damaged_streams_are_refused_as_the_reference_refuses_them():
    rng, x = random.Random(2), gaussians(SHAPE)
    x[1, 2, 95] = torch.nan
    buf = get_codec(SPEC, backend="triton").encode(x)
    width = layout_of(SPEC, SHAPE).sections.by_name["width"]
    for _ in range(8):
        check_decoding(SPEC, damaged(buf, rng), SHAPE, torch.float32, CPU)
    for place in range(width.stop - 3, width.end):
        changed = buf.clone()
        changed[place] ^= 1 << rng.randrange(8)
        check_decoding(SPEC, changed, SHAPE, torch.float32, CPU)


@pytest.mark.parametrize("byte", [0xFF, 0x00])
def test_codes_beside_the_buffer_are_never_read(byte):
    """Widths that say more planes than there are, or fewer; beside the buffer are pages that must not be touched."""
    codec, section = get_codec(SPEC, backend="triton"), layout_of(SPEC, SHAPE).sections.by_name["width"]
    buf = codec.encode(gaussians(SHAPE))
    memory = GuardedMemory(buf.numel())
    for place in (memory.at_end, memory.at_start):
        codec.decode(place(buf.numpy()), SHAPE)
    buf[section.start : section.stop] = byte
    for place in (memory.at_end, memory.at_start):
        with pytest.raises(CodecError):
            codec.decode(place(buf.numpy()), SHAPE)


def test_more_tiles_than_can_be_counted_are_refused():
    from tahq.quant.eden import triton as eden_triton

    with pytest.raises(CodecError, match="use reference"):
        eden_triton._plan(get_codec("eden").spec, layout_of("eden", (2**28, 8)).tiling)
