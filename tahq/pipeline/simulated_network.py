"""The network of a simulated step: uplinks that serve one piece at a time, paths, and downlinks.

A transfer is cut through, not stored and forwarded: its bytes leave the sender's uplink one after another
and enter the receiver's downlink `latency_s` later while the rest is still being sent. With n bytes,

    sent      = max(queued, uplink free) + n / uplink rate
    passed    = max(sent, max(first byte sent, path free) + n / path rate)
    delivered = max(passed + latency, max(first byte's arrival, downlink free) + n / downlink rate)

so with equal rates and a free downlink the frame arrives one serialisation and one latency later. Whenever an
uplink is free it takes a piece of the frame that goes first: the one queued first, or, where one direction is
preferred, the first of those. What it has begun to send it sends to the end of the piece. What a host gets it
acknowledges: where its uplink is busy, the next piece there waits for these bytes.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tahq.comm.frame import Direction
from tahq.pipeline.costs import Costs, FirstOut
from tahq.pipeline.timeline import TransferSpan

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
class _Uplink:
    """Frames that wait, by (preferred or not, number), and whether a piece is under way."""

    waiting: list[tuple[int, int, _Queued]] = field(default_factory=list)
    is_busy: bool = False
    to_acknowledge: float = 0.0
    """Bytes that came since the last piece went."""


class SimulatedNetwork:
    """Moves frames between stages; told the time by events that it asks for.

    Args:
        costs: rates, latencies, size of a piece, and which direction goes first.
        at: has an event happen at a time.
    """

    def __init__(self, costs: Costs, at: Callable[[float, Event], None]) -> None:
        self._costs = costs
        self._at = at
        self._uplinks = [_Uplink() for _ in costs.hosts]
        self._path_free_s: dict[tuple[int, int], float] = {}
        self._downlink_free_s = [0.0 for _ in costs.hosts]
        self._num_queued = 0

    def send(self, transfer: TransferSpan, now: float, deliver: Delivery) -> None:
        """Queue a frame on its source's uplink; `deliver` gets it with all its times when its last byte is there."""
        piece_nbytes = self._costs.piece_nbytes
        num_pieces = max(1, math.ceil(transfer.nbytes / piece_nbytes)) if piece_nbytes else 1
        queued = _Queued(replace(transfer, queued_s=now), deliver, num_pieces)
        self._num_queued += 1
        uplink = self._uplinks[transfer.source]
        heapq.heappush(uplink.waiting, (self._rank(transfer.direction), self._num_queued, queued))
        if not uplink.is_busy:
            self._send_piece(transfer.source, now)

    def _rank(self, direction: Direction) -> int:
        preferred = {FirstOut.ACTIVATIONS: Direction.FORWARD, FirstOut.GRADIENTS: Direction.BACKWARD}
        return int(direction is not preferred.get(self._costs.first, direction))

    def _send_piece(self, stage: int, now: float) -> None:
        uplink = self._uplinks[stage]
        uplink.is_busy = bool(uplink.waiting)
        if not uplink.waiting:
            return
        queued = uplink.waiting[0][2]
        nbytes = self._piece_nbytes(queued)
        acknowledging = self._costs.acknowledged * uplink.to_acknowledge
        uplink.to_acknowledge = 0.0
        sent_s = now + (acknowledging + nbytes) / self._costs.hosts[stage].uplink_bytes_per_s
        if queued.num_sent == 0:
            queued.transfer = replace(queued.transfer, start_s=now)
        queued.num_sent += 1
        is_last = queued.num_sent == queued.num_pieces
        if is_last:
            heapq.heappop(uplink.waiting)
            queued.transfer = replace(queued.transfer, sent_s=sent_s)
        self._travel(queued, nbytes, now, sent_s, is_last)
        self._at(sent_s, lambda time_s: self._send_piece(stage, time_s))

    def _piece_nbytes(self, queued: _Queued) -> float:
        if queued.num_pieces == 1:
            return queued.transfer.nbytes
        full = float(self._costs.piece_nbytes or 0)
        return queued.transfer.nbytes - full * queued.num_sent if queued.num_sent == queued.num_pieces - 1 else full

    def _travel(self, queued: _Queued, nbytes: float, first_s: float, last_s: float, is_last: bool) -> None:
        transfer = queued.transfer
        first_s, last_s = self._use_path(transfer, nbytes, first_s, last_s)
        latency_s = self._latency_s(transfer.cut)

        def arrive(now: float) -> None:
            delivered_s = self._use_downlink(transfer.target, nbytes, first_s + latency_s, now)
            receiver = self._uplinks[transfer.target]
            receiver.to_acknowledge += nbytes if receiver.is_busy else 0.0
            if is_last:
                done = replace(transfer, delivered_s=delivered_s)
                self._at(delivered_s, lambda _: queued.deliver(done))

        self._at(last_s + latency_s, arrive)

    def _use_path(self, transfer: TransferSpan, nbytes: float, first_s: float, last_s: float) -> tuple[float, float]:
        """When the first and the last byte leave the path that entered it at these times."""
        cut = self._costs.cuts[transfer.cut]
        forward = transfer.direction is Direction.FORWARD
        rate = cut.forward_bytes_per_s if forward else cut.backward_bytes_per_s
        ends = transfer.source, transfer.target
        start_s = max(first_s, self._path_free_s.get(ends, 0.0))
        self._path_free_s[ends] = max(last_s, start_s + nbytes / rate)
        return start_s, self._path_free_s[ends]

    def _latency_s(self, cut: int) -> float:
        own = self._costs.cuts[cut].latency_s
        return self._costs.latency_s if own is None else own

    def _use_downlink(self, stage: int, nbytes: float, first_s: float, last_s: float) -> float:
        rate = self._costs.hosts[stage].downlink_bytes_per_s
        drained_s = max(first_s, self._downlink_free_s[stage]) + nbytes / rate
        self._downlink_free_s[stage] = max(drained_s, last_s)
        return self._downlink_free_s[stage]
