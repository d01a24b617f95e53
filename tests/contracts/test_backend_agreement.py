"""Backends of a codec write the same streams and read each other's: every kernel against the reference.

Everything is equal to the bit except which tiles of `tah` get H bits, where entropies lie within 1e-5 of each other:
sums of logarithms round as their order goes. Such tiles are counted, and bounded. (`eden` and `wf`, whose streams may
differ in more, are compared in tests/quant/test_gaussian_cpu.py.)
"""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.agreement import compare
from support.codec_backends import backends_of, decode, every_codec_and_backend, is_slow, params, streams
from support.kernel_checks import awkward
from support.tile_agreement import EDGES, NOT_FINITE, as_bits, fixture_tensors

from tahq.quant import get_codec
from tahq.quant.backends import interprets_triton

SPECS = [
    "tah",
    "tah:tau=0,group=32",
    "tah:tau=inf,int4=1/3,group=256",
    "tah:group=8,low=2,high=8,int4=0.5",
    "tah:group=16,low=3,high=3,tau=0.5",
    "tah:group=128,tau=1.25,low=2,high=3",
    "tah:alloc=token,low=2,high=3",
    "tah:select=low,int4=0.5,tau=1",
    "tah:adaptive=off,int4=2/7",
    "tah:int4=0,tau=0,low=5,high=7",
    "tah:int4=1,alloc=token,high=5",
    "fixed",
    "fixed:bits=2,group=8",
    "fixed:bits=3,group=16,round=stochastic",
    "fixed:bits=6",
    "fixed:bits=10,group=32,round=stochastic",
    "fixed:bits=13,group=128",
    "fixed:bits=16,group=256",
]
SHAPES = [(2, 5, 64), (3, 100), (2, 1001), (1, 1, 1), (7,), (2, 3, 2, 40), (2, 1600), (1, 3, 1024), (5, 9, 8)]
SMALL_SHAPES = [(2, 3, 64), (3, 100)]
# The interpreter of triton, unlike a device, cuts off where it should round to bf16, and loses bf16's subnormals.
DTYPES = [torch.float32, torch.float16, *([] if interprets_triton() else [torch.bfloat16])]
KEY = 0xFEDCBA9876543210

# Interpreted, a hundred examples take minutes, and shrinking one that fails takes an hour.
QUICKLY = settings(max_examples=10, phases=[Phase.generate]) if interprets_triton() else settings()

every_kernel = every_codec_and_backend(SPECS, kernels_only=True)


