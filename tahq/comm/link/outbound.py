"""The sending half of a session: frames are queued, cut into numbered pieces, and acknowledged.

A piece gets its sequence number when it is taken for the wire, never before, so the number of the
last piece taken is the number of the last one on its way. Frames of one direction go out in the order
queued, the pieces of one without another's between them; a frame of the other direction may go between
them if it is to go first. At most `window_nbytes` are on their way unacknowledged. What waits, and what is on its way
and may be asked for again (`rewind`), are references to the caller's tensors.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tahq.comm.link.acknowledgement import Acknowledgement
from tahq.comm.link.frame import Direction, Frame, FrameHeader, FrameKind, LogicalId, buffer_of, pack_header
from tahq.comm.link.sending_order import AGAIN, First, Rank, next_to_send, rank_of
from tahq.comm.link.wire_time import PieceTimes


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


class BusyClocks:
    """One a direction, which frames of evaluations leave alone."""

    def __init__(self) -> None:
        self._clocks = {direction: BusyClock() for direction in Direction}

    def start(self, id: LogicalId, now_s: float) -> None:
        """Something of this frame is outstanding."""
        if not id.is_evaluation:
            self._clocks[id.direction].start(now_s)

    def stop(self, id: LogicalId, now_s: float) -> None:
        """It is no more."""
        if not id.is_evaluation:
            self._clocks[id.direction].stop(now_s)

    def total_s(self, direction: Direction, now_s: float) -> float:
        """Seconds until now in which anything was."""
        return self._clocks[direction].total_s(now_s)


class Stripes:
    """What is on its way over each of `connections` connections."""

    def __init__(self, connections: int) -> None:
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(connections)]
        self._nbytes = [0] * connections

    def take(self, sequence: int, nbytes: int) -> int:
        """The connection that carries the piece with this number; of equals the first one."""
        connection = self._nbytes.index(min(self._nbytes))
        if len(self._sent) > 1:
            self._sent[connection].append((sequence, nbytes))
            self._nbytes[connection] += nbytes
        return connection

    def forget(self) -> None:
        """Nothing is on its way: what was is lost, or will be dropped."""
        for connection, sent in enumerate(self._sent):
            sent.clear()
            self._nbytes[connection] = 0

    def acknowledge(self, arrived: Sequence[int]) -> None:
        """Up to which number each connection has delivered what it was given."""
        for connection, sequence in enumerate(arrived):
            sent = self._sent[connection]
            while sent and sent[0][0] <= sequence:
                self._nbytes[connection] -= sent.popleft()[1]


MAX_PIECES_KEPT = 1 << 16
"""Times of acknowledged pieces that nobody has asked for yet; older ones are forgotten."""

NO_TIMES = Acknowledgement()
"""What is known where no ACK says when messages came."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message for the wire, over one of the link's connections.

    `ready_s` is since when it could have been sent, had the wire been free.
    """

    header: bytes
    payload: memoryview | bytes
    ready_s: float
    connection: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both parts; the framing of ZMQ, TCP and IP is not counted."""
        return len(self.header) + len(self.payload)


@dataclass(frozen=True, slots=True)
class _SentPiece:
    """A piece on its way, or to go again: all that it takes to send it."""

    header: FrameHeader
    payload: memoryview
    is_last: bool
    queued_s: float
    taken_s: float
    is_again: bool = False

    @property
    def sequence(self) -> int:
        return self.header.sequence

    @property
    def nbytes(self) -> int:
        return len(self.payload)

    @property
    def id(self) -> LogicalId:
        return self.header.id


@dataclass(slots=True)
class _Cutting:
    """A frame of which `offset` bytes have been taken."""

    header: FrameHeader
    payload: memoryview
    ready_s: float
    offset: int = 0


