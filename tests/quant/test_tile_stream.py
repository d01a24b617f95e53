"""Streams of eden and wf: one damage at a time, each refused by every backend; what a decoder takes as it comes."""

import math

import pytest
import torch
from support.codec_backends import device_of, every_codec_and_backend

from tahq.errors import CodecError
from tahq.quant import CodecSpec, get_codec
from tahq.quant.gaussian.tile_stream import TileLayout

SHAPE = (2, 3, 100)  # 6 tokens of 2 tiles of 64, the second with 28 channels of filling
LAYOUTS = {"eden": TileLayout, "wf": TileLayout}
EDEN, WF = "eden:bits=2.5,group=64", "wf:bits=2.5,group=64"
BOTH = (EDEN, WF, "wf:bits=2.5,group=64,center=off")

both = every_codec_and_backend(BOTH)
eden = every_codec_and_backend([EDEN])
wf = every_codec_and_backend([WF])


def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def sections(spec, shape=SHAPE):
    return LAYOUTS[spec.partition(":")[0]].of(CodecSpec.parse(spec), shape).sections.by_name


def encode(spec, x):
    return get_codec(spec, backend="reference").encode(x)


def decode(spec, backend, buf, shape=SHAPE):
    return get_codec(spec, backend=backend).decode(buf.to(device_of(backend)), shape).cpu()


def assert_refused(spec, backend, place, value, message):
    buf = encode(spec, values())
    assert buf[place] != value
    buf[place] = value
    with pytest.raises(CodecError, match=message):
        decode(spec, backend, buf)


@both
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 2, r"byte 0 \(version\)"),
        (1, 2, r"byte 1 \(flags\)"),
        (1, 1, "flag for non-finite values does not agree"),
        (2, 5, r"byte 2 \(log2 G\) is 5, expected 6"),
        (15, 1, "must be zero"),
    ],
)
def test_damaged_header_is_refused(spec, backend, place, value, message):
    assert_refused(spec, backend, place, value, message)


@eden
def test_exponent_that_no_encoder_writes_is_refused_by_eden(spec, backend):
    assert_refused(spec, backend, 3, 256 - 118, r"\(e\) is -118, no encoder writes a value below -117")
    assert_refused(spec, backend, 4, 1, "bytes 4 to 15 must be zero")


@wf
def test_exponent_and_centering_that_are_not_the_specs_are_refused_by_wf(spec, backend):
    assert_refused(spec, backend, 3, 0, r"byte 3 \(center\) is 0, expected 1")
    assert_refused(spec, backend, 4, 256 - 118, r"\(e\) is -118, no encoder writes a value below -117")
    assert_refused(spec, backend, 5, 1, "bytes 5 to 15 must be zero")


@both
def test_filling_behind_a_section_is_refused(spec, backend):
    for section in sections(spec).values():
        for place in {section.stop, section.end - 1} if section.stop < section.end else ():
            assert_refused(spec, backend, place, 0x10, "padding after a section is not zero")


@both
def test_widths_that_do_not_sum_to_the_budget_are_refused(spec, backend):
    width = sections(spec)["width"]
    for pattern in (0x00, 0xFF):
        buf = encode(spec, values())
        buf[width.start : width.stop] = pattern
        with pytest.raises(CodecError, match=r"the widths must sum to 30|bits behind the widths"):
            decode(spec, backend, buf)
    buf = encode(spec, values())
    buf[width.start] ^= 1  # one bit more or less in tile 0
    with pytest.raises(CodecError, match="the widths must sum to 30"):
        decode(spec, backend, buf)


@both
def test_bits_behind_the_widths_are_refused(spec, backend):
    """12 tiles have 36 bits of widths, which leave four in the fifth byte."""
    place = sections(spec)["width"].stop - 1
    buf = encode(spec, values())
    buf[place] |= 0x10
    with pytest.raises(CodecError, match="bits behind the widths are not zero"):
        decode(spec, backend, buf)


@both
def test_mark_of_a_tile_that_is_not_finite_needs_the_flag(spec, backend):
    buf = encode(spec, values())
    buf[sections(spec)["scale"].start] = 255
    with pytest.raises(CodecError, match="flag for non-finite values does not agree"):
        decode(spec, backend, buf)
    buf[1] = 1
    assert decode(spec, backend, buf)[0, 0, :64].isnan().all()


@wf
@pytest.mark.parametrize("pattern", [0x7C00, 0xFC00, 0x7E00])
def test_mean_that_is_not_finite_is_refused(spec, backend, pattern):
    start = sections(spec)["mean"].start
    buf = encode(spec, values())
    buf[start + 2], buf[start + 3] = pattern & 0xFF, pattern >> 8
    with pytest.raises(CodecError, match="a mean is not finite"):
        decode(spec, backend, buf)


@both
def test_streams_of_another_budget_or_codec_are_refused(spec, backend):
    for other in ("eden:bits=3,group=64", "wf:bits=3,group=64", "wf:bits=2.5,group=32", "tah", "fixed:bits=3"):
        with pytest.raises(CodecError):
            decode(spec, backend, encode(other, values()))


@both
def test_widths_may_lie_otherwise_than_an_encoder_would_lay_them(spec, backend):
    """The first three tiles with 8 bits, others with fewer: offsets come from the widths as they are."""
    buf = encode(spec, values())
    widths = [8, 1, 8, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    number = sum((width - 1) << 3 * place for place, width in enumerate(widths))
    section = sections(spec)["width"]
    buf[section.start : section.stop] = torch.tensor(list(number.to_bytes(5, "little")), dtype=torch.uint8)
    back = decode(spec, backend, buf)
    assert back.isfinite().all()
    assert torch.equal(back, decode(spec, "reference", buf))


@both
def test_any_scale_and_any_code_is_taken(spec, backend):
    """Codes of tiles of scale 0, the largest scale in the largest tensor: values stay finite."""
    buf = encode(spec, torch.full(SHAPE, 3e38))
    layout = sections(spec)
    for scale in (0, 1, 254):
        buf[layout["scale"].start : layout["scale"].stop] = scale
        for pattern in (0x00, 0xFF, 0x5A):
            buf[layout["codes"].start : layout["codes"].stop] = pattern
            back = decode(spec, backend, buf)
            assert back.isfinite().all()
            assert torch.equal(back, decode(spec, "reference", buf))


@both
def test_tensors_without_elements_are_a_header(spec, backend):
    for shape in [(0,), (0, 4, 64), (2, 0, 64), (2, 3, 0)]:
        buf = encode(spec, torch.empty(shape))
        assert buf.numel() == 16
        assert decode(spec, backend, buf, shape).shape == shape


@both
def test_flag_is_set_for_non_finite_values_only(spec, backend):
    codec, x = get_codec(spec, backend=backend), values().to(device_of(backend))
    assert not codec.has_non_finite(codec.encode(x).cpu())
    x[1, 1, 99] = math.inf
    assert codec.has_non_finite(codec.encode(x).cpu())
