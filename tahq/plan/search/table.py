"""The numbers of a cluster as arrays: by host, and by pair of hosts.

Rates are bits per second, latencies one-way seconds. What no number was measured for is infinitely fast, or as the
cluster says for paths that are not listed; a codec that was not measured takes as long as one that was.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tahq.plan.cluster_numbers import ClusterNumbers, CodecTimes, HostNumbers, LayerTimes, PathNumbers
from tahq.plan.problem import PlanProblem
from tahq.quant import CodecSpec

Array = NDArray[np.float64]

_UNREACHABLE_BITS_PER_S = 8e-3
"""Of a path that nothing got through: so slow that no plan takes it where there is another."""

_TIMES = (
    *("block_forward", "block_backward", "block_input_gradient"),
    *("first_forward", "first_backward", "last_forward", "last_backward"),
)


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds by host for one size of micro-batch, and what a block keeps of one; 0: as counted."""

    block_forward: Array
    block_backward: Array
    block_input_gradient: Array
    first_forward: Array
    first_backward: Array
    last_forward: Array
    last_backward: Array
    held_block: Array


class ClusterTable:
    """Arrays made once from a problem, and shared by everything that searches.

    Args:
        problem: what is planned.
    """

    def __init__(self, problem: PlanProblem) -> None:
        hosts = problem.cluster.hosts
        self.problem = problem
        self.num_hosts = len(hosts)
        self.up = np.array([math.inf if host.up is None else host.up for host in hosts])
        self.down = np.array([math.inf if host.down is None else host.down for host in hosts])
        self.memory = np.array([math.inf if host.memory is None else float(host.memory) for host in hosts])
        self.path_rate, self.latency_s = _pairs(problem.cluster)
        self._times: dict[int, HostTimes] = {}
        self._codecs = [{_in_full(spec): times for spec, times in host.codecs.items()} for host in hosts]

    def times(self, micro_batch: int) -> HostTimes:
        """Seconds by host for micro-batches of this size."""
        if micro_batch not in self._times:
            rows = [times_of(host, micro_batch) for host in self.problem.cluster.hosts]
            self._times[micro_batch] = HostTimes(*(np.array(column) for column in zip(*rows, strict=True)))
        return self._times[micro_batch]

    def codec_s(self, host: int, codec: str, micro_batch: int) -> tuple[float, float]:
        """Seconds to encode and to decode a micro-batch on a host; see `codec_stand_in` for what was not measured."""
        measured = self._codecs[host]
        stand_in = self.codec_stand_in(host, codec)
        if stand_in is None:
            return 0.0, 0.0
        times, elements = measured[stand_in], self.problem.num_elements(micro_batch)
        return elements * times.encode_per_element, elements * times.decode_per_element

    def codec_stand_in(self, host: int, codec: str) -> str | None:
        """The codec whose times on a host are taken for this one's; None: none was measured, and they are nothing.

        It is the codec itself; or else of those of its family the slowest; or else the slowest of all but `raw`.
        """
        return _stand_in(self._codecs[host], _in_full(codec))

    def dead_hop(self, hosts: Sequence[int]) -> tuple[int, int] | None:
        """The first two neighbours in an order between which, one way or the other, nothing gets through."""
        for one, other in pairwise(hosts):
            for ends in ((one, other), (other, one)):
                if self.path_rate[ends] == _UNREACHABLE_BITS_PER_S:
                    return ends
        return None

    @cached_property
    def pair_rate(self) -> Array:
        """What a flow from one host to another has if it is alone."""
        rate: Array = np.minimum(np.minimum(self.up[:, None], self.down[None, :]), self.path_rate)
        return rate

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """A number for each host; hosts with the same one are alike and can take each other's place.

        A host that a path names is like no other.
        """
        cluster = self.problem.cluster
        on_paths = {end for path in cluster.paths for end in (path.source, path.target)}
        known: dict[object, int] = {}
        kinds = []
        for host in cluster.hosts:
            face = host.name if host.name in on_paths else host.model_copy(update={"name": ""}).model_dump_json()
            kinds.append(known.setdefault(face, len(known)))
        return tuple(kinds)


