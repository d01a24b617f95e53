"""How long the bytes of a host occupied the wire, computed from when each piece left and when it arrived.

A piece leaves the session at t, by this host's clock, and arrives at a, by its receiver's: the ACK carries a, and when
the ACK itself arrives makes no difference. With v, the travel time of an empty path, d = a - v is when the last byte of
the piece had passed the bottleneck, by this host's clock. Pieces pass the bottleneck one after the other, so piece i
occupied it from the later of t_i and the d of the piece before:

    w_i = d_i - max(t_i, d_{i-1})

The sum of w over a step is the time of the bytes; the rest of the time in which something was unacknowledged is
travel time, which more rate would not shorten. The host's links share its uplink, so the pieces of all of them are
taken in one order, and no moment is counted twice.

v is the least a - t of a recent heartbeat of the link that left when no data was under way. It is never more than the
least recent a - t - n·s on that link, with n the bytes of a piece and s the seconds per byte: the median over pieces
that followed another piece of the same frame without a pause, of the best recent step, since pieces of other links
may go in between (0 where no frame has more than one piece). Without heartbeats only this is known, and about one
piece per burst is counted as travel time.

The clocks need not agree: their difference is in a and in v alike and cancels out. It changes with the process at the
other end, so a new epoch of a link forgets what was learned. Only their drift while v is remembered counts: 50 parts
in a million, as between two ordinary quartzes, are 3 ms in the 60 s that v may be old, for a piece that follows no
other without a pause. Whatever a peer claims, a piece occupied the wire between its departure and its acknowledgement.

Pure: times are seconds of the sender's clock, except arrivals.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from tahq.comm.link.frame import Direction, LogicalId

RECENT_STEPS = 20
"""Steps of which the least travel time is remembered; a path may become longer."""
RECENT_S = 60.0
"""Seconds for which it is remembered; clocks drift."""
LEAST_NBYTES = 16 * 1024
"""Pieces smaller than this say more about threads and sockets than about rates."""


class PieceTimes(NamedTuple):
    """An acknowledged piece of a frame.

    `queued_s` is when its frame was given to the link, `arrived_s` by the receiver's clock, which is another one in
    another `epoch` of the link. `is_again`: it was sent before, and may have arrived that time.
    """

    id: LogicalId
    nbytes: int
    queued_s: float
    taken_s: float
    acked_s: float
    arrived_s: float
    epoch: int = 0
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """A heartbeat that had its link to itself; `arrived_s` is by the receiver's clock."""

    epoch: int
    left_s: float
    arrived_s: float
    answered_s: float = 0.0
    """When its acknowledgement came."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece had the wire to itself from `begin_s` to `end_s`."""

    link: int
    piece: PieceTimes
    begin_s: float
    end_s: float

    @property
    def key(self) -> tuple[int, Direction]:
        """Link and direction."""
        return self.link, self.piece.id.direction


class _Path:
    """What is known of the path of one link, in one of its epochs."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._seconds_per_byte: deque[float] = deque(maxlen=RECENT_STEPS)
        self._least_s: deque[tuple[float, float]] = deque(maxlen=RECENT_STEPS)
        """When some pieces were acknowledged, and the least travel time of them."""

    def passed_s(self, sent: Sequence[PieceTimes], heartbeats: Iterable[HeartbeatTimes]) -> Iterator[float]:
        """When each of these pieces, in the order of arrival, had passed the bottleneck."""
        now_s = max(piece.acked_s for piece in sent)
        self._learn(sent, now_s)
        least_s = [least_s for seen_s, least_s in self._least_s if now_s - seen_s <= RECENT_S]
        least_s += [beat.arrived_s - beat.left_s for beat in heartbeats if now_s - beat.left_s <= RECENT_S]
        bare_s = min(least_s, default=math.inf)
        for piece in sent:
            yield max(piece.taken_s, min(piece.acked_s, piece.arrived_s - bare_s))

    def _learn(self, sent: Sequence[PieceTimes], now_s: float) -> None:
        paces = list(_paces(sent))
        if paces:
            self._seconds_per_byte.append(median(paces))
        pace = min(self._seconds_per_byte, default=0.0)
        # a piece that was sent again may have arrived the first time
        took_s = [p.arrived_s - p.taken_s - pace * p.nbytes for p in sent if not p.is_again]
        if took_s:
            self._least_s.append((now_s, min(took_s)))


class WireClock:
    """The clock of one host's wire; it remembers every link's path, and until when the wire was occupied."""

    def __init__(self) -> None:
        self._paths: dict[int, _Path] = {}
        self._free_s = -math.inf

    def passages(
        self,
        pieces: Mapping[int, Sequence[PieceTimes]],
        heartbeats: Mapping[int, Sequence[HeartbeatTimes]] | None = None,
    ) -> list[Passage]:
        """When each piece acknowledged since the last call had the wire, in that order; both arguments are by link."""
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
        """When each piece had passed the bottleneck, with its link; epoch by epoch."""
        in_order = sorted(sent, key=lambda piece: (piece.epoch, piece.arrived_s))
        for epoch, group in groupby(in_order, key=lambda piece: piece.epoch):
            path = self._paths.get(link)
            if path is None or path.epoch != epoch:
                path = self._paths[link] = _Path(epoch)
            pieces = list(group)
            beats = [beat for beat in heartbeats if beat.epoch == epoch]
            for end_s, piece in zip(path.passed_s(pieces, beats), pieces, strict=True):
                yield end_s, link, piece


def _paces(sent: Sequence[PieceTimes]) -> Iterable[float]:
    """Seconds per byte of pieces that left before the previous piece of the same frame was acknowledged.

    Pieces that arrived at the same time count together.
    """
    together = [list(pieces) for _, pieces in groupby(sent, key=lambda piece: piece.arrived_s)]
    for before, pieces in pairwise(together):
        nbytes = sum(piece.nbytes for piece in pieces)
        follows = {piece.id for piece in pieces} == {before[-1].id} and pieces[0].taken_s < before[0].acked_s
        if follows and nbytes >= LEAST_NBYTES:
            yield (pieces[0].arrived_s - before[0].arrived_s) / nbytes


def busy_seconds(passages: Iterable[Passage]) -> dict[tuple[int, Direction], float]:
    """Seconds that the wire was occupied, by link and direction."""
    total: dict[tuple[int, Direction], float] = {}
    for passage in passages:
        total[passage.key] = total.get(passage.key, 0.0) + passage.end_s - passage.begin_s
    return total
