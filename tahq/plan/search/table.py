"""The numbers of a cluster as arrays: by host, and by pair of hosts.

Rates are bits per second, latencies one-way seconds. Rates that were not measured are infinite, paths that are not
listed have the cluster's round trip, and a codec that was not measured takes as long as one that was.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, RelayNumbers
from tahq.plan.problem import PlanProblem
from tahq.plan.simulate.bound import Array, Flags
from tahq.quant import CodecSpec

_UNREACHABLE_BITS_PER_S = 8e-3
"""Rate of a path that failed: so slow that no plan uses it where there is another."""


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds by host for one micro-batch size, and the bytes that a block keeps of one; 0: not measured."""

    block_forward: Array
    block_backward: Array
    block_input_gradient: Array
    first_forward: Array
    first_backward: Array
    last_forward: Array
    last_backward: Array
    held_block: Array


class ClusterTable:
    """Arrays made once from a problem, and shared by all searches."""

    def __init__(self, problem: PlanProblem) -> None:
        hosts = problem.cluster.hosts
        self.problem = problem
        self.num_hosts = len(hosts)
        self.up = np.array([math.inf if host.up is None else host.up for host in hosts])
        self.down = np.array([math.inf if host.down is None else host.down for host in hosts])
        self.memory = np.array([math.inf if host.memory is None else float(host.memory) for host in hosts])
        self.host_memory = np.array([math.inf if each.host_memory is None else each.host_memory for each in hosts])
        names = [host.device or f"of host {index}" for index, host in enumerate(hosts)]
        self.devices = tuple(names.index(name) for name in names)
        """A number for each host, the same for those that share a GPU."""
        self.host_link = np.array([0.0 if each.host_link is None else each.host_link for each in hosts])
        """0: not measured."""
        self.path_rate, self.latency_s, self.relayed = _pairs(problem.cluster)
        relay = problem.cluster.relay or RelayNumbers()
        self.relay = next((index for index, host in enumerate(hosts) if host.name == relay.host), None)
        """The host that relays, if it is one of these."""
        self.relay_rates = tuple(math.inf if rate is None else float(rate) for rate in (relay.up, relay.down))
        """Of the relaying host's uplink and downlink."""
        if self.relay is not None:  # measured with less at a time
            for rates, rate in zip((self.up, self.down), self.relay_rates, strict=True):
                rates[self.relay] = rate if math.isinf(rates[self.relay]) else max(rate, rates[self.relay])
            self.relay_rates = float(self.up[self.relay]), float(self.down[self.relay])
        self._times: dict[int, HostTimes] = {}
        self.costs_of_plans: dict[object, object] = {}
        """`StageCosts` of the plans that were looked at, by what they depend on."""
        self._codecs = [{_in_full(spec): times for spec, times in host.codecs.items()} for host in hosts]

    def times(self, micro_batch: int) -> HostTimes:
        """Seconds by host for micro-batches of this size."""
        if micro_batch not in self._times:
            rows = [times_of(host, micro_batch) for host in self.problem.cluster.hosts]
            self._times[micro_batch] = HostTimes(*map(np.array, zip(*rows, strict=True)))
        return self._times[micro_batch]

    def codec_s(self, host: int, codec: str, micro_batch: int) -> tuple[float, float]:
        """Seconds to encode and to decode a micro-batch on a host; see `codec_stand_in`."""
        stand_in = self.codec_stand_in(host, codec)
        if stand_in is None:
            return 0.0, 0.0
        times, elements = self._codecs[host][stand_in], self.problem.num_elements(micro_batch)
        return elements * times.encode_per_element, elements * times.decode_per_element

    def codec_stand_in(self, host: int, codec: str) -> str | None:
        """The codec whose times on a host stand for this one's; None: none was measured, and the times are zero.

        It is the codec itself; or else the slowest of its family; or else the slowest of all but `raw`.
        """
        measured, codec = self._codecs[host], _in_full(codec)
        if codec in measured:
            return codec
        by_family = [each for each in measured if _family(each) == _family(codec)]
        others = [each for each in measured if "raw" not in (_family(each), _family(codec))]
        return max(by_family or others, key=lambda each: sum(measured[each].model_dump().values()), default=None)

    def dead_hop(self, hosts: Sequence[int]) -> tuple[int, int] | None:
        """The first two neighbours in an order between which the path failed, in either direction."""
        hops = (ends for one, other in pairwise(hosts) for ends in ((one, other), (other, one)))
        return next((ends for ends in hops if self.path_rate[ends] == _UNREACHABLE_BITS_PER_S), None)

    @cached_property
    def pair_rate(self) -> Array:
        """The rate of a flow from one host to another that is alone."""
        rate: Array = np.minimum(np.minimum(self.up[:, None], self.down[None, :]), self.path_rate)
        return rate

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each host, the same for hosts that are interchangeable; those that a path names never are."""
        cluster = self.problem.cluster
        on_paths = {end for path in cluster.paths for end in (path.source, path.target)}
        if cluster.relay is not None:
            on_paths.add(cluster.relay.host or "")
        known: dict[str, int] = {}
        faces = (
            host.name if host.name in on_paths else host.model_copy(update={"name": ""}).model_dump_json()
            for host in cluster.hosts
        )
        return tuple(known.setdefault(face, len(known)) for face in faces)


@cache
def _in_full(spec: str) -> str:
    return str(CodecSpec.parse(spec))


def _family(spec: str) -> str:
    return spec.partition(":")[0]


def times_of(host: HostNumbers, micro_batch: int) -> tuple[float, ...]:
    """A host's seconds for a micro-batch size, in the order of `HostTimes`.

    Between two measured sizes, a straight line; beyond them the line through the nearest two, but never below zero or
    falling as micro-batches grow; where only one size was measured, times are proportional to it.
    """
    sizes = [float(times.micro_batch) for times in host.compute]
    rows = []
    for times in host.compute:
        values = times.model_dump() | {"held_block": times.block_activation_bytes}
        if values["block_input_gradient"] is None:
            values["block_input_gradient"] = times.block_backward / 2
        rows.append([float(values[name]) for name in HostTimes.__slots__])
    return tuple(_at(sizes, column, float(micro_batch)) for column in zip(*rows, strict=True))


def _at(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    if sizes[0] <= size <= sizes[-1]:
        return float(np.interp(size, sizes, values))
    near = slice(2) if size < sizes[0] else slice(-2, None)
    (x0, x1), (y0, y1) = sizes[near], values[near]
    line = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    return min(max(line, y0 * size / x0), y0) if size < sizes[0] else max(line, y1)


def _pairs(cluster: ClusterNumbers) -> tuple[Array, Array, Flags]:
    """Rate of each path, its one-way latency, and whether it is relayed: sites' paths first, hosts' over them."""
    count = len(cluster.hosts)
    rate = np.full((count, count), math.inf)
    round_trip = np.full((count, count), cluster.round_trip)
    relayed = np.full((count, count), False)
    members = {host.name: [index] for index, host in enumerate(cluster.hosts)}
    names = set(members)
    for index, host in enumerate(cluster.hosts):
        if host.site is not None:
            members.setdefault(host.site, []).append(index)
    known = {(path.source, path.target) for path in cluster.paths if path.round_trip is not None}
    for path in sorted(cluster.paths, key=lambda path: (path.source in names) + (path.target in names)):
        there = np.ix_(members[path.source], members[path.target])
        relayed[there] = path.relayed is True
        if path.failure is not None:
            rate[there] = _UNREACHABLE_BITS_PER_S
        if path.rate is not None:
            rate[there] = path.rate
        if path.round_trip is not None:
            round_trip[there] = path.round_trip
            if (path.target, path.source) not in known:
                round_trip[np.ix_(members[path.target], members[path.source])] = path.round_trip
    np.fill_diagonal(rate, math.inf)
    np.fill_diagonal(round_trip, 0.0)
    return rate, round_trip / 2, relayed
