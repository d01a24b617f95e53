"""When a relayed chunk is sent, arrives and is delivered: lines that carry one chunk at a time, in virtual time.

Pure: nothing here reads a clock. A chunk of n bytes is sent when its sender's uplink and the pair's own line
are free, is under way for the path's delay, and then takes its receiver's downlink. Each byte of payload costs
1514/1448 on a line, as it would in TCP's segments, so that a rate means the same under every backend.
"""

import math
from dataclasses import dataclass
from typing import Final

from tahq_netem.description import HostShape, NetworkPlan, PathShape
from tahq_netem.figures import GOODPUT_SHARE

LARGEST_CHUNK_BYTES: Final = 64 * 1024
SMALLEST_CHUNK_BYTES: Final = 1448
_CHUNK_S: Final = 2e-3
_WINDOW_LIMIT_BYTES: Final = 64 * 1024 * 1024
_QUEUE_BYTES: Final = 1024 * 1024
_UNSHAPED_BITS_PER_S: Final = 10e9


@dataclass(slots=True)
class Line:
    """What carries bytes one after another; `rate_bits_per_s` None: in no time."""

    rate_bits_per_s: float | None = None
    free_s: float = -math.inf

    def duration_s(self, num_bytes: int) -> float:
        """How long `num_bytes` of payload occupy it: 8·n / (0.956·rate)."""
        return 8 * num_bytes / (GOODPUT_SHARE * self.rate_bits_per_s) if self.rate_bits_per_s else 0.0

    def send(self, num_bytes: int, ready_s: float) -> float:
        """When bytes have left that wait since `ready_s`: max(free, ready) + duration."""
        self.free_s = max(self.free_s, ready_s) + self.duration_s(num_bytes)
        return self.free_s

    def pass_on(self, num_bytes: int, began_s: float, arrival_s: float) -> float:
        """When bytes have passed whose first arrived at `began_s` and whose last at `arrival_s`.

        max(arrival, max(free, began) + duration): nothing is added behind a slower line, or by its equal.
        """
        self.free_s = max(arrival_s, max(self.free_s, began_s) + self.duration_s(num_bytes))
        return self.free_s


class RelayPaths:
    """The lines of a network's hosts and pairs, and who is cut off."""

    def __init__(self, plan: NetworkPlan) -> None:
        self.plan = plan
        self._cut_off: set[str] = set()
        self._up = {host: Line(shape.up_bits_per_s) for host, shape in plan.host_shapes.items()}
        self._down = {host: Line(shape.down_bits_per_s) for host, shape in plan.host_shapes.items()}
        self._pairs = {pair: Line(path.rate_bits_per_s) for pair, path in plan.paths.items()}

    def set_rates(self, host: str, shape: HostShape) -> None:
        """Other rates of a host, from the next chunk on."""
        self.plan = self.plan.with_rates(host, shape.up_bits_per_s, shape.down_bits_per_s)
        self._up[host].rate_bits_per_s = shape.up_bits_per_s
        self._down[host].rate_bits_per_s = shape.down_bits_per_s

    def set_path(self, source: str, destination: str, shape: PathShape) -> None:
        """Another path, from the next chunk on."""
        self.plan = self.plan.with_path(source, destination, shape)
        self._pairs[source, destination].rate_bits_per_s = shape.rate_bits_per_s

    def set_link(self, host: str, *, is_up: bool) -> None:
        """Cut a host off, or join it again."""
        if is_up:
            self._cut_off.discard(host)
        else:
            self._cut_off.add(host)

    def is_open(self, source: str, destination: str) -> bool:
        """Whether anything gets from one to the other; a path that loses everything is an outage."""
        return not {source, destination} & self._cut_off and self.plan.paths[source, destination].loss < 1.0

    def free_s(self, source: str, destination: str) -> float:
        """When the next chunk can be sent."""
        return max(self._up[source].free_s, self._pairs[source, destination].free_s)

    def send(self, source: str, destination: str, num_bytes: int, ready_s: float) -> float:
        """When a chunk that has waited since `ready_s` reaches its destination's downlink."""
        up, pair = self._up[source], self._pairs[source, destination]
        sent_s = up.send(num_bytes, ready_s)
        passed_s = pair.pass_on(num_bytes, sent_s - up.duration_s(num_bytes), sent_s)
        return passed_s + self.plan.paths[source, destination].delay_s

    def deliver(self, source: str, destination: str, num_bytes: int, arrival_s: float) -> float:
        """When a chunk whose last byte reached the downlink at `arrival_s` is through it."""
        lines = self._up[source], self._pairs[source, destination]
        span_s = max(line.duration_s(num_bytes) for line in lines)
        return self._down[destination].pass_on(num_bytes, arrival_s - span_s, arrival_s)

    def chunk_bytes(self, source: str, destination: str) -> int:
        """How much to send at once: about 2 ms, so that those who share a line take turns often."""
        rate = self.plan.rate_bits_per_s(source, destination)
        wanted = LARGEST_CHUNK_BYTES if rate is None else int(rate * _CHUNK_S / 8)
        return min(LARGEST_CHUNK_BYTES, max(SMALLEST_CHUNK_BYTES, wanted))

    def window_bytes(self, source: str, destination: str) -> int:
        """How much of one connection may be under way: what the path itself holds, and a queue."""
        rate = self.plan.rate_bits_per_s(source, destination) or _UNSHAPED_BITS_PER_S
        held = rate * self.plan.paths[source, destination].delay_s / 8
        return min(_WINDOW_LIMIT_BYTES, int(held) + _QUEUE_BYTES)
