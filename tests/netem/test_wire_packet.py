"""Frames counted and cut: the same segments come out as if a card had cut them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ethernet_frames import FIN, PSH, segments_of, tcp_frame, udp_frame

from tahq_netem.wire.packet import cut, destination_address, read_packet, runs

HEADERS = 14 + 20 + 32


@pytest.mark.parametrize(
    ("frame", "num_segments", "wire_bytes"),
    [
        (tcp_frame(bytes(3 * 1448 + 10), 1448), 4, 3 * 1514 + HEADERS + 10),
        (tcp_frame(b"", 1448), 1, HEADERS),
        (tcp_frame(bytes(1448), 1448), 1, 1514),
        (udp_frame(bytes(1472)), 1, 1514),
    ],
)
def test_every_segment_counts_with_its_headers(frame, num_segments, wire_bytes):
    packet = read_packet(frame)
    assert (packet.num_segments, packet.wire_bytes) == (num_segments, wire_bytes)


def test_destination_is_read_from_ipv4_only():
    frame = udp_frame(b"x", destination="10.77.0.9")
    assert destination_address(frame) == bytes([10, 77, 0, 9])
    assert destination_address(frame[:22] + b"\x86\xdd" + frame[24:]) == b""
    assert destination_address(frame[:40]) == b""


@given(
    payload_bytes=st.integers(1, 9000),
    segment_bytes=st.integers(536, 1448),
    header=st.fixed_dictionaries(
        {
            "sequence": st.integers(0, 2**32 - 1),
            "identification": st.integers(0, 2**16 - 1),
            "flags": st.sampled_from([16, 16 | PSH, 16 | FIN, 16 | PSH | FIN]),
            "options": st.sampled_from([b"", b"\x01\x01\x08\x0a" + bytes(range(8))]),
        }
    ),
    data=st.data(),
)
def test_any_run_holds_exactly_its_segments(payload_bytes, segment_bytes, header, data):
    payload = bytes(index * 31 % 251 for index in range(payload_bytes))
    frame = tcp_frame(payload, segment_bytes, **header)
    whole = segments_of(frame)
    packet = read_packet(frame)
    assert packet.num_segments == len(whole)
    first = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(1, len(whole) - first))
    part = cut(packet, first, count)
    assert segments_of(part.frame) == whole[first : first + count]
    header_bytes = 14 + 40 + len(header["options"])
    assert part.wire_bytes == sum(header_bytes + len(segment.payload) for segment in whole[first : first + count])
    # What was cut can be cut again.
    assert [s for run in runs(part, 2) for s in segments_of(run.frame)] == whole[first : first + count]
