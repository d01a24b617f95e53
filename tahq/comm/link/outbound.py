"""The sending half of a session: frames are queued, cut into numbered pieces, sent, acknowledged and counted.

A piece gets its sequence number when it is taken for the wire, so the number of the last piece taken is the number of
the last one on its way. The frames of a lane (control, forward, backward, files) go out one after another in the order
queued; pieces of different lanes may alternate. Each channel has a window, the most of its bytes that may be
unacknowledged. Queued pieces, and those that may be asked for again (`rewind`), are
references to the caller's memory.

All links of a host share its uplink. Whenever it is free the piece with the lowest rank of all links is sent, so a
frame that goes first passes between the pieces of another: control messages, then activations and gradients in the
order of `links.first`, then files.
"""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from tahq.comm.link.frame import (
    EVALUATING,
    HEADER_NBYTES,
    Channel,
    Direction,
    Frame,
    FrameHeader,
    FrameKind,
    LogicalId,
    Outgoing,
    buffer_of,
    header_of,
    pack_header,
)
from tahq.comm.link.signals import Acknowledgement
from tahq.comm.link.spec import First, LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.wire_time import HeartbeatTimes, PieceTimes
from tahq.comm.transport import LinkStats

Rank = tuple[int, float]
"""Priority class and time since when it has been waiting (s); the lowest goes first."""
_PREFERRED = {"oldest": None, "activations": Direction.FORWARD, "gradients": Direction.BACKWARD}
_CONTROL, _DATA, _OTHER_DATA, _FILES = -1, 0, 1, 2
FAREWELL: Rank = (-2, 0.0)
"""The rank of a BYE, which comes after all frames of its own link and need not wait for those of others."""

_MAX_PIECES_KEPT = 1 << 16
"""Times of acknowledged pieces that were not taken yet; older ones are forgotten."""
_NO_TIMES = Acknowledgement()


def rank_of(direction: Direction, queued_s: float, first: First, channel: Channel = Channel.DATA) -> Rank:
    """The rank of a frame that was queued at `queued_s`."""
    if channel is Channel.DATA:
        preferred = _PREFERRED[first]
        return (_DATA if preferred is None or direction is preferred else _OTHER_DATA, queued_s)
    return (_CONTROL if channel is Channel.CONTROL else _FILES, queued_s)


class BusyClocks:
    """For each direction, the total time during which training data was outstanding; evaluations are not counted.

    One thread moves it, any thread may read it: a direction's state is one tuple, replaced whole.
    """

    def __init__(self) -> None:
        self._state: dict[Direction, tuple[int, float, float]] = dict.fromkeys(Direction, (0, 0.0, 0.0))
        """Number outstanding, seconds before the last change, time of that change."""

    def change(self, id: LogicalId, by: int, now_s: float) -> None:
        """Change the number of outstanding items in this frame's direction."""
        if id.purpose not in EVALUATING:
            number, total_s, since_s = self._state[id.direction]
            total_s += max(0.0, now_s - since_s) if number else 0.0
            self._state[id.direction] = (number + by, total_s, max(now_s, since_s) if number else now_s)

    def total_s(self, direction: Direction, now_s: float) -> float:
        """Seconds until now during which anything was outstanding."""
        number, total_s, since_s = self._state[direction]
        return total_s + max(0.0, now_s - since_s) if number else total_s


