"""What every codec promises, run over every codec, backend, input type and shape.

A new codec is one line in SPECS, and in `support.codec_backends.KERNELS` if it has kernels of its own.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.codec_backends import backends_of, can_run, device_of, every_codec_and_backend, is_slow

from tahq.errors import CodecError
from tahq.quant import get_codec

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
    "tah:alloc=token,select=low": 6.6 / 7 / 12**0.5,
    "tah:adaptive=off,int4=2/7,group=16": 6.6 / 7 / 12**0.5,
    # Without sample ids every sample is sent whole, in fp16: half a unit in the last place of 11 bits.
    "aqsgd": 2**-11,
    # The scale is a channel's largest of few tokens, s: a positive s itself loses a step of s/2^(bits − 1), others
    # half a step at most.
    "aqsgd:cache=none": 1 / 8 + 2**-11,
    "aqsgd:bits=8,cache=none": 1 / 128 + 2**-11,
    # A quantiser that loses the share D of a tile's energy, D = 0.363, 0.117, 0.0345, … (`gaussian.levels`), has the
    # error √(D/(1 − D)) once it is unbiased; a tile of few values may be far from Gaussian; an 8-bit scale is off by
    # 1/8 at most.
    "eden": (0.117 / 0.883) ** 0.5 + 1 / 8,
    "eden:bits=1,group=8": (0.363 / 0.637) ** 0.5 + 1 / 8,
    "eden:bits=10/3,group=64": (0.0345 / 0.9655) ** 0.5 + 1 / 8,
    "eden:bits=8,group=32": 1 / 8,
    # Not rescaled, it has √D; the scale is the best of five, 9 % apart. (A tensor of few tokens is mostly its mean.)
    "wf": 0.0345**0.5 + 1 / 16,
    "wf:bits=2.5,group=64,center=off": 0.117**0.5 + 1 / 16,
    "wf:bits=1,group=16": 0.363**0.5 + 1 / 16,
    "wf:bits=8,group=256,center=off": 1 / 16,
}
TRANSFORMING = ("tah", "eden", "wf")
"""Codecs that spread the error of a value over its tile."""
SHAPES = [(2, 3, 64), (1, 1, 1), (3, 100), (2, 1001), (7,), (1, 2, 3, 40), (2, 2, 1600)]
SMALL_SHAPES = [(2, 3, 64), (3, 100), (7,)]
"""For what is slow."""
EMPTY_SHAPES = [(0,), (0, 4, 64), (2, 0, 64), (2, 3, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

every_codec = every_codec_and_backend(SPECS)


def gaussian(shape, seed=0, dtype=torch.float32, backend="reference"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device_of(backend))


def has_its_length(buf, codec, shape):
    """A stateful codec's streams may be shorter than it says beforehand."""
    nbytes = codec.encoded_nbytes(shape)
    return 0 < buf.numel() <= nbytes if codec.is_stateful else buf.numel() == nbytes


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


@every_codec
def test_round_trip_keeps_shape_type_length_and_values(spec, backend):
    codec = get_codec(spec, backend=backend)
    for shape, dtype in itertools.product(SMALL_SHAPES if is_slow(backend) else SHAPES, DTYPES):
        x = gaussian(shape, dtype=dtype, backend=backend)
        buf = codec.encode(x, key=3)
        assert (buf.dtype, buf.dim(), buf.is_contiguous(), buf.device) == (torch.uint8, 1, True, x.device)
        assert has_its_length(buf, codec, shape)
        back = codec.decode(buf, shape, dtype, key=3)
        assert (back.shape, back.dtype, back.is_contiguous(), back.device) == (x.shape, dtype, True, x.device)
        rounding = 0.0 if spec == "raw:dtype=fp32" else torch.finfo(dtype).eps  # of x̂ to dtype
        error = (back.double() - x.double()).norm() / x.double().norm()
        assert error <= SPECS[spec] + rounding
        assert not codec.has_non_finite(buf)


@every_codec
def test_empty_tensors_and_zeros_round_trip(spec, backend):
    codec = get_codec(spec, backend=backend)
    zeros = torch.zeros(3, 5, 72, device=device_of(backend))
    assert torch.equal(codec.decode(codec.encode(zeros), zeros.shape), zeros)
    for shape in EMPTY_SHAPES:
        buf = codec.encode(torch.empty(shape, device=device_of(backend)))
        assert has_its_length(buf, codec, shape)
        assert codec.decode(buf, shape, torch.bfloat16).shape == shape
        assert not codec.has_non_finite(buf)