def gaussian(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def not_finite(shape):
    x = awkward(shape, seed=1)
    x.view(-1)[[70, -100, -1]] = torch.tensor(NOT_FINITE)
    return x


KINDS = {
    "some not finite": not_finite,
    "heavy tails": lambda shape: gaussian(shape) ** 7,
    "zeros of both signs": lambda shape: gaussian(shape).sign() * 0.0,
    "constant": lambda shape: torch.full(shape, -0.3),
    "rows of constants": lambda shape: gaussian((*shape[:-1], 1)).expand(shape),
    "one spike a row": lambda shape: torch.zeros(shape).index_fill(-1, torch.tensor([shape[-1] // 2]), 3.0),
    "60 powers of ten": lambda shape: gaussian(shape) * 10.0 ** (30 * gaussian(shape, 1)).clamp(-30, 30).round(),
    "all NaN": lambda shape: torch.full(shape, math.nan),
}


def check(spec, backend, x, key=KEY):
    """Both streams agree, and each backend reads both to the same bits, in every type; returns what was counted."""
    written = streams(spec, ("reference", backend), x, key)
    codec = {name: get_codec(spec, backend=name) for name in written}
    for writer, buf in written.items():
        for dtype in DTYPES:
            values = {reader: decode(codec[reader], buf, x.shape, reader, dtype, key) for reader in codec}
            assert torch.equal(as_bits(values["reference"]), as_bits(values[backend])), (writer, dtype)
    return compare(codec["reference"].spec, x, written["reference"], written[backend])


@every_kernel
def test_streams_agree_and_are_read_alike(spec, backend):
    for shape in SMALL_SHAPES if is_slow(backend) else SHAPES:
        for dtype in DTYPES[: 1 if is_slow(backend) else None]:
            counted = check(spec, backend, awkward(shape).to(dtype))
            assert counted.num_codes == 0
            assert counted.num_selections <= 2


@every_kernel
def test_values_of_every_kind_agree(spec, backend):
    for make in KINDS.values():
        for shape in SMALL_SHAPES[:1] if is_slow(backend) else [(2, 3, 100), (2, 2, 256)]:
            assert check(spec, backend, make(shape)).num_codes == 0


@every_kernel
def test_magnitudes_of_every_size_agree(spec, backend):
    """From fp32's least subnormal to its largest; a flush to zero anywhere would show."""
    x = awkward((2, 3, 72), seed=2).double()
    x /= x.abs().max()
    for power in (-140,) if is_slow(backend) else (-149, -148, -140, -127, -126, -118, -40, 15, 16, 100, 127):
        check(spec, backend, (x * 2.0**power).float())


LARGE = ["tah", "tah:tau=0", "tah:alloc=token,select=low", "fixed", "fixed:bits=6,round=stochastic"]


@every_codec_and_backend(LARGE, kernels_only=True)
@pytest.mark.parametrize("tokens", [64, pytest.param(512, marks=pytest.mark.acceptance)])
def test_differences_are_few_on_gaussians_activations_and_gradients(spec, backend, tokens):
    """No code may differ at all. Entropies scatter by about 0.05 nats, so that of n tiles a share of about
    1e-5 · 2 / 0.05 lies within 1e-5 of a border: one in 2,500."""
    if backend == "triton" and interprets_triton():
        pytest.skip("interpreted it would take an hour")
    counted = check(spec, backend, gaussian((2, tokens, 640), seed=3))
    for x in fixture_tensors().values():
        counted += check(spec, backend, x[:, :tokens])
    assert counted.num_codes == 0
    assert counted.num_selections <= 2 + counted.num_tiles // 2500


@pytest.mark.parametrize("backend", params([("cpu",), ("triton",)], 0))
@QUICKLY
@given(data=st.data())
def test_any_values_agree(backend, data):
    spec = data.draw(st.sampled_from([spec for spec in SPECS if backend in backends_of(spec)]))
    shape = (*data.draw(st.lists(st.integers(0, 4), max_size=3)), data.draw(st.integers(0, 140)))
    value = st.sampled_from(EDGES) | st.floats(width=32, allow_nan=False, allow_infinity=False)
    pool = data.draw(st.lists(value, min_size=1, max_size=6))
    pool += data.draw(st.lists(st.sampled_from(NOT_FINITE), max_size=1))
    seed = data.draw(st.integers(0, 999))
    index = torch.randint(len(pool), shape, generator=torch.Generator().manual_seed(seed))
    x = torch.tensor(pool, dtype=torch.float32)[index].to(data.draw(st.sampled_from(DTYPES)))
    check(spec, backend, x, key=data.draw(st.integers(0, 2**64 - 1)))


@pytest.mark.parametrize("spec", ["tah", "tah:alloc=token,tau=0", "tah:adaptive=off", "fixed", "fixed:bits=11", "wf"])
def test_number_of_threads_does_not_change_the_bytes(spec):
    x = gaussian((3, 83, 1001))
    x[1, 4, 7] = torch.nan
    one, three = (get_codec(spec, backend="cpu", threads=threads) for threads in (1, 3))
    buf = one.encode(x, key=KEY)
    assert torch.equal(three.encode(x, key=KEY), buf)
    values = [codec.decode(buf, x.shape, torch.bfloat16, key=KEY) for codec in (one, three)]
    assert torch.equal(*map(as_bits, values))
