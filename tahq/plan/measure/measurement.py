"""The measurements of a cluster that `tahq measure` asks of the workers, and the `ClusterNumbers` they give. Pure.

A job is for one worker: it dials one or more peers and measures both directions. The jobs of a batch run at the same
time. As in a run, the higher stage dials the lower one; where it cannot, the lower one dials. Where neither can, the
path is relayed: both measure their paths to the coordinator's machine, of which the relayed path is composed.

A missing measurement costs as little as possible: hosts without compute times are left out with their paths,
everything else is kept.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import ValidationError

from tahq.comm.control.messages import ComputeMeasured, PathsMeasured
from tahq.comm.topology import Endpoint
from tahq.errors import RemoteProtocolError
from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers, RelayNumbers

WORTHWHILE_GAIN = 1.1
"""More connections are proposed if their rate is this many times that of fewer."""

Pair = tuple[int, int]
"""Two stages, the lower one first."""

RELAY = 0xFFFF_FFFF
"""The coordinator's machine, as the peer of a job."""

JobKind = Literal["path", "connections", "access", "leg", "legs"]
"""A path, a path over several connections, or a host's uplink and downlink with all others at once; the path to the
relay alone, or together with those of other hosts."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """The user's request to `tahq measure`: micro-batch sizes and codecs (full specs) to time, and how.

    Attributes:
        seconds: shortest duration of each stream.
        parallel: whether pairs of separate machines measure at the same time.
        access: whether each host's uplink and downlink are measured, with all others at once.
        connections: numbers of connections to try on each path, besides one.
        paths: whether paths are measured.
        compute_s: seconds after which no worker begins with a larger micro-batch; 0: no limit.
        each: whether workers that share a GPU all time their compute, as sleeping stages do, and not one for all.
        known: figures of which only free memory is measured again, and codecs are added.
        needs_codecs: called with all other figures, says whether to time codecs, whose kernels take long to compile.
            None: they are timed first.
    """

    micro_batches: tuple[int, ...]
    codecs: tuple[str, ...]
    seconds: float = 1.0
    parallel: bool = False
    access: bool = True
    connections: tuple[int, ...] = ()
    paths: bool = True
    compute_s: float = 0.0
    each: bool = False
    known: ClusterNumbers | None = None
    needs_codecs: Callable[[ClusterNumbers], bool] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One worker's measurement; `peers` are stages, and a stage that is listed twice gets two connections."""

    kind: JobKind
    dialler: int
    peers: tuple[int, ...]

    @property
    def pair(self) -> Pair:
        """The two stages of a job that has one peer."""
        return min(self.dialler, self.peers[0]), max(self.dialler, self.peers[0])


def diallers(pair: Pair, endpoints: Sequence[Endpoint]) -> Pair | None:
    """The stage that dials and the stage that it dials; None: neither can be dialled."""
    lower, upper = pair
    if endpoints[lower].address:
        return upper, lower
    return (lower, upper) if endpoints[upper].address else None


def planned_jobs(
    endpoints: Sequence[Endpoint], machines: Sequence[str], request: MeasureRequest
) -> tuple[list[list[Job]], list[Pair]]:
    """Batches of jobs of these workers on their machines, and the pairs that cannot be connected."""
    batches: list[list[Job]] = []
    apart: list[Pair] = []
    for pairs in measuring_rounds(machines, parallel=request.parallel) if request.paths else ():
        ends = {pair: diallers(pair, endpoints) for pair in pairs}
        apart += [pair for pair, end in ends.items() if end is None]
        joined = [end for end in ends.values() if end is not None]
        for count in (1, *request.connections):
            kind: JobKind = "path" if count == 1 else "connections"
            batches.append([Job(kind, dialler, (peer,) * count) for dialler, peer in joined])
    for stage in range(len(endpoints)) if request.access else ():
        others = tuple(end.stage for end in endpoints if end.address and machines[end.stage] != machines[stage])
        if len(others) > 1:  # with only one, its path has measured the same
            batches.append([Job("access", stage, others)])
    return [batch for batch in batches if batch], sorted(apart)


