"""The network of a simulated step: uplinks that serve one piece at a time, paths, and downlinks.

All three are lines of `tahq.comm.network_model`. A transfer is cut through, not stored and forwarded: its bytes leave
the sender's uplink one after another and enter the path at once and the receiver's downlink one latency later. So with
equal rates and a free downlink the frame arrives one serialisation and one latency later. Whenever an uplink is free it
takes a piece of the frame that goes first: the one queued first; where one direction is preferred, the first of those;
where no order is kept, as under plain TCP, of the link whose turn it is. A piece is sent to its end. A host
acknowledges what it receives: where its uplink is busy, the next piece there waits for these bytes.

Queues before downlinks and paths hold `Costs.queue_s`. Flow and congestion control keep in the sender what does not
fit: its uplink takes a piece of another link, or none until something has been delivered. So two neighbours that send
to one host slow each other down, and their other links with them.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from tahq.comm.link.frame import Direction
from tahq.comm.link.sending_order import Rank, rank_of
from tahq.comm.network_model import Line, transmission_s
from tahq.plan.simulate.costs import Costs


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """A frame that crosses a cut; times are seconds from the start of the step.

    queued_s: encoded and given to the sender's uplink. start_s, sent_s: first byte into, last byte out of
    the uplink. delivered_s: last byte out of the receiver's downlink.
    """

    cut: int
    direction: Direction
    micro_batch: int
    source: int
    target: int
    nbytes: float
    queued_s: float
    start_s: float
    sent_s: float
    delivered_s: float


Event = Callable[[float], None]
Delivery = Callable[[TransferSpan], None]


@dataclass(slots=True)
class _Queued:
    """A frame in an uplink's queue, and how many of its pieces have left."""

    transfer: TransferSpan
    deliver: Delivery
    num_pieces: int
    num_sent: int = 0


@dataclass(slots=True)
class _Link:
    """What waits on a host for one receiver, and what is under way to it."""

    waiting: list[tuple[Rank, _Queued]] = field(default_factory=list)
    """A heap by rank."""
    under_way: float = 0.0
    """Bytes."""
    turn: int = 0
    """Of the last piece that went."""


@dataclass(slots=True)
class _Uplink:
    """A host's links by receiver, and whether a piece is leaving."""

    links: dict[int, _Link] = field(default_factory=dict)
    is_busy: bool = False
    to_acknowledge: float = 0.0
    """Bytes that came since the last piece went."""


