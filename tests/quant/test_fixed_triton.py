"""`fixed`'s Triton kernels against the reference, in Triton's interpreter; on CUDA, tests/gpu/test_codec_kernels.py."""

import random

import pytest
import torch
from support.kernel_checks import awkward, check_decoding, check_encoding, check_round_trip, damaged

from tahq.quant import get_codec
from tahq.quant.backends import interprets_triton

pytestmark = [
    pytest.mark.skipif(not interprets_triton(), reason="needs TRITON_INTERPRET=1; test_interpreted_kernels.py sets it"),
    # numpy reports what a device computes silently: whole numbers that wrap, ∞ times a power of two.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(2, 3, 64), (3, 100), (1,), (1, 2, 1001)], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 6, 8, 10, 13, 16])
def test_stream_and_values_equal_the_references(bits, shape):
    check_round_trip(f"fixed:bits={bits},group={8 * 2 ** (bits % 6)}", awkward(shape, seed=bits))


@pytest.mark.parametrize("key", [0, 1, 2**31, 2**64 - 1])
def test_stochastic_rounding_draws_as_the_reference_does(key):
    check_round_trip("fixed:bits=5,round=stochastic", awkward((2, 3, 100)), key=key)
    check_round_trip("fixed:bits=16,group=16,round=stochastic", awkward((2, 3, 64)).half(), key=key)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read_as_it_is(dtype):
    check_round_trip("fixed", awkward((2, 3, 64)).to(dtype), dtype=torch.float16)


@pytest.mark.parametrize("power", [-149, -140, -126, -40, 15, 100, 127])
def test_magnitudes_of_every_size(power):
    x = awkward((2, 3, 72), seed=5)
    scaled = ((x / x.abs().max()).double() * 2.0**power).float()
    check_round_trip("fixed", scaled)
    check_round_trip("fixed:bits=4,round=stochastic", scaled)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_groups_that_are_not_finite(bad):
    x = awkward((2, 4, 100), seed=6)
    x[0, 1, 3] = x[1, 2, 99] = bad
    check_round_trip("fixed", x)
    check_round_trip("fixed:bits=7,round=stochastic", x)
    check_round_trip("fixed", torch.full((2, 100), bad))


def test_quotients_in_the_middle_of_two_codes_round_to_even():
    x = (torch.arange(512, dtype=torch.float32) - 256).view(1, 8, 64) * 0.5
    x[..., 0] = 127.0
    check_round_trip("fixed", x.clamp(-127, 127))


def test_every_byte_is_written(monkeypatch):
    empty = torch.empty

    def poisoned(*args, **kwargs):
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xAA)
        return made

    monkeypatch.setattr(torch, "empty", poisoned)
    for spec, shape in (("fixed", (2, 3, 100)), ("fixed:bits=11,group=8", (3, 5, 72)), ("fixed:bits=2", (1, 64))):
        check_round_trip(spec, awkward(shape))


def test_damaged_streams_are_refused_as_the_reference_refuses_them():
    spec, shape, rng = "fixed:bits=10", (2, 3, 100), random.Random(2)
    x = awkward(shape)
    x[1, 2, 99] = torch.nan
    buf = check_encoding(spec, x)
    for _ in range(40):
        check_decoding(spec, damaged(buf, rng), shape, torch.float32, CPU)


def test_largest_scale_in_the_largest_tensor_decodes_to_finite_values():
    spec = "fixed:bits=2"
    buf = get_codec(spec).encode(torch.tensor([[3.0e38, 0.0] * 32]))
    buf[16:18] = torch.tensor([0xFF, 0x7B], dtype=torch.uint8)
    check_decoding(spec, buf, (1, 64), torch.float32, CPU)
    check_decoding(spec, buf, (1, 64), torch.float16, CPU)
