"""How long the bytes of a host occupied the way to their receivers, told from when they left and when they came.

A piece leaves the session at t, by this host's clock, and comes at a, by its receiver's: the ACK says so, and when that
is back makes no difference. With v, what the way takes where nothing is met on it, d = a - v is when the last byte of
the piece had passed the narrowest place, as this host's clock says. Pieces pass that place one after the other, so
this one had it from the later of t and the d of the piece before:

    w_i = d_i - max(t_i, d_{i-1})

The sum of w over a step is what the bytes cost; the rest of the time that something was unacknowledged is
the length of the way there and back, which more rate would not shorten. The host's links share its uplink, so the
pieces of all of them are taken in one order, and no moment is counted twice.

v is the least of a - t that a heartbeat of the link took lately, which left when nothing of it was on its way. It is
never more than the least of a - t - n·s that was seen lately on that link, n being the bytes of a piece and
s the seconds a byte takes: the median over pieces that followed another one of the same frame without a pause, of
the best recent step, since pieces of other links may go in between (0 where no frame has more than one piece). Where
no heartbeat has come that is all that is known, and about one piece a burst is taken for length.

The clocks need not agree. What they differ by is in a and in v alike, and goes out; it is another difference with
each process at the other end, so with a new epoch of a link what was learned of it is forgotten. Only what they drift
apart while v is remembered counts: 50 parts in a million, as two ordinary quartzes may, are 3 ms in the 60 s that v may
be old, for a piece that follows no other without a pause. Whatever a peer says, a piece had the wire between when it
left and when it was acknowledged.

Pure: times are seconds of the sender's clock, but for arrivals.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from tahq.comm.link.frame import Direction, LogicalId

RECENT_STEPS = 20
"""Steps whose least time on the way counts; a way may become longer."""
RECENT_S = 60.0
"""Likewise; clocks drift apart."""
LEAST_NBYTES = 16 * 1024
"""Smaller pieces tell more about threads and sockets than about rates."""


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """One piece of a frame that was sent, has come and was acknowledged."""

    id: LogicalId
    nbytes: int
    queued_s: float
    """When its frame was given to the link."""
    taken_s: float
    acked_s: float
    arrived_s: float
    """By the receiver's clock."""
    epoch: int = 0
    """Of the link: with another one the receiver's clock is another."""
    is_again: bool = False
    """Whether it was sent before, and may have come that time."""


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """One heartbeat that had its link for itself."""

    epoch: int
    left_s: float
    arrived_s: float
    """By the receiver's clock."""


@dataclass(frozen=True, slots=True)
class Passage:
    """When one piece had the wire for itself: from `begin_s` to `end_s`."""

    link: int
    piece: PieceTimes
    begin_s: float
    end_s: float

    @property
    def key(self) -> tuple[int, Direction]:
        """Link and direction."""
        return self.link, self.piece.id.direction


class _Way:
    """What is known of the way of one link, in one epoch of it."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._seconds_a_byte: deque[float] = deque(maxlen=RECENT_STEPS)
        self._least_s: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """When the last of some pieces was acknowledged, and the least that one of them took beyond its bytes."""

    def passed_s(self, sent: Sequence[PieceTimes], heartbeats: Iterable[HeartbeatTimes]) -> Iterator[float]:
        """When each of these pieces, in the order in which they came, had passed the narrowest place."""
        now_s = max(piece.acked_s for piece in sent)
        self._learn(sent, now_s)
        bare_s = min([*self._recent(now_s), *_times_on_way(heartbeats, now_s)], default=math.inf)
        for piece in sent:
            yield max(piece.taken_s, min(piece.acked_s, piece.arrived_s - bare_s))

    def _learn(self, sent: Sequence[PieceTimes], now_s: float) -> None:
        paces = list(_paces(sent))
        if paces:
            self._seconds_a_byte.append(median(paces))
        pace = min(self._seconds_a_byte, default=0.0)
        # What was sent again may have come the first time.
        took_s = [p.arrived_s - p.taken_s - pace * p.nbytes for p in sent if not p.is_again]
        if took_s:
            self._least_s.append((now_s, min(took_s)))

    def _recent(self, now_s: float) -> list[float]:
        return [least_s for seen_s, least_s in self._least_s if now_s - seen_s <= RECENT_S]


def _times_on_way(heartbeats: Iterable[HeartbeatTimes], now_s: float) -> list[float]:
    return [beat.arrived_s - beat.left_s for beat in heartbeats if now_s - beat.left_s <= RECENT_S]


class WireClock:
    """One host's; it remembers what is known of every link's way, and until when the wire was taken."""

    def __init__(self) -> None:
        self._ways: dict[int, _Way] = {}
        self._free_s = -math.inf

    def passages(
        self,
        pieces: Mapping[int, Sequence[PieceTimes]],
        heartbeats: Mapping[int, Sequence[HeartbeatTimes]] | None = None,
    ) -> list[Passage]:
        """When each piece had the wire, in that order.

        Args:
            pieces: what was acknowledged since the last call, by link.
            heartbeats: the last few of each link; none: not known.
        """
        known = heartbeats or {}
        passed = [item for link, sent in pieces.items() for item in self._passed(link, sent, known.get(link, ()))]
        passed.sort(key=lambda item: item[0])
        result: list[Passage] = []
        for end_s, link, piece in passed:
            begin_s = max(piece.taken_s, self._free_s)
            self._free_s = max(begin_s, end_s)
            result.append(Passage(link, piece, begin_s, self._free_s))
        return result

    def _passed(
        self, link: int, sent: Sequence[PieceTimes], heartbeats: Sequence[HeartbeatTimes]
    ) -> Iterator[tuple[float, int, PieceTimes]]:
        """When each piece had passed the narrowest place, with its link; epoch by epoch."""
        in_order = sorted(sent, key=lambda piece: (piece.epoch, piece.arrived_s))
        for epoch, group in groupby(in_order, key=lambda piece: piece.epoch):
            some = list(group)
            beats = [beat for beat in heartbeats if beat.epoch == epoch]
            for end_s, piece in zip(self._way(link, epoch).passed_s(some, beats), some, strict=True):
                yield end_s, link, piece

    def _way(self, link: int, epoch: int) -> _Way:
        way = self._ways.get(link)
        if way is None or way.epoch != epoch:
            way = self._ways[link] = _Way(epoch)
        return way


def _paces(sent: Sequence[PieceTimes]) -> Iterable[float]:
    """Seconds a byte, of pieces that were taken before the one before them, of the same frame, was acknowledged.

    Several may be told to have come at one time, and then count together.
    """
    together = [list(pieces) for _, pieces in groupby(sent, key=lambda piece: piece.arrived_s)]
    for before, pieces in pairwise(together):
        nbytes = sum(piece.nbytes for piece in pieces)
        follows = {piece.id for piece in pieces} == {before[-1].id} and pieces[0].taken_s < before[0].acked_s
        if follows and nbytes >= LEAST_NBYTES:
            yield (pieces[0].arrived_s - before[0].arrived_s) / nbytes


def busy_seconds(passages: Iterable[Passage]) -> dict[tuple[int, Direction], float]:
    """Seconds that the wire was taken, by link and direction."""
    total: dict[tuple[int, Direction], float] = {}
    for passage in passages:
        total[passage.key] = total.get(passage.key, 0.0) + passage.end_s - passage.begin_s
    return total
