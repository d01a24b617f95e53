import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tahq.comm.link.frame import (
    DTYPES,
    HEADER_NBYTES,
    Direction,
    FrameHeader,
    FrameKind,
    LogicalId,
    Purpose,
    pack_header,
    peek_kind,
    unpack_header,
)
from tahq.errors import LocalProtocolError, RemoteProtocolError

u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (16, 32, 64))
ids = st.builds(LogicalId, u64, u32, u64, st.sampled_from(Purpose), u32, u32, st.sampled_from(Direction))
payloads = st.binary(max_size=200)


@st.composite
def headers(draw: st.DrawFn) -> tuple[FrameHeader, bytes]:
    payload = draw(payloads)
    offset = draw(st.integers(0, 2**40))
    header = FrameHeader(
        kind=draw(st.sampled_from(FrameKind)),
        epoch=draw(u32),
        link=draw(u32),
        sequence=draw(u64),
        id=draw(ids),
        shard=draw(u16),
        codec=draw(u16),
        dtype=draw(st.sampled_from(DTYPES)),
        shape=tuple(draw(st.lists(u32, max_size=4))),
        offset=offset,
        total_nbytes=offset + len(payload) + draw(st.integers(0, 100)),
        payload_nbytes=len(payload),
    )
    return header, payload


EXAMPLE = FrameHeader(
    kind=FrameKind.DATA,
    epoch=3,
    link=1,
    sequence=258,
    id=LogicalId(0x1122334455667788, 0, 41, Purpose.TRAIN, 5, 1, Direction.BACKWARD),
    shard=0,
    codec=2,
    dtype=torch.bfloat16,
    shape=(4, 256, 512),
    offset=262144,
    total_nbytes=262148,
    payload_nbytes=4,
)
EXAMPLE_HEX = (
    "5441485103000001" "8877665544332211" "0201000000000000" "2900000000000000"
    "03000000" "01000000" "00000000" "05000000" "01000000" "0000" "0200" "02030000"
    "04000000" "00010000" "00020000" "00000000" "04000000" "0000040000000000" "0400040000000000"
)  # fmt: skip


def test_layout_is_what_the_protocol_document_shows():
    packed = pack_header(EXAMPLE, b"abcd")
    assert packed[:-4].hex() == EXAMPLE_HEX
    assert packed[-4:] == zlib.crc32(bytes.fromhex(EXAMPLE_HEX) + b"abcd").to_bytes(4, "little")
    assert len(packed) == HEADER_NBYTES == 100
    assert peek_kind(packed) == FrameKind.DATA


@given(headers())
def test_header_survives_a_round_trip(case):
    header, payload = case
    assert unpack_header(pack_header(header, payload), payload, "peer") == header


@given(headers(), st.data())
def test_any_damaged_byte_is_noticed_and_the_peer_named(case, data):
    header, payload = case
    message = bytearray(pack_header(header, payload) + payload)
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RemoteProtocolError, match="link 4 to stage 5"):
        unpack_header(bytes(message[:HEADER_NBYTES]), bytes(message[HEADER_NBYTES:]), "link 4 to stage 5")


@given(st.binary(max_size=300), payloads)
def test_garbage_is_a_protocol_error(data, payload):
    with pytest.raises(RemoteProtocolError, match="stranger"):
        unpack_header(data, payload, "stranger")


def resealed(change_at: int, value: int) -> bytes:
    """The example with one byte changed and the checksum made right again: a peer that means it."""
    fields = bytearray(pack_header(EXAMPLE, b"abcd")[:-4])
    fields[change_at] = value
    return bytes(fields) + zlib.crc32(bytes(fields) + b"abcd").to_bytes(4, "little")


@pytest.mark.parametrize(
    ("change_at", "value", "message"),
    [
        (4, 1, "version 1"),
        (5, 9, "out of range"),
        (6, 200, "out of range"),
        (7, 2, "out of range"),
        (56, 77, "out of range"),
        (57, 5, "5 dimensions"),
        (57, 2, "2 dimensions"),
        (58, 3, "out of range"),
        (59, 1, "reserved"),
        (76, 5, "announced 5 bytes"),
        (80, 1, "past the end"),
    ],
)
def test_field_out_of_range_is_a_protocol_error(change_at, value, message):
    with pytest.raises(RemoteProtocolError, match=message):
        unpack_header(resealed(change_at, value), b"abcd", "peer")


@given(st.integers(0, 95), st.integers(0, 255))
def test_field_of_any_value_is_a_header_or_a_protocol_error(change_at, value):
    try:
        header = unpack_header(resealed(change_at, value), b"abcd", "peer")
    except RemoteProtocolError:
        return
    assert pack_header(header, b"abcd") == resealed(change_at, value)


@pytest.mark.parametrize(
    "changes",
    [{"codec": 2**16}, {"epoch": -1}, {"shape": (1,) * 5}, {"dtype": torch.complex64}, {"payload_nbytes": 5}],
    ids=str,
)
def test_header_that_has_no_place_for_a_value_is_our_own_error(changes):
    with pytest.raises(LocalProtocolError):
        pack_header(EXAMPLE._replace(**changes), b"abcd")
