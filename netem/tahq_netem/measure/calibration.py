"""A network measured after it was built: is it what its description says?

`figures` says what the figures should be; those that noise made too slow are measured again. A calibration is stored
beside the results of the experiment that it belongs to, and an experiment on a network that is off does not start.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

from tahq.comm.network_model import FULL_FRAME_NBYTES
from tahq.errors import NetworkError
from tahq_netem.backends.network import Network
from tahq_netem.measure import meter
from tahq_netem.measure.figures import (
    DATAGRAM_WIRE_BITS,
    Calibration,
    Figure,
    goodput,
    goodput_figure,
    loss_figure,
    round_trip_figure,
)
from tahq_netem.network.description import NetworkPlan, PathShape

_Result = TypeVar("_Result")
MESSAGE_BYTES: Final = 1_000_000
ATTEMPTS: Final = 6
"""At 1 Gbit/s a message takes 8 ms, of which one late wake-up may take a tenth; the machine under a virtual machine may
be busy for seconds, as long as a few steady flows."""

_IDLE_S: Final = 1.0
_LONGEST_MESSAGE_S: Final = 10.0
_FEWEST_PACKETS: Final = 100
"""Of a flow, so that one packet is at most 1 %."""
_UNBOUNDED_BYTES: Final = 1 << 62
"""More than any link carries while it is measured."""
_UNSHAPED_TIMEOUT_S: Final = 10.0
_MOST_WAKERS: Final = 50
_BYTES_PER_WAKER: Final = 10_000
"""So that the datagrams that wake the machine up take the link for about 1 % of the message's time, and before it."""
_TRIP_INTERVAL_S: Final = 0.01
_COUNTED_PER_S: Final = 10_000.0
_LOST_WANTED: Final = 400
_WAIT_S: Final = 0.5
"""For an answer, beyond the round trip."""


def neighbours(plan: NetworkPlan) -> list[tuple[str, str]]:
    """Each host and the next, in both directions: covers what a pipeline uses, and every uplink and downlink."""
    chain = zip(plan.hosts, plan.hosts[1:], strict=False)
    return [path for one, other in chain for path in ((one, other), (other, one))]


