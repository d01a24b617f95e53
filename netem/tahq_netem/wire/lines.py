"""Lines, queues and paths of the wire, as a discrete-event simulation. Pure: time is an argument.

Events run in the order of their due times, and each sees its own due time as *now*, so that a process that wakes up
late catches up: lateness moves single packets, never rates or delays. Every random choice comes from a generator
seeded by a name, so the same packets meet the same fate. `tahq.comm.network_model.Line` says when a packet has left a
line.

- `Uplink`: the kernel's shaper hands a packet over when its first bit would leave; the line holds it until its last.
- `Transmitter`: a line further on, behind a drop-tail queue. A packet has been serialised once before it gets there.
- `Path`: what packets meet between the two hosts' own lines: loss, the pair's rate, delay.
- `Gaps`: which packets of a stream are chosen (to be lost, to overtake), reproducibly.
- `Switch`: all hosts and what joins them: where a frame goes, and what it meets there.
"""

import math
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final

from tahq.comm.network_model import FULL_FRAME_NBYTES, Line, burst_nbytes, queue_limit_nbytes
from tahq_netem.network.description import NetworkPlan, PathShape
from tahq_netem.wire.packet import Packet, cut, destination_address, read_packet, runs

Forward = Callable[[float, Packet], None]

LONGEST_RUN_S: Final = 1e-3
"""A transmitter takes packets in runs of at most this long, so that 64 kB at 10 Mbit/s do not arrive at once."""
FIRST_RUN_S: Final = 1e-4
OPENING_S: Final = 10e-3
OPENING_RUN_S: Final = 2.5e-4
"""On an idle uplink runs are `FIRST_RUN_S` long, in the first `OPENING_S` of a busy one `OPENING_RUN_S`, then whole."""
WHOLE: Final = 1 << 16


def segments_within(duration_s: float, rate_bits_per_s: float) -> int:
    """How many full packets a line sends within `duration_s`; at least one."""
    return max(1, int(rate_bits_per_s * duration_s / 8 / FULL_FRAME_NBYTES))


