"""One damage at a time, each refused by every backend with its own reason; and what a decoder takes as it comes."""

import pytest
import torch
from support.codec_backends import device_of, every_backend

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.fixed.stream import FixedLayout
from tahq.quant.tah.stream import TahLayout

SHAPE = (2, 3, 100)  # 6 tokens of 2 tiles of 64, the second with 28 channels of filling


def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def set_half(buf, start, pattern):
    buf[start], buf[start + 1] = pattern & 0xFF, pattern >> 8


def decode(codec, buf, backend):
    """By this backend, on its device."""
    return get_codec(codec.spec, backend=backend).decode(buf.to(device_of(backend)), SHAPE).cpu()


TAH = get_codec("tah:int4=0.5", backend="reference")
TAH_AT = {name: section.start for name, section in TahLayout.of(TAH.spec, SHAPE).sections.by_name.items()}
TAH_END = {name: section.stop for name, section in TahLayout.of(TAH.spec, SHAPE).sections.by_name.items()}
TOKENS = get_codec("tah:int4=0.5,alloc=token", backend="reference")
FIXED = get_codec("fixed:bits=10", backend="reference")
FIXED_AT = {name: section.start for name, section in FixedLayout.of(FIXED.spec, SHAPE).sections.by_name.items()}
FIXED_END = {name: section.stop for name, section in FixedLayout.of(FIXED.spec, SHAPE).sections.by_name.items()}


@every_backend
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 0, r"byte 0 \(version\) is 0, expected 1"),
        (0, 2, r"byte 0 \(version\) is 2, expected 1"),
        (1, 2, r"byte 1 \(flags\) is 2, expected 0"),
        (1, 1, "flag for non-finite values does not agree"),
        (2, 5, r"byte 2 \(log2 G\) is 5, expected 6"),
        (3, 2, r"byte 3 \(L\) is 2, expected 3"),
        (4, 5, r"byte 4 \(H\) is 5, expected 4"),
        (5, 0x80, r"\(e\) is -128, no encoder writes a value below -117"),
        (5, 0x8A, r"\(e\) is -118"),
        (6, 1, "bytes 6 to 15 must be zero"),
        (15, 1, "bytes 6 to 15 must be zero"),
        (TAH_AT["bit map"], 0xFF, "must give H bits to 3 tiles of every sample"),
        (TAH_AT["bit map"], 0x00, "must give H bits to 3 tiles of every sample"),
        (TAH_AT["bit map"] + 1, 0xF0, "bits behind the bit map or the pivots"),
        (TAH_END["bit map"], 1, "padding after a section is not zero"),
        (TAH_END["scale"], 1, "padding after a section is not zero"),
        (TAH_END["pivot"], 0x80, "padding after a section is not zero"),
    ],
)
def test_damaged_tah_byte_is_refused(place, value, message, backend):
    buf = TAH.encode(values())
    assert buf[place] != value
    buf[place] = value
    with pytest.raises(CodecError, match=message):
        decode(TAH, buf, backend)


@every_backend
@pytest.mark.parametrize(
    ("section", "pattern", "message"),
    [
        ("scale", 0x7C00, "a scale is not finite"),
        ("scale", 0xFC00, "a scale is not finite"),
        ("scale", 0x7E00, "a scale is not finite"),
        ("zero-point", 0x7C00, "a zero-point is infinite"),
        ("zero-point", 0xFC00, "a zero-point is infinite"),
        ("zero-point", 0x7E00, r"a zero-point is NaN where the scale is not \+0"),
    ],
)
def test_metadata_that_is_not_finite_is_refused(section, pattern, message, backend):
    buf = TAH.encode(values())
    set_half(buf, TAH_AT[section] + 4, pattern)
    with pytest.raises(CodecError, match=message):
        decode(TAH, buf, backend)