def calibrate(network: Network, *, pairs: Sequence[tuple[str, str]] | None = None, quick: bool = False) -> Calibration:
    """Measure a network that carries nothing else meanwhile; `check` of the result refuses one that is off.

    `pairs` are (source, destination) of each path to measure (None: `neighbours`); a quick calibration has shorter
    flows, and only figures that are judged.

    Raises:
        NetworkError: nothing gets through.
    """
    # The wanted directions of each two hosts, under the direction named first.
    grouped: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for path in neighbours(network.plan) if pairs is None else pairs:
        grouped.setdefault(path[::-1] if path[::-1] in grouped else path, []).append(path)
    with PathMeasurements(network, QUICK if quick else FULL) as measurements:
        figures = [figure for ends, paths in grouped.items() for figure in measurements.between(*ends, paths)]
    return Calibration(tuple(figures), tuple(sorted(measurements.congestion_controls)), network.describe(), quick)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each figure may take."""

    num_trips: int
    skip_s: float
    steady_s: float
    counting_s: float
    has_unjudged: bool


FULL: Final = Effort(num_trips=31, skip_s=0.5, steady_s=2.0, counting_s=4.0, has_unjudged=True)
QUICK: Final = Effort(num_trips=21, skip_s=0.2, steady_s=1.0, counting_s=1.0, has_unjudged=False)


@contextmanager
def lifted(network: Network, one: str, other: str) -> Iterator[None]:
    """Lift delay, jitter, loss and reordering between two hosts, so that only rates hold within the block."""
    plan = before = network.plan
    for ends in ((one, other), (other, one)):
        plan = plan.with_path(*ends, PathShape(rate_bits_per_s=plan.paths[ends].rate_bits_per_s))
    try:
        network.set_plan(plan)
        yield
    finally:
        network.set_plan(before)


class PathMeasurements:
    """Measures the paths of a network, one after another; a context manager that ends the hosts' responders."""

    def __init__(self, network: Network, effort: Effort = QUICK) -> None:
        self._network = network
        self._effort = effort
        self._targets: dict[str, meter.Target] = {}
        self._responders = ExitStack()
        self.congestion_controls: set[str] = set()
        """TCP's, as the sockets of all streams so far had it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._responders.close()

    def measure(self, what: Callable[..., _Result], source: str, destination: str, **arguments: Any) -> _Result:
        """Make a measurement of `meter` between two hosts."""
        if destination not in self._targets:
            address = self._network.address(destination)
            with self._network.entered(destination):
                responder = self._responders.enter_context(closing(meter.Responder(address)))
            self._targets[destination] = address, responder.port
        try:
            with self._network.entered(source):
                return what(self._targets[destination], **arguments)
        except OSError as error:
            raise NetworkError(f"a measurement from {source} failed: {type(error).__name__}: {error}") from error

    def between(self, one: str, other: str, directions: Sequence[tuple[str, str]]) -> list[Figure]:
        """All figures of two hosts; those that have a direction in each of `directions`."""
        figures = [self.round_trip(one, other)]
        there, back = self._network.plan.paths[one, other], self._network.plan.paths[other, one]
        for path in directions:
            if self._network.plan.paths[path].loss > 0:
                figures.append(self.loss(*path))
            if self._effort.has_unjudged and (there.needs_netem or back.needs_netem):
                measured = self._steady_goodput(*path)
                figures.append(Figure("steady goodput over the path as set", *path, "bit/s", measured))
        with lifted(self._network, one, other):
            for path in directions:
                figures += [self.message(*path), self.steady(*path)]
        return figures

    def round_trip(self, source: str, destination: str) -> Figure:
        """The median of a train of datagrams, with the path as it is set."""

        def attempt() -> Figure:
            trips_s = self._trips_s(source, destination)
            return round_trip_figure(self._network.plan, source, destination, statistics.median(trips_s), len(trips_s))

        return fastest(attempt, ATTEMPTS)

    def _trips_s(self, source: str, destination: str) -> list[float]:
        paths = [self._network.plan.paths[ends] for ends in ((source, destination), (destination, source))]
        # Packets keep their order, so datagrams sent within each other's jitter would delay each other.
        interval_s = _TRIP_INTERVAL_S + 2 * max(path.jitter_s for path in paths)
        wait_s = sum(path.delay_s + path.jitter_s for path in paths) + _WAIT_S
        train = {"count": self._effort.num_trips, "interval_s": interval_s, "wait_s": wait_s}
        trips_s = self.measure(meter.round_trips, source, destination, **train)
        if not trips_s:
            raise NetworkError(
                f"none of {train['count']} datagrams came back from {destination} to {source}: is a link down?"
            )
        return trips_s

    def loss(self, source: str, destination: str) -> Figure:
        """The share of a train of datagrams that does not arrive, on a path with a loss."""
        plan = self._network.plan
        rate = plan.rate_bits_per_s(source, destination)
        # At half the rate no queue fills, so no datagrams are dropped there.
        per_s = _COUNTED_PER_S if rate is None else min(_COUNTED_PER_S, rate / 2 / DATAGRAM_WIRE_BITS)
        wanted = _LOST_WANTED / plan.paths[source, destination].loss
        count = max(1, round(min(wanted, self._effort.counting_s * per_s)))
        wait_s = plan.round_trip_s(source, destination) + _WAIT_S
        train = {"count": count, "datagrams_per_s": per_s, "wait_s": wait_s}
        arrived = self.measure(meter.count_datagrams, source, destination, **train)
        return loss_figure(plan, source, destination, count, arrived)

    def message(self, source: str, destination: str) -> Figure:
        """Goodput of 1 MB after the connection was idle."""
        plan = self._network.plan
        # The last byte's travel is not part of the time that the link is busy. The shortest trip is the network's own:
        # longer ones include wake-ups, and subtracting those would make the message too fast.
        travel_s = min(self._trips_s(source, destination)) / 2
        expected = goodput(plan, source, destination)
        num_bytes = MESSAGE_BYTES if expected is None else min(MESSAGE_BYTES, int(expected * _LONGEST_MESSAGE_S / 8))
        sending = {
            "num_bytes": num_bytes,
            "idle_s": _IDLE_S,
            "timeout_s": _UNSHAPED_TIMEOUT_S if expected is None else 3 * 8 * num_bytes / expected + 1.0,
            "num_wakers": min(_MOST_WAKERS, num_bytes // _BYTES_PER_WAKER),
        }

        def attempt() -> Figure:
            stream = self._stream(meter.message, source, destination, **sending)
            measured = _bits_per_s(stream.num_bytes, stream.total_s - travel_s)
            return goodput_figure(plan, "goodput of a message after idle", source, destination, measured)

        return fastest(attempt, ATTEMPTS)

    def steady(self, source: str, destination: str) -> Figure:
        """Goodput of a flow without its beginning."""

        def attempt() -> Figure:
            measured = self._steady_goodput(source, destination)
            return goodput_figure(self._network.plan, "steady goodput", source, destination, measured)

        return fastest(attempt, ATTEMPTS)

    def _steady_goodput(self, source: str, destination: str) -> float:
        plan = self._network.plan
        rate = plan.rate_bits_per_s(source, destination)
        skip_s = self._effort.skip_s + 4 * plan.round_trip_s(source, destination)
        fewest_s = 0.0 if rate is None else 8 * FULL_FRAME_NBYTES * _FEWEST_PACKETS / rate
        duration_s = skip_s + max(self._effort.steady_s, fewest_s)
        max_bytes = _UNBOUNDED_BYTES if rate is None else int(duration_s * rate / 8)
        flow = {"max_bytes": max_bytes, "skip_s": skip_s, "duration_s": duration_s}
        stream = self._stream(meter.steady, source, destination, **flow)
        return _bits_per_s(stream.steady_bytes, stream.steady_s)

    def _stream(
        self, what: Callable[..., meter.StreamFigures], source: str, destination: str, **arguments: Any
    ) -> meter.StreamFigures:
        stream = self.measure(what, source, destination, **arguments)
        self.congestion_controls.add(stream.congestion_control)
        return stream


def fastest(attempt: Callable[[], Figure], num_attempts: int) -> Figure:
    """The fastest of a few attempts; the first that is not too slow is the last."""
    figures: list[Figure] = []
    while not figures or (len(figures) < num_attempts and figures[-1].is_too_slow):
        figures.append(attempt())
    return max(figures, key=lambda figure: figure.speed)


def _bits_per_s(num_bytes: int, duration_s: float) -> float:
    return 8 * num_bytes / duration_s if duration_s > 0 else 0.0
