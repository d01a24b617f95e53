"""Frames as a TUN device hands them over, and a reader that trusts nothing: tests compare the two."""

import struct
from dataclasses import dataclass

from tahq_netem.wire.packet import VNET_HEADER_BYTES

ETHERNET = 14
NEEDS_CSUM, GSO_NONE, GSO_TCPV4 = 1, 0, 1
FIN, PSH, ACK = 1, 8, 16


@dataclass(frozen=True)
class Segment:
    """What the receiver of one TCP segment reads."""

    sequence: int
    identification: int
    flags: int
    payload: bytes


def address(text: str) -> bytes:
    return bytes(map(int, text.split(".")))


def ones_complement_sum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def tcp_frame(
    payload: bytes,
    segment_bytes: int,
    *,
    source: str = "10.77.0.1",
    destination: str = "10.77.0.2",
    sequence: int = 1000,
    identification: int = 7,
    flags: int = ACK,
    options: bytes = b"\x01\x01\x08\x0a" + bytes(8),
) -> bytes:
    """A frame of one or more segments, whose TCP checksum was left to the device."""
    tcp_length = 20 + len(options) + len(payload)
    source_bytes, destination_bytes = address(source), address(destination)
    pseudo = source_bytes + destination_bytes + struct.pack("!BBH", 0, 6, tcp_length)
    offset_and_flags = ((20 + len(options)) // 4) << 12 | flags
    tcp = struct.pack("!HHIIHHHH", 4000, 5000, sequence, 55, offset_and_flags, 500, ones_complement_sum(pseudo), 0)
    has_many = len(payload) > segment_bytes
    vnet = struct.pack(
        "=BBHHHH",
        NEEDS_CSUM,
        GSO_TCPV4 if has_many else GSO_NONE,
        ETHERNET + 40 + len(options) if has_many else 0,
        segment_bytes if has_many else 0,
        ETHERNET + 20,
        16,
    )
    return vnet + _ethernet_ip(source_bytes, destination_bytes, 6, identification, tcp_length) + tcp + options + payload


def udp_frame(payload: bytes, *, source: str = "10.77.0.1", destination: str = "10.77.0.2") -> bytes:
    udp = struct.pack("!HHHH", 4000, 5000, 8 + len(payload), 0)
    head = _ethernet_ip(address(source), address(destination), 17, 1, 8 + len(payload))
    return bytes(VNET_HEADER_BYTES) + head + udp + payload


def _ethernet_ip(source: bytes, destination: bytes, protocol: int, identification: int, length: int) -> bytes:
    def header(checksum: int) -> bytes:
        fields = (0x45, 0, 20 + length, identification, 0x4000, 64, protocol, checksum)
        return struct.pack("!BBHHHBBH", *fields) + source + destination

    ethernet = b"\x02" * 12 + b"\x08\x00"
    return ethernet + header(~ones_complement_sum(header(0)) & 0xFFFF)


def segments_of(frame: bytes) -> list[Segment]:
    """Cut a frame as a network card does, after checking everything that a card would rely on."""
    flags, gso_type, _, gso_size, csum_start, csum_offset = struct.unpack_from("=BBHHHH", frame)
    ip, tcp = frame[24:44], frame[44:]
    assert ones_complement_sum(ip) == 0xFFFF, "IP checksum"
    total_length, identification = struct.unpack_from("!HH", ip, 2)
    assert total_length == len(frame) - 24
    assert (flags, csum_start, csum_offset) == (NEEDS_CSUM, 34, 16)
    pseudo = ip[12:20] + struct.pack("!BBH", 0, 6, len(tcp))
    (partial,) = struct.unpack_from("!H", tcp, 16)
    assert partial == ones_complement_sum(pseudo), "sum of the pseudo header"
    header_length = (tcp[12] >> 4) * 4
    (sequence,) = struct.unpack_from("!I", tcp, 4)
    payload = tcp[header_length:]
    assert (gso_type, gso_size) == (GSO_NONE, 0) or (gso_type == GSO_TCPV4 and len(payload) > gso_size)
    step = gso_size or max(1, len(payload))
    starts = range(0, max(1, len(payload)), step)
    return [
        Segment(
            (sequence + start) % 2**32,
            (identification + number) % 2**16,
            tcp[13] if start + step >= len(payload) else tcp[13] & ~(FIN | PSH),
            payload[start : start + step],
        )
        for number, start in enumerate(starts)
    ]
