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
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from random import Random
from typing import Final

from tahq_netem.network.description import PathShape
from tahq_netem.wire.packet import FULL_FRAME_BYTES, Packet, cut, runs

Forward = Callable[[float, Packet], None]

LONGEST_RUN_S: Final = 1e-3
"""A transmitter takes packets in runs of at most this long, so that 64 kB at 10 Mbit/s do not arrive at once."""
SMALLEST_QUEUE_BYTES: Final = 128 * FULL_FRAME_BYTES
SHORTEST_QUEUE_S: Final = 0.2
BURST_S: Final = 1e-4
FIRST_RUN_S: Final = 1e-4
OPENING_S: Final = 10e-3
OPENING_RUN_S: Final = 2.5e-4
"""On an idle line runs are of `FIRST_RUN_S`, in the first `OPENING_S` of a busy one of `OPENING_RUN_S`, then whole."""
WHOLE: Final = 1 << 16


def queue_limit_bytes(rate_bits_per_s: float, rtt_s: float) -> int:
    """Depth of a drop-tail queue: one round trip at its rate, but at least 200 ms and 128 full frames.

    A bandwidth-delay product lets one flow of a loss-based congestion control keep the line full (it
    may halve its window at a loss and must still cover the round trip). 200 ms is what access networks
    have, and lets a message of 1 MB pass where only the receiver's side is slow.
    """
    return max(SMALLEST_QUEUE_BYTES, math.ceil(rate_bits_per_s / 8 * max(SHORTEST_QUEUE_S, rtt_s)))


def burst_bytes(rate_bits_per_s: float) -> int:
    """What an idle line lets through at once: two full frames, or 100 µs of a fast line.

    More would show as a faster first message after idle (measured at 100 Mbit/s: 70 kB are 10 % of 1 MB);
    less would turn every late wake-up of a shaper into lost rate.
    """
    return max(2 * FULL_FRAME_BYTES, math.ceil(rate_bits_per_s / 8 * BURST_S))


def segments_within(duration_s: float, rate_bits_per_s: float) -> int:
    """How many full packets a line of this rate sends within `duration_s`; at least one."""
    return max(1, int(rate_bits_per_s * duration_s / 8 / FULL_FRAME_BYTES))


def longest_run_segments(rate_bits_per_s: float) -> int:
    """How many full packets a line of this rate sends within `LONGEST_RUN_S`; at least one."""
    return segments_within(LONGEST_RUN_S, rate_bits_per_s)


class Agenda:
    """What is to happen, by due time; equal times in the order in which they were put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Forward, Packet]] = []
        self._count = 0

    @property
    def next_due_s(self) -> float | None:
        """When the earliest entry is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def put(self, due_s: float, action: Forward, packet: Packet) -> None:
        """Call `action(due_s, packet)` when the time has come."""
        self._count += 1
        heappush(self._heap, (due_s, self._count, action, packet))

    def run_until(self, now_s: float) -> None:
        """Do everything that is due, in order, including what that adds."""
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due_s, _, action, packet = heappop(heap)
            action(due_s, packet)


class Gaps:
    """Which packets of a stream are chosen, each with probability p: by the gaps between them.

    The number of packets before the next chosen one is geometric, floor(ln u / ln(1 − p)) with u uniform
    in (0, 1], so that 44 segments of which none is chosen cost one comparison.
    """

    def __init__(self, random: Random, probability: float) -> None:
        self._random = random
        self._probability = probability
        self._before_next = self._draw()

    def set_probability(self, probability: float) -> None:
        """Choose with another probability from now on."""
        if probability == self._probability:
            return
        self._probability = probability
        self._before_next = self._draw()

    def chosen(self, num_packets: int) -> list[int]:
        """Positions in [0, num_packets) that are chosen among the next `num_packets`."""
        if num_packets <= self._before_next:
            self._before_next -= num_packets
            return []
        positions = []
        position = self._before_next
        while position < num_packets:
            positions.append(int(position))
            position += 1 + self._draw()
        self._before_next = position - num_packets
        return positions

    def _draw(self) -> float:
        if self._probability <= 0:
            return math.inf
        if self._probability >= 1:
            return 0
        return math.floor(math.log(1 - self._random.random()) / math.log1p(-self._probability))


