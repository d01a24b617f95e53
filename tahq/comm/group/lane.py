"""One direction of a link over a process group: its messages, and its threads, whose failures reach the link.

The sender announces a frame (the header of frame.py, without a payload, and the payload's checksum); the
receiver answers that it has memory for it, or has it already; the payload follows; the receiver
acknowledges it. See docs/dev/protocol.md. Every message has a fixed length, since a group's receive must
be posted with the length of the message.
"""

import logging
import struct
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch

from tahq.comm.group.gloo_group import GlooGroup, GroupBrokenError, PayloadPath, Store
from tahq.comm.link.frame import HEADER_NBYTES, Frame, FrameHeader, FrameKind, buffer_of, pack_header, unpack_header
from tahq.comm.link.spec import PeerIdentity
from tahq.errors import RemoteProtocolError, TahqError

_log = logging.getLogger(__name__)

_CHECKSUM = struct.Struct("<I")
ANNOUNCEMENT_NBYTES = HEADER_NBYTES + _CHECKSUM.size
ANSWER_NBYTES = 1


class Answer(IntEnum):
    """The receiver's answer: one byte."""

    SEND = 1
    """I have memory for the frame: send the payload."""
    HAVE_IT = 2
    """The frame was delivered before: do not send it."""
    RECEIVED = 3
    """The payload has arrived."""


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
    """CRC-32 of a payload in host memory; 0 on a device, from which it is not copied for this."""
    return zlib.crc32(buffer_of(payload)) if payload.is_cpu else 0


def pack_announcement(header: FrameHeader, checksum: int) -> torch.Tensor:
    """The message as a tensor of ANNOUNCEMENT_NBYTES bytes."""
    return torch.frombuffer(bytearray(pack_header(header, b"") + _CHECKSUM.pack(checksum)), dtype=torch.uint8)


def unpack_announcement(message: torch.Tensor, peer: str) -> tuple[FrameHeader, int]:
    """Header and the payload's checksum, everything in the header verified.

    Raises:
        RemoteProtocolError: the header is invalid, or not that of an announcement.
    """
    data = bytes(buffer_of(message))
    header = unpack_header(data[:HEADER_NBYTES], b"", peer)
    if header.kind not in (FrameKind.DATA, FrameKind.BYE) or header.offset:
        raise RemoteProtocolError(f"{peer}: sent a malformed announcement: {header}; expected DATA or BYE at offset 0")
    return header, _CHECKSUM.unpack(data[HEADER_NBYTES:])[0]


def unpack_answer(message: torch.Tensor, peer: str) -> Answer:
    """The answer; RemoteProtocolError if it is unknown."""
    try:
        return Answer(int(message[0]))
    except ValueError:
        raise RemoteProtocolError(f"{peer}: answered {int(message[0])}; expected 1 to 3") from None


@dataclass(frozen=True, slots=True)
class Lane:
    """One direction of a link, as its threads see it.

    `peer` names link and peer in messages; NCCL uses `store`, where the ends found each other, as long as it lives.
    """

    group: GlooGroup
    path: PayloadPath
    identity: PeerIdentity
    link: int
    peer: str
    store: Store

    def abort(self) -> None:
        """End every wait in it."""
        self.group.abort()
        self.path.abort()


class GroupThread:
    """Runs `body`; its exceptions go to `fail`, those of a broken group to `broken`."""

    def __init__(
        self,
        name: str,
        lane: Lane,
        body: Callable[[], None],
        fail: Callable[[TahqError], None],
        broken: Callable[[str], None],
    ) -> None:
        self._lane = lane
        self._body = body
        self._fail = fail
        self._broken = broken
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._body()
        except TahqError as error:
            self._fail(error)
        except GroupBrokenError as error:
            self._broken(str(error))
        except Exception as error:
            _log.exception("%s: a thread of its process group failed", self._lane.peer)
            self._fail(TahqError(f"{self._lane.peer}: a thread of its process group failed: {error!r}"))
