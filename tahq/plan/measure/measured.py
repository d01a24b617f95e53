"""Gathers the workers' measurements and turns them into `ClusterNumbers`. Pure.

A missing measurement costs as little as possible: hosts without compute times are left out with their paths,
everything else is kept.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from tahq.comm.control.messages import ComputeMeasured, PathsMeasured
from tahq.errors import RemoteProtocolError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.measure.jobs import Job, Pair

WORTHWHILE_GAIN = 1.1
"""More connections are proposed if their rate is this many times that of fewer."""


@dataclass(frozen=True, slots=True)
class Imitated:
    """Limits that workers enforce between session and socket, which plain TCP does not meet; None, 0: none."""

    rate_bits_per_s: float | None = None
    delay_s: float = 0.0


@dataclass(slots=True)
class PathFigures:
    """One direction between two stages; `rates` are by number of connections."""

    round_trip_s: float = math.inf
    rates: dict[int, float] = field(default_factory=dict)
    failure: str = ""


class Measured:
    """Figures as they come in.

    Args:
        names: names of the hosts, by stage.
        computers: the computer of each stage; stages on one computer and device share its memory.
    """

    def __init__(self, names: Sequence[str], computers: Sequence[str]) -> None:
        self.names = tuple(names)
        self._computers = tuple(computers)
        self.failures: list[str] = []
        """The measurements that failed, in words."""
        self.notes: list[str] = []
        self._computes: dict[int, tuple[ComputeMeasured, list[LayerTimes]]] = {}
        self._devices: dict[int, tuple[str, str]] = {}
        self._paths: dict[tuple[int, int], PathFigures] = defaultdict(PathFigures)
        self._access: dict[int, tuple[float, float]] = {}

    @property
    def has_hosts(self) -> bool:
        """Whether there is enough for a file."""
        return bool(self._computes)

    def take_compute(self, figures: ComputeMeasured, device: str, name: str) -> None:
        """Take a worker's times of its device.

        Args:
            figures: its message.
            device: the device's name on its computer; others may use it too.
            name: the worker's name for messages.

        Raises:
            RemoteProtocolError: impossible figures.
        """
        try:
            times = [LayerTimes.model_validate(row) for row in figures.times]
            for encode_s, decode_s in figures.codecs.values():
                CodecTimes(encode_per_element=encode_s, decode_per_element=decode_s)
        except (ValidationError, ValueError) as error:
            raise RemoteProtocolError(f"{name} sent malformed times: {_first_line(error)}") from None
        if not times or figures.memory_bytes < 0:
            raise RemoteProtocolError(f"{name} sent no times of its compute")
        self._computes[figures.stage] = figures, times
        self._devices[figures.stage] = self._computers[figures.stage], device
        self.notes += [f"{self.names[figures.stage]}: {note}" for note in figures.notes]

    def take_paths(self, job: Job, figures: PathsMeasured, name: str) -> None:
        """Take a worker's rates and round trips to others, or its reason why it has none.

        Raises:
            RemoteProtocolError: figures that were not asked for.
        """
        rows = {"round trips": figures.round_trips, "rates out": figures.outward, "rates in": figures.inward}
        for what, row in rows.items():
            is_whole = len(row) == len(job.peers) or (figures.error and not row)
            if not is_whole or not all(0 < value < math.inf for value in row):
                raise RemoteProtocolError(
                    f"{name} sent malformed {what}: got {row[:8]}, expected {len(job.peers)} positive numbers"
                )
        if figures.error:
            others = ", ".join(dict.fromkeys(self.names[peer] for peer in job.peers))
            self.failures.append(f"from {self.names[job.dialler]} to {others}: {figures.error}")
        if job.kind == "access":
            if not figures.error:
                self._access[job.dialler] = sum(figures.outward), sum(figures.inward)
            return
        ends = job.dialler, job.peers[0]
        for path, row in ((self._paths[ends], figures.outward), (self._paths[ends[::-1]], figures.inward)):
            path.round_trip_s = min([*figures.round_trips, path.round_trip_s])
            if row:
                path.rates[len(job.peers)] = sum(row)
            elif job.kind == "path":
                path.failure = figures.error

    def note_apart(self, pair: Pair) -> None:
        """Note two hosts of which neither can be dialled."""
        one, other = (self.names[stage] for stage in pair)
        reason = "both only dial out; give one of them an address that the other reaches (advertise)"
        self.failures.append(f"{one} and {other}: {reason}")
        self._paths[pair].failure = self._paths[pair[::-1]].failure = reason

    def has_failed(self, one: int, other: int) -> bool:
        """Whether a measurement between two stages failed, so that no other is needed."""
        return bool(self._paths[one, other].failure or self._paths[other, one].failure)

    def numbers(self, imitated: Imitated, source: str) -> ClusterNumbers:
        """All that is known, rounded to four digits.

        Args:
            imitated: caps the rates and adds to the round trips.
            source: origin of the numbers, for the file.
        """
        sharing = Counter(self._devices.values())
        hosts = [self._host(stage, sharing[self._devices[stage]], imitated) for stage in sorted(self._computes)]
        known = [ends for ends in sorted(self._paths) if set(ends) <= self._computes.keys()]
        return ClusterNumbers(hosts=hosts, paths=[self._path(ends, imitated) for ends in known], source=source)

    def _host(self, stage: int, num_sharing: int, imitated: Imitated) -> HostNumbers:
        figures, times = self._computes[stage]
        memory = figures.memory_bytes // num_sharing
        up, down = (self._access_rate(stage, end) for end in (0, 1))
        return HostNumbers(
            name=self.names[stage],
            memory=memory // 1_000_000 * 1_000_000 if memory else None,
            up=_slower(up, imitated.rate_bits_per_s),
            down=_slower(down, imitated.rate_bits_per_s),
            compute=[_rounded_times(row) for row in times],
            codecs={
                spec: CodecTimes(encode_per_element=_rounded(encode_s), decode_per_element=_rounded(decode_s))
                for spec, (encode_s, decode_s) in figures.codecs.items()
            },
        )

    def _access_rate(self, stage: int, end: int) -> float | None:
        """The rate of an access link (end 0: up, 1: down), which carries at least as much as any path over it."""
        if stage not in self._access:
            return None
        over_it = [max(path.rates.values()) for ends, path in self._paths.items() if ends[end] == stage and path.rates]
        return max([self._access[stage][end], *over_it])

    def _path(self, ends: tuple[int, int], imitated: Imitated) -> PathNumbers:
        path = self._paths[ends]
        count = chosen_connections(path.rates)
        trip_s = path.round_trip_s + 2 * imitated.delay_s
        return PathNumbers(
            source=self.names[ends[0]],
            target=self.names[ends[1]],
            rate=None if path.failure else _slower(path.rates.get(count), imitated.rate_bits_per_s),
            round_trip=_rounded(trip_s) if trip_s < math.inf else None,
            connections=count if count > 1 else None,
            failure=path.failure or None,
        )


def chosen_connections(rates: Mapping[int, float]) -> int:
    """The fewest connections that carry nearly as much as more of them.

    From the fewest on, the next larger number is taken if its rate is `WORTHWHILE_GAIN` times the chosen one's.

    Args:
        rates: bits per second by number of connections; empty: 1 is chosen.

    Example:
        50, 80, 85, 86 with 1, 2, 4, 8: two, since four gain 6 % and eight 8 %.
    """
    chosen = min(rates, default=1)
    for count in sorted(rates):
        if rates[count] > WORTHWHILE_GAIN * rates[chosen]:
            chosen = count
    return chosen


def _slower(rate: float | None, limit: float | None) -> float | None:
    if rate is None:
        return limit
    return _rounded(min(rate, limit) if limit is not None else rate)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded_times(times: LayerTimes) -> LayerTimes:
    values = {key: _rounded(value) for key, value in times.model_dump().items() if isinstance(value, float)}
    return times.model_copy(update=values)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]