@every_backend
@pytest.mark.parametrize(
    ("bits", "message"),
    [
        (0b000001, "must give H bits to 2 tiles of every sample"),  # 1 of sample 0's three, 0 of sample 1's
        (0b001111, "must give H bits to 2 tiles of every sample"),
        (0b111101, "must give H bits to 2 tiles of every sample"),
        (0b1110011, "bits behind the bit map or the pivots"),
    ],
)
def test_bit_map_has_a_bit_for_each_allocation_tile(bits, message, backend):
    """Six tokens, so six bits, though there are twelve tiles."""
    buf = TOKENS.encode(values())
    buf[16] = bits
    with pytest.raises(CodecError, match=message):
        decode(TOKENS, buf, backend)
    buf[16] = 0b110101
    assert decode(TOKENS, buf, backend).isfinite().all()


@every_backend
def test_mark_of_a_non_finite_tile_needs_the_flag_and_scale_plus_0(backend):
    buf = TAH.encode(values())
    set_half(buf, TAH_AT["scale"], 0x0000)
    set_half(buf, TAH_AT["zero-point"], 0x7E00)
    with pytest.raises(CodecError, match="flag for non-finite values does not agree"):
        decode(TAH, buf, backend)
    buf[1] = 1
    assert decode(TAH, buf, backend)[0, 0, :64].isnan().all()
    set_half(buf, TAH_AT["scale"], 0x8000)
    with pytest.raises(CodecError, match=r"scale is not \+0"):
        decode(TAH, buf, backend)


@every_backend
def test_decoder_takes_what_changes_no_value(backend):
    """Pivots of tiles that are not transformed, codes of filling, zero-points of −0, other NaN patterns."""
    codec, x = get_codec("tah:int4=0.5,tau=inf", backend="reference"), values()
    x[1, 1] = 0.0
    x[1, 2, 99] = torch.nan
    buf = codec.encode(x)
    expected = codec.decode(buf, SHAPE)
    odd = buf.clone()
    odd[TAH_AT["pivot"] : TAH_END["pivot"]] = 0xFF
    set_half(odd, TAH_AT["zero-point"] + 2 * 8, 0x8000)
    set_half(odd, TAH_AT["zero-point"] + 2 * 11, 0xFF01)
    odd[TAH_AT["low planes"] : TAH_END["low planes"]].view(12, 3, 8)[1::2, :, 5:] = 0xFF  # channels 104 to 127
    assert not torch.equal(odd, buf)
    assert torch.equal(decode(codec, odd, backend).nan_to_num(7.0), expected.nan_to_num(7.0))


@every_backend
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, 2, r"byte 0 \(version\)"),
        (1, 0x80, r"byte 1 \(flags\)"),
        (1, 1, "flag for non-finite values does not agree"),
        (2, 7, r"byte 2 \(log2 G\) is 7, expected 6"),
        (3, 8, r"byte 3 \(bits\) is 8, expected 10"),
        (4, 0x8E, r"\(e\) is -114, no encoder writes a value below -113"),
        (5, 9, "bytes 5 to 15 must be zero"),
        (FIXED_AT["scale"] + 1, 0x7C, "flag for non-finite values|a scale is infinite"),
        (FIXED_AT["scale"] + 1, 0xC0, "a scale is negative"),
        (FIXED_END["scale"], 1, "padding after a section is not zero"),
    ],
)
def test_damaged_fixed_byte_is_refused(place, value, message, backend):
    buf = FIXED.encode(values())
    assert buf[place] != value
    buf[place] = value
    with pytest.raises(CodecError, match=message):
        decode(FIXED, buf, backend)


@every_backend
def test_largest_scale_in_the_largest_tensor_decodes_to_finite_values(backend):
    buf = get_codec("fixed:bits=2", backend="reference").encode(torch.tensor([[3.0e38, 0.0] * 32]))
    set_half(buf, 16, 0x7BFF)  # 65,504·2^113 exceeds fp32
    back = get_codec("fixed:bits=2", backend=backend).decode(buf.to(device_of(backend)), (1, 64))
    assert torch.equal(back.cpu(), torch.tensor([[torch.finfo(torch.float32).max, 0.0] * 32]))


def test_has_non_finite_refuses_what_has_no_header():
    for codec in (TAH, FIXED):
        with pytest.raises(CodecError, match="header of 16 bytes"):
            codec.has_non_finite(torch.zeros(15, dtype=torch.uint8))
    with pytest.raises(CodecError, match="expected a multiple of 4"):
        get_codec("raw").has_non_finite(torch.zeros(6, dtype=torch.uint8))