class Agenda:
    """Events by due time; events with equal times in the order in which they were put."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Forward, Packet]] = []
        self._count = 0

    @property
    def next_due_s(self) -> float | None:
        """When the earliest event is due; None: no event."""
        return self._heap[0][0] if self._heap else None

    def put(self, due_s: float, action: Forward, packet: Packet) -> None:
        """Call `action(due_s, packet)` at that time."""
        self._count += 1
        heappush(self._heap, (due_s, self._count, action, packet))

    def run_until(self, now_s: float) -> None:
        """Run the events that are due, in order, including those that they add."""
        heap = self._heap
        while heap and heap[0][0] <= now_s:
            due_s, _, action, packet = heappop(heap)
            action(due_s, packet)


class Gaps:
    """Which packets of a stream are chosen, each with probability p: by the gaps between them.

    The number of packets before the next chosen one is geometric, floor(ln u / ln(1 − p)) with u uniform in (0, 1], so
    that 44 segments of which none is chosen cost one comparison.
    """

    def __init__(self, random: Random, probability: float) -> None:
        self._random = random
        self._probability = probability
        self._before_next = self._draw()

    def set_probability(self, probability: float) -> None:
        """Choose with another probability from now on."""
        if probability != self._probability:
            self._probability = probability
            self._before_next = self._draw()

    def chosen(self, num_packets: int) -> list[int]:
        """Positions in [0, num_packets) that are chosen among the next `num_packets`."""
        if num_packets <= self._before_next:
            self._before_next -= num_packets
            return []
        positions, position = [], self._before_next
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


class ShapedUplink:
    """The end of a sender's line, which the kernel shapes: holds each packet until its last bit is out.

    A long flow's frames stay whole, which saves work. A message's first frames are handed over in shorter runs: its
    sender waits for their acknowledgements, and TCP's window is still small.
    """

    def __init__(self, agenda: Agenda, rate_bits_per_s: float | None) -> None:
        self._agenda = agenda
        self._began_s = -math.inf
        self._line = Line()
        self.set_rate(rate_bits_per_s)

    def set_rate(self, rate_bits_per_s: float | None) -> None:
        """Another rate from now on; None: unlimited."""
        self._line.rate_bits_per_s = rate_bits_per_s or math.inf

    def enter(self, now_s: float, packet: Packet, forward: Forward) -> None:
        """Forward the packet when it has left the line."""
        if self._line.rate_bits_per_s == math.inf:
            forward(now_s, packet)
            return
        for run in runs(packet, self._longest_run(now_s)):
            _, left_s = self._line.serve(run.wire_bytes, now_s)
            self._agenda.put(left_s, forward, run)

    def _longest_run(self, now_s: float) -> int:
        idle_s = now_s - self._line.free_s
        if idle_s > OPENING_S:
            self._began_s = now_s
        if idle_s > FIRST_RUN_S:
            return segments_within(FIRST_RUN_S, self._line.rate_bits_per_s)
        if now_s - self._began_s < OPENING_S:
            return segments_within(OPENING_RUN_S, self._line.rate_bits_per_s)
        return WHOLE


class Transmitter:
    """A line of a given rate behind a drop-tail queue; rate None lets everything through."""

    def __init__(self, agenda: Agenda, forward: Forward, rate_bits_per_s: float | None, rtt_s: float) -> None:
        self._agenda = agenda
        self._forward = forward
        self._waiting: deque[Packet] = deque()
        self._waiting_bytes = 0
        self._line = Line()
        self._free_before_s = -math.inf
        self._wake_s = math.inf
        self._limit_bytes = 0
        self._longest_run = WHOLE
        self.set_rate(0.0, rate_bits_per_s, rtt_s)

    def set_rate(self, now_s: float, rate_bits_per_s: float | None, rtt_s: float) -> None:
        """Another rate and queue length from now on, for waiting packets too."""
        self._line.rate_bits_per_s = rate_bits_per_s or math.inf
        if rate_bits_per_s is None:
            while self._waiting:
                self._pass_first(now_s)
            return
        self._line.burst_s = 8 * burst_nbytes(rate_bits_per_s) / rate_bits_per_s
        self._limit_bytes = queue_limit_nbytes(rate_bits_per_s, rtt_s)
        self._longest_run = segments_within(LONGEST_RUN_S, rate_bits_per_s)
        if self._waiting:
            self._line.free_s = self._free_before_s
            self._sleep(max(now_s, self._serve(now_s, self._waiting[0])))

    def enter(self, now_s: float, packet: Packet) -> None:
        """Take a packet: it goes on at once, waits, or is dropped because the queue is full."""
        if self._line.rate_bits_per_s == math.inf:
            self._forward(now_s, packet)
            return
        for run in runs(packet, self._longest_run):
            self._take(now_s, run)

    def _take(self, now_s: float, packet: Packet) -> None:
        if self._waiting and self._waiting_bytes + packet.wire_bytes > self._limit_bytes:
            return
        if not self._waiting:
            left_s = self._serve(now_s, packet)
            if left_s <= now_s:
                self._forward(now_s, packet)
                return
            self._sleep(left_s)
        self._waiting.append(packet)
        self._waiting_bytes += packet.wire_bytes

    def _serve(self, now_s: float, first: Packet) -> float:
        """Put the first packet on the line; return when it has left."""
        self._free_before_s = self._line.free_s
        return self._line.serve(first.wire_bytes, -math.inf, now_s)[1]

    def _sleep(self, until_s: float) -> None:
        self._wake_s = until_s
        self._agenda.put(until_s, self._wake, Packet(b"", 0))

    def _wake(self, now_s: float, _packet: Packet) -> None:
        if now_s != self._wake_s or not self._waiting:
            return  # set before the rate was changed
        self._pass_first(now_s)
        if self._waiting:
            self._sleep(self._serve(now_s, self._waiting[0]))

    def _pass_first(self, now_s: float) -> None:
        packet = self._waiting.popleft()
        self._waiting_bytes -= packet.wire_bytes
        self._forward(now_s, packet)


class Path:
    """What packets from one host to another meet between the two hosts' own lines.

    1. loss: each packet is dropped with probability `loss`, independently;
    2. the pair's rate, if an exception sets one: a transmitter with a drop-tail queue;
    3. the delay: `delay` ± uniform `jitter`, never below 0. Packets keep their order, but for a share `reorder` that
       skips the delay.

    Segments in one frame are lost and reordered one by one. Jitter is drawn once per frame, since frames are at most
    about 1 ms long. `forward` takes packets to the receiver's own line.
    """

    def __init__(self, agenda: Agenda, forward: Forward, shape: PathShape, rtt_s: float, *, seed: str) -> None:
        self._agenda = agenda
        self._forward = forward
        self._shape = shape
        self._loss = Gaps(Random(f"{seed}/loss"), shape.loss)
        self._overtaking = Gaps(Random(f"{seed}/reorder"), shape.reorder)
        self._jitter = Random(f"{seed}/jitter")
        self._line = Transmitter(agenda, self._delay, shape.rate_bits_per_s, rtt_s)
        self._last_due_s = -math.inf

    def set_shape(self, now_s: float, shape: PathShape, rtt_s: float) -> None:
        """Another shape from now on; packets under way arrive as they would have."""
        self._loss.set_probability(shape.loss)
        self._overtaking.set_probability(shape.reorder)
        self._shape = shape
        self._line.set_rate(now_s, shape.rate_bits_per_s, rtt_s)

    def enter(self, now_s: float, packet: Packet) -> None:
        """Take a packet that has left its sender's line."""
        for run, is_lost in _divide(packet, self._loss.chosen(packet.num_segments)):
            if not is_lost:
                self._line.enter(now_s, run)

    def _delay(self, now_s: float, packet: Packet) -> None:
        if self._shape.delay_s == 0 and self._shape.jitter_s == 0 and now_s >= self._last_due_s:
            self._forward(now_s, packet)
            return
        for part, overtakes in _divide(packet, self._overtaking.chosen(packet.num_segments)):
            if overtakes:
                self._forward(now_s, part)
            else:
                self._agenda.put(self._due_s(now_s), self._forward, part)

    def _due_s(self, now_s: float) -> float:
        jitter_s = self._shape.jitter_s
        drawn_s = self._jitter.uniform(-jitter_s, jitter_s) if jitter_s else 0.0
        self._last_due_s = max(self._last_due_s, now_s + max(0.0, self._shape.delay_s + drawn_s))
        return self._last_due_s


