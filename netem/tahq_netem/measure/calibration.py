"""A network measured after it was built: is it what its description says?

`figures` says what the figures should be; those that noise made too slow are measured again. A calibration is stored
beside the results of the experiment that it belongs to, and an experiment on a network that is off does not start.
"""

import itertools
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
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

Path = tuple[str, str]
"""Source and destination."""
_Result = TypeVar("_Result")
MESSAGE_BYTES: Final = 1_000_000
ATTEMPTS: Final = 6
"""At 1 Gbit/s a message takes 8 ms, of which one late wake-up may take a tenth; the machine under a virtual machine may
be busy for seconds, as long as a few steady flows."""

_UNBOUNDED_BYTES: Final = 1 << 62
"""More than any link carries while it is measured."""
_UNSHAPED_TIMEOUT_S: Final = 10.0
_MOST_WAKERS: Final = 50
_BYTES_PER_WAKER: Final = 10_000
"""So that the datagrams that wake the machine up take the link for about 1 % of the message's time, and before it."""
_TRIP_INTERVAL_S: Final = 0.01
_COUNTED_PER_S: Final = 10_000.0
_LOST_WANTED: Final = 400
_WAIT_S: Final = 0.2
"""For an answer, beyond the round trip."""


def neighbours(plan: NetworkPlan) -> list[Path]:
    """Each host and the next, in both directions: covers what a pipeline uses, and every uplink and downlink."""
    chain = zip(plan.hosts, plan.hosts[1:], strict=False)
    return [path for one, other in chain for path in ((one, other), (other, one))]


