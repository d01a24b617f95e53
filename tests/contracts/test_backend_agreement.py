"""Backends of a codec write the same streams and read each other's: every kernel against the reference.

Everything is equal to the bit but which tiles of `tah` get H bits, where entropies lie within 1e-5 of each other:
sums of logarithms round as their order goes. Such tiles are counted, and bounded.
"""

import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.agreement import Differences, compare
from support.codec_backends import backends_of, can_run, decode, every_codec_and_backend, is_slow, params, streams

from tahq.quant import get_codec
from tahq.quant.backends import interprets_triton

SPECS = [
    "tah",
    "tah:tau=0,group=32",
    "tah:tau=inf,int4=1/3,group=256",
    "tah:group=8,low=2,high=8,int4=0.5",
    "tah:group=16,low=3,high=3",
    "tah:group=128,tau=1.25,low=2,high=3",
    "tah:alloc=token,low=2,high=3",
    "tah:select=low,int4=0.5",
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


def spiky(shape, seed=0):
    """Gaussians of several orders of magnitude, some with an outlier, some tiles constant or zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= 10.0 ** torch.randint(-4, 2, (*shape[:-1], 1), generator=generator)
    x[torch.rand(shape, generator=generator) < 0.01] *= 50
    flat = x.view(-1)
    flat[: flat.numel() // 8] = flat[0]
    flat[-(flat.numel() // 8) :] = 0.0
    return x


def as_bits(values):
    """Comparable to the bit; of NaN there is one."""
    return torch.where(values.isnan(), torch.nan, values).view({2: torch.int16, 4: torch.int32}[values.dtype.itemsize])


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
            counted = check(spec, backend, spiky(shape).to(dtype))
            assert counted.num_codes == 0
            assert counted.num_selections <= 2


@every_kernel
def test_values_that_are_not_finite_agree(spec, backend):
    x = spiky((2, 3, 100), seed=1)
    x[0, 1, 70], x[1, 0, 3], x[1, 2, 99] = math.nan, math.inf, -math.inf
    check(spec, backend, x)
    check(spec, backend, torch.full((1, 64), math.nan))


@every_kernel
def test_magnitudes_of_every_size_agree(spec, backend):
    """From fp32's least subnormal to its largest; a flush to zero anywhere would show."""
    x = spiky((2, 3, 72), seed=2).double()
    x /= x.abs().max()
    for power in (-140,) if is_slow(backend) else (-149, -148, -140, -127, -126, -118, -40, 15, 16, 100, 127):
        check(spec, backend, (x * 2.0**power).float())


def fixture_tensors():
    from safetensors.torch import load_file

    folder = Path(os.environ.get("TAHQ_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path = folder / "gpt2small_boundary.safetensors"
    if not path.exists():
        pytest.skip("no gpt2small_boundary.safetensors; set TAHQ_SHARED_DATA")
    return load_file(path)


LARGE = ["tah", "tah:tau=0", "tah:alloc=token,select=low", "fixed", "fixed:bits=6,round=stochastic"]


@every_codec_and_backend(LARGE, kernels_only=True)
def test_differences_are_few_on_a_million_gaussians(spec, backend):
    if backend == "triton" and interprets_triton():
        pytest.skip("interpreted it would take an hour")
    x = torch.randn(4, 164, 1600, generator=torch.Generator().manual_seed(3))
    assert_few(check(spec, backend, x))


@every_codec_and_backend(LARGE, kernels_only=True)
def test_differences_are_few_on_activations_and_gradients(spec, backend):
    if backend == "triton" and interprets_triton():
        pytest.skip("interpreted it would take an hour")
    counted = Differences()
    for x in fixture_tensors().values():
        counted += check(spec, backend, x)
    assert_few(counted)


def assert_few(counted):
    """No code may differ at all. Entropies scatter by about 0.05 nats, so that of n tiles a share of about
    1e-5 · 2 / 0.05 lies within 1e-5 of a border: one in 2,500."""
    assert counted.num_codes == 0
    assert counted.num_selections <= 2 + counted.num_tiles // 2500


# Values at which something changes: signs, subnormals, the ends of fp16 and fp32, what is not finite.
EDGES = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 6e-8, 65504.0, -65504.0, 65520.0, 1e5, 3.38e38, -3.4028235e38]
NOT_FINITE = [math.nan, math.inf, -math.inf]


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


@pytest.mark.skipif(not can_run("triton"), reason="needs a CUDA device, or TRITON_INTERPRET=1")
@pytest.mark.parametrize("spec", SPECS)
def test_every_kernel_reads_what_every_other_wrote(spec):
    x = spiky((2, 3, 100), seed=4)
    kernels = [backend for backend in backends_of(spec)[1:] if can_run(backend)]
    readers = {backend: get_codec(spec, backend=backend) for backend in kernels}
    for buf in streams(spec, kernels, x, KEY).values():
        first, *others = (
            as_bits(decode(codec, buf, x.shape, reader, torch.float32, KEY)) for reader, codec in readers.items()
        )
        assert all(torch.equal(first, other) for other in others)