def relay_jobs(stages: Sequence[int]) -> list[list[Job]]:
    """Batches of jobs of the workers whose paths are relayed: each path to the relay alone, then all at once."""
    return [*([Job("leg", stage, (RELAY,))] for stage in stages), [Job("legs", stage, (RELAY,)) for stage in stages]]


def measuring_rounds(machines: Sequence[str], *, parallel: bool) -> list[list[Pair]]:
    """Rounds of pairs that may measure at the same time: no machine, whose stages share its uplink, is in two of them.

    Not `parallel`: one pair at a time in the same order, since pairs of separate machines can still share a bottleneck.
    """
    rounds: list[list[Pair]] = []
    for pairs in tournament(len(machines)):
        # a round of the tournament in as many parts as its shared machines require
        parts: list[tuple[list[Pair], set[str]]] = []
        for pair in pairs:
            wanted = {machines[stage] for stage in pair}
            part = next((part for part in parts if not part[1] & wanted), None)
            if part is None:
                parts.append(([pair], wanted))
            else:
                part[0].append(pair)
                part[1].update(wanted)
        rounds += [together for together, _ in parts]
    return rounds if parallel else [[pair] for pairs in rounds for pair in pairs]


def tournament(num_players: int) -> list[list[Pair]]:
    """Rounds of a round-robin tournament: every two players meet once, and each plays at most once per round.

    The circle method: the first stays, the others move on by one place each round; with an odd number, one place is
    empty.

    Example:
        Four players: (0,3) (1,2), then (0,2) (1,3), the last having moved behind the first, then (0,1) (2,3).
    """
    places: list[int | None] = list(range(num_players))
    if num_players % 2:
        places.append(None)
    rounds = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append(sorted((min(a, b), max(a, b)) for a, b in meetings if a is not None and b is not None))
        places = [places[0], places[-1], *places[1:-1]]
    return [pairs for pairs in rounds if pairs]


# -- results -------------------------------------------------------------------------------------


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
    is_relayed: bool = False