@every_codec
def test_encoding_is_pure(spec, backend):
    codec, x = get_codec(spec, backend=backend), gaussian((4, 5, 100), backend=backend)
    kept = x.clone()
    first = codec.encode(x, key=9)
    assert torch.equal(first, codec.encode(x, key=9))
    assert torch.equal(x, kept)
    assert torch.equal(first, codec.encode(x.requires_grad_(), key=9))


@every_codec
def test_strides_do_not_matter(spec, backend):
    codec, x = get_codec(spec, backend=backend), gaussian((4, 5, 96), backend=backend)
    expected = codec.encode(x, key=9)
    wider = torch.zeros(4, 7, 100, device=x.device)
    wider[:, 1:6, 2:98] = x
    views = {
        "transposed": x.transpose(0, 1).contiguous().transpose(0, 1),
        "channels first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a wider one": wider[:, 1:6, 2:98],
    }
    for name, view in views.items():
        assert not view.is_contiguous()
        assert torch.equal(expected, codec.encode(view, key=9)), name
    others = [x[:1].expand(4, 5, 96), x.transpose(1, 2), x.transpose(1, 2)[..., ::2], x.half().transpose(1, 2)]
    for view in others:
        assert torch.equal(codec.encode(view, key=9), codec.encode(view.contiguous(), key=9))
    strided = torch.stack((expected, expected), dim=1)[:, 0]
    assert torch.equal(codec.decode(strided, x.shape), codec.decode(expected, x.shape))


@every_codec
def test_only_a_randomised_codec_looks_at_the_key(spec, backend):
    codec, x = get_codec(spec, backend=backend), gaussian((2, 3, 64), backend=backend)
    same = torch.equal(codec.encode(x, key=1), codec.encode(x, key=2**64 - 1))
    assert same != codec.is_keyed
    assert codec.is_keyed == ("stochastic" in spec or spec.startswith("eden"))


@every_codec
def test_decoded_tensor_is_fresh_and_aligned_wherever_the_buffer_lies(spec, backend):
    codec, shape, dtype = get_codec(spec, backend=backend), (2, 3, 100), torch.bfloat16
    buf = codec.encode(gaussian(shape, backend=backend))
    expected = codec.decode(buf, shape, dtype)
    for offset in (0, 1, 2, 7):
        backing = torch.full((buf.numel() + 32,), 0xAA, dtype=torch.uint8, device=buf.device)
        part = backing[offset : offset + buf.numel()]
        part.copy_(buf)
        back = codec.decode(part, shape, dtype)
        assert torch.equal(part, buf), "decoding wrote into the buffer"
        backing.fill_(0)
        assert torch.equal(as_bytes(back), as_bytes(expected)), "the result shares the buffer's memory"
        assert back.data_ptr() % 16 == 0


@every_codec
def test_every_byte_is_written(spec, backend, monkeypatch):
    """Fresh memory is filled with something else than zeros: nothing of it may come through."""
    codec, shape = get_codec(spec, backend=backend), (2, 3, 100)
    x = gaussian(shape, backend=backend)
    plain = codec.encode(x, key=7)
    values = codec.decode(plain, shape, key=7)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)  # workers switch it off
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty returns
    try:
        assert torch.empty(8, dtype=torch.uint8).tolist() == [255] * 8
        assert torch.equal(codec.encode(x, key=7), plain)
        assert torch.equal(codec.decode(plain, shape, key=7), values)
    finally:
        torch.use_deterministic_algorithms(False)


@every_codec
def test_decoding_refuses_buffers_of_another_length_or_type(spec, backend):
    codec, shape = get_codec(spec, backend=backend), (2, 3, 100)
    buf = codec.encode(gaussian(shape, backend=backend))
    longer = torch.cat((buf, buf[:1]))
    wrong = [buf[:-1], longer, buf[:0], buf[:15], buf.float(), buf.view(1, -1), buf.view(torch.int8)]
    for bad in wrong:
        with pytest.raises(CodecError):
            codec.decode(bad, shape)
    with pytest.raises(CodecError):
        codec.decode(buf, (2, 4, 100))


