"""How long the bytes of a host occupied the way to their receivers, told from when they left and were acknowledged.

A piece leaves the session at t, and its acknowledgement is back at a. Take the bare round trip r off, the one of a
piece that meets nobody, and d = a - r is when its last byte had passed the narrowest place of the way. Pieces pass
that place one after the other, so this one had it from the later of t and the d of the piece before:

    w_i = d_i - max(t_i, d_{i-1})

The sum of w over a step is what the bytes cost; the rest of the time that something was unacknowledged is
the length of the way, which more rate would not shorten. The host's links share its uplink, so the pieces of all of
them are taken in one order, and no moment is counted twice.

The bare round trip is that of a heartbeat that met nobody, and the delay that an acknowledgement of a small piece has.
It is never more than the least of a - t - n·s that was seen lately on that link, n being the bytes of a piece and
s the seconds a byte takes: the median over pieces that followed another one of the same frame without a pause, of
the best recent step, since pieces of other links may go in between (0 where no frame has more than one piece). Where
no heartbeat has come back that is all that is known, and about one piece a burst is taken for length.

Pure: times are seconds of the sender's clock.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median

from tahq.comm.frame import Direction, LogicalId

ACK_DELAY_S = 0.005
ACK_AT_ONCE_NBYTES = 64 * 1024
"""Small frames are acknowledged together, after the delay: an ACK of its own would cost as much as the
frame does. Large ones are acknowledged at once, since goodput is measured by it."""

RECENT_STEPS = 20
"""Steps whose least round trip counts; a way may become longer."""
LEAST_NBYTES = 16 * 1024
"""Smaller pieces tell more about threads and sockets than about rates."""


@dataclass(frozen=True, slots=True)
class PieceTimes:
    """One piece of a frame that was sent and acknowledged."""

    id: LogicalId
    nbytes: int
    queued_s: float
    """When its frame was given to the link."""
    taken_s: float
    acked_s: float


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


class WireClock:
    """One host's; it remembers the bare round trip of every link, and until when the wire was taken."""

    def __init__(self) -> None:
        self._seconds_a_byte: dict[int, deque[float]] = {}
        self._bare_s: dict[int, deque[float]] = {}
        self._free_s = -math.inf

    def passages(
        self, pieces: Mapping[int, Sequence[PieceTimes]], heartbeats_s: Mapping[int, float] | None = None
    ) -> list[Passage]:
        """When each piece had the wire, in that order.

        Args:
            pieces: what was acknowledged since the last call, by link, as it was acknowledged.
            heartbeats_s: round trips of heartbeats by link; 0 or none: not known.
        """
        for link, sent in pieces.items():
            self._learn(link, sent)
        known_s = heartbeats_s or {}
        passed = [
            (p.acked_s - self._bare_s_of(p, link, known_s.get(link, 0.0)), link, p)
            for link, sent in pieces.items()
            for p in sent
        ]
        passed.sort(key=lambda item: item[0])
        result: list[Passage] = []
        for end_s, link, piece in passed:
            begin_s = max(piece.taken_s, self._free_s)
            self._free_s = max(begin_s, end_s)
            result.append(Passage(link, piece, begin_s, self._free_s))
        return result

    def bare_round_trip_s(self, link: int) -> float:
        """The most that an empty message can take, as far as pieces tell; 0.0 before anything was sent."""
        return min(self._bare_s.get(link, ()), default=0.0)

    def _bare_s_of(self, piece: PieceTimes, link: int, heartbeat_s: float) -> float:
        learned_s = self.bare_round_trip_s(link)
        if heartbeat_s <= 0:
            return learned_s
        return min(learned_s, heartbeat_s + (ACK_DELAY_S if piece.nbytes < ACK_AT_ONCE_NBYTES else 0.0))

    def _learn(self, link: int, sent: Sequence[PieceTimes]) -> None:
        if not sent:
            return
        paces = list(_paces(sent))
        if paces:
            self._seconds_a_byte.setdefault(link, deque(maxlen=RECENT_STEPS)).append(median(paces))
        pace = min(self._seconds_a_byte.get(link, ()), default=0.0)
        recent = self._bare_s.setdefault(link, deque(maxlen=RECENT_STEPS))
        recent.append(min(max(0.0, p.acked_s - p.taken_s - pace * p.nbytes) for p in sent))


def _paces(sent: Sequence[PieceTimes]) -> Iterable[float]:
    """Seconds a byte, of pieces that were taken before the one before them, of the same frame, was acknowledged.

    One acknowledgement may be for several pieces, which then count together.
    """
    together = [list(pieces) for _, pieces in groupby(sent, key=lambda piece: piece.acked_s)]
    for before, pieces in pairwise(together):
        nbytes = sum(piece.nbytes for piece in pieces)
        follows = {piece.id for piece in pieces} == {before[-1].id} and pieces[0].taken_s < before[0].acked_s
        if follows and nbytes >= LEAST_NBYTES:
            yield (pieces[0].acked_s - before[0].acked_s) / nbytes


def busy_seconds(passages: Iterable[Passage]) -> dict[tuple[int, Direction], float]:
    """Seconds that the wire was taken, by link and direction."""
    total: dict[tuple[int, Direction], float] = {}
    for passage in passages:
        total[passage.key] = total.get(passage.key, 0.0) + passage.end_s - passage.begin_s
    return total
