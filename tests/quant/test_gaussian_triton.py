"""Triton kernels that only `eden` and `wf` have, in Triton's interpreter; see `test_codecs_triton.py` for the rest."""

import random

import pytest
import torch
from support.guarded_memory import GuardedMemory
from support.interpreter import in_interpreter
from support.kernel_checks import check_decoding, damaged
from support.tile_agreement import check, check_allocation, gaussians, layout_of, sinking

from tahq.errors import CodecError
from tahq.quant import bit_planes, get_codec
from tahq.quant.gaussian import bit_allocation, tile_stream
from tahq.quant.tiling import Tiling

pytestmark = in_interpreter
CPU = torch.device("cpu")
KEY = 0xFEDCBA9876543210
FP32 = ("triton", [torch.float32])
both = pytest.mark.parametrize("spec", ["eden", "wf"])


@pytest.fixture
def wf_triton():
    from tahq.quant.gaussian import triton as wf_triton

    wf_triton.plan.cache_clear()
    yield wf_triton
    wf_triton.plan.cache_clear()


@pytest.mark.parametrize("spec", ["eden:bits=3,group=32", "wf:bits=2.5,group=32"])
def test_differences_are_few(spec):
    """A sum off by some units of 2^−24 moves a width, a scale or a code in about one tile of 10,000."""
    counted = check(spec, gaussians((2, 12, 320), 1), KEY, *FP32)
    assert counted.share < 5e-3
    assert counted.means == 0
    assert counted.largest_step <= 1 or spec.startswith("wf")
    check(spec, sinking(3)[::5], KEY, *FP32)


@pytest.mark.parametrize("count", [1, 7, 4096, 9001])
@pytest.mark.parametrize("kind", ["equal", "few", "many"])
def test_bits_are_allocated_as_by_the_reference(kind, count):
    """Over several blocks of tiles, whose ties are granted in order across their borders."""
    generator = torch.Generator().manual_seed(count)
    spread = {"equal": 1, "few": 9, "many": 255}[kind]
    levels = torch.randint(spread, (count,), generator=generator, dtype=torch.int32) + (510 - spread)
    for budget in {count, 5 * count // 2, 4 * count + 1, 8 * count - 1, 8 * count}:
        check_allocation(levels, min(max(budget, count), 8 * count))


def test_planes_before_a_tile_are_counted_over_many_programs():
    """Each of a decoder's programs counts those before its tiles for itself, 32,768 tiles at a time."""
    from tahq.quant.gaussian import triton as eden_triton

    layout = layout_of("eden:bits=2.5,group=8", (8750, 64))
    count = layout.tiling.num_tiles
    levels = torch.randint(200, (count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    width = bit_allocation.allocate(levels, layout.num_planes)
    buf = torch.zeros(layout.sections.nbytes, dtype=torch.uint8)
    packed = bit_planes.pack_numbers((width - 1).to(torch.uint8), tile_stream.WIDTH_BITS)
    layout.sections.view(buf, "width").copy_(packed)
    work = torch.full((eden_triton.SLOTS + count + 1,), -1, dtype=torch.int32)
    _, starts = eden_triton.plan(layout).decode[0]
    starts(buf, work)
    assert torch.equal(work[eden_triton.SLOTS :], torch.nn.functional.pad(width.cumsum(0, dtype=torch.int32), (1, 0)))
    assert work[1] == 0


def test_more_tiles_than_can_be_counted_are_refused():
    from tahq.quant.gaussian import triton as eden_triton

    with pytest.raises(CodecError, match="use reference"):
        eden_triton.plan(layout_of("eden", (2**28, 8)))


@pytest.mark.parametrize(
    "limits", [{"MAX_PARTS": 3}, {"MAX_MEASURED": 2}, {"MAX_MEASURED": 5, "MAX_PARTS": 2}], ids=str
)
def test_parts_of_the_tokens_do_not_show(wf_triton, monkeypatch, limits):
    """Several blocks per part, several parts per column, several columns per program."""
    monkeypatch.setattr(wf_triton, "ELEMENTS_PER_BLOCK", 128)
    for name, limit in limits.items():
        monkeypatch.setattr(wf_triton, name, limit)
    assert check("wf:group=32,bits=2", gaussians((3, 9, 96), 3) + 2, KEY, *FP32).same_bytes


def test_more_parts_than_are_added_at_once(wf_triton, monkeypatch):
    monkeypatch.setattr(wf_triton, "ELEMENTS_PER_BLOCK", 256)
    assert wf_triton.Columns.of(Tiling.of((20, 256), 256)).num_parts == 20
    assert check("wf:group=256,bits=2", gaussians((20, 256), 4) - 1, KEY, *FP32).same_bytes


def test_means_are_never_minus_zero_and_a_token_may_have_more_tiles_than_are_summed_at_once():
    assert check("wf:bits=1.5,group=8", gaussians((1, 1040), 2, spread=0.0), KEY, *FP32).same_bytes
    x = gaussians((2, 3, 64), 8)
    x[..., 5], x[..., 6] = -1e-12, -0.0
    assert check("wf:bits=2", x, KEY, *FP32).same_bytes


DAMAGED = {"eden": ("eden:bits=2.5,group=32", (3, 5, 96)), "wf": ("wf:bits=2.5,group=32", (3, 5, 90))}
"""45 tiles each, of `wf` padded: one bit is left over behind the widths."""


@both
def test_damaged_streams_are_refused_as_the_reference_refuses_them(spec):
    (spec, shape), rng = DAMAGED[spec], random.Random(2)
    x = gaussians(shape)
    x[1, 2, 89] = torch.nan
    buf = get_codec(spec, backend="triton").encode(x)
    width = layout_of(spec, shape).sections.by_name["width"]
    for _ in range(8):
        check_decoding(spec, damaged(buf, rng), shape, torch.float32, CPU)
    for place in range(width.stop - 3, width.end):
        changed = buf.clone()
        changed[place] ^= 1 << rng.randrange(8)
        check_decoding(spec, changed, shape, torch.float32, CPU)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7BFF, 0x8000])
def test_means_that_are_not_finite_are_refused(bits):
    spec, shape = DAMAGED["wf"]
    buf = get_codec(spec, backend="triton").encode(gaussians(shape))
    section = layout_of(spec, shape).sections.by_name["mean"]
    for place in (section.start, section.stop - 2):
        changed = buf.clone()
        changed[place : place + 2] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
        check_decoding(spec, changed, shape, torch.float32, CPU)


@both
@pytest.mark.parametrize("byte", [0xFF, 0x00])
def test_codes_beside_the_buffer_are_never_read(spec, byte):
    """Widths that say more planes than there are, or fewer; beside the buffer are pages that must not be touched."""
    spec, shape = DAMAGED[spec]
    codec, section = get_codec(spec, backend="triton"), layout_of(spec, shape).sections.by_name["width"]
    buf = codec.encode(gaussians(shape))
    memory = GuardedMemory(buf.numel())
    for place in (memory.at_end, memory.at_start):
        codec.decode(place(buf.numpy()), shape)
    buf[section.start : section.stop] = byte
    for place in (memory.at_end, memory.at_start):
        with pytest.raises(CodecError):
            codec.decode(place(buf.numpy()), shape)
