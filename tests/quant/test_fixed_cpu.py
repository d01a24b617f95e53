"""`fixed` in numba answers to the reference: the same bytes, the same values, the same refusals."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.same_outcome import assert_same_outcome, bits_of

from tahq.quant.cpu.numbers import Key
from tahq.quant.fixed import cpu as fixed_cpu
from tahq.quant.fixed.cpu import draw
from tahq.quant.fixed.reference import decode as decode_reference
from tahq.quant.fixed.reference import encode as encode_reference
from tahq.quant.fixed.stream import FixedLayout
from tahq.quant.spec import CodecSpec, FixedSpec
from tahq.quant.stochastic_rounding import draws

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEY = 0xFEDCBA9876543210
SHAPES = [(2, 5, 96), (2, 3, 1), (1, 2, 301), (7,)]


def gaussian(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spoiled(shape):
    x = gaussian(shape)
    x.view(-1)[::131] = torch.nan
    x.view(-1)[7::257] = -torch.inf
    return x


INPUTS = {
    "gaussian": gaussian,
    "spanning": lambda shape: gaussian(shape) ** 9 * 1e-12,
    "zeros": torch.zeros,
    "constant": lambda shape: torch.full(shape, -0.3),
    "denormal": lambda shape: gaussian(shape) * 1e-41,
    "largest": lambda shape: gaussian(shape).clamp(-1, 1) * 3.4e38,
    "not finite": spoiled,
}


def assert_equal(spec, x, key=KEY, threads=1):
    layout = FixedLayout.of(spec, x.shape)
    expected = encode_reference(layout, x, key=key)
    ours = fixed_cpu.encode(layout, x, key=key, threads=threads)
    assert torch.equal(ours, expected)
    for dtype in DTYPES:
        values = decode_reference(layout, ours, dtype)
        assert torch.equal(bits_of(fixed_cpu.decode(layout, ours, dtype, threads=threads)), bits_of(values))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("bits", range(2, 17))
def test_streams_and_values_equal_the_references(bits, kind):
    for rounding in ("nearest", "stochastic"):
        for shape in SHAPES:
            assert_equal(FixedSpec(bits=bits, round=rounding, group=32), INPUTS[kind](shape))


@pytest.mark.parametrize("group", [8, 16, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_group_and_input_type_agrees(group, dtype):
    for kind in INPUTS.values():
        assert_equal(FixedSpec(bits=6, group=group), kind((3, 2, 300)).to(dtype))
        assert_equal(FixedSpec(bits=11, group=group, round="stochastic"), kind((2, 2, 512)).to(dtype))


@pytest.mark.parametrize("bits", [6, 8, 11])
def test_number_of_threads_does_not_change_the_bytes(bits):
    for rounding in ("nearest", "stochastic"):
        assert_equal(FixedSpec(bits=bits, round=rounding), gaussian((3, 83, 1001)), threads=3)


@pytest.mark.parametrize("key", [0, 1, KEY, 2**64 - 1])
def test_draws_are_the_references(key):
    expected = draws(1000, key, torch.device("cpu")).numpy()
    got = np.array([draw(index, Key.of(key)) for index in range(1000)])
    np.testing.assert_array_equal(got, expected)
    assert draw(2**32 + 5, Key.of(key)) == expected[5]


@settings(max_examples=150)
@given(
    bits=st.integers(2, 16),
    group=st.sampled_from([8, 16, 32, 64, 128, 256]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    shape=st.lists(st.integers(1, 4), max_size=2),
    channels=st.integers(1, 300),
    pool=st.lists(st.floats(width=32), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    key=st.integers(0, 2**64 - 1),
)
def test_any_tensor_agrees(bits, group, rounding, shape, channels, pool, seed, dtype, key):
    index = torch.randint(len(pool), (*shape, channels), generator=torch.Generator().manual_seed(seed))
    assert_equal(FixedSpec(bits=bits, group=group, round=rounding), torch.tensor(pool)[index].to(dtype), key)


@settings(max_examples=150)
@given(data=st.data(), seed=st.integers(0, 3), spec=st.sampled_from(["fixed:bits=6", "fixed:bits=10", "fixed"]))
def test_mutated_stream_is_refused_as_the_reference_refuses_it(data, seed, spec):
    x = gaussian((2, 3, 100), seed)
    if seed == 3:
        x[0, 1, 70] = torch.nan
    layout = FixedLayout.of(CodecSpec.parse(spec), x.shape)
    buf = fixed_cpu.encode(layout, x)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, buf.numel() - 1))
        buf[place] = data.draw(st.integers(0, 255))
    assert_same_outcome(spec, x.shape, buf)
