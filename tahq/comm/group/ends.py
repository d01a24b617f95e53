"""The two ends of the payloads of a link inside a site: what is announced, answered, sent and received.

On the session's control channel the sender announces a frame (the header of frame.py and the payload's checksum); the
receiver answers that it has memory for it, or has it already; the payload follows over the group; the receiver
acknowledges it. Frames are announced ahead, up to a window, so that answers are on their way while a payload is
received. Payloads go one after another, each after its answer, so a frame that the receiver refuses is never sent, and
memory is taken only after its header was checked against the posted receives.
"""

import queue
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from tahq.comm.group.paths import PayloadPath
from tahq.comm.link.frame import (
    HEADER_NBYTES,
    Frame,
    FrameHeader,
    LogicalId,
    buffer_of,
    header_of,
    pack_header,
    unpack_header,
)
from tahq.comm.link.inbound import Inbound
from tahq.comm.link.outbound import BusyClocks
from tahq.comm.link.spec import SessionLimits
from tahq.errors import RemoteProtocolError

_CHECKSUM = struct.Struct("<I")
ANNOUNCEMENT_NBYTES = HEADER_NBYTES + 1 + HEADER_NBYTES + _CHECKSUM.size
"""Of the session's message, header included."""
_WINDOW_FRAMES = 16
_WINDOW_NBYTES = 64 * 1024 * 1024
"""Most bytes announced without a receipt, or one frame."""


class GroupMessage(IntEnum):
    """The first byte of a message on the control channel of a link."""

    ADDRESS = 0
    """Where the sender's end of the group is (see transport.py)."""
    ANNOUNCE = 1
    """I have this frame."""
    SEND = 2
    """I have memory for the frame: send the payload."""
    HAVE_IT = 3
    """The frame was delivered before: do not send it."""
    RECEIVED = 4
    """The payload has arrived."""


def unpack_message(message: bytes, peer: object) -> tuple[GroupMessage, bytes]:
    """The kind and the rest of a message; RemoteProtocolError if the kind is unknown."""
    try:
        return GroupMessage(message[0]), message[1:]
    except (ValueError, IndexError):
        raise RemoteProtocolError(f"{peer}: sent the message {message[:16].hex()!r} about its process group") from None


def checksum_of(payload: torch.Tensor) -> int:
    """CRC-32 of a payload in host memory; 0 on a device, from which it is not copied for this."""
    return zlib.crc32(buffer_of(payload)) if payload.is_cpu else 0


class _Queued(NamedTuple):
    """A frame to be sent, and the event after which its payload is ready."""

    frame: Frame
    mark: torch.cuda.Event | None


class GroupSender:
    """A queue of frames, and the thread's body that announces and sends them; `say` sends a message to the peer."""

    def __init__(self, path: PayloadPath, say: Callable[[bytes], None], peer: object) -> None:
        self._path = path
        self._say = say
        self._peer = peer
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[GroupMessage | None] = queue.SimpleQueue()
        """Those of the peer; None: none will come any more."""
        self.busy = BusyClocks()
        self.queued_nbytes = 0
        """Payload bytes given to `send` that have no receipt."""
        self._is_abandoned = False
        self._announced: deque[_Queued] = deque()
        self._sent: deque[_Queued] = deque()

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        self._count(frame, 1)
        self._queue.put(_Queued(frame, self._path.mark()))

    def close(self) -> None:
        """End the thread after the queued frames."""
        self._queue.put(None)

    def abandon(self) -> None:
        """End the thread at once, without a message to the peer."""
        self._is_abandoned = True
        self._queue.put(None)
        self.answers.put(None)

    def run(self) -> None:
        """The thread's body."""
        while self._announce_ahead() and (answer := self.answers.get()) is not None:
            self._obey(answer)

    def _announce_ahead(self) -> bool:
        """Announce queued frames up to the window, waiting if none is under way; returns whether any is."""
        while not self._is_abandoned:
            under_way = [queued.frame.payload.numel() for queued in (*self._announced, *self._sent)]
            if len(under_way) >= _WINDOW_FRAMES or sum(under_way) >= _WINDOW_NBYTES:
                break
            try:
                queued = self._queue.get(block=not under_way)
            except queue.Empty:
                break
            if queued is None:
                self._queue.put(None)  # for the next call, if frames are under way
                break
            header = pack_header(header_of(queued.frame, 0, 0), b"")
            checksum = _CHECKSUM.pack(checksum_of(queued.frame.payload))
            self._say(bytes([GroupMessage.ANNOUNCE]) + header + checksum)
            self._announced.append(queued)
        return bool(self._announced or self._sent)

    def _obey(self, answer: GroupMessage) -> None:
        if answer is GroupMessage.RECEIVED and self._sent:
            self._count(self._sent.popleft().frame, -1)
        elif answer is GroupMessage.HAVE_IT and self._announced:
            self._count(self._announced.popleft().frame, -1)
        elif answer is GroupMessage.SEND and self._announced:
            queued = self._announced.popleft()
            self._path.send(queued.frame.payload, queued.mark)
            self._sent.append(queued)
        else:
            raise RemoteProtocolError(f"{self._peer}: answered {answer.name} about a frame that was not announced")

    def _count(self, frame: Frame, number: int) -> None:
        with self._lock:
            self.busy.change(frame.id, number, time.monotonic())
            self.queued_nbytes += number * frame.payload.numel()


