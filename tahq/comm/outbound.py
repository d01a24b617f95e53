"""The sending half of a session: frames are queued, cut into numbered pieces, and acknowledged.

A piece gets its sequence number when it is taken for the wire, never before, so the number of the
last piece taken is the number of the last one on its way. Frames go out in the order queued, the
pieces of one without another's between them. At most `window_nbytes` are on their way unacknowledged;
the rest waits here as references to the caller's tensors.
"""

from collections import deque
from dataclasses import dataclass, replace

from tahq.comm.frame import Direction, Frame, FrameHeader, FrameKind, buffer_of, pack_header


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the wire. `ready_s` is since when it could have been sent, had the wire been free."""

    header: bytes
    payload: memoryview | bytes
    ready_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of both parts; the framing of ZMQ, TCP and IP is not counted."""
        return len(self.header) + len(self.payload)


@dataclass(frozen=True, slots=True)
class _SentPiece:
    sequence: int
    nbytes: int
    finishes: Direction | None
    """The direction of the frame whose last piece this is; None for the other pieces."""


@dataclass(slots=True)
class _Cutting:
    """A frame of which `offset` bytes have been taken."""

    header: FrameHeader
    payload: memoryview
    ready_s: float
    offset: int = 0


class BusyClock:
    """How long something was outstanding, in all.

    One thread moves it, any thread may read it: the state is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._outstanding = 0
        self._state: tuple[float, float | None] = (0.0, None)

    def start(self, now_s: float) -> None:
        """One thing more is outstanding."""
        self._outstanding += 1
        total_s, since_s = self._state
        if since_s is None:
            self._state = (total_s, now_s)

    def stop(self, now_s: float) -> None:
        """One thing less is outstanding."""
        self._outstanding -= 1
        total_s, since_s = self._state
        if self._outstanding == 0 and since_s is not None:
            self._state = (total_s + max(0.0, now_s - since_s), None)

    def total_s(self, now_s: float) -> float:
        """Seconds until now."""
        total_s, since_s = self._state
        return total_s if since_s is None else total_s + max(0.0, now_s - since_s)


class Outbound:
    """Queue, scissors and the list of what is not acknowledged yet."""

    def __init__(self, link: int, epoch: int, piece_nbytes: int, window_nbytes: int) -> None:
        self._link = link
        self._epoch = epoch
        self._piece_nbytes = piece_nbytes
        self._window_nbytes = window_nbytes
        self._queue: deque[_Cutting] = deque()
        self._unacknowledged: deque[_SentPiece] = deque()
        self._in_flight_nbytes = 0
        self._queued_nbytes = 0
        self.last_sequence = 0
        self.busy = {direction: BusyClock() for direction in Direction}

    @property
    def is_settled(self) -> bool:
        """Whether everything queued has been taken and acknowledged."""
        return not self._queue and not self._unacknowledged

    @property
    def nbytes(self) -> int:
        """Payload bytes queued or on their way."""
        return self._queued_nbytes + self._in_flight_nbytes

    @property
    def is_drained(self) -> bool:
        """Whether everything queued has been taken for the wire."""
        return not self._queue

    @property
    def can_send(self) -> bool:
        """Whether there is a piece to take and room for it in the window."""
        return bool(self._queue) and self._in_flight_nbytes < self._window_nbytes

    def queue(self, frame: Frame, now_s: float) -> None:
        """Take a frame for sending; its payload is a uint8 CPU tensor, contiguous."""
        payload = buffer_of(frame.payload)
        header = FrameHeader(
            kind=FrameKind.DATA,
            epoch=self._epoch,
            link=self._link,
            sequence=0,
            id=frame.id,
            shard=frame.shard,
            codec=frame.codec,
            dtype=frame.dtype,
            shape=frame.shape,
            total_nbytes=len(payload),
        )
        self._queue.append(_Cutting(header, payload, now_s))
        self._queued_nbytes += len(payload)
        self.busy[frame.id.direction].start(now_s)

    def take_piece(self) -> Outgoing:
        """The next piece, numbered; only while `can_send`."""
        cutting = self._queue[0]
        piece = cutting.payload[cutting.offset : cutting.offset + self._piece_nbytes]
        self.last_sequence += 1
        header = replace(cutting.header, sequence=self.last_sequence, offset=cutting.offset, payload_nbytes=len(piece))
        cutting.offset += len(piece)
        is_last = cutting.offset == len(cutting.payload)
        if is_last:
            self._queue.popleft()
        self._note_sent(len(piece), header.id.direction if is_last else None)
        return Outgoing(pack_header(header, piece), piece, cutting.ready_s)

    def _note_sent(self, nbytes: int, finishes: Direction | None) -> None:
        self._unacknowledged.append(_SentPiece(self.last_sequence, nbytes, finishes))
        self._queued_nbytes -= nbytes
        self._in_flight_nbytes += nbytes

    def acknowledge(self, sequence: int, now_s: float) -> None:
        """The peer has everything up to and with `sequence`."""
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            piece = self._unacknowledged.popleft()
            self._in_flight_nbytes -= piece.nbytes
            if piece.finishes is not None:
                self.busy[piece.finishes].stop(now_s)

    def discard(self, now_s: float) -> None:
        """Forget everything: nobody is there to take it."""
        for cutting in self._queue:
            self.busy[cutting.header.id.direction].stop(now_s)
        self._queue.clear()
        self._queued_nbytes = 0
        self.acknowledge(self.last_sequence, now_s)
