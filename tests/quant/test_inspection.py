"""Inspection reports the content of a stream, for every codec; damaged streams are refused, not misread."""

import math

import pytest
import torch

from tahq.errors import CodecError
from tahq.quant import get_codec
from tahq.quant.inspection import header_fields, header_guesses, hex_rows, section_table, statistics

SPECS = [
    "raw:dtype=fp16",
    "fixed",
    "fixed:bits=10,group=8",
    "tah",
    "tah:alloc=token,low=2",
    "aqsgd",
    "aqsgd:cache=none",
]
SHAPE = (2, 3, 100)

every_spec = pytest.mark.parametrize("text", SPECS)


def encoded(text, x):
    codec = get_codec(text, backend="reference")
    return codec.spec, codec.encode(x)


def gaussian(shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@every_spec
def test_sections_cover_the_stream_without_a_gap_and_the_header_is_guessed(text):
    parsed, buf = encoded(text, gaussian())
    fields = header_fields(parsed, buf)
    assert [field.place for field in fields] == list(range(len(fields)))
    assert header_guesses(buf).get(parsed.name, ()) == fields
    end = 0
    for row in section_table(parsed, SHAPE, buf):
        assert row.offset == end, row
        assert not buf[row.offset + row.nbytes : row.offset + row.nbytes + row.filling].any()
        end = row.offset + row.nbytes + row.filling
    assert end == buf.numel()


@pytest.mark.parametrize(
    "bad", [b"", b"\x01" * 15, bytes(16), b"\x01\x00\x06\x03\x04\x07" + b"\x01" * 10, b"\xff" * 64]
)
def test_bytes_that_no_encoder_writes_match_no_header(bad):
    assert header_guesses(torch.tensor(list(bad), dtype=torch.uint8)) == {}


@every_spec
@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 3, 0), (1, 1), (2, 1001), (7,)], ids=str)
def test_any_shape_can_be_inspected(text, shape):
    parsed, buf = encoded(text, gaussian(shape))
    assert section_table(parsed, shape, buf)
    num_elements = math.prod(shape)
    said = statistics(parsed, shape, buf)
    assert said["bits per element"] == (8 * buf.numel() / num_elements if num_elements else 0.0)


def test_statistics_of_tah_count_its_tiles():
    x = gaussian((1, 10, 128))
    x[0, 0, 3] = 50.0  # an outlier
    x[0, 1, 70] = math.nan
    x[0, 2, :64] = 0.0
    said = statistics(*_arguments("tah", x))
    assert (said["tiles"], said["allocation tiles"], said["tiles that are not finite"]) == (20, 20, 1)
    assert said["share of allocation tiles with H bits"] == 0.8
    assert said["share of tiles transformed"] >= 1 / 20
    assert said["tiles of one value"] == 1
    assert 0 < said["smallest step above 0"] < said["largest step"] < 50
    assert said["largest value"] == pytest.approx(50.0, rel=0.01)


def test_statistics_of_fixed_are_in_the_tensors_unit():
    x = gaussian((4, 64)) * 1e-6
    x[1] = 0.0
    x[2, 0] = math.inf
    said = statistics(*_arguments("fixed:bits=8", x))
    assert (said["groups"], said["groups of zeros"], said["groups that are not finite"]) == (4, 1, 1)
    largest = x[[0, 3]].abs().max().item()
    assert said["largest step"] == pytest.approx(largest / 127, rel=1e-3)


def test_statistics_of_aqsgd_tell_first_visits_from_changes():
    codec = get_codec("aqsgd")
    codec.encode(gaussian((2, 3, 8)), sample_ids=[3, 4])
    buf = codec.encode(gaussian((2, 3, 8)) + 1, sample_ids=[4, 9])
    said = statistics(codec.spec, (2, 3, 8), buf)
    assert (said["samples"], said["samples sent whole"], said["most visits of a sample"]) == (2, 1, 1)
    assert said["samples without an id"] == 0
    assert "largest value" not in said, "its values are relative to what the ends remember"


def test_statistics_of_tiles_with_widths_count_bits():
    x = gaussian((4, 64)) * torch.tensor([1.0, 1e-3, 0.0, 1.0]).unsqueeze(-1)
    x[3, 9] = math.nan
    said = statistics(*_arguments("eden:bits=2.5,group=16", x))
    assert (said["tiles"], said["tiles of zeros"], said["tiles that are not finite"]) == (16, 4, 1)
    assert said["bits of a code on average"] == 2.5
    assert 1 <= said["fewest bits of a code"] < 2.5 < said["most bits of a code"] <= 8
    centred = statistics(*_arguments("wf:group=16", gaussian((64, 16)) + 5))
    assert centred["largest mean of a channel"] == pytest.approx(5, abs=1)


def _arguments(text, x):
    parsed, buf = encoded(text, x)
    return parsed, x.shape, buf


@every_spec
def test_damaged_stream_is_refused(text):
    parsed, buf = encoded(text, gaussian())
    with pytest.raises(CodecError):
        statistics(parsed, SHAPE, buf[:-1])
    if parsed.name != "raw":
        damaged = buf.clone()
        damaged[15] = 1
        with pytest.raises(CodecError, match="zero"):
            statistics(parsed, SHAPE, damaged)
        with pytest.raises(CodecError, match="header of 16 bytes"):
            header_fields(parsed, buf[:15])


def test_values_of_a_randomised_codec_need_its_key():
    codec, x = get_codec("eden:bits=8,group=64", backend="reference"), gaussian((8, 64)) + 10
    buf = codec.encode(x, key=2**64 - 1)
    smallest = [statistics(codec.spec, x.shape, buf, key=key)["smallest value"] for key in (2**64 - 1, 1)]
    assert smallest[0] > 5 > smallest[1]


def test_hex_rows_stop_at_the_limit():
    buf = torch.arange(40, dtype=torch.uint8)
    assert list(hex_rows(buf, (), 17)) == ["00  " + bytes(range(16)).hex(" "), "10  10"]
    assert list(hex_rows(buf, (), 0)) == []