class _Coming(NamedTuple):
    """A frame whose payload was asked for; `arrived` waits for it."""

    header: FrameHeader
    checksum: int
    payload: torch.Tensor
    arrived: Callable[[], None]


class GroupReceiver:
    """The posted receives, and the body of the thread that takes payloads as they arrive.

    The computing thread posts (`expect`), another one answers announcements (`answer`), so that answers never wait for
    payloads. A lock protects the matching of frames with posts. `say` sends a message to the peer, `deliver` takes
    whole frames that were expected.
    """

    def __init__(
        self,
        path: PayloadPath,
        say: Callable[[bytes], None],
        deliver: Callable[[Frame], None],
        peer: object,
        run_id: int,
    ) -> None:
        self._path = path
        self._say = say
        self._deliver = deliver
        self._peer = peer
        self._run_id = run_id
        self._lock = threading.Lock()
        self._inbound = Inbound(SessionLimits(), str(peer))
        self._coming: queue.SimpleQueue[_Coming | None] = queue.SimpleQueue()
        self.unanswered: deque[tuple[FrameHeader, int]] = deque()
        """Announcements, with checksums: the first is of a frame that was not posted and for which there is no room."""

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Inbound.expect for what it raises."""
        with self._lock:
            early = self._inbound.expect(id, max_nbytes)
        if early is not None:
            self._deliver(early)

    def answer(self, announcement: bytes) -> None:
        """Ask for the payload of an announced frame, say that it is not needed, or wait until it is posted.

        RemoteProtocolError: see `admit`; or more is announced ahead than may be.
        """
        header = unpack_header(announcement[: -_CHECKSUM.size], b"", self._peer)
        if header.kind or header.offset or header.id.run != self._run_id:
            raise RemoteProtocolError(
                f"{self._peer}: announced {header}; expected kind DATA, offset 0 and run {self._run_id}"
            )
        (checksum,) = _CHECKSUM.unpack(announcement[-_CHECKSUM.size :])
        self.unanswered.append((header, checksum))
        if len(self.unanswered) > _WINDOW_FRAMES:
            raise RemoteProtocolError(f"{self._peer}: announced more than {_WINDOW_FRAMES} frames ahead")
        self.go_on()

    def go_on(self) -> None:
        """Answer what can be answered by now, in order; in the thread that answers, once something was posted."""
        while self.unanswered:
            header, checksum = self.unanswered[0]
            with self._lock:
                if not self._inbound.has_room(header):
                    return
                is_wanted = self._inbound.admit(header)
            self.unanswered.popleft()
            if not is_wanted:
                self._say(bytes([GroupMessage.HAVE_IT]))
                continue
            payload = self._path.allocate(header.total_nbytes)
            arrived = self._path.post(payload)
            self._say(bytes([GroupMessage.SEND]))  # first: the receipt of an empty payload must not overtake this
            self._coming.put(_Coming(header, checksum, payload, arrived))

    def end(self) -> None:
        """End the thread after the payloads that were asked for."""
        self._coming.put(None)

    def run(self) -> None:
        """The thread's body."""
        while (coming := self._coming.get()) is not None:
            coming.arrived()
            if checksum_of(coming.payload) != coming.checksum:
                raise RemoteProtocolError(f"{self._peer}: sent {coming.header.id} damaged: its checksum does not match")
            with self._lock:
                frame = self._inbound.complete(coming.header, coming.payload)
            if frame is not None:
                self._deliver(frame)
            self._say(bytes([GroupMessage.RECEIVED]))