class Outbound:
    """Queues, scissors and the list of what is not acknowledged yet."""

    def __init__(
        self,
        link: int,
        epoch: int,
        piece_nbytes: int,
        window_nbytes: int,
        first: First = "oldest",
        connections: int = 1,
    ) -> None:
        self._link = link
        self._epoch = epoch
        self._piece_nbytes = piece_nbytes
        self._window_nbytes = window_nbytes
        self._first: First = first
        self._stripes = Stripes(connections)
        self._queues: dict[Direction, deque[_Cutting]] = {direction: deque() for direction in Direction}
        self._unacknowledged: deque[_SentPiece] = deque()
        self._again: deque[_SentPiece] = deque()
        """What is to be sent again, before anything else; their numbers follow those of `_unacknowledged`."""
        self._in_flight_nbytes = 0
        self._queued_nbytes = 0
        self._room_since_s = -math.inf
        self._rewound_s = -math.inf
        self.last_sequence = 0
        self.num_again = 0
        """Pieces that were sent again."""
        self.busy = BusyClocks()
        """From when a frame is queued until it is acknowledged."""
        self.sending = BusyClocks()
        """As `busy`, but from when a piece is taken: a frame that waits for others is not being sent."""
        self.pieces: deque[PieceTimes] = deque(maxlen=MAX_PIECES_KEPT)
        """Of what an ACK has told the arrival of; filled here, emptied by any one thread."""

    @property
    def is_settled(self) -> bool:
        """Whether everything queued has been taken and acknowledged."""
        return self.is_drained and not self._unacknowledged

    @property
    def nbytes(self) -> int:
        """Payload bytes queued or on their way."""
        return self._queued_nbytes + self._in_flight_nbytes

    @property
    def is_drained(self) -> bool:
        """Whether everything queued has been taken for the wire."""
        return not any(self._queues.values()) and not self._again

    @property
    def is_resending(self) -> bool:
        """Whether something is to be sent again."""
        return bool(self._again)

    @property
    def sent_through(self) -> int:
        """The number up to which everything has been sent, or sent again."""
        return self._again[0].sequence - 1 if self._again else self.last_sequence

    @property
    def has_room(self) -> bool:
        """Whether the window lets another piece go."""
        return self._in_flight_nbytes < self._window_nbytes

    @property
    def next_rank(self) -> Rank | None:
        """The rank of the next piece; None if there is none, or no room for it."""
        if not self.has_room:
            return None
        if self._again:
            return AGAIN
        frame = self._next_frame()
        return None if frame is None else self._rank(frame)

    def count_on_from(self, before: "Outbound", now_s: float) -> None:
        """Take over the clocks of the one before, whose frames are forgotten."""
        before.discard(now_s)
        self.busy, self.sending, self.pieces = before.busy, before.sending, before.pieces
        self.num_again = before.num_again

    def limit_window(self, nbytes: int) -> None:
        """Have no more than this on its way unacknowledged; the receiver wants it so."""
        self._window_nbytes = min(self._window_nbytes, nbytes)

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
        self._queues[frame.id.direction].append(_Cutting(header, payload, now_s))
        self._queued_nbytes += len(payload)
        self.busy.start(frame.id, now_s)

    def take_piece(self, now_s: float) -> Outgoing:
        """The next piece, numbered; only while there is a `next_rank`."""
        if self._again:
            return self._take_again(now_s)
        cutting = self._next_frame()
        if cutting is None:
            raise AssertionError("no piece is queued")
        piece = cutting.payload[cutting.offset : cutting.offset + self._piece_nbytes]
        self.last_sequence += 1
        header = replace(cutting.header, sequence=self.last_sequence, offset=cutting.offset, payload_nbytes=len(piece))
        cutting.offset += len(piece)
        is_last = cutting.offset == len(cutting.payload)
        if is_last:
            self._queues[header.id.direction].popleft()
        return self._send(_SentPiece(header, piece, is_last, cutting.ready_s, now_s), cutting.ready_s)

    def _take_again(self, now_s: float) -> Outgoing:
        self.num_again += 1
        return self._send(replace(self._again.popleft(), taken_s=now_s, is_again=True), self._rewound_s)

    def _send(self, piece: _SentPiece, ready_s: float) -> Outgoing:
        self._unacknowledged.append(piece)
        self._queued_nbytes -= piece.nbytes
        self._in_flight_nbytes += piece.nbytes
        self.sending.start(piece.id, piece.taken_s)
        connection = self._stripes.take(piece.sequence, piece.nbytes)
        header = pack_header(piece.header, piece.payload)
        return Outgoing(header, piece.payload, max(ready_s, self._room_since_s), connection)

    def _next_frame(self) -> _Cutting | None:
        heads = (queue[0] for queue in self._queues.values() if queue)
        return next_to_send((self._rank(head), head) for head in heads)

    def _rank(self, frame: _Cutting) -> Rank:
        return rank_of(frame.header.id.direction, frame.ready_s, self._first)

    def acknowledge(self, sequence: int, now_s: float, ack: Acknowledgement = NO_TIMES) -> None:
        """The peer has everything up to and with `sequence`; `ack` says since when, and over which connections."""
        self._stripes.acknowledge(ack.passed)
        had_room = self.has_room
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            piece = self._unacknowledged.popleft()
            self._recall(piece, now_s)
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.sequence))
        while self._again and self._again[0].sequence <= sequence:  # it has come after all
            piece = self._again.popleft()
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.sequence))
        if self.has_room and not had_room:
            self._room_since_s = now_s

    def rewind(self, sequence: int, now_s: float) -> None:
        """The peer has everything up to and with `sequence`, and not all that was sent after that: send that again."""
        self.acknowledge(sequence, now_s)
        for piece in self._unacknowledged:
            self._recall(piece, now_s)
        self._again.extendleft(reversed(self._unacknowledged))
        self._unacknowledged.clear()
        self._stripes.forget()
        self._rewound_s = now_s

    def _recall(self, piece: _SentPiece, now_s: float) -> None:
        """It is not on its way any more."""
        self._in_flight_nbytes -= piece.nbytes
        self._queued_nbytes += piece.nbytes
        self.sending.stop(piece.id, now_s)

    def _forget(self, piece: _SentPiece, now_s: float, arrived_s: float | None) -> None:
        """The peer has it, or is not there to take it; where nobody says when it came, it is in no figures."""
        self._queued_nbytes -= piece.nbytes
        if piece.is_last:
            self.busy.stop(piece.id, now_s)
        if arrived_s is not None:
            times_s = (piece.queued_s, piece.taken_s, now_s, arrived_s)
            self.pieces.append(PieceTimes(piece.id, piece.nbytes, *times_s, self._epoch, piece.is_again))

    def discard(self, now_s: float) -> None:
        """Forget everything: nobody is there to take it."""
        for queue in self._queues.values():
            for cutting in queue:
                self._queued_nbytes -= len(cutting.payload) - cutting.offset
                self.busy.stop(cutting.header.id, now_s)
            queue.clear()
        self.acknowledge(self.last_sequence, now_s)
