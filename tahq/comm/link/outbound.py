"""The sending half of a session: frames are queued, cut into numbered pieces, sent and acknowledged.

A piece gets its sequence number when it is taken for the wire, so the number of the last piece taken is the number of
the last one on its way. The frames of a lane (control, forward, backward, files) go out in the order queued, the pieces
of one without another's between them; pieces of different lanes may alternate. Each channel has a window: at most so
many of its bytes are on their way unacknowledged. Queued pieces, and those that may be asked for again (`rewind`), are
references to the caller's memory.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tahq.comm.link.acknowledgement import Acknowledgement
from tahq.comm.link.frame import (
    EVALUATING,
    Channel,
    Direction,
    Frame,
    FrameHeader,
    FrameKind,
    LogicalId,
    buffer_of,
    header_of,
    pack_header,
)
from tahq.comm.link.sending_order import DATA_AGAIN, FILES_AGAIN, Rank, rank_of
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.wire_time import PieceTimes

_MAX_PIECES_KEPT = 1 << 16
"""Times of acknowledged pieces that were not taken yet; older ones are forgotten."""
_NO_TIMES = Acknowledgement()


class BusyClocks:
    """For each direction, the total time during which training data was outstanding; evaluations are not counted.

    One thread moves it, any thread may read it: a direction's state is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._state: dict[Direction, tuple[int, float, float]] = dict.fromkeys(Direction, (0, 0.0, 0.0))
        """Number outstanding, seconds before the last change, time of that change."""

    def start(self, id: LogicalId, now_s: float) -> None:
        """One more item of this frame is outstanding."""
        self._change(id, 1, now_s)

    def stop(self, id: LogicalId, now_s: float) -> None:
        """One item less is."""
        self._change(id, -1, now_s)

    def _change(self, id: LogicalId, by: int, now_s: float) -> None:
        if id.purpose not in EVALUATING:
            number, total_s, since_s = self._state[id.direction]
            total_s += max(0.0, now_s - since_s) if number else 0.0
            self._state[id.direction] = (number + by, total_s, max(now_s, since_s) if number else now_s)

    def total_s(self, direction: Direction, now_s: float) -> float:
        """Seconds until now during which anything was outstanding."""
        number, total_s, since_s = self._state[direction]
        return total_s + max(0.0, now_s - since_s) if number else total_s


class Stripes:
    """Which connection of a link takes the next piece: the one with the fewest bytes on their way.

    Each connection keeps its order; nothing is known about the order between two of them.
    """

    def __init__(self, connections: int) -> None:
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(connections)]
        self._nbytes = [0] * connections

    def take(self, sequence: int, nbytes: int) -> int:
        """The connection that carries the piece with this number; the first of equals."""
        if len(self._sent) == 1:
            return 0
        connection = self._nbytes.index(min(self._nbytes))
        self._sent[connection].append((sequence, nbytes))
        self._nbytes[connection] += nbytes
        return connection

    def forget(self) -> None:
        """Nothing is on its way: it was lost, or will be dropped."""
        for connection, sent in enumerate(self._sent):
            sent.clear()
            self._nbytes[connection] = 0

    def acknowledge(self, arrived: Sequence[int]) -> None:
        """Each connection has delivered what it was given up to this number."""
        for connection, sequence in enumerate(arrived):
            sent = self._sent[connection]
            while sent and sent[0][0] <= sequence:
                self._nbytes[connection] -= sent.popleft()[1]


class Outgoing(NamedTuple):
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


@dataclass(slots=True)
class _SentPiece:
    """A piece on its way, or to be sent again."""

    header: FrameHeader
    payload: memoryview
    queued_s: float
    taken_s: float
    is_again: bool = False

    @property
    def is_last(self) -> bool:
        """Whether its frame ends with it."""
        return self.header.offset + self.header.payload_nbytes == self.header.total_nbytes


@dataclass(slots=True)
class _Queued:
    """A frame of which `offset` bytes have been taken."""

    header: FrameHeader
    payload: memoryview
    rank: Rank
    offset: int = 0


@dataclass(slots=True)
class _Flow:
    """One channel: its window, and the bytes on their way."""

    window_nbytes: int
    in_flight_nbytes: int = 0
    room_since_s: float = -math.inf


