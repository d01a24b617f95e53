"""The numba backend of `eden` against the reference: same streams but where sums round differently, same values."""

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
    sinking,
    with_not_finite,
)

from tahq.errors import CodecError
from tahq.quant import get_codec, stream

SPECS = [
    "eden",
    "eden:bits=1",
    "eden:bits=4/3,group=8",
    "eden:bits=2.5,group=16",
    "eden:bits=4,group=32",
    "eden:bits=5.5,group=64",
    "eden:bits=7",
    "eden:bits=8,group=128",
]
KEY = 0xFEDCBA9876543210


@pytest.mark.parametrize("spec", SPECS)
def test_streams_agree_and_are_read_alike(spec):
    """Small tensors: a sum that rounds differently crosses a border about once in a hundred thousand tiles."""
    for seed, shape in enumerate(SHAPES):
        for dtype in DTYPES:
            counted = check(spec, gaussians(shape, seed).to(dtype), KEY + seed)
            assert counted is None or counted.same_bytes


@pytest.mark.parametrize("key", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1])
def test_both_halves_of_the_key_count(key):
    x = gaussians((2, 3, 96))
    assert check("eden", x, key).same_bytes
    others = [get_codec("eden", backend="cpu").encode(x, key=key ^ flip) for flip in (1, 1 << 32)]
    ours = get_codec("eden", backend="cpu").encode(x, key=key)
    assert not any(torch.equal(ours, other) for other in others)


@pytest.mark.parametrize("spec", ["eden", "eden:bits=3,group=64", "eden:bits=8,group=32"])
def test_differences_are_few(spec):
    """‖z‖² and the projection differ by some units of 2^−24. A value lies that near one of at most 128 thresholds, or
    a scale that near its draw, in less than one tile of 10,000; widths move only where a level does."""
    tensors = [gaussians((2, 300, 1600)), gaussians((4, 100, 1600), 1, spread=0.0)]
    for x in tensors:
        counted = check(spec, x, KEY)
        assert counted.share < 1e-3
        assert counted.largest_step <= 1


def test_differences_are_few_on_activations_and_gradients():
    for x in fixture_tensors().values():
        counted = check("eden:bits=3", x, KEY)
        assert counted.share < 1e-3
        assert counted.largest_step <= 1


@pytest.mark.parametrize("spec", ["eden", "eden:bits=7,group=16"])
def test_tiles_that_are_not_finite_spoil_only_themselves(spec):
    assert check(spec, with_not_finite(), KEY).same_bytes
    assert check(spec, torch.full((2, 64), math.nan), KEY).same_bytes


@pytest.mark.parametrize("spec", ["eden", "eden:bits=7,group=8"])
def test_magnitudes_of_every_size_agree(spec):
    """A flush to zero anywhere would show."""
    for x in of_all_sizes((2, 3, 72), 2):
        assert check(spec, x, KEY).same_bytes
    assert check(spec, torch.zeros(2, 3, 72), KEY).same_bytes


def test_tiles_far_below_the_largest_agree():
    for spec in ("eden", "eden:bits=8", "eden:bits=6"):
        check(spec, sinking(3), KEY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_of_threads_does_not_show(dtype):
    x = gaussians((2, 96, 1000), 4).to(dtype)
    x[1, 3, 5] = math.nan
    one, three = (get_codec("eden:bits=2.5", backend="cpu", threads=threads) for threads in (1, 3))
    buf = one.encode(x, key=KEY)
    assert torch.equal(three.encode(x, key=KEY), buf)
    values = [codec.decode(buf, x.shape, dtype, key=KEY) for codec in (one, three)]
    assert torch.equal(as_bits(values[0]), as_bits(values[1]))


def test_strides_do_not_matter_and_nothing_is_written():
    x = gaussians((64, 3, 48), 5).transpose(0, 1)
    before, codec = x.clone(), get_codec("eden", backend="cpu")
    assert torch.equal(codec.encode(x, key=KEY), codec.encode(x.contiguous(), key=KEY))
    assert torch.equal(x, before)


@settings(max_examples=60)
@given(spec=st.sampled_from(SPECS), x=any_tensors(), key=st.integers(0, 2**64 - 1))
def test_any_values_are_read_alike(spec, x, key):
    check(spec, x, key)


# -- what a decoder refuses ----------------------------------------------------------------------------

SPEC, SHAPE = "eden:bits=2.5,group=32", (3, 5, 96)  # 45 tiles: one bit left over behind the widths
LAYOUT = layout_of(SPEC, SHAPE)


def at(name, place=0):
    section = LAYOUT.sections.by_name[name]
    return section.start + place if place >= 0 else section.stop + place


DAMAGES = {
    "version": lambda buf: buf[0].fill_(2),
    "unknown flag": lambda buf: buf[1].fill_(2),
    "another group": lambda buf: buf[2].fill_(6),
    "exponent below -117": lambda buf: buf[3].fill_(128),
    "header's zeros": lambda buf: buf[15].fill_(1),
    "flag without a mark": lambda buf: buf[1].fill_(1),
    "mark without the flag": lambda buf: buf[at("scale", 7)].fill_(255),
    "dirty filling": lambda buf: buf[at("scale", -1) + 1].fill_(1),
    "bits behind the widths": lambda buf: buf[at("width", -1)].bitwise_or_(0x80),
    "one bit more": lambda buf: buf[at("width")].add_(1),
    "eight bits everywhere": lambda buf: buf[at("width") : at("width", -1)].fill_(255),
    "one bit everywhere": lambda buf: buf[at("width") : at("width", -1) + 1].zero_(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_the_reference_refuses_is_refused_alike(damage):
    buf = get_codec(SPEC, backend="cpu").encode(gaussians(SHAPE), key=KEY)
    DAMAGES[damage](buf)
    said = []
    for backend in ("reference", "cpu"):
        with pytest.raises(CodecError) as refusal:
            get_codec(SPEC, backend=backend).decode(buf, SHAPE, key=KEY)
        said.append(str(refusal.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("change", [lambda buf: buf[:-1], lambda buf: buf.float(), lambda buf: buf.view(1, -1)])
def test_buffers_of_another_form_are_refused(change):
    buf = get_codec(SPEC, backend="cpu").encode(gaussians(SHAPE), key=KEY)
    with pytest.raises(CodecError):
        get_codec(SPEC, backend="cpu").decode(change(buf), SHAPE, key=KEY)


def test_codes_beside_the_buffer_are_never_read():
    """The widths say more planes than there are; behind the last one is a page that must not be touched."""
    codec = get_codec(SPEC, backend="cpu")
    buf = codec.encode(gaussians(SHAPE), key=KEY)
    memory = GuardedMemory(stream.HEADER_NBYTES + buf.numel())
    codec.decode(memory.at_end(buf.numpy()), SHAPE, key=KEY)
    codec.decode(memory.at_start(buf.numpy()), SHAPE, key=KEY)
    DAMAGES["eight bits everywhere"](buf)
    with pytest.raises(CodecError):
        codec.decode(memory.at_end(buf.numpy()), SHAPE, key=KEY)
