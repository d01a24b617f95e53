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
from dataclasses import dataclass, replace

from tahq.comm.link.acknowledgement import Acknowledgement
from tahq.comm.link.frame import (
    Channel,
    Direction,
    Frame,
    FrameHeader,
    FrameKind,
    LogicalId,
    buffer_of,
    pack_header,
)
from tahq.comm.link.sending_order import Rank, next_to_send, rank_again, rank_of
from tahq.comm.link.spec import LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.wire_time import PieceTimes

MAX_PIECES_KEPT = 1 << 16
"""Times of acknowledged pieces that were not taken yet; older ones are forgotten."""

NO_TIMES = Acknowledgement()
"""Stands for an ACK where none says when messages came."""


class BusyClock:
    """Total time during which something was outstanding.

    One thread moves it, any thread may read it: the state is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._outstanding = 0
        self._state: tuple[float, float | None] = (0.0, None)

    def start(self, now_s: float) -> None:
        """One more item is outstanding."""
        self._outstanding += 1
        total_s, since_s = self._state
        if since_s is None:
            self._state = (total_s, now_s)

    def stop(self, now_s: float) -> None:
        """One item less is outstanding."""
        self._outstanding -= 1
        total_s, since_s = self._state
        if self._outstanding == 0 and since_s is not None:
            self._state = (total_s + max(0.0, now_s - since_s), None)

    def total_s(self, now_s: float) -> float:
        """Seconds until now."""
        total_s, since_s = self._state
        return total_s if since_s is None else total_s + max(0.0, now_s - since_s)


class BusyClocks:
    """A clock per direction of a training step's data; frames of evaluations, and None, are not counted."""

    def __init__(self) -> None:
        self._clocks = {direction: BusyClock() for direction in Direction}

    def start(self, id: LogicalId | None, now_s: float) -> None:
        """Something of this frame is outstanding."""
        if id is not None and not id.is_evaluation:
            self._clocks[id.direction].start(now_s)

    def stop(self, id: LogicalId | None, now_s: float) -> None:
        """It is no longer."""
        if id is not None and not id.is_evaluation:
            self._clocks[id.direction].stop(now_s)

    def total_s(self, direction: Direction, now_s: float) -> float:
        """Seconds until now during which anything was outstanding."""
        return self._clocks[direction].total_s(now_s)


class Stripes:
    """Which connection of a link takes the next piece: the one with the fewest bytes on their way.

    Each connection keeps its order; nothing is known about the order between two of them.
    """

    def __init__(self, connections: int) -> None:
        self._sent: list[deque[tuple[int, int]]] = [deque() for _ in range(connections)]
        self._nbytes = [0] * connections

    def take(self, sequence: int, nbytes: int) -> int:
        """The connection that carries the piece with this number; the first of equals."""
        connection = self._nbytes.index(min(self._nbytes))
        if len(self._sent) > 1:
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
    """A piece on its way, or to be sent again."""

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
    def channel(self) -> Channel:
        return self.header.channel


@dataclass(slots=True)
class _Cutting:
    """A frame of which `offset` bytes have been taken."""

    header: FrameHeader
    payload: memoryview
    ready_s: float
    offset: int = 0


def _timed(header: FrameHeader) -> LogicalId | None:
    return header.id if header.channel is Channel.DATA else None


