"""Each kind of damage is refused by every backend with its own reason; and streams that every decoder accepts."""

import pytest
import torch
from support.codec_backends import backends_of, device_of, every_codec_and_backend, params

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.inspection import section_table

SHAPE = (2, 3, 100)  # 6 tokens of 2 tiles of 64, the second with 28 channels of padding
TAH, TOKENS, FIXED = "tah:int4=0.5", "tah:int4=0.5,alloc=token", "fixed:bits=10"
EDEN, WF, UNCENTRED = "eden:bits=2.5,group=64", "wf:bits=2.5,group=64", "wf:bits=2.5,group=64,center=off"
TILED = (EDEN, WF, UNCENTRED)


def values():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def encode(spec, x=None):
    return get_codec(spec, backend="reference").encode(values() if x is None else x)


def decode(spec, backend, buf, shape=SHAPE):
    """By this backend, on its device."""
    return get_codec(spec, backend=backend).decode(buf.to(device_of(backend)), shape).cpu()


def at(spec, section):
    """The first byte of a section; of `section end`, the byte behind it."""
    name, is_end = section.removesuffix(" end"), section.endswith(" end")
    table = section_table(get_codec(spec).spec, SHAPE, encode(spec))
    row = next(row for row in table if row.name == name)
    return row.offset + row.nbytes * is_end


def put_half(buf, place, pattern):
    buf[place], buf[place + 1] = pattern & 0xFF, pattern >> 8


def assert_refused(spec, backend, buf, message):
    with pytest.raises(CodecError, match=message):
        decode(spec, backend, buf)


NO_FLAG, PADDING = "flag for non-finite values does not agree", "padding after a section is not zero"
LOW_E = "no encoder writes a value below"
# Spec, section, byte in it, its new value, the reason.
BYTES = [
    *((spec, "header", 0, 2, r"byte 0 \(version\) is 2, expected 1") for spec in (TAH, FIXED, *TILED)),
    *((spec, "header", 1, 2, r"byte 1 \(flags\) is 2, expected 0") for spec in (TAH, FIXED, *TILED)),
    *((spec, "header", 1, 1, NO_FLAG) for spec in (TAH, FIXED, *TILED)),
    *((spec, "header", 2, 5, r"byte 2 \(log2 G\) is 5, expected 6") for spec in (TAH, FIXED, *TILED)),
    *((spec, "header", 15, 1, "must be zero") for spec in (TAH, FIXED, *TILED)),
    (TAH, "header", 0, 0, r"byte 0 \(version\) is 0, expected 1"),
    (TAH, "header", 3, 2, r"byte 3 \(L\) is 2, expected 3"),
    (TAH, "header", 4, 5, r"byte 4 \(H\) is 5, expected 4"),
    (TAH, "header", 5, 0x80, rf"\(e\) is -128, {LOW_E} -117"),
    (TAH, "header", 5, 0x8A, r"\(e\) is -118"),
    (TAH, "header", 6, 1, "bytes 6 to 15 must be zero"),
    (FIXED, "header", 3, 8, r"byte 3 \(bits\) is 8, expected 10"),
    (FIXED, "header", 4, 0x8E, rf"\(e\) is -114, {LOW_E} -113"),
    (EDEN, "header", 3, 256 - 118, rf"\(e\) is -118, {LOW_E} -117"),
    (EDEN, "header", 4, 1, "bytes 4 to 15 must be zero"),
    (WF, "header", 3, 0, r"byte 3 \(center\) is 0, expected 1"),
    (WF, "header", 4, 256 - 118, rf"\(e\) is -118, {LOW_E} -117"),
    (TAH, "bit map", 0, 0xFF, "must give H bits to 3 tiles of every sample"),
    (TAH, "bit map", 0, 0x00, "must give H bits to 3 tiles of every sample"),
    (TAH, "bit map", 1, 0xF0, "bits behind the bit map or the pivots"),
    # Six tokens, so six bits, though there are twelve tiles.
    (TOKENS, "bit map", 0, 0b000001, "must give H bits to 2 tiles of every sample"),
    (TOKENS, "bit map", 0, 0b111101, "must give H bits to 2 tiles of every sample"),
    (TOKENS, "bit map", 0, 0b1110011, "bits behind the bit map or the pivots"),
    *((TAH, f"{name} end", 0, 0x80, PADDING) for name in ("bit map", "scale", "pivot")),
    (FIXED, "scale", 1, 0x7C, f"{NO_FLAG}|a scale is infinite"),
    (FIXED, "scale", 1, 0xC0, "a scale is negative"),
    (FIXED, "scale end", 0, 1, PADDING),
    *((spec, "scale end", 0, 0x10, PADDING) for spec in TILED),
    *((spec, "width end", 0, 0x10, PADDING) for spec in TILED),
    (WF, "mean end", 0, 0x10, PADDING),
    *((spec, "scale", 0, 255, NO_FLAG) for spec in TILED),
    # 12 tiles have 36 bits of widths, which leave four in the fifth byte.
    *((spec, "width", 4, 0xF0, "bits behind the widths are not zero") for spec in TILED),
]
# The same of two bytes.
HALVES = [
    *((TAH, "scale", 4, pattern, "a scale is not finite") for pattern in (0x7C00, 0xFC00, 0x7E00)),
    *((TAH, "zero-point", 4, pattern, "a zero-point is infinite") for pattern in (0x7C00, 0xFC00)),
    (TAH, "zero-point", 4, 0x7E00, r"a zero-point is NaN where the scale is not \+0"),
    *((WF, "mean", 2, pattern, "a mean is not finite") for pattern in (0x7C00, 0xFC00, 0x7E00)),
]