class LinkCounter:
    """Counts frames by direction; used by the thread that sends.

    Args:
        link: its number.
        piece_nbytes: the longest payload that one header goes with; None: a frame has one header, whatever its length.
        header_nbytes: of each header.
    """

    def __init__(self, link: int, piece_nbytes: int | None, header_nbytes: int = HEADER_NBYTES) -> None:
        self._link = link
        self._piece_nbytes = piece_nbytes
        self._header_nbytes = header_nbytes
        self._counts = dict.fromkeys(Direction, (0, 0, 0, 0))
        """Frames, payload bytes, bytes on the wire, elements since the last `take`."""
        self._taken_s = dict.fromkeys(Direction, (0.0, 0.0))
        """Busy and sending seconds until the last `take`."""

    def count(self, frame: Frame) -> None:
        """A frame was sent; those of evaluations are in no step's figures."""
        id, nbytes = frame.id, frame.payload.numel()
        if id.purpose in EVALUATING:
            return
        pieces = 1 if self._piece_nbytes is None else max(1, -(-nbytes // self._piece_nbytes))
        own = (1, nbytes, nbytes + self._header_nbytes * pieces, math.prod(frame.shape))
        frames, payload, wire, elements = map(add, self._counts[id.direction], own)
        self._counts[id.direction] = (frames, payload, wire, elements)

    def take(
        self,
        busy: BusyClocks,
        sending: BusyClocks,
        now_s: float,
        pieces: Sequence[PieceTimes] = (),
        heartbeats: tuple[HeartbeatTimes, ...] = (),
    ) -> list[LinkStats]:
        """Figures since the last call, one entry per direction in which something was sent, or acknowledged.

        Args:
            busy: times in which something was queued or not acknowledged.
            sending: times in which bytes were on their way.
            now_s: now, by the clock of these.
            pieces: those acknowledged since the last call, evaluations included.
            heartbeats: the last few that had the link to themselves.
        """
        stats = []
        for direction, count in self._counts.items():
            own = tuple(piece for piece in pieces if piece.id.direction is direction)
            if not count[0] and not own:
                continue
            before_s = self._taken_s[direction]
            # another thread may end a time slightly before the moment until which it was counted here already
            busy_s = max(before_s[0], busy.total_s(direction, now_s))
            sending_s = max(before_s[1], sending.total_s(direction, now_s))
            times_s = (busy_s - before_s[0], sending_s - before_s[1])
            stats.append(LinkStats(self._link, direction, *count, *times_s, own, heartbeats))
            self._counts[direction], self._taken_s[direction] = (0, 0, 0, 0), (busy_s, sending_s)
        return stats


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


@dataclass(slots=True)
class _SentPiece:
    """A piece on its way, or to be sent again."""

    header: FrameHeader
    payload: memoryview
    queued_s: float
    taken_s: float
    is_again: bool = False


@dataclass(slots=True)
class _Queued:
    """A frame of which `offset` bytes have been taken."""

    header: FrameHeader
    payload: memoryview
    rank: Rank
    offset: int = 0


@dataclass(slots=True)
class _Window:
    """One channel's window, and the bytes on their way."""

    most_nbytes: int
    used_nbytes: int = 0
    room_since_s: float = -math.inf

    @property
    def is_full(self) -> bool:
        return self.used_nbytes >= self.most_nbytes


class Outbound:
    """Queued frames, and the pieces that are not acknowledged yet."""

    def __init__(self, identity: PeerIdentity, spec: LinkSpec, limits: SessionLimits) -> None:
        self._link = spec.link
        self._epoch = identity.epoch
        self._message_id = LogicalId.of_session(identity.run_id)
        self._piece_nbytes = limits.piece_nbytes
        self._first = limits.first
        self._windows = [_Window(limits.windows[channel]) for channel in Channel]
        self._stripes = Stripes(limits.connections)
        self._lanes: defaultdict[tuple[Channel, Direction], deque[_Queued]] = defaultdict(deque)
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
        return not self._again and not any(self._lanes.values())

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
        """The rank of the next piece; None if there is none, or no room for it.

        A piece that is sent again goes before anything else of its class, since the peer waits for it.
        """
        if self._again:
            if self._windows[self._again[0].header.channel].is_full:
                return None
            has_files_alone = all(piece.header.channel is Channel.FILES for piece in self._again)
            return (_FILES if has_files_alone else _DATA, -math.inf)
        lane = self._next_lane()
        return None if lane is None else lane[0].rank

    def _next_lane(self) -> deque[_Queued] | None:
        best = None
        for (channel, _), lane in self._lanes.items():
            if lane and not self._windows[channel].is_full and (best is None or lane[0].rank < best[0].rank):
                best = lane
        return best

    def take_piece_times(self) -> list[PieceTimes]:
        """The times of the pieces acknowledged since the last call; any one thread may call it."""
        return [self._pieces.popleft() for _ in range(len(self._pieces))]

    def count_on_from(self, before: "Outbound", now_s: float) -> None:
        """Take over the clocks of `before`, whose frames are forgotten."""
        before.discard(now_s)
        self.busy, self.sending, self._pieces = before.busy, before.sending, before._pieces
        self.num_again = before.num_again

    def limit_window(self, nbytes: int) -> None:
        """Keep no more data than this unacknowledged, as the receiver asks."""
        window = self._windows[Channel.DATA]
        window.most_nbytes = min(window.most_nbytes, nbytes)

    def queue(self, frame: Frame, now_s: float) -> None:
        """Queue a frame of data; its payload is a contiguous uint8 CPU tensor."""
        self._queue(header_of(frame, self._epoch, self._link), buffer_of(frame.payload), now_s)
        self.busy.change(frame.id, 1, now_s)

    def queue_message(self, channel: Channel, data: bytes, now_s: float) -> None:
        """Queue a message of another channel."""
        place = (FrameKind.DATA, self._epoch, self._link, 0, self._message_id)
        self._queue(FrameHeader(*place, total_nbytes=len(data), channel=channel), memoryview(data), now_s)

    def _queue(self, header: FrameHeader, payload: memoryview, now_s: float) -> None:
        channel, direction = header.channel, header.id.direction
        rank = rank_of(direction, now_s, self._first, channel)
        self._lanes[channel, direction].append(_Queued(header, payload, rank))
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
        queued = lane[0]
        payload = queued.payload[queued.offset : queued.offset + self._piece_nbytes]
        self.last_sequence += 1
        header = queued.header._replace(sequence=self.last_sequence, offset=queued.offset, payload_nbytes=len(payload))
        queued.offset += len(payload)
        if queued.offset == len(queued.payload):
            lane.popleft()
        queued_s = queued.rank[1]
        return self._send(_SentPiece(header, payload, queued_s, now_s), queued_s)

    def _send(self, piece: _SentPiece, ready_s: float) -> Outgoing:
        header, nbytes = piece.header, len(piece.payload)
        self._unacknowledged.append(piece)
        window = self._windows[header.channel]
        window.used_nbytes += nbytes
        if header.channel is Channel.DATA:
            self.sending.change(header.id, 1, piece.taken_s)
        connection = self._stripes.take(header.sequence, nbytes)
        packed = pack_header(header, piece.payload)
        return Outgoing(packed, piece.payload, max(ready_s, window.room_since_s), connection)

    def acknowledge(self, sequence: int, now_s: float, ack: Acknowledgement = _NO_TIMES) -> None:
        """The peer has everything up to and including `sequence`; `ack` says when, and over which connections."""
        self._stripes.acknowledge(ack.passed)
        for sent in (self._unacknowledged, self._again):  # of those to be sent again, some have come after all
            while sent and sent[0].header.sequence <= sequence:
                piece = sent.popleft()
                if sent is self._unacknowledged:
                    self._recall(piece, now_s)
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
        window = self._windows[piece.header.channel]
        was_full = window.is_full
        window.used_nbytes -= len(piece.payload)
        if was_full and not window.is_full:
            window.room_since_s = now_s
        if piece.header.channel is Channel.DATA:
            self.sending.change(piece.header.id, -1, now_s)

    def _forget(self, piece: _SentPiece, now_s: float, arrived_s: float | None) -> None:
        """The peer has the piece, or has left; without an arrival time it is in no statistics."""
        header, nbytes = piece.header, len(piece.payload)
        self.nbytes -= nbytes
        if header.channel is not Channel.DATA:
            return
        if header.offset + nbytes == header.total_nbytes:
            self.busy.change(header.id, -1, now_s)
        if arrived_s is not None:
            times_s = (piece.queued_s, piece.taken_s, now_s, arrived_s)
            self._pieces.append(PieceTimes(header.id, nbytes, *times_s, self._epoch, piece.is_again))

    def discard(self, now_s: float) -> None:
        """Forget everything: the peer will not take it."""
        for lane in self._lanes.values():
            for queued in lane:
                self.nbytes -= len(queued.payload) - queued.offset
                if queued.header.channel is Channel.DATA:
                    self.busy.change(queued.header.id, -1, now_s)
            lane.clear()
        self.acknowledge(self.last_sequence, now_s)