@dataclass(slots=True)
class _SendLane:
    """Frames that go out in the order queued."""

    flow: _Flow
    frames: deque[_Queued] = field(default_factory=deque)


class Outbound:
    """Queued frames, and the pieces that are not acknowledged yet."""

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._link = spec.link
        self._epoch = identity.epoch
        self._message_id = LogicalId.of_session(identity.run_id)
        self._piece_nbytes = limits.piece_nbytes
        self._first = limits.first
        self._flows = [_Flow(limits.windows[channel]) for channel in Channel]
        self._stripes = Stripes(limits.connections)
        self._lanes: dict[tuple[Channel, Direction], _SendLane] = {}
        self._unacknowledged: deque[_SentPiece] = deque()
        self._again: deque[_SentPiece] = deque()
        """To be sent again, before anything else; their numbers follow those of `_unacknowledged`."""
        self._rewound_s = -math.inf
        self.nbytes = 0
        """Payload bytes queued or on their way; any thread may read it."""
        self.last_sequence = 0
        self.num_again = 0
        """Pieces that were sent again because the peer did not get them."""
        self.busy = BusyClocks()
        """From when a frame is queued until it is acknowledged; any thread may read it."""
        self.sending = BusyClocks()
        """As `busy`, but from when a piece is taken: a frame that waits for others is not being sent."""
        self._pieces: deque[PieceTimes] = deque(maxlen=_MAX_PIECES_KEPT)

    @property
    def is_settled(self) -> bool:
        """Whether everything queued has been taken and acknowledged."""
        return not self._unacknowledged and self.is_drained

    @property
    def is_drained(self) -> bool:
        """Whether everything queued has been taken for the wire."""
        return not self._again and not any(lane.frames for lane in self._lanes.values())

    @property
    def is_resending(self) -> bool:
        """Whether something is to be sent again."""
        return bool(self._again)

    @property
    def sent_through(self) -> int:
        """The number up to which everything has been sent, or sent again."""
        return self._again[0].header.sequence - 1 if self._again else self.last_sequence

    @property
    def next_rank(self) -> Rank | None:
        """The rank of the next piece; None if there is none, or no room for it."""
        if self._again:
            flow = self._flows[self._again[0].header.channel]
            if flow.in_flight_nbytes >= flow.window_nbytes:
                return None
            has_files_alone = all(piece.header.channel is Channel.FILES for piece in self._again)
            return FILES_AGAIN if has_files_alone else DATA_AGAIN
        lane = self._next_lane()
        return None if lane is None else lane.frames[0].rank

    def _next_lane(self) -> _SendLane | None:
        best = None
        for lane in self._lanes.values():
            if not lane.frames or lane.flow.in_flight_nbytes >= lane.flow.window_nbytes:
                continue
            if best is None or lane.frames[0].rank < best.frames[0].rank:
                best = lane
        return best

    def take_piece_times(self) -> list[PieceTimes]:
        """When pieces left and arrived, of those acknowledged since the last call; any one thread may ask."""
        return [self._pieces.popleft() for _ in range(len(self._pieces))]

    def count_on_from(self, before: "Outbound", now_s: float) -> None:
        """Take over the clocks of the one before, whose frames are forgotten."""
        before.discard(now_s)
        self.busy, self.sending, self._pieces = before.busy, before.sending, before._pieces
        self.num_again = before.num_again

    def limit_window(self, nbytes: int) -> None:
        """Have no more data than this on its way unacknowledged, as the receiver asks."""
        self._flows[Channel.DATA].window_nbytes = min(self._flows[Channel.DATA].window_nbytes, nbytes)

    def queue(self, frame: Frame, now_s: float) -> None:
        """Queue a frame of data; its payload is a contiguous uint8 CPU tensor."""
        self._queue(header_of(frame, self._epoch, self._link), buffer_of(frame.payload), now_s)
        self.busy.start(frame.id, now_s)

    def queue_message(self, channel: Channel, data: bytes, now_s: float) -> None:
        """Queue a message of another channel."""
        place = (FrameKind.DATA, self._epoch, self._link, 0, self._message_id)
        self._queue(FrameHeader(*place, total_nbytes=len(data), channel=channel), memoryview(data), now_s)

    def _queue(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        name = (header.channel, header.id.direction)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _SendLane(self._flows[header.channel])
        rank = rank_of(header.id.direction, now_s, self._first, header.channel)
        lane.frames.append(_Queued(header, payload, rank))
        self.nbytes += len(payload)

    def take_piece(self, now_s: float) -> Outgoing:
        """The next piece, numbered; only while there is a `next_rank`."""
        if self._again:
            self.num_again += 1
            piece = self._again.popleft()
            piece.taken_s, piece.is_again = now_s, True
            return self._send(piece, self._rewound_s)
        lane = self._next_lane()
        if lane is None:
            raise AssertionError("no piece is queued")
        queued = lane.frames[0]
        payload = queued.payload[queued.offset : queued.offset + self._piece_nbytes]
        self.last_sequence += 1
        header = queued.header._replace(sequence=self.last_sequence, offset=queued.offset, payload_nbytes=len(payload))
        queued.offset += len(payload)
        if queued.offset == len(queued.payload):
            lane.frames.popleft()
        queued_s = queued.rank[1]
        return self._send(_SentPiece(header, payload, queued_s, now_s), queued_s)

    def _send(self, piece: _SentPiece, ready_s: float) -> Outgoing:
        header, nbytes = piece.header, len(piece.payload)
        self._unacknowledged.append(piece)
        flow = self._flows[header.channel]
        flow.in_flight_nbytes += nbytes
        if header.channel is Channel.DATA:
            self.sending.start(header.id, piece.taken_s)
        connection = self._stripes.take(header.sequence, nbytes)
        packed = pack_header(header, piece.payload)
        return Outgoing(packed, piece.payload, max(ready_s, flow.room_since_s), connection)

    def acknowledge(self, sequence: int, now_s: float, ack: Acknowledgement = _NO_TIMES) -> None:
        """The peer has everything up to and including `sequence`; `ack` says when, and over which connections."""
        self._stripes.acknowledge(ack.passed)
        while self._unacknowledged and self._unacknowledged[0].header.sequence <= sequence:
            piece = self._unacknowledged.popleft()
            self._recall(piece, now_s)
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.header.sequence))
        while self._again and self._again[0].header.sequence <= sequence:  # it has come after all
            piece = self._again.popleft()
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.header.sequence))

    def rewind(self, sequence: int, now_s: float) -> None:
        """The peer has everything up to and including `sequence`, but not all that followed: send that again."""
        self.acknowledge(sequence, now_s)
        for piece in self._unacknowledged:
            self._recall(piece, now_s)
        self._again.extendleft(reversed(self._unacknowledged))
        self._unacknowledged.clear()
        self._stripes.forget()
        self._rewound_s = now_s

    def _recall(self, piece: _SentPiece, now_s: float) -> None:
        """The piece is no longer on its way."""
        flow = self._flows[piece.header.channel]
        had_no_room = flow.in_flight_nbytes >= flow.window_nbytes
        flow.in_flight_nbytes -= len(piece.payload)
        if had_no_room and flow.in_flight_nbytes < flow.window_nbytes:
            flow.room_since_s = now_s
        if piece.header.channel is Channel.DATA:
            self.sending.stop(piece.header.id, now_s)

    def _forget(self, piece: _SentPiece, now_s: float, arrived_s: float | None) -> None:
        """The peer has the piece, or has left; without an arrival time it is in no statistics."""
        self.nbytes -= len(piece.payload)
        if piece.header.channel is not Channel.DATA:
            return
        if piece.is_last:
            self.busy.stop(piece.header.id, now_s)
        if arrived_s is not None:
            times_s = (piece.queued_s, piece.taken_s, now_s, arrived_s)
            self._pieces.append(PieceTimes(piece.header.id, len(piece.payload), *times_s, self._epoch, piece.is_again))

    def discard(self, now_s: float) -> None:
        """Forget everything: the peer will not take it."""
        for lane in self._lanes.values():
            for queued in lane.frames:
                self.nbytes -= len(queued.payload) - queued.offset
                if queued.header.channel is Channel.DATA:
                    self.busy.stop(queued.header.id, now_s)
            lane.frames.clear()
        self.acknowledge(self.last_sequence, now_s)