@every_codec
def test_refuses_tensors_that_no_stream_holds(spec, backend):
    codec = get_codec(spec, backend=backend)
    for bad in (torch.tensor(1.0), torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(CodecError, match="a codec takes"):
            codec.encode(bad.to(device_of(backend)))
    with pytest.raises(CodecError, match="one dimension or more"):
        codec.encoded_nbytes(())
    with pytest.raises(CodecError, match="shape"):
        codec.encoded_nbytes((2, -1))
    with pytest.raises(CodecError, match="decodes to"):
        codec.decode(codec.encode(torch.zeros(8, device=device_of(backend))), (8,), torch.float64)


@every_codec
def test_non_finite_value_is_flagged_and_comes_out_as_one(spec, backend):
    codec, shape = get_codec(spec, backend=backend), (2, 3, 100)
    for bad in (math.nan, math.inf, -math.inf):
        x = gaussian(shape, backend=backend)
        x[1, 2, 70] = bad
        buf = codec.encode(x)
        assert codec.has_non_finite(buf)
        back = codec.decode(buf, shape)
        assert not back[1, 2, 70].isfinite()
        assert torch.cat((back[0].flatten(), back[1, :2].flatten())).isfinite().all()
        only_bad = torch.full_like(x, bad)
        assert not codec.decode(codec.encode(only_bad), shape).isfinite().any()


@every_codec
def test_finite_values_of_any_size_stay_finite(spec, backend):
    codec = get_codec(spec, backend=backend)
    for magnitude in (1e-45, 1e-40, 1e-30, 1e-9, 65504.0, 1e20, 3.38e38):
        largest = min(magnitude, 65504.0 if "fp16" in spec else 3.38e38)
        x = (gaussian((2, 3, 64), backend=backend).clamp(-1, 1) * largest).contiguous()
        x[0, 0, 0] = largest
        buf = codec.encode(x)
        assert not codec.has_non_finite(buf)
        assert codec.decode(buf, x.shape).isfinite().all()
    x = torch.full((2, 64), 65504.0, dtype=torch.float16, device=device_of(backend))
    x[:, ::3] = -65504.0
    assert codec.decode(codec.encode(x), x.shape, torch.float16).isfinite().all() or spec == "raw:dtype=bf16"


@pytest.mark.parametrize("spec", SPECS)
def test_encoding_never_asks_the_device(spec):
    """On the meta device there is no data: any .item(), any shape that depends on data, would raise."""
    codec = get_codec(spec)
    for shape in (*SMALL_SHAPES, *EMPTY_SHAPES[1:3]):
        buf = codec.encode(torch.empty(shape, device="meta"), key=5)
        assert buf.device.type == "meta"
        assert has_its_length(buf, codec, shape)


@pytest.mark.parametrize(
    ("spec", "backend"), [(spec, backend) for spec in SPECS for backend in backends_of(spec) if backend != "cpu"]
)
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_writes_streams_that_cpu_reads_and_does_not_synchronise(spec, backend):
    codec, here = get_codec(spec, backend=backend), get_codec(spec, backend="reference")
    for shape in (*SHAPES, *EMPTY_SHAPES):
        x = gaussian(shape)
        on_device = x.cuda()
        codec.prepare(shape, x.dtype, on_device.device)  # loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode("error")
        try:
            buf = codec.encode(on_device, key=5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        read_here = here.decode(buf.cpu(), shape, key=5)
        assert torch.equal(codec.decode(buf, shape, key=5).cpu(), read_here)
        assert (read_here - x).norm() <= x.norm() * (SPECS[spec] + 1e-6)


@given(
    case=st.sampled_from([(spec, backend) for spec in SPECS for backend in backends_of(spec) if can_run(backend)]),
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    channels=st.integers(0, 140),
    kind=st.sampled_from(["values", "constant", "spiky"]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_any_finite_tensor_round_trips_to_something_finite(case, shape, channels, kind, dtype, data):
    spec, backend = case
    shape = (*shape, channels)
    limit = 60000.0 if "fp16" in spec or dtype is torch.float16 else 2.0**127
    value = st.floats(-limit, limit, width=32)
    pool = torch.tensor(data.draw(st.lists(value, min_size=1, max_size=6)))
    index = torch.randint(len(pool), shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    x = {"values": pool[index], "constant": pool[:1].expand(shape), "spiky": pool[index] * (index == 0)}[kind].to(dtype)
    codec = get_codec(spec, backend=backend)
    buf = codec.encode(x.to(device_of(backend)), key=data.draw(st.integers(0, 2**64 - 1)))
    assert has_its_length(buf, codec, shape)
    assert not codec.has_non_finite(buf)
    back = codec.decode(buf, shape, dtype).cpu()
    assert back.isfinite().all()
    if x.numel() and not spec.startswith(TRANSFORMING):  # a transform spreads an error: only its norm is bounded
        assert (back.double() - x.double()).abs().max() <= x.double().abs().max()