class SimulatedNetwork:
    """Moves frames between stages.

    Args:
        costs: rates, latencies, queues, size of a piece, and which direction goes first.
        at: schedules an event at a time.
    """

    def __init__(self, costs: Costs, at: Callable[[float, Event], None]) -> None:
        self._costs = costs
        self._at = at
        self._uplinks = [_Uplink() for _ in costs.hosts]
        self._paths: dict[tuple[int, int], Line] = defaultdict(Line)
        """By source and target."""
        self._downlinks = [Line(host.downlink_bits_per_s) for host in costs.hosts]
        self._under_way: dict[int, float] = defaultdict(float)
        """Bytes by receiver, from all senders."""
        self._held_up: set[int] = set()
        """Hosts of which something waits for room in a queue."""
        self._num_queued = 0
        self._num_turns = 0

    def send(self, transfer: TransferSpan, now: float, deliver: Delivery) -> None:
        """Queue a frame on its source's uplink; `deliver` gets it with all its times when its last byte is there."""
        piece_nbytes = self._costs.piece_nbytes
        num_pieces = max(1, math.ceil(transfer.nbytes / piece_nbytes)) if piece_nbytes else 1
        queued = _Queued(replace(transfer, queued_s=now), deliver, num_pieces)
        self._num_queued += 1
        uplink = self._uplinks[transfer.source]
        link = uplink.links.setdefault(transfer.target, _Link())
        rank = rank_of(transfer.direction, self._num_queued, self._costs.first or "oldest")
        heapq.heappush(link.waiting, (rank, queued))
        if not uplink.is_busy:
            self._send_piece(transfer.source, now)

    def _send_piece(self, stage: int, now: float) -> None:
        uplink = self._uplinks[stage]
        link = self._next_link(stage)
        uplink.is_busy = link is not None
        if link is None:
            return
        queued = link.waiting[0][1]
        nbytes = self._piece_nbytes(queued)
        acknowledging = self._costs.acknowledged * uplink.to_acknowledge
        uplink.to_acknowledge = 0.0
        sent_s = now + transmission_s(acknowledging + nbytes, self._costs.hosts[stage].uplink_bits_per_s)
        if queued.num_sent == 0:
            queued.transfer = replace(queued.transfer, start_s=now)
        queued.num_sent += 1
        is_last = queued.num_sent == queued.num_pieces
        if is_last:
            heapq.heappop(link.waiting)
            queued.transfer = replace(queued.transfer, sent_s=sent_s)
        self._num_turns += 1
        link.turn = self._num_turns
        link.under_way += nbytes
        self._under_way[queued.transfer.target] += nbytes
        self._travel(queued, nbytes, now, sent_s, is_last)
        self._at(sent_s, lambda time_s: self._send_piece(stage, time_s))

    def _next_link(self, stage: int) -> _Link | None:
        """The link whose piece an uplink takes now; None if it has to wait."""
        links = self._uplinks[stage].links
        ready = [(target, link) for target, link in links.items() if link.waiting]
        if self._costs.queue_s < math.inf:
            waiting = len(ready)
            ready = [(target, link) for target, link in ready if self._has_room(target, link)]
            if len(ready) < waiting:
                self._held_up.add(stage)
        if not ready:
            return None
        if self._costs.first is None:
            return min(ready, key=lambda item: (item[1].turn, item[1].waiting[0][0]))[1]
        return min(ready, key=lambda item: item[1].waiting[0][0])[1]

    def _has_room(self, target: int, link: _Link) -> bool:
        """Whether the queues before a receiver would still take a piece; an empty one takes a piece of any size."""
        transfer = link.waiting[0][1].transfer
        queue_s = self._costs.queue_s + self._costs.cuts[transfer.cut].latency_s
        allowed = queue_s * self._costs.hosts[target].downlink_bits_per_s / 8
        path = queue_s * self._path_bits_per_s(transfer) / 8
        return not link.under_way or (self._under_way[target] <= allowed and link.under_way <= path)

    def _piece_nbytes(self, queued: _Queued) -> float:
        if queued.num_pieces == 1:
            return queued.transfer.nbytes
        full = float(self._costs.piece_nbytes or 0)
        return queued.transfer.nbytes - full * queued.num_sent if queued.num_sent == queued.num_pieces - 1 else full

    def _travel(self, queued: _Queued, nbytes: float, first_s: float, last_s: float, is_last: bool) -> None:
        transfer = queued.transfer
        path = self._paths[transfer.source, transfer.target]
        path.rate_bits_per_s = self._path_bits_per_s(transfer)
        first_s, last_s = path.serve(nbytes, first_s, last_s)
        latency_s = self._costs.cuts[transfer.cut].latency_s

        def arrive(now: float) -> None:
            _, delivered_s = self._downlinks[transfer.target].serve(nbytes, first_s + latency_s, now)
            receiver = self._uplinks[transfer.target]
            receiver.to_acknowledge += nbytes if receiver.is_busy else 0.0
            if self._costs.queue_s < math.inf:
                self._at(delivered_s, lambda time_s: self._make_room(transfer, nbytes, time_s))
            if is_last:
                done = replace(transfer, delivered_s=delivered_s)
                self._at(delivered_s, lambda _: queued.deliver(done))

        self._at(last_s + latency_s, arrive)

    def _make_room(self, transfer: TransferSpan, nbytes: float, now: float) -> None:
        """Take a piece out of the queues, and let uplinks that waited for room go on."""
        self._under_way[transfer.target] -= nbytes
        self._uplinks[transfer.source].links[transfer.target].under_way -= nbytes
        for stage in self._take_held_up(transfer.target):
            if not self._uplinks[stage].is_busy:
                self._send_piece(stage, now)

    def _take_held_up(self, target: int) -> Iterator[int]:
        for stage in sorted(self._held_up):
            link = self._uplinks[stage].links.get(target)
            if link is not None and link.waiting:
                self._held_up.discard(stage)
                yield stage

    def _path_bits_per_s(self, transfer: TransferSpan) -> float:
        cut = self._costs.cuts[transfer.cut]
        return cut.forward_bits_per_s if transfer.direction is Direction.FORWARD else cut.backward_bits_per_s
