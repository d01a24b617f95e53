"""What the two ends of a process group say to each other about a frame, beside its payload.

The sender announces a frame (the header of frame.py, without a payload, and the payload's checksum); the
receiver answers that it has taken memory for it, or has it already; the payload follows; the receiver
acknowledges it. See docs/protocol.md. Every message has a fixed length, since a group's receive must
be posted with the length of what comes.
"""

import struct
import zlib
from enum import IntEnum

import torch

from tahq.comm.link.frame import HEADER_NBYTES, Frame, FrameHeader, FrameKind, buffer_of, pack_header, unpack_header
from tahq.comm.link.spec import PeerIdentity
from tahq.errors import RemoteProtocolError

_CHECKSUM = struct.Struct("<I")
ANNOUNCEMENT_NBYTES = HEADER_NBYTES + _CHECKSUM.size
ANSWER_NBYTES = 1


class Answer(IntEnum):
    """What the receiver says, one byte."""

    SEND = 1
    """There is memory for the frame: send the payload."""
    HAVE_IT = 2
    """The frame was delivered before: do not send it."""
    RECEIVED = 3
    """The payload has come whole."""


def header_of(frame: Frame, identity: PeerIdentity, link: int, sequence: int) -> FrameHeader:
    """The header that announces a frame; `sequence` counts the frames of this direction, from 1."""
    return FrameHeader(
        kind=FrameKind.DATA,
        epoch=identity.epoch,
        link=link,
        sequence=sequence,
        id=frame.id,
        shard=frame.shard,
        codec=frame.codec,
        dtype=frame.dtype,
        shape=frame.shape,
        total_nbytes=frame.payload.numel(),
    )


def checksum_of(payload: torch.Tensor) -> int:
    """CRC-32 of a payload in host memory; 0 for one on a device, which is not copied to be looked at."""
    return zlib.crc32(buffer_of(payload)) if payload.is_cpu else 0


def pack_announcement(header: FrameHeader, checksum: int) -> torch.Tensor:
    """The message as a tensor of ANNOUNCEMENT_NBYTES bytes."""
    return torch.frombuffer(bytearray(pack_header(header, b"") + _CHECKSUM.pack(checksum)), dtype=torch.uint8)


def unpack_announcement(message: torch.Tensor, peer: str) -> tuple[FrameHeader, int]:
    """Header and the payload's checksum, everything in the header verified.

    Raises:
        RemoteProtocolError: it is no valid header, or one that no announcement has.
    """
    data = bytes(buffer_of(message))
    header = unpack_header(data[:HEADER_NBYTES], b"", peer)
    if header.kind not in (FrameKind.DATA, FrameKind.BYE) or header.offset:
        raise RemoteProtocolError(f"{peer}: announced what is no frame: {header}")
    return header, _CHECKSUM.unpack(data[HEADER_NBYTES:])[0]


def unpack_answer(message: torch.Tensor, peer: str) -> Answer:
    """The answer; RemoteProtocolError if it is none."""
    try:
        return Answer(int(message[0]))
    except ValueError:
        raise RemoteProtocolError(f"{peer}: answered {int(message[0])}, which means nothing") from None