def calibrate(network: Network, *, pairs: Sequence[Path] | None = None, quick: bool = False) -> Calibration:
    """Measure a network that carries nothing else meanwhile; `check` of the result refuses one that is off.

    `pairs` are (source, destination) of each path to measure (None: `neighbours`); a quick calibration has shorter
    flows, and only figures that are judged.

    Raises:
        NetworkError: nothing gets through.
    """
    paths = list(neighbours(network.plan) if pairs is None else pairs)
    with PathMeasurements(network, QUICK if quick else FULL) as measurements:
        figures = measurements.all(paths)
    return Calibration(tuple(figures), tuple(sorted(measurements.congestion_controls)), network.describe(), quick)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long each figure may take, and how much is measured at once.

    A message takes `message_s` or is as short as `message_bytes`; where it would take twice as long, none is sent.
    `most_bits_per_s` is the sum of the rates of flows at once; 0: everything is measured alone.
    """

    num_trips: int
    idle_s: float
    message_s: float
    message_bytes: int
    skip_s: float
    steady_s: float
    num_packets: int
    """Fewest of a steady flow."""
    counting_s: float
    most_bits_per_s: float
    has_unjudged: bool


FULL: Final = Effort(
    num_trips=31,
    idle_s=1.0,
    message_s=10.0,
    message_bytes=0,
    skip_s=0.5,
    steady_s=2.0,
    num_packets=100,
    counting_s=4.0,
    most_bits_per_s=0.0,
    has_unjudged=True,
)
QUICK: Final = Effort(
    num_trips=15,
    idle_s=0.05,
    message_s=0.2,
    message_bytes=200_000,  # one packet is 1 %
    skip_s=0.1,
    steady_s=0.35,
    num_packets=60,
    counting_s=0.9,
    most_bits_per_s=500e6,
    has_unjudged=False,
)
"""Four or eight hosts take at most 5 s where the machine keeps up."""


def turns(paths: Sequence[Path], plan: NetworkPlan, most_bits_per_s: float) -> list[list[Path]]:
    """Divide paths among turns; those of one turn have no host in common, and their rates add up to a limit."""
    rates = {path: plan.rate_bits_per_s(*path) or math.inf for path in paths}
    found: list[list[Path]] = []
    for path in paths:
        for turn in found:
            is_apart = not {host for other in turn for host in other} & set(path)
            if is_apart and sum(rates[other] for other in [*turn, path]) <= most_bits_per_s:
                turn.append(path)
                break
        else:
            found.append([path])
    return found


@contextmanager
def lifted(network: Network, *pairs: Path) -> Iterator[None]:
    """Lift delay, jitter, loss and reordering between hosts, so that only rates hold within the block."""
    plan = before = network.plan
    for ends in {path for one, other in pairs for path in ((one, other), (other, one))}:
        plan = plan.with_path(*ends, PathShape(rate_bits_per_s=plan.paths[ends].rate_bits_per_s))
    try:
        network.set_plan(plan)
        yield
    finally:
        network.set_plan(before)


class PathMeasurements:
    """Measures the paths of a network; a context manager that ends the hosts' responders."""

    def __init__(self, network: Network, effort: Effort = QUICK) -> None:
        self._network = network
        self._effort = effort
        self._targets: dict[str, meter.Target] = {}
        self._responders = ExitStack()
        self._starting = threading.Lock()
        self.congestion_controls: set[str] = set()
        """TCP's, as the sockets of all streams so far had it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._responders.close()

    def measure(self, what: Callable[..., _Result], source: str, destination: str, **arguments: Any) -> _Result:
        """Make a measurement of `meter` between two hosts."""
        with self._starting:
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

    def all(self, paths: Sequence[Path]) -> list[Figure]:
        """All figures of these paths, path by path; a round trip belongs to the first path between its hosts."""
        plan, effort = self._network.plan, self._effort
        alone = effort.most_bits_per_s == 0
        trips = [path for index, path in enumerate(paths) if path[::-1] not in paths[:index]]
        lossy = [path for path in paths if plan.paths[path].loss > 0]
        share = 1.0 if alone else min(1.0, 1.5 / max(1, len(lossy)))
        as_set = [partial(self.round_trip, *path) for path in trips]
        as_set += [partial(self.loss, *path, share=share) for path in lossy]
        if effort.has_unjudged:
            as_set += [partial(self._steady_as_set, *path) for path in paths if _needs_netem(plan, path)]
        found = _results(as_set, alone=alone)
        shaped = [path for path in paths if effort.has_unjudged or plan.rate_bits_per_s(*path) is not None]
        with lifted(self._network, *paths):
            travels_s = _results([partial(self._travel_s, *path) for path in trips], alone=alone)
            travel_of = {frozenset(path): travel_s for path, travel_s in zip(trips, travels_s, strict=True)}
            for turn in turns(shaped, plan, effort.most_bits_per_s):
                jobs = [partial(self._goodputs, *path, travel_of[frozenset(path)]) for path in turn]
                found += itertools.chain(*_results(jobs))
        return sorted(found, key=lambda figure: paths.index((figure.source, figure.destination)))

    def _goodputs(self, source: str, destination: str, travel_s: float) -> list[Figure]:
        message = [self.message(source, destination, travel_s)] if self._has_message(source, destination) else []
        return [*message, self.steady(source, destination)]

    def _steady_as_set(self, source: str, destination: str) -> Figure:
        measured = self._steady_goodput(source, destination)
        return Figure("steady goodput over the path as set", source, destination, "bit/s", measured)

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
        count = self._effort.num_trips
        train = {"count": count, "interval_s": interval_s, "wait_s": wait_s}
        trips_s = self.measure(meter.round_trips, source, destination, **train)
        if not trips_s:
            raise NetworkError(f"none of {count} datagrams came back from {destination} to {source}: is a link down?")
        return trips_s

    def loss(self, source: str, destination: str, share: float = 1.0) -> Figure:
        """The share of a train of datagrams that does not arrive, on a path with a loss.

        `share`: of the hosts' lines and of the machine, which other trains use meanwhile.
        """
        plan = self._network.plan
        rate = plan.rate_bits_per_s(source, destination)
        # At half the rate no queue fills, so no datagrams are dropped there.
        per_s = share * (_COUNTED_PER_S if rate is None else min(_COUNTED_PER_S, rate / 2 / DATAGRAM_WIRE_BITS))
        wanted = _LOST_WANTED / plan.paths[source, destination].loss
        count = max(1, round(min(wanted, self._effort.counting_s * per_s)))
        wait_s = plan.round_trip_s(source, destination) + _WAIT_S
        train = {"count": count, "datagrams_per_s": per_s, "wait_s": wait_s}
        arrived = self.measure(meter.count_datagrams, source, destination, **train)
        return loss_figure(plan, source, destination, count, arrived)

    def message(self, source: str, destination: str, travel_s: float | None = None) -> Figure:
        """Goodput of a message, 1 MB at most, after the connection was idle.

        `travel_s`: of the last byte; None: measured now.
        """
        plan = self._network.plan
        travel_s = self._travel_s(source, destination) if travel_s is None else travel_s
        expected, num_bytes = goodput(plan, source, destination), self._message_bytes(source, destination)
        sending = {
            "num_bytes": num_bytes,
            "idle_s": self._effort.idle_s,
            "timeout_s": _UNSHAPED_TIMEOUT_S if expected is None else 3 * 8 * num_bytes / expected + 1.0,
            "num_wakers": min(_MOST_WAKERS, num_bytes // _BYTES_PER_WAKER),
        }

        def attempt() -> Figure:
            stream = self._stream(meter.message, source, destination, **sending)
            measured = _bits_per_s(stream.num_bytes, stream.total_s - travel_s)
            return goodput_figure(plan, "goodput of a message after idle", source, destination, measured)

        return fastest(attempt, ATTEMPTS)

    def _travel_s(self, source: str, destination: str) -> float:
        """The last byte's travel, which is not part of the time that the link is busy.

        The shortest trip is the network's own: longer ones include wake-ups, and subtracting those would make the
        message too fast.
        """
        return min(self._trips_s(source, destination)) / 2

    def _message_bytes(self, source: str, destination: str) -> int:
        expected, effort = goodput(self._network.plan, source, destination), self._effort
        if expected is None:
            return MESSAGE_BYTES
        return min(MESSAGE_BYTES, max(effort.message_bytes, int(expected * effort.message_s / 8)))

    def _has_message(self, source: str, destination: str) -> bool:
        expected = goodput(self._network.plan, source, destination) or math.inf
        return 8 * self._message_bytes(source, destination) / expected <= 2 * self._effort.message_s

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
        fewest_s = 0.0 if rate is None else 8 * FULL_FRAME_NBYTES * self._effort.num_packets / rate
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


def _results(jobs: Sequence[Callable[[], _Result]], *, alone: bool = False) -> list[_Result]:
    """The jobs' results; all run at once, or each alone."""
    with ThreadPoolExecutor(1 if alone else max(1, len(jobs))) as pool:
        return list(pool.map(lambda job: job(), jobs))


def _needs_netem(plan: NetworkPlan, path: Path) -> bool:
    return plan.paths[path].needs_netem or plan.paths[path[::-1]].needs_netem


def fastest(attempt: Callable[[], Figure], num_attempts: int) -> Figure:
    """The fastest of a few attempts; the first that is not too slow is the last."""
    figures: list[Figure] = []
    while not figures or (len(figures) < num_attempts and figures[-1].is_too_slow):
        figures.append(attempt())
    return replace(max(figures, key=lambda figure: figure.speed), num_attempts=len(figures))


def _bits_per_s(num_bytes: int, duration_s: float) -> float:
    return 8 * num_bytes / duration_s if duration_s > 0 else 0.0
