"""What every codec promises, run over every codec, input type and shape. A new codec is one line in SPECS."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.errors import CodecError
from tahq.quant import CodecSpec, get_codec

# Spec -> relative error ‖x̂ − x‖/‖x‖ that Gaussian values stay below, by the arithmetic beside it.
SPECS = {
    "raw:dtype=fp32": 0.0,
    "raw:dtype=fp16": 2**-11,  # half a unit in the last place of 11 bits
    "raw:dtype=bf16": 2**-8,
    # A group of 64 Gaussians spans about ±2.4σ to ±3.3σ: step 3.3σ/Q, uniform error step/√12 (nearest),
    # at most step/2 (stochastic).
    "fixed:bits=2": 1.0,
    "fixed:bits=3,group=32": 3.3 / 3 / 12**0.5,
    "fixed:bits=6": 3.3 / 31 / 12**0.5,
    "fixed": 3.3 / 127 / 12**0.5,
    "fixed:bits=10,round=stochastic": 3.3 / 511 / 2,
    "fixed:bits=16,group=8": 3.3 / 32767 / 12**0.5 + 2**-15,
    # min to max of 64 Gaussians is about 4.8σ, at most 6.6σ: step 6.6σ/(2^3 − 1) where bits are fewest.
    "tah": 6.6 / 7 / 12**0.5,
    "tah:tau=0,group=32": 6.6 / 7 / 12**0.5,
    "tah:tau=inf,int4=1/3": 6.6 / 7 / 12**0.5,
    "tah:low=2,high=3,int4=0.2": 6.6 / 3 / 12**0.5,
    "tah:low=4,high=4,group=256": 7.6 / 15 / 12**0.5,
    "tah:low=2,high=8,int4=0.5,group=8": 6.6 / 3 / 12**0.5,
}
SHAPES = [(2, 3, 64), (1, 1, 1), (3, 100), (2, 1001), (7,), (1, 2, 3, 40), (2, 2, 1600)]
EMPTY_SHAPES = [(0,), (0, 4, 64), (2, 0, 64), (2, 3, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_codec = pytest.mark.parametrize("spec", SPECS)


def gaussian(shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


@every_codec
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip_keeps_shape_type_length_and_values(spec, shape, dtype):
    codec, x = get_codec(spec), gaussian(shape, dtype=dtype)
    buf = codec.encode(x, key=3)
    assert (buf.dtype, buf.dim(), buf.is_contiguous(), buf.device) == (torch.uint8, 1, True, x.device)
    assert buf.numel() == codec.encoded_nbytes(shape)
    back = codec.decode(buf, shape, dtype, key=3)
    assert (back.shape, back.dtype, back.is_contiguous()) == (x.shape, dtype, True)
    rounding = 0.0 if spec == "raw:dtype=fp32" else torch.finfo(dtype).eps  # of x̂ to dtype
    error = (back.double() - x.double()).norm() / x.double().norm()
    assert error <= SPECS[spec] + rounding
    assert not codec.has_non_finite(buf)


@every_codec
@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_empty_tensor_round_trips(spec, shape):
    codec = get_codec(spec)
    buf = codec.encode(torch.empty(shape))
    assert buf.numel() == codec.encoded_nbytes(shape)
    assert codec.decode(buf, shape, torch.bfloat16).shape == shape
    assert not codec.has_non_finite(buf)


@every_codec
def test_encoding_is_pure(spec):
    codec, x = get_codec(spec), gaussian((4, 5, 100))
    kept = x.clone()
    first = codec.encode(x, key=9)
    assert torch.equal(first, codec.encode(x, key=9))
    assert torch.equal(x, kept)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()
    assert torch.equal(first, codec.encode(strided, key=9))
    assert torch.equal(first, codec.encode(x.requires_grad_(), key=9))


@every_codec
def test_only_a_randomised_codec_looks_at_the_key(spec):
    codec, x = get_codec(spec), gaussian((2, 3, 64))
    same = torch.equal(codec.encode(x, key=1), codec.encode(x, key=2**64 - 1))
    assert same == ("stochastic" not in spec)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 64), (2, 3, 100)], ids=str)
def test_decoded_tensor_is_fresh_and_aligned_wherever_the_buffer_lies(spec, dtype, shape):
    codec = get_codec(spec)
    buf = codec.encode(gaussian(shape))
    expected = codec.decode(buf, shape, dtype)
    for offset in (0, 1, 2, 7):
        backing = torch.full((buf.numel() + 32,), 0xAA, dtype=torch.uint8)
        part = backing[offset : offset + buf.numel()]
        part.copy_(buf)
        back = codec.decode(part, shape, dtype)
        assert torch.equal(part, buf), "decoding wrote into the buffer"
        backing.fill_(0)
        assert torch.equal(as_bytes(back), as_bytes(expected)), "the result shares the buffer's memory"
        assert back.data_ptr() % 16 == 0


@every_codec
def test_decoding_takes_a_strided_buffer(spec):
    codec = get_codec(spec)
    buf = codec.encode(gaussian((2, 64)))
    strided = torch.stack((buf, buf), dim=1)[:, 0]
    assert torch.equal(codec.decode(strided, (2, 64)), codec.decode(buf, (2, 64)))


@every_codec
def test_decoding_refuses_what_is_no_stream_of_that_length(spec):
    codec, shape = get_codec(spec), (2, 3, 100)
    buf = codec.encode(gaussian(shape))
    longer = torch.cat((buf, buf[:1]))
    wrong = [buf[:-1], longer, buf[:0], buf[:15], buf.float(), buf.view(1, -1), buf.view(torch.int8)]
    for bad in wrong:
        with pytest.raises(CodecError):
            codec.decode(bad, shape)
    with pytest.raises(CodecError):
        codec.decode(buf, (2, 4, 100))


@every_codec
def test_refuses_tensors_that_no_stream_holds(spec):
    codec = get_codec(spec)
    for bad in (torch.tensor(1.0), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(CodecError, match="a codec takes"):
            codec.encode(bad)
    with pytest.raises(CodecError, match="one dimension or more"):
        codec.encoded_nbytes(())
    with pytest.raises(CodecError, match="shape"):
        codec.encoded_nbytes((2, -1))
    with pytest.raises(CodecError, match="decodes to"):
        codec.decode(codec.encode(torch.zeros(8)), (8,), torch.float64)


@every_codec
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_value_is_flagged_and_comes_out_as_one(spec, bad):
    codec, shape = get_codec(spec), (2, 3, 100)
    x = gaussian(shape)
    x[1, 2, 70] = bad
    buf = codec.encode(x)
    assert codec.has_non_finite(buf)
    back = codec.decode(buf, shape)
    assert not back[1, 2, 70].isfinite()
    untouched = torch.cat((back[0].flatten(), back[1, :2].flatten()))
    assert untouched.isfinite().all()
    only_bad = torch.full(shape, bad)
    assert not codec.decode(codec.encode(only_bad), shape).isfinite().any()


@every_codec
def test_zeros_stay_zeros(spec):
    codec = get_codec(spec)
    assert torch.equal(codec.decode(codec.encode(torch.zeros(3, 5, 72)), (3, 5, 72)), torch.zeros(3, 5, 72))


def _exact_range(spec):
    return 65504.0 if "fp16" in spec else 3.38e38


@every_codec
@pytest.mark.parametrize("magnitude", [1e-45, 1e-40, 1e-30, 1e-9, 65504.0, 1e20, 3.38e38])
def test_finite_values_of_any_size_stay_finite(spec, magnitude):
    x = (gaussian((2, 3, 64)).clamp(-1, 1) * min(magnitude, _exact_range(spec))).contiguous()
    x[0, 0, 0] = min(magnitude, _exact_range(spec))
    codec = get_codec(spec)
    buf = codec.encode(x)
    assert not codec.has_non_finite(buf)
    assert codec.decode(buf, x.shape).isfinite().all()


@every_codec
def test_fp16_at_its_limit_decodes_to_finite_fp16(spec):
    x = torch.full((2, 64), 65504.0, dtype=torch.float16)
    x[:, ::3] = -65504.0
    codec = get_codec(spec)
    assert codec.decode(codec.encode(x), x.shape, torch.float16).isfinite().all() or spec == "raw:dtype=bf16"


@every_codec
def test_encoding_never_asks_the_device(spec):
    """On the meta device there is no data: any .item(), any shape that depends on data, would raise."""
    codec = get_codec(spec)
    for shape in (*SHAPES, *EMPTY_SHAPES):
        buf = codec.encode(torch.empty(shape, device="meta"), key=5)
        assert (buf.device.type, buf.numel()) == ("meta", codec.encoded_nbytes(shape))


@every_codec
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_writes_streams_that_cpu_reads_and_does_not_synchronise(spec):
    codec = get_codec(spec)
    for shape in (*SHAPES, *EMPTY_SHAPES):
        x = gaussian(shape)
        on_device = x.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            buf = codec.encode(on_device, key=5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        here = codec.decode(buf.cpu(), shape, key=5)
        assert torch.equal(codec.decode(buf, shape, key=5).cpu(), here)
        assert (here - x).norm() <= x.norm() * (SPECS[spec] + 1e-6)


@every_codec
def test_spec_is_canonical(spec):
    codec = get_codec(spec)
    assert CodecSpec.parse(str(codec.spec)) == codec.spec
    assert get_codec(codec.spec).encoded_nbytes((2, 100)) == codec.encoded_nbytes((2, 100))


@every_codec
def test_mutated_streams_raise_codec_error_or_decode(spec):
    codec, shape, rng = get_codec(spec), (2, 3, 72), random.Random(1)
    streams = [codec.encode(gaussian(shape, seed)) for seed in range(4)]
    refused = 0
    for _ in range(400):
        buf = rng.choice(streams).clone()
        for _ in range(rng.choice((1, 1, 2, 8))):
            near_header = rng.random() < 0.5
            place = rng.randrange(min(48, buf.numel()) if near_header else buf.numel())
            buf[place] = rng.choice((0, 0xFF, rng.randrange(256), int(buf[place]) ^ 1 << rng.randrange(8)))
        if rng.random() < 0.1:
            buf = buf[: rng.randrange(buf.numel())]
        try:
            back = codec.decode(buf, shape)
        except CodecError:
            refused += 1
        else:
            assert back.shape == shape
            assert codec.has_non_finite(buf) == (not back.isfinite().all())
    assert refused > 20  # a tenth are cut short


@given(
    spec=st.sampled_from(list(SPECS)),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    channels=st.integers(0, 140),
    kind=st.sampled_from(["values", "constant", "spiky"]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_finite_tensor_round_trips_to_something_finite(spec, shape, channels, kind, dtype, data):
    shape = (*shape, channels)
    limit = 60000.0 if "fp16" in spec or dtype is torch.float16 else 2.0**127
    value = st.floats(-limit, limit, width=32)
    pool = torch.tensor(data.draw(st.lists(value, min_size=1, max_size=6)))
    index = torch.randint(len(pool), shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    x = {"values": pool[index], "constant": pool[:1].expand(shape), "spiky": pool[index] * (index == 0)}[kind].to(dtype)
    codec = get_codec(spec)
    buf = codec.encode(x, key=data.draw(st.integers(0, 2**64 - 1)))
    assert buf.numel() == codec.encoded_nbytes(shape)
    assert not codec.has_non_finite(buf)
    back = codec.decode(buf, shape, dtype)
    assert back.isfinite().all()
    if x.numel() and "tah" not in spec:  # a transform spreads an error: there only its norm is bounded
        assert (back.double() - x.double()).abs().max() <= x.double().abs().max()