class Outbound:
    """Queued frames, and the pieces that are not acknowledged yet."""

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._link = spec.link
        self._epoch = identity.epoch
        self._message_id = LogicalId.of_session(identity.run_id)
        self._piece_nbytes = limits.piece_nbytes
        self._windows = limits.windows
        self._first = limits.first
        self._stripes = Stripes(limits.connections)
        self._lanes: dict[tuple[Channel, Direction], deque[_Cutting]] = {}
        self._unacknowledged: deque[_SentPiece] = deque()
        self._again: deque[_SentPiece] = deque()
        """To be sent again, before anything else; their numbers follow those of `_unacknowledged`."""
        self._in_flight_nbytes = dict.fromkeys(Channel, 0)
        self._queued_nbytes = 0
        self._room_since_s = dict.fromkeys(Channel, -math.inf)
        self._rewound_s = -math.inf
        self.last_sequence = 0
        self.num_again = 0
        """Pieces that were sent again because the peer did not get them."""
        self.busy = BusyClocks()
        """From when a frame is queued until it is acknowledged; any thread may read it."""
        self.sending = BusyClocks()
        """As `busy`, but from when a piece is taken: a frame that waits for others is not being sent."""
        self._pieces: deque[PieceTimes] = deque(maxlen=MAX_PIECES_KEPT)

    @property
    def is_settled(self) -> bool:
        """Whether everything queued has been taken and acknowledged."""
        return self.is_drained and not self._unacknowledged

    @property
    def nbytes(self) -> int:
        """Payload bytes queued or on their way; any thread may ask."""
        return self._queued_nbytes + sum(self._in_flight_nbytes.values())

    @property
    def is_drained(self) -> bool:
        """Whether everything queued has been taken for the wire."""
        return not any(self._lanes.values()) and not self._again

    @property
    def is_resending(self) -> bool:
        """Whether something is to be sent again."""
        return bool(self._again)

    @property
    def sent_through(self) -> int:
        """The number up to which everything has been sent, or sent again."""
        return self._again[0].sequence - 1 if self._again else self.last_sequence

    @property
    def next_rank(self) -> Rank | None:
        """The rank of the next piece; None if there is none, or no room for it."""
        if self._again:
            is_room = self._has_room(self._again[0].channel)
            return rank_again(piece.channel for piece in self._again) if is_room else None
        frame = self._next_frame()
        return None if frame is None else self._rank(frame)

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
        self._windows[Channel.DATA] = min(self._windows[Channel.DATA], nbytes)

    def queue(self, frame: Frame, now_s: float) -> None:
        """Queue a frame of data; its payload is a contiguous uint8 CPU tensor."""
        payload = buffer_of(frame.payload)
        header = FrameHeader(
            *(FrameKind.DATA, self._epoch, self._link, 0, frame.id, frame.shard, frame.codec, frame.dtype, frame.shape),
            total_nbytes=len(payload),
        )
        self._queue(_Cutting(header, payload, now_s))

    def queue_message(self, channel: Channel, data: bytes, now_s: float) -> None:
        """Queue a message of another channel."""
        header = FrameHeader(
            *(FrameKind.DATA, self._epoch, self._link, 0, self._message_id), total_nbytes=len(data), channel=channel
        )
        self._queue(_Cutting(header, memoryview(data), now_s))

    def _queue(self, frame: _Cutting) -> None:
        self._lanes.setdefault((frame.header.channel, frame.header.id.direction), deque()).append(frame)
        self._queued_nbytes += len(frame.payload)
        self.busy.start(_timed(frame.header), frame.ready_s)

    def take_piece(self, now_s: float) -> Outgoing:
        """The next piece, numbered; only while there is a `next_rank`."""
        if self._again:
            self.num_again += 1
            return self._send(replace(self._again.popleft(), taken_s=now_s, is_again=True), self._rewound_s)
        cutting = self._next_frame()
        if cutting is None:
            raise AssertionError("no piece is queued")
        piece = cutting.payload[cutting.offset : cutting.offset + self._piece_nbytes]
        self.last_sequence += 1
        header = replace(cutting.header, sequence=self.last_sequence, offset=cutting.offset, payload_nbytes=len(piece))
        cutting.offset += len(piece)
        is_last = cutting.offset == len(cutting.payload)
        if is_last:
            self._lanes[header.channel, header.id.direction].popleft()
        return self._send(_SentPiece(header, piece, is_last, cutting.ready_s, now_s), cutting.ready_s)

    def _send(self, piece: _SentPiece, ready_s: float) -> Outgoing:
        nbytes = len(piece.payload)
        self._unacknowledged.append(piece)
        self._queued_nbytes -= nbytes
        self._in_flight_nbytes[piece.channel] += nbytes
        self.sending.start(_timed(piece.header), piece.taken_s)
        connection = self._stripes.take(piece.sequence, nbytes)
        ready_s = max(ready_s, self._room_since_s[piece.channel])
        return Outgoing(pack_header(piece.header, piece.payload), piece.payload, ready_s, connection)

    def _has_room(self, channel: Channel) -> bool:
        return self._in_flight_nbytes[channel] < self._windows[channel]

    def _next_frame(self) -> _Cutting | None:
        heads = (lane[0] for (channel, _), lane in self._lanes.items() if lane and self._has_room(channel))
        return next_to_send((self._rank(head), head) for head in heads)

    def _rank(self, frame: _Cutting) -> Rank:
        return rank_of(frame.header.id.direction, frame.ready_s, self._first, frame.header.channel)

    def acknowledge(self, sequence: int, now_s: float, ack: Acknowledgement = NO_TIMES) -> None:
        """The peer has everything up to and including `sequence`; `ack` says when, and over which connections."""
        self._stripes.acknowledge(ack.passed)
        had_room = {channel: self._has_room(channel) for channel in Channel}
        while self._unacknowledged and self._unacknowledged[0].sequence <= sequence:
            piece = self._unacknowledged.popleft()
            self._recall(piece, now_s)
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.sequence))
        while self._again and self._again[0].sequence <= sequence:  # it has come after all
            piece = self._again.popleft()
            self._forget(piece, now_s, ack.arrival_s(sequence - piece.sequence))
        for channel in Channel:
            if self._has_room(channel) and not had_room[channel]:
                self._room_since_s[channel] = now_s

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
        self._in_flight_nbytes[piece.channel] -= len(piece.payload)
        self._queued_nbytes += len(piece.payload)
        self.sending.stop(_timed(piece.header), now_s)

    def _forget(self, piece: _SentPiece, now_s: float, arrived_s: float | None) -> None:
        """The peer has the piece, or has left; without an arrival time it is in no statistics."""
        self._queued_nbytes -= len(piece.payload)
        if piece.is_last:
            self.busy.stop(_timed(piece.header), now_s)
        if arrived_s is not None and piece.channel is Channel.DATA:
            times_s = (piece.queued_s, piece.taken_s, now_s, arrived_s)
            self._pieces.append(PieceTimes(piece.header.id, len(piece.payload), *times_s, self._epoch, piece.is_again))

    def discard(self, now_s: float) -> None:
        """Forget everything: the peer will not take it."""
        for lane in self._lanes.values():
            for cutting in lane:
                self._queued_nbytes -= len(cutting.payload) - cutting.offset
                self.busy.stop(_timed(cutting.header), now_s)
            lane.clear()
        self.acknowledge(self.last_sequence, now_s)