class Uplink:
    """The end of a sender's line, which the kernel shapes: holds each packet until its last bit is out.

    A long flow's frames stay whole, which saves work. A message's first frames are handed over in shorter
    runs, as those are complete: its sender waits to see them acknowledged, and TCP's window is still small.
    """

    def __init__(self, agenda: Agenda, rate_bits_per_s: float | None) -> None:
        self._agenda = agenda
        self._began_s = -math.inf
        self._finished_s = -math.inf
        self.rate_bits_per_s = rate_bits_per_s

    def enter(self, now_s: float, packet: Packet, forward: Forward) -> None:
        """Forward the packet when it has left the line."""
        rate = self.rate_bits_per_s
        if rate is None:
            forward(now_s, packet)
            return
        for run in runs(packet, self._longest_run(now_s, rate)):
            self._finished_s = max(self._finished_s, now_s) + 8 * run.wire_bytes / rate
            self._agenda.put(self._finished_s, forward, run)

    def _longest_run(self, now_s: float, rate: float) -> int:
        idle_s = now_s - self._finished_s
        if idle_s > OPENING_S:
            self._began_s = now_s
        if idle_s > FIRST_RUN_S:
            return segments_within(FIRST_RUN_S, rate)
        if now_s - self._began_s < OPENING_S:
            return segments_within(OPENING_RUN_S, rate)
        return WHOLE


class Transmitter:
    """A line of a given rate behind a drop-tail queue; rate None lets everything through."""

    def __init__(self, agenda: Agenda, forward: Forward, rate_bits_per_s: float | None, rtt_s: float) -> None:
        self._agenda = agenda
        self._forward = forward
        self._waiting: deque[Packet] = deque()
        self._waiting_bytes = 0
        self._free_s = -math.inf
        self._wake_s = math.inf
        self._rate: float | None = None
        self.num_dropped = 0
        self.set_rate(0.0, rate_bits_per_s, rtt_s)

    def set_rate(self, now_s: float, rate_bits_per_s: float | None, rtt_s: float) -> None:
        """Another rate and depth of the queue from now on; for what waits, too."""
        self._rate = rate_bits_per_s
        if rate_bits_per_s is None:
            self._flush(now_s)
            return
        self._limit_bytes = queue_limit_bytes(rate_bits_per_s, rtt_s)
        self._burst_s = 8 * burst_bytes(rate_bits_per_s) / rate_bits_per_s
        self._longest_run = longest_run_segments(rate_bits_per_s)
        if self._waiting:
            self._sleep(now_s)

    def enter(self, now_s: float, packet: Packet) -> None:
        """Take a packet: it goes on at once, waits, or is dropped because the queue is full."""
        if self._rate is None:
            self._forward(now_s, packet)
        elif packet.num_segments > self._longest_run:
            for run in runs(packet, self._longest_run):
                self._take(now_s, run, 8 / self._rate)
        else:
            self._take(now_s, packet, 8 / self._rate)

    def _take(self, now_s: float, packet: Packet, s_per_byte: float) -> None:
        finish_s = self._free_s + packet.wire_bytes * s_per_byte
        if not self._waiting and finish_s <= now_s:
            # An idle line saves up no more than a burst.
            self._free_s = max(finish_s, now_s - self._burst_s)
            self._forward(now_s, packet)
        elif self._waiting_bytes + packet.wire_bytes > self._limit_bytes:
            self.num_dropped += packet.num_segments
        else:
            self._waiting.append(packet)
            self._waiting_bytes += packet.wire_bytes
            if len(self._waiting) == 1:
                self._sleep(now_s)

    def _sleep(self, now_s: float) -> None:
        """Wake when the first in the queue has left the line."""
        assert self._rate is not None, "a line without a rate has no queue"
        self._wake_s = max(now_s, self._free_s + 8 * self._waiting[0].wire_bytes / self._rate)
        self._agenda.put(self._wake_s, self._wake, self._waiting[0])

    def _wake(self, now_s: float, _packet: Packet) -> None:
        if now_s != self._wake_s or not self._waiting:
            return  # set before the rate was changed
        packet = self._waiting.popleft()
        self._waiting_bytes -= packet.wire_bytes
        self._free_s = now_s
        self._forward(now_s, packet)
        if self._waiting:
            self._sleep(now_s)

    def _flush(self, now_s: float) -> None:
        while self._waiting:
            self._forward(now_s, self._waiting.popleft())
        self._waiting_bytes = 0


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
