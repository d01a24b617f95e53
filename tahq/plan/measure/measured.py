"""What workers have measured so far, and the `ClusterNumbers` that it comes to. Pure.

Nothing that came in is lost to what did not: hosts without figures of their compute are left out with their paths,
everything else stands.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from tahq.comm.control.measuring import ComputeMeasured, PathsMeasured
from tahq.errors import RemoteProtocolError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.measure.jobs import Job
from tahq.plan.measure.rounds import Pair

WORTHWHILE_GAIN = 1.1
"""More connections are proposed where they carry so many times what fewer do."""


@dataclass(frozen=True, slots=True)
class Imitated:
    """What workers enforce between session and socket, which plain TCP does not meet; None, 0: nothing."""

    rate_bits_per_s: float | None = None
    delay_s: float = 0.0


@dataclass(slots=True)
class WayFigures:
    """One direction between two stages: rates by number of connections."""

    round_trip_s: float | None = None
    rates: dict[int, float] = field(default_factory=dict)
    failure: str = ""


class Measured:
    """Figures as they come in.

    Args:
        names: what the hosts are called, by stage.
        computers: where each stage runs; stages on one computer and device share its memory.
    """

    def __init__(self, names: Sequence[str], computers: Sequence[str]) -> None:
        self.names = tuple(names)
        self._computers = tuple(computers)
        self.failures: list[str] = []
        """What could not be measured, in words."""
        self.notes: list[str] = []
        self._computes: dict[int, tuple[ComputeMeasured, list[LayerTimes]]] = {}
        self._devices: dict[int, tuple[str, str]] = {}
        self._ways: dict[tuple[int, int], WayFigures] = {}
        self._access: dict[int, tuple[float, float]] = {}

    @property
    def has_hosts(self) -> bool:
        """Whether there is enough for a file."""
        return bool(self._computes)

    def take_compute(self, figures: ComputeMeasured, device: str, name: str) -> None:
        """A worker has timed its device.

        Args:
            figures: what it says.
            device: which of its computer's; others may use it too.
            name: how messages call it.

        Raises:
            RemoteProtocolError: figures that cannot be.
        """
        try:
            times = [LayerTimes.model_validate(row) for row in figures.times]
            codecs = [CodecTimes(encode_per_element=a, decode_per_element=b) for a, b in figures.codecs.values()]
        except (ValidationError, ValueError) as error:
            raise RemoteProtocolError(f"{name} sent times that are none: {_first_line(error)}") from None
        if not times or figures.memory_bytes < 0 or len(codecs) != len(figures.codecs):
            raise RemoteProtocolError(f"{name} sent no times of its compute")
        self._computes[figures.stage] = figures, times
        self._devices[figures.stage] = self._computers[figures.stage], device
        self.notes += [f"{self.names[figures.stage]}: {note}" for note in figures.notes]

    def take_paths(self, job: Job, figures: PathsMeasured, name: str) -> None:
        """A worker has measured its ways to others, or why it could not.

        Raises:
            RemoteProtocolError: figures that are not what was asked for.
        """
        rows = {"round trips": figures.round_trips, "rates out": figures.outward, "rates in": figures.inward}
        for what, row in rows.items():
            is_whole = len(row) == len(job.peers) or (figures.error and not row)
            if not is_whole or not all(0 < value < math.inf for value in row):
                raise RemoteProtocolError(f"{name} sent {what} that are none: {row[:8]}")
        if figures.error:
            others = ", ".join(dict.fromkeys(self.names[peer] for peer in job.peers))
            self.failures.append(f"from {self.names[job.dialler]} to {others}: {figures.error}")
        if job.kind == "access":
            if not figures.error:
                self._access[job.dialler] = sum(figures.outward), sum(figures.inward)
            return
        for source, target, row in (
            (job.dialler, job.peers[0], figures.outward),
            (job.peers[0], job.dialler, figures.inward),
        ):
            way = self._way(source, target)
            if figures.round_trips:
                way.round_trip_s = min([*figures.round_trips, way.round_trip_s or math.inf])
            if row:
                way.rates[len(job.peers)] = sum(row)
            elif job.kind == "path":
                way.failure = figures.error

    def note_apart(self, pair: Pair) -> None:
        """Two hosts of which neither can be dialled."""
        one, other = (self.names[stage] for stage in pair)
        reason = "both only dial out; give one of them an address that the other reaches (advertise)"
        self.failures.append(f"{one} and {other}: {reason}")
        for ends in (pair, pair[::-1]):
            self._way(*ends).failure = reason

    def has_failed(self, one: int, other: int) -> bool:
        """Whether nothing more need be tried between two stages."""
        return any(self._way(*ends).failure for ends in ((one, other), (other, one)))

    def _way(self, source: int, target: int) -> WayFigures:
        return self._ways.setdefault((source, target), WayFigures())

    # -- what it comes to ------------------------------------------------------------------------

    def numbers(self, imitated: Imitated, source: str) -> ClusterNumbers:
        """All that is known, rounded to what can be known of it.

        Args:
            imitated: rates are at most, and round trips longer by, what the workers themselves enforce.
            source: where the numbers are from.
        """
        sharing = Counter(self._devices.values())
        hosts = [self._host(stage, sharing, imitated) for stage in sorted(self._computes)]
        known = [ends for ends in sorted(self._ways) if set(ends) <= self._computes.keys()]
        paths = [self._path(ends, imitated) for ends in known]
        return ClusterNumbers(hosts=hosts, paths=paths, source=source)

    def _host(self, stage: int, sharing: Mapping[tuple[str, str], int], imitated: Imitated) -> HostNumbers:
        figures, times = self._computes[stage]
        up, down = self._access.get(stage, (None, None))
        memory = figures.memory_bytes // sharing[self._devices[stage]]
        return HostNumbers(
            name=self.names[stage],
            memory=_rounded_size(memory) if memory else None,
            up=_slower(self._at_least(up, stage, 0), imitated.rate_bits_per_s),
            down=_slower(self._at_least(down, stage, 1), imitated.rate_bits_per_s),
            compute=[_rounded_times(row) for row in times],
            codecs={
                spec: CodecTimes(encode_per_element=_rounded(a), decode_per_element=_rounded(b))
                for spec, (a, b) in figures.codecs.items()
            },
        )

    def _at_least(self, rate: float | None, stage: int, end: int) -> float | None:
        """An access link carries what any path over it does."""
        if rate is None:
            return None
        over_it = [max(way.rates.values()) for ends, way in self._ways.items() if ends[end] == stage and way.rates]
        return max([rate, *over_it])

    def _path(self, ends: tuple[int, int], imitated: Imitated) -> PathNumbers:
        way = self._ways[ends]
        count = chosen_connections(way.rates)
        trip_s = None if way.round_trip_s is None else _rounded(way.round_trip_s + 2 * imitated.delay_s)
        return PathNumbers(
            source=self.names[ends[0]],
            target=self.names[ends[1]],
            rate=None if way.failure else _slower(way.rates.get(count), imitated.rate_bits_per_s),
            round_trip=trip_s,
            connections=count if count > 1 else None,
            failure=way.failure or None,
        )


def chosen_connections(rates: Mapping[int, float]) -> int:
    """The fewest connections that carry nearly what more of them do.

    From the fewest on, the next larger number is taken when it carries `WORTHWHILE_GAIN` of what the chosen one does.

    Args:
        rates: bits a second by number of connections; empty: one it is.

    Example:
        50, 80, 85, 86 with 1, 2, 4, 8: two, since four gain 6 % and eight 8 %.
    """
    if not rates:
        return 1
    chosen, *more = sorted(rates)
    for count in more:
        if rates[count] > WORTHWHILE_GAIN * rates[chosen]:
            chosen = count
    return chosen


def _slower(rate: float | None, limit: float | None) -> float | None:
    if rate is None:
        return limit
    return _rounded(min(rate, limit) if limit is not None else rate)


def _rounded(value: float) -> float:
    """Four digits: more cannot be known."""
    return float(f"{value:.4g}")


def _rounded_size(nbytes: int) -> int:
    return nbytes // 1_000_000 * 1_000_000


def _rounded_times(times: LayerTimes) -> LayerTimes:
    values = {key: _rounded(value) for key, value in times.model_dump().items() if isinstance(value, float)}
    return times.model_copy(update=values)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]
