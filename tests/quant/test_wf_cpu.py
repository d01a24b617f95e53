"""The numba backend of `wf` against the reference: same streams but where sums round differently, same values."""

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
    as_bits,
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
    "wf",
    "wf:center=off",
    "wf:bits=1",
    "wf:bits=4/3,group=8",
    "wf:bits=2.5,group=16,center=off",
    "wf:bits=5.5,group=32",
    "wf:bits=7,group=64",
    "wf:bits=8,group=256",
]


def assert_few(counted):
    """A sum off by some units of 2^−24 moves a level, or the choice between two steps whose errors are that near, in
    about one tile of 100,000; a mean summed in fp64 moves only at a border of fp16 and fp64."""
    assert counted.share < 1e-3
    assert counted.means == 0


@pytest.mark.parametrize("spec", SPECS)
def test_streams_agree_and_are_read_alike(spec):
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            counted = check(spec, gaussians(shape, seed).to(dtype))
            assert counted is None or counted.same_bytes


@pytest.mark.parametrize("spec", ["wf", "wf:center=off,bits=5,group=64", "wf:bits=7.5,group=32"])
def test_differences_are_few_on_gaussians(spec):
    assert_few(check(spec, gaussians((2, 300, 1600))))
    assert_few(check(spec, gaussians((4, 100, 1600), 1, spread=0.0)))


def test_differences_are_few_on_activations_and_gradients():
    for x in fixture_tensors().values():
        assert_few(check("wf", x))


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


@pytest.mark.parametrize("spec", ["wf", "wf:center=off,bits=7,group=16"])
def test_tiles_that_are_not_finite_spoil_only_themselves(spec):
    assert check(spec, with_not_finite()).same_bytes
    assert check(spec, torch.full((2, 64), math.nan)).same_bytes


@pytest.mark.parametrize("spec", ["wf", "wf:center=off,bits=7,group=8"])
def test_magnitudes_of_every_size_agree(spec):
    """A flush to zero anywhere would show."""
    for x in of_all_sizes((2, 3, 72), 2):
        assert check(spec, x).same_bytes
    assert check(spec, torch.zeros(2, 3, 72)).same_bytes
    assert check(spec, torch.full((2, 3, 72), 3e38)).same_bytes


def test_tiles_far_below_the_largest_agree():
    for spec in ("wf", "wf:center=off", "wf:bits=8,group=256"):
        check(spec, sinking(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_of_threads_does_not_show(dtype):
    x = gaussians((2, 96, 1000), 4).to(dtype)
    x[1, 3, 5] = math.nan
    one, three = (get_codec("wf", backend="cpu", threads=threads) for threads in (1, 3))
    buf = one.encode(x)
    assert torch.equal(three.encode(x), buf)
    values = [codec.decode(buf, x.shape, dtype) for codec in (one, three)]
    assert torch.equal(as_bits(values[0]), as_bits(values[1]))


def test_strides_do_not_matter_and_nothing_is_written():
    x = gaussians((64, 3, 48), 5).transpose(0, 1)
    before, codec = x.clone(), get_codec("wf", backend="cpu")
    assert torch.equal(codec.encode(x), codec.encode(x.contiguous(), key=7))
    assert torch.equal(x, before)


@settings(max_examples=60)
@given(spec=st.sampled_from(SPECS), x=any_tensors())
def test_any_values_are_read_alike(spec, x):
    check(spec, x)


# -- what a decoder refuses ----------------------------------------------------------------------------

SPEC, SHAPE = "wf:bits=2.5,group=32", (3, 5, 90)  # padded to 96: 45 tiles, one bit left over behind the widths
LAYOUT = layout_of(SPEC, SHAPE)


def at(name, place=0):
    section = LAYOUT.sections.by_name[name]
    return section.start + place if place >= 0 else section.stop + place


def put_mean(buf, bits):
    buf[at("mean", 2) : at("mean", 4)] = torch.tensor([bits & 0xFF, bits >> 8], dtype=torch.uint8)


DAMAGES = {
    "version": lambda buf: buf[0].fill_(2),
    "another group": lambda buf: buf[2].fill_(6),
    "without centering": lambda buf: buf[3].fill_(0),
    "exponent below -117": lambda buf: buf[4].fill_(128),
    "flag without a mark": lambda buf: buf[1].fill_(1),
    "mark without the flag": lambda buf: buf[at("scale", 7)].fill_(255),
    "dirty filling": lambda buf: buf[at("mean", -1) + 1].fill_(1),
    "bits behind the widths": lambda buf: buf[at("width", -1)].bitwise_or_(0x80),
    "one bit more": lambda buf: buf[at("width")].add_(1),
    "eight bits everywhere": lambda buf: buf[at("width") : at("width", -1)].fill_(255),
    "a mean that is infinite": lambda buf: put_mean(buf, 0x7C00),
    "a mean that is NaN": lambda buf: put_mean(buf, 0xFE01),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_reference_refuses_is_refused_alike(damage):
    buf = get_codec(SPEC, backend="cpu").encode(gaussians(SHAPE))
    DAMAGES[damage](buf)
    said = []
    for backend in ("reference", "cpu"):
        with pytest.raises(CodecError) as refusal:
            get_codec(SPEC, backend=backend).decode(buf, SHAPE)
        said.append(str(refusal.value))
    assert said[0] == said[1]


def test_codes_beside_the_buffer_are_never_read():
    """The widths say more planes than there are; behind the last one is a page that must not be touched."""
    codec = get_codec(SPEC, backend="cpu")
    buf = codec.encode(gaussians(SHAPE))
    memory = GuardedMemory(buf.numel())
    codec.decode(memory.at_end(buf.numpy()), SHAPE)
    codec.decode(memory.at_start(buf.numpy()), SHAPE)
    DAMAGES["eight bits everywhere"](buf)
    with pytest.raises(CodecError):
        codec.decode(memory.at_end(buf.numpy()), SHAPE)