class Measured:
    """Collects figures as they arrive; `names` of hosts and `computers`, whose stages share memory, are by stage.

    `relay_host` is the name of the host on the coordinator's machine, None: it has no stage.
    """

    def __init__(self, names: Sequence[str], computers: Sequence[str], relay_host: str | None = None) -> None:
        self.names = tuple(names)
        self.computers = tuple(computers)
        self._relay_host = relay_host
        self._failures: dict[Pair | Job, str] = {}
        self.notes: list[str] = []
        self._computes: dict[int, tuple[ComputeMeasured, list[LayerTimes]]] = {}
        self._devices: dict[int, tuple[str, str]] = {}
        self._paths: dict[tuple[int, int], PathFigures] = defaultdict(PathFigures)
        self._access: dict[int, tuple[float, float]] = {}
        self._legs: dict[int, tuple[float, float]] = {}
        """Rates to and from the relay, of all hosts at once."""

    @property
    def failures(self) -> list[str]:
        """The measurements that failed, in words."""
        return list(self._failures.values())

    def name_of(self, peer: int) -> str:
        """The name of a stage's host, or of the relay."""
        return "the coordinator's machine" if peer == RELAY else self.names[peer]

    @property
    def has_hosts(self) -> bool:
        """Whether there is enough for a file."""
        return bool(self._computes)

    def take_compute(self, figures: ComputeMeasured, device: str, name: str) -> None:
        """Take a worker's times on a device of its computer; RemoteProtocolError if they are malformed."""
        try:
            times = [LayerTimes.model_validate(row) for row in figures.times]
            for encode_s, decode_s in figures.codecs.values():
                CodecTimes(encode_per_element=encode_s, decode_per_element=decode_s)
        except (ValidationError, ValueError) as error:
            raise RemoteProtocolError(f"{name} sent malformed times: {_first_line(error)}") from None
        if min(figures.memory_bytes, figures.host_memory_bytes) < 0 or not 0 <= figures.host_link < math.inf:
            raise RemoteProtocolError(f"{name} sent malformed figures of memory")
        if figures.stage in self._computes and not times:  # codecs alone
            first, times = self._computes[figures.stage]
            figures = replace(first, codecs=first.codecs | figures.codecs, notes=figures.notes)
        self._computes[figures.stage] = figures, times
        self._devices[figures.stage] = self.computers[figures.stage], device
        self.notes += [f"{self.names[figures.stage]}: {note}" for note in figures.notes]

    def take_paths(self, job: Job, figures: PathsMeasured, name: str) -> None:
        """Take a worker's rates and round trips to others, or its error; RemoteProtocolError if they are malformed."""
        rows = {"round trips": figures.round_trips, "rates out": figures.outward, "rates in": figures.inward}
        for what, row in rows.items():
            is_whole = len(row) == len(job.peers) or (figures.error and not row)
            if not is_whole or not all(0 < value < math.inf for value in row):
                raise RemoteProtocolError(
                    f"{name} sent malformed {what}: got {row[:8]}, expected {len(job.peers)} positive numbers"
                )
        key = job.pair if job.kind == "path" else job
        before = self._failures.pop(key, "")
        if figures.error:
            others = ", ".join(dict.fromkeys(map(self.name_of, job.peers)))
            failure = f"from {self.names[job.dialler]} to {others}: {figures.error}"
            self._failures[key] = f"{before}; {failure}" if before else failure
        if job.kind in ("access", "legs"):
            if not figures.error:
                sums = self._access if job.kind == "access" else self._legs
                sums[job.dialler] = sum(figures.outward), sum(figures.inward)
            return
        ends = job.dialler, job.peers[0]
        for path, row in ((self._paths[ends], figures.outward), (self._paths[ends[::-1]], figures.inward)):
            path.round_trip_s = min([*figures.round_trips, path.round_trip_s])
            if row:
                path.rates[len(job.peers)] = sum(row)
            if job.kind in ("path", "leg"):
                path.failure = "" if row else figures.error

    def note_apart(self, pair: Pair) -> None:
        """Note two hosts that both only dial out."""
        one, other = (self.names[stage] for stage in pair)
        reason = "both only dial out; give one of them an address that the other can reach (advertise)"
        self._failures[pair] = f"{one} and {other}: {reason}"
        self._paths[pair].failure = self._paths[pair[::-1]].failure = reason

    def note_relayed(self, pair: Pair) -> str:
        """Note two hosts of which neither can dial the other: their path is relayed if both have measured theirs to
        the relay. Returns what to tell the user."""
        failure = self._failures[pair]
        if any(self.has_failed(stage, RELAY) for stage in pair):
            return failure
        del self._failures[pair]
        for ends in (pair, pair[::-1]):
            self._paths[ends].failure, self._paths[ends].is_relayed = "", True
        one, other = (self.names[stage] for stage in pair)
        return f"as neighbours {one} and {other} would be relayed through {self.name_of(RELAY)}: {failure}"

    def has_failed(self, one: int, other: int) -> bool:
        """Whether a measurement between two stages failed, so that no other is needed."""
        return bool(self._paths[one, other].failure or self._paths[other, one].failure)

    def numbers(self, imitated: Imitated, source: str) -> ClusterNumbers:
        """All that is known, rounded to four digits; `imitated` caps the rates and adds to the round trips."""
        hosts = self.brought_up_to_date([self._host(stage, imitated) for stage in sorted(self._computes)])
        known = [ends for ends in sorted(self._paths) if set(ends) <= self._computes.keys()]
        paths, relay = [self._path(ends, imitated) for ends in known], None
        if any(path.relayed for path in paths):
            relay = RelayNumbers(host=self._relay_host, up=self._relay_rate(1), down=self._relay_rate(0))
        return ClusterNumbers(hosts=hosts, paths=paths, relay=relay, source=source)

    def brought_up_to_date(self, hosts: Sequence[HostNumbers]) -> list[HostNumbers]:
        """The measured hosts, each with its share of what is free on its device and, with a GPU, on its machine, and
        with the codecs that were timed."""
        sharing, there = Counter(self._devices.values()), Counter(machine for machine, _ in self._devices.values())
        found = []
        for host, (stage, (figures, _)) in zip(hosts, sorted(self._computes.items()), strict=False):
            memory = in_megabytes(figures.memory_bytes // sharing[self._devices[stage]])
            host_memory = in_megabytes(figures.host_memory_bytes // there[self._devices[stage][0]])
            codecs = host.codecs | {
                spec: CodecTimes(encode_per_element=_rounded(encode_s), decode_per_element=_rounded(decode_s))
                for spec, (encode_s, decode_s) in figures.codecs.items()
            }
            found.append(host.model_copy(update={"memory": memory, "host_memory": host_memory, "codecs": codecs}))
        return found

    def _host(self, stage: int, imitated: Imitated) -> HostNumbers:
        (figures, times), device = self._computes[stage], self._devices[stage]
        up, down = (self._access_rate(stage, end) for end in (0, 1))
        computes = device[1].startswith("cuda") and all(row.block_input_gradient is not None for row in times)
        num_sharing = list(self._devices.values()).count(device) if computes else 1
        return HostNumbers(
            name=self.names[stage],
            device=" ".join(device) if num_sharing > 1 else None,
            host_link=_rounded(figures.host_link / num_sharing) or None,
            up=_slower(up, imitated.rate_bits_per_s),
            down=_slower(down, imitated.rate_bits_per_s),
            compute=[row.model_copy(update=_rounded_floats(row.model_dump())) for row in times],
        )

    def _access_rate(self, stage: int, end: int) -> float | None:
        """The rate of an access link (end 0: up, 1: down), which carries at least as much as any path over it."""
        if stage not in self._access:
            return None
        over_it = [max(path.rates.values()) for ends, path in self._paths.items() if ends[end] == stage and path.rates]
        return max([self._access[stage][end], *over_it])

    def _relay_rate(self, end: int) -> float | None:
        """The rate of the relay's downlink (end 0) or uplink (1): of all hosts at once, and at least that of each."""
        alone = [
            max(path.rates.values()) for ends, path in self._paths.items() if ends[1 - end] == RELAY and path.rates
        ]
        return _rounded(max([sum(rates[end] for rates in self._legs.values()), *alone])) or None

    def _relayed(self, ends: tuple[int, int]) -> PathFigures:
        legs = self._paths[ends[0], RELAY], self._paths[RELAY, ends[1]]
        trip_s = sum(leg.round_trip_s for leg in legs)
        return PathFigures(trip_s, {1: min(leg.rates[1] for leg in legs)}, is_relayed=True)

    def _path(self, ends: tuple[int, int], imitated: Imitated) -> PathNumbers:
        path = self._relayed(ends) if self._paths[ends].is_relayed else self._paths[ends]
        count = chosen_connections(path.rates)
        trip_s = path.round_trip_s + 2 * imitated.delay_s
        return PathNumbers(
            source=self.names[ends[0]],
            target=self.names[ends[1]],
            rate=None if path.failure else _slower(path.rates.get(count), imitated.rate_bits_per_s),
            round_trip=_rounded(trip_s) if trip_s < math.inf else None,
            connections=count if count > 1 else None,
            relayed=path.is_relayed or None,
            failure=path.failure or None,
        )


def chosen_connections(rates: Mapping[int, float]) -> int:
    """The fewest connections that carry nearly as much as more of them.

    From the fewest on, the next larger number is taken if its rate is `WORTHWHILE_GAIN` times the chosen one's.

    Example:
        50, 80, 85, 86 with 1, 2, 4, 8: two, since four gain 6 % and eight 8 %.
    """
    chosen = min(rates, default=1)
    for count in sorted(rates):
        if rates[count] > WORTHWHILE_GAIN * rates[chosen]:
            chosen = count
    return chosen


def in_megabytes(nbytes: int) -> int | None:
    """Bytes in whole megabytes; None: less than one."""
    return nbytes // 1_000_000 * 1_000_000 or None


def _slower(rate: float | None, limit: float | None) -> float | None:
    if rate is None:
        return limit
    return _rounded(min(rate, limit) if limit is not None else rate)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _rounded_floats(values: Mapping[str, object]) -> dict[str, float]:
    return {key: _rounded(value) for key, value in values.items() if isinstance(value, float)}


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(error).splitlines()[0]
