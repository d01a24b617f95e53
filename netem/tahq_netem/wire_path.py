"""What packets from one host to another meet between the two hosts' own lines. Pure: time is an argument.

1. loss: each packet is dropped with probability `loss`, independently;
2. the pair's rate, where an exception sets one: a transmitter with a drop-tail queue;
3. the delay: `delay` ± uniform `jitter`, never below 0. Packets keep their order, but for a share `reorder`
   that skips the delay.

Many segments in one frame are lost and reordered one by one; of jitter each frame draws once, since
frames are at most about 1 ms long (see `longest_run_segments`).
Every random choice comes from a generator seeded by a name, so the same packets meet the same fate.
"""

import math
from collections.abc import Iterator
from random import Random

from tahq_netem.description import PathShape
from tahq_netem.wire_packet import Packet, cut
from tahq_netem.wire_queue import Agenda, Forward, Gaps, Transmitter


class Path:
    """What packets from one host to another meet; `forward` takes them to the receiver's own line."""

    def __init__(self, agenda: Agenda, forward: Forward, shape: PathShape, rtt_s: float, *, seed: str) -> None:
        self._agenda = agenda
        self._forward = forward
        self._shape = shape
        self._loss = Gaps(Random(f"{seed}/loss"), shape.loss)
        self._overtaking = Gaps(Random(f"{seed}/reorder"), shape.reorder)
        self._jitter = Random(f"{seed}/jitter")
        self._line = Transmitter(agenda, self._delay, shape.rate_bits_per_s, rtt_s)
        self._last_due_s = -math.inf
        self._num_packets = 0
        self._num_lost = 0

    def counters(self) -> dict[str, int]:
        """Packets that came, that were lost by chance, and that the pair's queue had no room for."""
        return {"packets": self._num_packets, "lost": self._num_lost, "dropped": self._line.num_dropped}

    def set_shape(self, now_s: float, shape: PathShape, rtt_s: float) -> None:
        """Another shape from now on; what is already under way arrives as it would have."""
        self._loss.set_probability(shape.loss)
        self._overtaking.set_probability(shape.reorder)
        self._shape = shape
        self._line.set_rate(now_s, shape.rate_bits_per_s, rtt_s)

    def enter(self, now_s: float, packet: Packet) -> None:
        """Take a packet that its sender's line has let through."""
        self._num_packets += packet.num_segments
        lost = self._loss.chosen(packet.num_segments)
        if not lost:
            self._line.enter(now_s, packet)
            return
        self._num_lost += len(lost)
        for run, is_lost in _divide(packet, lost):
            if not is_lost:
                self._line.enter(now_s, run)

    def _delay(self, now_s: float, packet: Packet) -> None:
        if self._shape.delay_s == 0 and self._shape.jitter_s == 0 and now_s >= self._last_due_s:
            self._forward(now_s, packet)
            return
        chosen = self._overtaking.chosen(packet.num_segments)
        parts = _divide(packet, chosen) if chosen else ((packet, False),)
        for part, overtakes in parts:
            if overtakes:
                self._forward(now_s, part)
            else:
                self._agenda.put(self._due_s(now_s), self._forward, part)

    def _due_s(self, now_s: float) -> float:
        shape = self._shape
        delay_s = shape.delay_s
        if shape.jitter_s:
            delay_s = max(0.0, delay_s + self._jitter.uniform(-shape.jitter_s, shape.jitter_s))
        self._last_due_s = max(self._last_due_s, now_s + delay_s)
        return self._last_due_s


def _divide(packet: Packet, chosen: list[int]) -> Iterator[tuple[Packet, bool]]:
    """The packet's segments in order: those chosen one by one, those between them as runs."""
    start = 0
    for position in chosen:
        if position > start:
            yield cut(packet, start, position - start), False
        yield cut(packet, position, 1), True
        start = position + 1
    if start < packet.num_segments:
        yield cut(packet, start, packet.num_segments - start), False
