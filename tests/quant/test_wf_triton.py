"""`wf`'s Triton kernels against the reference, in Triton's interpreter; on CUDA, tests/gpu/test_gaussian_kernels.py.

What they share with `eden`'s, the allocation of bits among them, is in test_eden_triton.py.
"""

import math
import random

import pytest
import torch
from support.gaussian_kernels import check_kernels
from support.guarded_memory import GuardedMemory
from support.kernel_checks import awkward, check_decoding, damaged
from support.tile_agreement import gaussians, layout_of, of_all_sizes, sinking, with_not_finite

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.backends import interprets_triton
from tahq.quant.tiling import Tiling

pytestmark = [
    pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"),
    # numpy reports what a device computes silently: whole numbers that wrap, ∞ − ∞ in tiles that are not finite.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")


@pytest.fixture
def wf_triton():
    from tahq.quant.wf import triton as wf_triton

    wf_triton._plan.cache_clear()
    yield wf_triton
    wf_triton._plan.cache_clear()


@pytest.mark.parametrize(
    "spec",
    [
        "wf",
        "wf:center=off",
        "wf:bits=1",
        "wf:bits=4/3,group=8",
        pytest.param("wf:bits=2.5,group=16,center=off", marks=pytest.mark.acceptance),
        pytest.param("wf:bits=5.5,group=32", marks=pytest.mark.acceptance),
        pytest.param("wf:bits=7,group=64", marks=pytest.mark.acceptance),
        pytest.param("wf:bits=8,group=256", marks=pytest.mark.acceptance),
    ],
)
def test_streams_and_values_equal_the_references(spec):
    assert check_kernels(spec, gaussians((3, 100), seed=100)).same_bytes


@pytest.mark.parametrize("shape", [(1,), (2, 333), (1, 3, 2, 40)], ids=str)
def test_other_shapes(shape):
    assert check_kernels("wf:bits=3", gaussians(shape), dtypes=[torch.float32]).same_bytes


@pytest.mark.acceptance
def test_differences_are_few():
    """A sum off by some units of 2^−24 moves a width or the choice between two steps whose errors are that near, in
    about one tile of 10,000; a mean summed in fp64 moves only at a border of fp16 and fp64."""
    counted = check_kernels("wf:bits=2.5,group=32", gaussians((2, 12, 320), 1), dtypes=[torch.float32])
    assert counted.share < 5e-3
    assert counted.means == 0


@pytest.mark.acceptance
def test_tokens_of_more_tiles_than_are_summed_at_once():
    assert check_kernels("wf:bits=1.5,group=8", gaussians((1, 1040), 2, spread=0.0), dtypes=[torch.float32]).same_bytes


@pytest.mark.parametrize(
    "limits", [{"MAX_PARTS": 3}, {"MAX_MEASURED": 2}, {"MAX_MEASURED": 5, "MAX_PARTS": 2}], ids=str
)
def test_parts_of_the_tokens_do_not_show(wf_triton, monkeypatch, limits):
    """Several blocks a part, several parts a column, several columns a program."""
    monkeypatch.setattr(wf_triton, "ELEMENTS_PER_BLOCK", 128)
    for name, limit in limits.items():
        monkeypatch.setattr(wf_triton, name, limit)
    assert check_kernels("wf:group=32,bits=2", gaussians((3, 9, 96), 3) + 2, dtypes=[torch.float32]).same_bytes


def test_more_parts_than_are_added_at_once(wf_triton, monkeypatch):
    monkeypatch.setattr(wf_triton, "ELEMENTS_PER_BLOCK", 256)
    assert wf_triton.Columns.of(Tiling.of((20, 256), 256)).num_parts == 20
    assert check_kernels("wf:group=256,bits=2", gaussians((20, 256), 4) - 1, dtypes=[torch.float32]).same_bytes


def test_means_are_never_minus_zero():
    x = gaussians((2, 3, 64), 8)
    x[..., 5], x[..., 6] = -1e-12, -0.0
    assert check_kernels("wf:bits=2", x, dtypes=[torch.float32]).same_bytes


@pytest.mark.parametrize("shape", [(2, 1024, 1600), (1, 1), (16384, 64), (1, 1 << 20), (7, 3, 40000)], ids=str)
def test_every_token_is_in_one_part(wf_triton, shape):
    columns = wf_triton.Columns.of(Tiling.of(shape, 128))
    assert (columns.num_parts - 1) * columns.tokens_per_part < columns.num_tokens
    assert columns.num_parts * columns.tokens_per_part >= columns.num_tokens
    assert columns.tokens_per_part % columns.tokens_per_block == 0
    assert 1 <= columns.num_programs <= wf_triton.MAX_MEASURED


@pytest.mark.acceptance
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_it_is(dtype):
    assert check_kernels("wf", gaussians((2, 3, 256)).to(dtype)).same_bytes


@pytest.mark.acceptance
@pytest.mark.parametrize("spec", ["wf:bits=2", "wf:center=off,bits=2,group=8"])
def test_magnitudes_of_every_size(spec):
    for x in of_all_sizes((1, 72), 2)[::2]:
        assert check_kernels(spec, x, dtypes=[torch.float32]).same_bytes


@pytest.mark.acceptance
def test_values_that_are_equal_zero_or_far_apart():
    check_kernels("wf:group=64", awkward((2, 4, 128)))
    check_kernels("wf:bits=3", sinking(3)[::5], dtypes=[torch.float32])
    for value in (0.0, -0.0, 1.0, -3.5):
        assert check_kernels("wf:bits=1.5", torch.full((3, 64), value), dtypes=[torch.float32]).same_bytes


def test_common_parts_of_channels():
    x = gaussians((2, 10, 96), 6, spread=0.0) + 10 * gaussians((96,), 7, spread=0.0)
    x[..., 13] *= 100
    for spec in ("wf:bits=2", "wf:bits=2,center=off"):
        counted = check_kernels(spec, x, dtypes=[torch.float32])
        assert counted.share < 0.1  # one tile of twenty
        assert counted.means == 0


@pytest.mark.parametrize("spec", ["wf", "wf:center=off,bits=2,group=16"])
def test_tiles_that_are_not_finite_spoil_only_themselves(spec):
    assert check_kernels(spec, with_not_finite()).same_bytes
    assert check_kernels(spec, torch.full((2, 64), math.nan), dtypes=[torch.float32]).same_bytes


def test_every_byte_is_written(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    for spec, shape in (("wf", (3, 100)), ("wf:bits=7.5,group=8,center=off", (3, 72)), ("wf:bits=1", (1, 64))):
        assert check_kernels(spec, gaussians(shape)).same_bytes


def test_tensors_and_buffers_may_lie_anywhere():
    codec, x = get_codec("wf", backend="triton"), gaussians((4, 5, 64))
    buf = codec.encode(x)
    backing = torch.zeros(x.numel() + 1)
    backing[1:] = x.flatten()
    assert torch.equal(codec.encode(backing[1:].view(x.shape), key=3), buf)
    assert torch.equal(codec.encode(x.transpose(0, 1).contiguous().transpose(0, 1)), buf)
    moved = torch.zeros(buf.numel() + 1, dtype=torch.uint8)
    moved[1:] = buf
    assert torch.equal(codec.decode(moved[1:], x.shape), codec.decode(buf, x.shape))


# -- what a decoder refuses ----------------------------------------------------------------------------

SPEC, SHAPE = "wf:bits=2.5,group=32", (3, 5, 90)  # padded to 96: 45 tiles, one bit left over behind the widths


def test_damaged_streams_are_refused_as_the_reference_refuses_them():
    rng, x = random.Random(2), gaussians(SHAPE)
    x[1, 2, 89] = torch.nan
    buf = get_codec(SPEC, backend="triton").encode(x)
    for _ in range(8):
        check_decoding(SPEC, damaged(buf, rng), SHAPE, torch.float32, CPU)


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFFFF, 0x7BFF, 0x8000])
def test_means_that_are_not_finite_are_refused(bits):
    buf = get_codec(SPEC, backend="triton").encode(gaussians(SHAPE))
    section = layout_of(SPEC, SHAPE).sections.by_name["mean"]
    for place in (section.start, section.stop - 2):
        changed = buf.clone()
        changed[place : place + 2] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)
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
