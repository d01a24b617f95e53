"""The numba backend of `eden` and `wf` against the reference: equal values; equal streams except where sums round."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.guarded_memory import GuardedMemory
from support.tile_agreement import (
    DTYPES,
    SHAPES,
    any_tensors,
    check,
    fixture_tensors,
    gaussians,
    layout_of,
    of_all_sizes,
    relative_error,
    sinking,
    with_not_finite,
)

from tahq.errors import CodecError
from tahq.quant import get_codec

SPECS = [
    "eden",
    "eden:bits=1",
    "eden:bits=4/3,group=8",
    "eden:bits=2.5,group=16",
    "eden:bits=4,group=32",
    "eden:bits=5.5,group=64",
    "eden:bits=8,group=128",
    "wf",
    "wf:center=off",
    "wf:bits=1",
    "wf:bits=4/3,group=8",
    "wf:bits=2.5,group=16,center=off",
    "wf:bits=5.5,group=32",
    "wf:bits=7,group=64",
    "wf:bits=8,group=256",
]
KEY = 0xFEDCBA9876543210
both = pytest.mark.parametrize("spec", ["eden", "wf"])


def assert_few(counted):
    """A sum off by some units of 2^−24 moves a width, a scale or a code in about one tile of 10,000; a mean summed in
    fp64 moves only at a border of fp16 and fp64."""
    assert counted.share < 1e-3
    assert counted.means == 0


@pytest.mark.parametrize("spec", SPECS)
def test_streams_agree_and_are_read_alike(spec):
    """Small tensors: a sum that rounds differently crosses a border about once in a hundred thousand tiles."""
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            counted = check(spec, gaussians(shape, seed).to(dtype), KEY + seed)
            assert counted is None or counted.same_bytes


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_both_halves_of_the_key_count(key):
    x, codec = gaussians((2, 3, 96)), get_codec("eden", backend="cpu")
    assert check("eden", x, key).same_bytes
    others = [codec.encode(x, key=key ^ flip) for flip in (1, 1 << 32)]
    assert not any(torch.equal(codec.encode(x, key=key), other) for other in others)


@pytest.mark.parametrize("spec", ["eden", "eden:bits=8,group=32", "wf", "wf:bits=7.5,group=32,center=off"])
@pytest.mark.parametrize("tokens", [24, pytest.param(512, marks=pytest.mark.acceptance)])
def test_differences_are_few_on_gaussians_activations_and_gradients(spec, tokens):
    made = (gaussians((2, tokens, 640)), gaussians((1, tokens, 640), 1, spread=0.0))
    for x in (*made, *(x[:, :tokens] for x in fixture_tensors().values())):
        counted = check(spec, x, KEY)
        assert_few(counted)
        assert spec.startswith("wf") or counted.largest_step <= 1


def test_common_parts_of_channels_cost_nothing():
    """Means of ten times the spread, and one channel a hundred times as large as the others."""
    x = gaussians((2, 40, 96), 6, spread=0.0) + 10 * gaussians((96,), 7, spread=0.0)
    x[..., 13] *= 100
    errors = []
    for spec in ("wf", "wf:center=off"):
        assert_few(check(spec, x))
        codec = get_codec(spec, backend="cpu")
        errors.append(relative_error(codec.decode(codec.encode(x), x.shape), x))
    assert errors[0] < errors[1] / 2


@pytest.mark.parametrize("spec", ["eden", "eden:bits=7,group=8", "wf", "wf:center=off,bits=7,group=8"])
def test_magnitudes_of_every_size_and_tiles_that_are_not_finite_agree(spec):
    """A flush to zero anywhere would show."""
    edges = (torch.zeros(2, 3, 72), with_not_finite(), torch.full((2, 64), math.nan))
    for x in (*of_all_sizes((2, 3, 72), 2), *edges):
        assert check(spec, x, KEY).same_bytes
    check(spec, sinking(3), KEY)  # tiles far below the largest


@settings(max_examples=100)
@given(spec=st.sampled_from(SPECS), x=any_tensors(), key=st.integers(0, 2**64 - 1))
def test_any_values_are_read_alike(spec, x, key):
    check(spec, x, key)


@both
def test_codes_beside_the_buffer_are_never_read(spec):
    """The widths say more planes than there are; behind the last one is a page that must not be touched."""
    text, shape = f"{spec}:bits=2.5,group=32", (3, 5, 90)
    codec = get_codec(text, backend="cpu")
    buf = codec.encode(gaussians(shape), key=KEY)
    memory = GuardedMemory(buf.numel())
    for place in (memory.at_end, memory.at_start):
        codec.decode(place(buf.numpy()), shape, key=KEY)
    width = layout_of(text, shape).sections.by_name["width"]
    buf[width.start : width.stop - 1] = 255
    with pytest.raises(CodecError):
        codec.decode(memory.at_end(buf.numpy()), shape, key=KEY)