@cache
def _in_full(spec: str) -> str:
    return str(CodecSpec.parse(spec))


def _stand_in(measured: Mapping[str, CodecTimes], codec: str) -> str | None:
    if codec in measured:
        return codec
    family = [each for each in measured if _family(each) == _family(codec)]
    others = [each for each in measured if _family(each) != "raw"]
    nearest = family or (others if _family(codec) != "raw" else [])
    return max(nearest, key=lambda each: sum(measured[each].model_dump().values()), default=None)


def _family(spec: str) -> str:
    return spec.partition(":")[0]


def times_of(host: HostNumbers, micro_batch: int) -> tuple[float, ...]:
    """A host's seconds for a size of micro-batch, in the order of `HostTimes`.

    Between two sizes that were measured, the straight line. Beyond them the nearest two lend theirs, but never to
    fall below zero or to fall as micro-batches grow; where one size alone is known, times are proportional to it.
    """
    rows = [_filled(times) for times in host.compute]
    sizes = [float(times.micro_batch) for times in host.compute]
    return tuple(_at(sizes, column, float(micro_batch)) for column in zip(*rows, strict=True))


def _filled(times: LayerTimes) -> list[float]:
    own = times.block_backward / 2 if times.block_input_gradient is None else times.block_input_gradient
    values = [own if name == "block_input_gradient" else float(getattr(times, name)) for name in _TIMES]
    return [*values, float(times.block_activation_bytes)]


def _at(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    if sizes[0] <= size <= sizes[-1]:
        return float(np.interp(size, sizes, values))
    near = (0, 1) if size < sizes[0] else (-2, -1)
    (x0, x1), (y0, y1) = (sizes[near[0]], sizes[near[1]]), (values[near[0]], values[near[1]])
    line = y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    if size < sizes[0]:
        return min(max(line, y0 * size / x0), y0)
    return max(line, y1)


def _pairs(cluster: ClusterNumbers) -> tuple[Array, Array]:
    """Rate of each path, and its one-way latency: sites' paths first, hosts' over them."""
    count = len(cluster.hosts)
    rate = np.full((count, count), math.inf)
    round_trip = np.full((count, count), cluster.round_trip)
    members = _members(cluster)
    names = {host.name for host in cluster.hosts}
    told = {(path.source, path.target) for path in cluster.paths if path.round_trip is not None}
    for path in sorted(cluster.paths, key=lambda path: (path.source in names) + (path.target in names)):
        ends = members[path.source], members[path.target]
        _put(path, ends, rate, round_trip, both_ways=(path.target, path.source) not in told)
    np.fill_diagonal(rate, math.inf)
    np.fill_diagonal(round_trip, 0.0)
    return rate, round_trip / 2


def _members(cluster: ClusterNumbers) -> dict[str, list[int]]:
    """Indices of the hosts that a name stands for: a host's own, or all of a site."""
    members: dict[str, list[int]] = {}
    for index, host in enumerate(cluster.hosts):
        members[host.name] = [index]
        if host.site is not None:
            members.setdefault(host.site, []).append(index)
    return members


def _put(
    path: PathNumbers, ends: tuple[list[int], list[int]], rate: Array, round_trip: Array, *, both_ways: bool
) -> None:
    source, target = ends
    if path.failure is not None:
        rate[np.ix_(source, target)] = _UNREACHABLE_BITS_PER_S
    if path.rate is not None:
        rate[np.ix_(source, target)] = path.rate
    if path.round_trip is not None:
        round_trip[np.ix_(source, target)] = path.round_trip
        if both_ways:
            round_trip[np.ix_(target, source)] = path.round_trip