def _divide(packet: Packet, chosen: list[int]) -> Iterator[tuple[Packet, bool]]:
    """The packet's segments in order: the chosen ones one by one, those between them as runs."""
    if not chosen:
        yield packet, False
        return
    start = 0
    for position in chosen:
        if position > start:
            yield cut(packet, start, position - start), False
        yield cut(packet, position, 1), True
        start = position + 1
    if start < packet.num_segments:
        yield cut(packet, start, packet.num_segments - start), False


class Switch:
    """Everything between the hosts' devices; `deliver(host, frame)` is called with each frame that arrives.

    ::

        frame of a → [a up?] → uplink of a → path a→b: loss · rate · delay → transmitter of b → [b up?] → frame to b

    Hosts are known by their index in the plan and by their IPv4 address; frames to other addresses (multicast,
    outside) are dropped.
    """

    def __init__(self, plan: NetworkPlan, addresses: Sequence[str], deliver: Callable[[int, bytes], object]) -> None:
        self._plan = plan
        self._deliver = deliver
        self._by_address = {socket.inet_aton(address): index for index, address in enumerate(addresses)}
        self._index = {name: index for index, name in enumerate(plan.hosts)}
        self._cut_off: set[int] = set()
        self._agenda = Agenda()
        self._uplinks = [ShapedUplink(self._agenda, plan.host_shapes[host].up_bits_per_s) for host in plan.hosts]
        self._downlinks = [
            Transmitter(
                self._agenda,
                partial(self._arrive, index),
                plan.host_shapes[host].down_bits_per_s,
                plan.longest_round_trip_s(host),
            )
            for index, host in enumerate(plan.hosts)
        ]
        self._paths = {
            (self._index[source], self._index[destination]): Path(
                self._agenda,
                self._downlinks[self._index[destination]].enter,
                shape,
                plan.round_trip_s(source, destination),
                seed=f"{source}/{destination}",
            )
            for (source, destination), shape in plan.paths.items()
        }

    @property
    def next_due_s(self) -> float | None:
        """When `run_until` next has something to do; None: not before the next frame."""
        return self._agenda.next_due_s

    def run_until(self, now_s: float) -> None:
        """Deliver what is due."""
        self._agenda.run_until(now_s)

    def send(self, now_s: float, source: int, frame: bytes) -> None:
        """Take a frame that the host `source` has started to send."""
        destination = self._by_address.get(destination_address(frame))
        if destination is None or destination == source or source in self._cut_off:
            return
        self._uplinks[source].enter(now_s, read_packet(frame), self._paths[source, destination].enter)

    def _arrive(self, destination: int, now_s: float, packet: Packet) -> None:
        if destination not in self._cut_off:
            self._deliver(destination, packet.frame)

    def set_link(self, _now_s: float, host: str, is_up: bool) -> None:
        """Cut a host off (its traffic is lost in both directions) or join it again."""
        (self._cut_off.discard if is_up else self._cut_off.add)(self._index[host])

    def set_plan(self, now_s: float, plan: NetworkPlan) -> None:
        """Set every host's access link, and what packets meet on each path."""
        before, self._plan = self._plan, plan
        changed = {host for host in plan.hosts if plan.host_shapes[host] != before.host_shapes[host]}
        for ends, shape in plan.paths.items():
            if shape != before.paths[ends]:
                source, destination = ends
                path = self._paths[self._index[source], self._index[destination]]
                path.set_shape(now_s, shape, plan.round_trip_s(source, destination))
                changed |= {source, destination}  # the length of a queue follows the round trip
        for host in changed:
            index, shape_of_host = self._index[host], plan.host_shapes[host]
            self._uplinks[index].set_rate(shape_of_host.up_bits_per_s)
            self._downlinks[index].set_rate(now_s, shape_of_host.down_bits_per_s, plan.longest_round_trip_s(host))