def on_every_backend(cases):
    return params([(*case, backend) for case in cases for backend in backends_of(case[0])], -1)


@pytest.mark.parametrize(("spec", "section", "offset", "value", "message", "backend"), on_every_backend(BYTES + HALVES))
def test_damaged_byte_or_number_is_refused(spec, section, offset, value, message, backend):
    buf = encode(spec)
    damaged, place = buf.clone(), at(spec, section) + offset
    if value > 0xFF:
        put_half(damaged, place, value)
    else:
        damaged[place] = value
    assert not torch.equal(damaged, buf)
    assert_refused(spec, backend, damaged, message)


@every_codec_and_backend(TILED)
def test_widths_that_do_not_sum_to_the_budget_are_refused(spec, backend):
    start, stop = at(spec, "width"), at(spec, "width end")
    for pattern in (0x00, 0xFF):
        buf = encode(spec)
        buf[start:stop] = pattern
        assert_refused(spec, backend, buf, r"the widths must sum to 30|bits behind the widths")
    buf = encode(spec)
    buf[start] ^= 1  # one bit more or less in tile 0
    assert_refused(spec, backend, buf, "the widths must sum to 30")


@every_codec_and_backend([TAH, EDEN, WF])
def test_mark_of_a_tile_that_is_not_finite_needs_the_flag(spec, backend):
    buf = encode(spec)
    if spec == TAH:
        put_half(buf, at(spec, "scale"), 0x0000)
        put_half(buf, at(spec, "zero-point"), 0x7E00)
    else:
        buf[at(spec, "scale")] = 255
    assert_refused(spec, backend, buf, NO_FLAG)
    buf[1] = 1
    assert decode(spec, backend, buf)[0, 0, :64].isnan().all()
    if spec == TAH:
        put_half(buf, at(spec, "scale"), 0x8000)
        assert_refused(spec, backend, buf, r"scale is not \+0")


@every_codec_and_backend(TILED)
def test_streams_of_another_budget_or_codec_are_refused(spec, backend):
    for other in ("eden:bits=3,group=64", "wf:bits=3,group=64", "wf:bits=2.5,group=32", "tah", "fixed:bits=3"):
        with pytest.raises(CodecError):
            decode(spec, backend, encode(other))


@every_codec_and_backend(["tah:int4=0.5,tau=inf"])
def test_decoder_takes_what_changes_no_value(spec, backend):
    """Pivots of tiles that are not transformed, codes of padding, zero-points of −0, other NaN patterns."""
    x = values()
    x[1, 1] = 0.0
    x[1, 2, 99] = torch.nan
    buf = encode(spec, x)
    odd = buf.clone()
    odd[at(spec, "pivot") : at(spec, "pivot end")] = 0xFF
    put_half(odd, at(spec, "zero-point") + 2 * 8, 0x8000)
    put_half(odd, at(spec, "zero-point") + 2 * 11, 0xFF01)
    odd[at(spec, "low planes") : at(spec, "low planes end")].view(12, 3, 8)[1::2, :, 5:] = 0xFF  # channels 104 to 127
    assert not torch.equal(odd, buf)
    expected = decode(spec, "reference", buf)
    assert torch.equal(decode(spec, backend, odd).nan_to_num(7.0), expected.nan_to_num(7.0))


@every_codec_and_backend(TILED)
def test_any_widths_scales_and_codes_are_taken(spec, backend):
    """Widths in another order than an encoder's; codes of tiles of scale 0; the largest scale in the largest tensor."""
    number = sum((width - 1) << 3 * place for place, width in enumerate([8, 1, 8, 1, 1, 1, 1, 1, 2, 2, 2, 2]))
    for x, scale, pattern in ((values(), None, None), *((3e38, s, p) for s in (0, 1, 254) for p in (0x00, 0xFF, 0x5A))):
        buf = encode(spec, x if scale is None else torch.full(SHAPE, x))
        if scale is None:
            widths = torch.tensor(list(number.to_bytes(5, "little")), dtype=torch.uint8)
            buf[at(spec, "width") : at(spec, "width end")] = widths
        else:
            buf[at(spec, "scale") : at(spec, "scale end")] = scale
            buf[at(spec, "codes") : at(spec, "codes end")] = pattern
        back = decode(spec, backend, buf)
        assert back.isfinite().all()
        assert torch.equal(back, decode(spec, "reference", buf))


@every_codec_and_backend(["fixed:bits=2"])
def test_largest_scale_in_the_largest_tensor_decodes_to_finite_values(spec, backend):
    buf = encode(spec, torch.tensor([[3.0e38, 0.0] * 32]))
    put_half(buf, 16, 0x7BFF)  # 65,504·2^113 exceeds fp32
    back = decode(spec, backend, buf, (1, 64))
    assert torch.equal(back, torch.tensor([[torch.finfo(torch.float32).max, 0.0] * 32]))


def test_has_non_finite_refuses_what_has_no_header():
    for spec in (TAH, FIXED):
        with pytest.raises(CodecError, match="header of 16 bytes"):
            get_codec(spec).has_non_finite(torch.zeros(15, dtype=torch.uint8))
    with pytest.raises(CodecError, match="expected a multiple of 4"):
        get_codec("raw").has_non_finite(torch.zeros(6, dtype=torch.uint8))
