"""Every codec's Triton kernels against the reference, in Triton's interpreter; on CUDA: tests/gpu.

The interpreter computes with numpy: additions, divisions and roundings are IEEE's, as on a device, but it cuts
off where bf16 rounds, so that no values are decoded to bf16 here.
"""

import random

import pytest
import torch
from support.interpreter import in_interpreter
from support.kernel_checks import awkward, check_decoding, check_encoding, check_round_trip, damaged, poison

from tahq.quant import get_codec

pytestmark = in_interpreter
CPU = torch.device("cpu")
KEY = 0xFEDCBA9876543210
QUICK = "fixed"
"""The codec that is tested with every change: its kernels are the fastest to interpret."""


def over(*cases):
    """Cases, tuples or specs, the spec first; `acceptance` runs those of slow codecs."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[] if row[0].startswith(QUICK) else pytest.mark.acceptance) for row in rows]


@pytest.mark.parametrize(
    "spec",
    over(
        *(f"fixed:bits={bits},group={8 * 2 ** (bits % 6)}" for bits in (2, 3, 6, 8, 10, 13, 16)),
        *("tah", "tah:tau=0", "tah:tau=inf,int4=1/3", "tah:group=8,int4=0.5", "tah:group=32,tau=0.99,select=low"),
        *("tah:group=256,low=2,high=8,tau=0", "tah:low=2,high=3,int4=0.2,alloc=token", "tah:low=4,high=4,int4=1"),
        *("tah:low=5,high=7,int4=0,group=16", "tah:adaptive=off,int4=2/7,group=16"),
        *("eden", "eden:bits=4/3,group=8", "eden:bits=1", "eden:bits=2.5,group=16", "eden:bits=5.5,group=64"),
        *("eden:bits=8,group=32", "wf", "wf:bits=2.5,group=16,center=off", "wf:bits=1", "wf:bits=4/3,group=8"),
        *("wf:bits=5.5,group=32", "wf:bits=8,group=256", "wf:center=off"),
    ),
)
def test_stream_and_values_equal_the_references(spec):
    check_round_trip(spec, awkward((3, 100), seed=100), key=KEY)


@pytest.mark.parametrize("shape", [(2, 3, 64), (1,), (1, 2, 1001), (2, 1, 2, 320)], ids=str)
@pytest.mark.parametrize("spec", over("fixed", "fixed:bits=13,group=16", "tah", "eden", "wf"))
def test_other_shapes(spec, shape):
    check_round_trip(spec, awkward(shape), key=KEY)


@pytest.mark.parametrize(
    ("spec", "key"),
    over(*(("fixed:bits=5,round=stochastic", key) for key in (0, 1, 2**31, 2**64 - 1)), ("eden", 2**32)),
)
def test_both_halves_of_the_key_count(spec, key):
    check_round_trip(spec, awkward((2, 3, 100)), key=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spec", over("fixed", "tah", "tah:group=128,low=2,high=5", "eden", "wf"))
def test_half_precision_is_read_as_it_is(spec, dtype):
    check_round_trip(spec, awkward((2, 2, 128)).to(dtype), dtype=torch.float16)


@pytest.mark.parametrize("power", [-149, -140, -126, -40, 15, 100, 127])
@pytest.mark.parametrize(
    "spec", over("fixed", "fixed:bits=4,round=stochastic", "tah", "tah:tau=0", "eden:bits=3,group=8", "wf:bits=2")
)
def test_magnitudes_of_every_size(spec, power):
    x = awkward((1, 2, 72), seed=5)
    check_round_trip(spec, ((x / x.abs().max()).double() * 2.0**power).float(), key=KEY)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "spec", over("fixed", "fixed:bits=7,round=stochastic", "tah", "tah:adaptive=off", "eden", "wf", "wf:center=off")
)
def test_tiles_that_are_not_finite(spec, bad):
    x = awkward((2, 4, 100), seed=6)
    x[0, 1, 3] = x[1, 2, 99] = bad
    check_round_trip(spec, x)
    check_round_trip(spec, torch.full((2, 100), bad))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.5])
@pytest.mark.parametrize("spec", over("fixed", "tah", "tah:tau=0.5", "eden:bits=1.5", "wf:bits=1.5"))
def test_constants(spec, value):
    check_round_trip(spec, torch.full((2, 3, 64), value))


def test_quotients_in_the_middle_of_two_codes_round_to_even():
    x = (torch.arange(512, dtype=torch.float32) - 256).view(1, 8, 64) * 0.5
    x[..., 0] = 127.0
    check_round_trip("fixed", x.clamp(-127, 127))


def test_largest_scale_in_the_largest_tensor_decodes_to_finite_values():
    spec = "fixed:bits=2"
    buf = get_codec(spec).encode(torch.tensor([[3.0e38, 0.0] * 32]))
    buf[16:18] = torch.tensor([0xFF, 0x7B], dtype=torch.uint8)
    for dtype in (torch.float32, torch.float16):
        check_decoding(spec, buf, (1, 64), dtype, CPU)


@pytest.mark.parametrize(
    ("spec", "shape"),
    over(
        *(("fixed", (2, 3, 100)), ("fixed:bits=11,group=8", (3, 5, 72)), ("fixed:bits=2", (1, 64))),
        *(("tah", (2, 3, 100)), ("tah:group=8,alloc=24,low=2,high=7", (3, 5, 72)), ("tah", (1, 64))),
        *(("eden", (3, 100)), ("eden:bits=7.5,group=8", (3, 72)), ("wf", (3, 100)), ("wf:bits=1", (1, 64))),
        ("wf:bits=7.5,group=8,center=off", (3, 72)),
    ),
)
def test_every_byte_is_written(spec, shape, monkeypatch):
    poison(monkeypatch)
    check_round_trip(spec, awkward(shape))


@pytest.mark.parametrize("spec", over("fixed", "tah", "eden", "wf"))
def test_tensors_and_buffers_may_lie_anywhere(spec):
    codec, x = get_codec(spec, backend="triton"), awkward((2, 3, 64))
    buf = check_encoding(spec, x.transpose(0, 1).contiguous().transpose(0, 1))
    backing = torch.zeros(x.numel() + 1)
    backing[1:] = x.flatten()
    assert torch.equal(codec.encode(backing[1:].view(x.shape)), buf)
    moved = torch.zeros(buf.numel() + 1, dtype=torch.uint8)
    moved[1:] = buf
    assert torch.equal(codec.decode(moved[1:], x.shape), codec.decode(buf, x.shape))


@pytest.mark.parametrize(
    ("spec", "count"),
    over(("fixed:bits=10", 40), ("tah:int4=0.5", 6)),  # `eden` and `wf`: test_gaussian_triton.py
)
def test_damaged_streams_are_refused_as_the_reference_refuses_them(spec, count):
    shape, rng = (2, 3, 100), random.Random(2)
    x = awkward(shape)
    x[1, 2, 99] = torch.nan
    buf = check_encoding(spec, x)
    for _ in range(count):
        check_decoding(spec, damaged(buf, rng), shape, torch.float32, CPU)
