"""A frame as the kernel hands it to the wire, counted and cut as a real network card would.

Where the kernel leaves segmentation to the device (TSO), one frame holds many TCP segments, up to 64 kB, behind a
virtio-net header (IFF_VNET_HDR). The wire moves such a frame whole, but counts it as the packets that it stands for:

    wire bytes = (bytes of the frame) + (segments − 1) · (bytes of its headers)

`cut` takes a run of segments out of it, so that loss, overtaking and queueing happen to single packets of MTU size. The
result is a valid frame again: length, IP identification, IP checksum, sequence number, flags and the pseudo-header sum
(the checksum that the kernel left to the device, NEEDS_CSUM) are those of that run; every other bit is unchanged.
"""

from dataclasses import dataclass
from struct import Struct
from typing import Final

from tahq.comm.network_model import ETHERNET_HEADER_NBYTES

VNET_HEADER_BYTES: Final = 10
_IP: Final = VNET_HEADER_BYTES + ETHERNET_HEADER_NBYTES
LARGEST_FRAME_BYTES: Final = _IP + 65536

_DESTINATION: Final = slice(_IP + 16, _IP + 20)
_ETHERTYPE: Final = slice(_IP - 2, _IP)
_IPV4: Final = b"\x08\x00"
_SHORTEST: Final = _IP + 20

_GSO_NONE: Final = 0
_VNET: Final = Struct("=BBHHHH")  # flags, gso_type, hdr_len, gso_size, csum_start, csum_offset
_U16: Final = Struct("!H")
_U32: Final = Struct("!I")
_FIN_PSH: Final = 0x09


@dataclass(slots=True)
class Packet:
    """A frame with its virtio-net header, and the packets that it stands for.

    `header_bytes` counts Ethernet, IP and TCP headers, `segment_bytes` the payload of each segment but the last; both
    are 0 for a frame of one packet.
    """

    frame: bytes
    wire_bytes: int
    num_segments: int = 1
    header_bytes: int = 0
    segment_bytes: int = 0


def destination_address(frame: bytes) -> bytes:
    """The four bytes of the IPv4 destination; empty if the frame is no IPv4."""
    if len(frame) < _SHORTEST or frame[_ETHERTYPE] != _IPV4:
        return b""
    return frame[_DESTINATION]


def read_packet(frame: bytes) -> Packet:
    """Count a frame: one packet, or the TCP segments that the kernel left to the device to make."""
    if frame[1] == _GSO_NONE:
        return Packet(frame, len(frame) - VNET_HEADER_BYTES)
    tcp = _IP + (frame[_IP] & 15) * 4
    payload = tcp + (frame[tcp + 12] >> 4) * 4
    segment_bytes = frame[4] | frame[5] << 8  # gso_size; little-endian, like every machine tahq runs on
    num_segments = max(1, -(-(len(frame) - payload) // segment_bytes))
    header_bytes = payload - VNET_HEADER_BYTES
    wire_bytes = len(frame) - VNET_HEADER_BYTES + (num_segments - 1) * header_bytes
    return Packet(frame, wire_bytes, num_segments, header_bytes, segment_bytes)


def cut(packet: Packet, first: int, count: int) -> Packet:
    """Segments [first, first + count) of a packet, as a packet of their own."""
    if count == packet.num_segments:
        return packet
    header = VNET_HEADER_BYTES + packet.header_bytes
    start = header + first * packet.segment_bytes
    end = start + count * packet.segment_bytes
    payload = packet.frame[start:end]
    frame = _headers_of_run(packet, first, count, len(payload)) + payload
    wire_bytes = len(frame) - VNET_HEADER_BYTES + (count - 1) * packet.header_bytes
    return Packet(frame, wire_bytes, count, packet.header_bytes, packet.segment_bytes)


def runs(packet: Packet, longest: int) -> list[Packet]:
    """The packet in pieces of at most `longest` segments, in order."""
    num_segments = packet.num_segments
    if num_segments <= longest:
        return [packet]
    return [cut(packet, first, min(longest, num_segments - first)) for first in range(0, num_segments, longest)]


def _headers_of_run(packet: Packet, first: int, count: int, payload_bytes: int) -> bytes:
    """The headers of segments [first, first + count), as a network card would write them."""
    header = bytearray(packet.frame[: VNET_HEADER_BYTES + packet.header_bytes])
    tcp = _IP + (header[_IP] & 15) * 4
    old_bytes, new_bytes = len(packet.frame) - tcp, len(header) - tcp + payload_bytes
    if count == 1:
        flags, _, _, _, csum_start, csum_offset = _VNET.unpack_from(header)
        _VNET.pack_into(header, 0, flags, _GSO_NONE, 0, 0, csum_start, csum_offset)
    # IP: total length, identification (a card adds one per segment), checksum
    _U16.pack_into(header, _IP + 2, tcp - _IP + new_bytes)
    _add(_U16, header, _IP + 4, first)
    _U16.pack_into(header, _IP + 10, 0)
    words = Struct(f"!{(tcp - _IP) // 2}H").unpack_from(header, _IP)
    _U16.pack_into(header, _IP + 10, ~_fold(sum(words)) & 0xFFFF)
    # TCP: FIN and PSH belong to the last segment (the kernel itself cuts a frame with CWR). With NEEDS_CSUM the
    # checksum field holds the sum of the pseudo header, of which the length is a part.
    _add(_U32, header, tcp + 4, first * packet.segment_bytes)
    if first + count < packet.num_segments:
        header[tcp + 13] &= ~_FIN_PSH & 0xFF
    (partial,) = _U16.unpack_from(header, tcp + 16)
    _U16.pack_into(header, tcp + 16, _fold(partial + (~old_bytes & 0xFFFF) + new_bytes))
    return bytes(header)


def _add(number: Struct, header: bytearray, offset: int, amount: int) -> None:
    (before,) = number.unpack_from(header, offset)
    number.pack_into(header, offset, (before + amount) % (1 << 8 * number.size))


def _fold(total: int) -> int:
    """Fold carries, as ones' complement needs."""
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
