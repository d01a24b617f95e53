"""Seconds and bytes of the stages on the hosts of one order, for one micro-batch size; the best divisions of layers.

Layers may be one division, of shape [P], or many, [N, P]; what depends on them has the same shape.

Blocks are alike, so for a given limit of the busiest stage's compute time the best division gives each block to the
fastest host that has room: the time that a micro-batch needs to pass through is a sum. So a few limits are tried in
place of all divisions, each division is bounded with everything else (links, memory, latency), and where there are few
divisions, all are tried.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tahq.comm.network_model import transmission_s
from tahq.plan.problem import MemoryOption, PipelinePlan
from tahq.plan.search.needs import Flags, StageCompute, StageHosts, StageNeeds, whole_quotient
from tahq.plan.search.table import ClusterTable
from tahq.plan.simulate.bound import Array, DirectionSeconds, StepSeconds, shared_devices, step_bound

Depths = tuple[int, ...]
Numbers = npt.NDArray[np.intp]
"""Of options."""

MAX_ALL, MAX_ALL_SHARED = 2_000, 20_000
"""Up to this many divisions, all are tried; the second where stages share a GPU, which no division makes faster."""

_NUM_LIMITS = 48
_BISECTIONS = 30


class StageCosts:
    """Costs of stages on hosts, given by index and in order; codecs are by cut, None for those of fewest bits."""

    def __init__(
        self,
        table: ClusterTable,
        hosts: Sequence[int],
        micro_batch: int,
        activations: Sequence[str] | None = None,
        gradients: Sequence[str] | None = None,
    ) -> None:
        self.table, model = table, table.problem.model
        self.hosts = np.array(hosts)
        self.devices = [table.devices[host] for host in hosts]
        self.micro_batch = micro_batch
        self.num_micro_batches = model.global_batch // micro_batch
        self.memory: Array = table.memory[self.hosts]
        self.first_trainable = model.first_trainable
        first, last = np.zeros(len(hosts)), np.zeros(len(hosts))
        first[0] = last[-1] = 1.0
        is_trained = float(model.first_trainable == 0)  # the embedding
        times = table.times(micro_batch)
        own = {name: getattr(times, name)[self.hosts] for name in times.__slots__}
        self.ends = self.hosts[:-1], self.hosts[1:]
        """Hosts before and after each cut."""
        self.latency = table.latency_s[self.ends]
        self.nbytes = np.zeros((len(hosts) - 1, 2))
        """Of a frame at each cut, forward and backward."""
        fewest_bits = [[codec] * (len(hosts) - 1) for codec in table.problem.fewest_bits]
        self.outward = self._direction(0, activations or fewest_bits[0], self.ends)
        self.inward = self._direction(1, gradients or fewest_bits[1], self.ends[::-1])
        is_own_end = (self.ends[0] == table.relay) | (self.ends[1] == table.relay)
        self.relayed: Flags = table.relayed[self.ends] & ~is_own_end
        """Cuts whose frames go over another host's relay."""
        frame_nbytes = np.zeros(len(hosts))
        frame_nbytes[:-1] += self.nbytes.sum(axis=1)
        frame_nbytes[1:] += self.nbytes.sum(axis=1)
        self._stage_hosts = StageHosts(
            micro_batch=micro_batch,
            num_micro_batches=self.num_micro_batches,
            first=first,
            last=last,
            block=StageCompute(own["block_forward"], own["block_backward"], own["block_input_gradient"]),
            ends=StageCompute(
                first * own["first_forward"] + last * own["last_forward"],
                is_trained * first * own["first_backward"] + last * own["last_backward"],
                # no stage waits for the gradient of an embedding's input; of the head's two products one is the input's
                last * own["last_backward"] / 2,
            ),
            held_block=own["held_block"],
            frame_nbytes=frame_nbytes,
            memory=self.memory,
            host_memory=table.host_memory[self.hosts],
            link=table.host_link[self.hosts],
            out_nbytes=self.nbytes[:, 0],
            first_trainable=model.first_trainable,
        )
        self.needs = self._needs(model.options)
        """By option; only the first if no stage can need another."""

    def _needs(self, options: Sequence[MemoryOption]) -> list[StageNeeds]:
        first = StageNeeds(options, 0, self._stage_hosts)
        whole = np.full(len(self.hosts), float(self.table.problem.model.num_layers))
        if first.fits(whole, np.full(len(self.hosts), float(self.num_micro_batches))).all():
            return [first]
        return [first, *(StageNeeds(options, number, self._stage_hosts) for number in range(1, len(options)))]

    @classmethod
    def of(cls, table: ClusterTable, plan: PipelinePlan) -> "StageCosts":
        """The costs of a plan's stages."""
        key = plan.hosts, plan.micro_batch, plan.activations, plan.gradients
        found = table.costs_of_plans.get(key)
        if found is None:
            found = table.costs_of_plans[key] = cls(table, *key)
        assert isinstance(found, cls)
        return found

    @property
    def block_s(self) -> Array:
        """Seconds of a block, forward and backward, without recomputation, by stage."""
        block = self._stage_hosts.block
        return np.maximum(block.forward + block.backward, 1e-12)

    @property
    def block_seconds(self) -> tuple[Array, Array]:
        """Of a block without, and with, a backward, by stage."""
        return np.maximum(self._stage_hosts.block.forward, 1e-12), self.block_s

    @property
    def ends_s(self) -> Array:
        """Seconds of the model's ends, forward and backward, by stage."""
        ends = self._stage_hosts.ends
        return ends.forward + ends.backward

    def carries(self, layers: Array) -> Flags:
        """Whether gradients cross a cut, as something before it is trained."""
        crossed: Flags = np.cumsum(layers, axis=-1)[..., :-1] > self.first_trainable
        return crossed

    def gradients_of(self, layers: Array) -> DirectionSeconds:
        """What gradients cost at the cuts of a division."""
        return self.inward if self.first_trainable == 0 else self.inward.where(self.carries(layers))

    def relay_s(self, layers: Array) -> Array | float:
        """Seconds of a micro-batch on the slower of the relaying host's uplink and downlink."""
        if not self.relayed.any():
            return 0.0
        nbytes = self.nbytes[:, 0] + np.where(self.carries(layers), self.nbytes[:, 1], 0.0)
        relayed: Array = np.where(self.relayed, nbytes, 0.0).sum(axis=-1)
        return transmission_s(relayed, np.full_like(relayed, min(self.table.relay_rates)))

    def options_of(self, plan: PipelinePlan) -> Numbers:
        """The number of each stage's option in a plan, [P]; the first where none fits."""
        if plan.options:
            return np.array(plan.options)
        layers, seconds = np.array(plan.layers, dtype=float), []
        for needs, fits in zip(self.needs, self._fits(plan), strict=True):
            times = needs.times(layers)
            step_s = self.num_micro_batches * (times.forward + times.backward) + needs.update_s(layers)
            seconds.append(np.where(fits, step_s, math.inf))
        chosen: Numbers = np.argmin(seconds, axis=0)
        return chosen

    def _fits(self, plan: PipelinePlan) -> list[Flags]:
        """By option, whether it fits each stage of a plan."""
        most = float(plan.num_micro_batches)
        depths = np.array(plan.depths, dtype=float) / plan.chunks_per_stage if plan.depths else most
        in_flight = np.minimum(most, np.broadcast_to(depths, len(self.hosts)))
        layers, split = np.array(plan.layers, dtype=float), plan.schedule == "zero-bubble"
        return [needs.fits(layers, in_flight) & (needs.option.splits or not split) for needs in self.needs]

    def fits(self, plan: PipelinePlan) -> bool:
        """Whether the options that a plan names fit its stages."""
        every = self._fits(plan)
        return all(every[number][stage] for stage, number in enumerate(plan.options))

    def usable_options(self, plan: PipelinePlan) -> list[list[int]]:
        """By stage, numbers of the options that fit, of those that are never faster than another only the first."""
        layers, rows = np.array(plan.layers, dtype=float), []
        for needs, fits in zip(self.needs, self._fits(plan), strict=True):
            rows.append(np.where(fits, np.array([*needs.times(layers), needs.update_s(layers)]), math.inf).T)
        return [_undominated(column) for column in np.array(rows).transpose(1, 0, 2)]

    def times(self, layers: Array, options: Numbers | None = None) -> StageCompute:
        """Seconds by stage under these options; None: the least of those with room for a micro-batch."""
        rows = [needs.times(layers) for needs in self.needs]
        if len(rows) == 1:
            return rows[0]
        if options is not None:
            return StageCompute(*(_picked(column, options) for column in zip(*rows, strict=True)))
        ones = np.ones_like(layers)
        fits = [needs.fits(layers, ones) for needs in self.needs]
        has_any = np.any(fits, axis=0)
        least = (np.min(np.where(fits, column, math.inf), axis=0) for column in zip(*rows, strict=True))
        return StageCompute(*(np.where(has_any, each, first) for each, first in zip(least, rows[0], strict=True)))

    def times_of(self, plan: PipelinePlan) -> StageCompute:
        """Seconds by stage of a plan."""
        return self.times(np.array(plan.layers, dtype=float), self.options_of(plan))

    def step_seconds(
        self, layers: Array, depths: Array | None, *, split: bool, options: Numbers | None = None
    ) -> StepSeconds:
        """The input of `tahq.plan.simulate.bound`; `split`: whether backwards are; `options` as of `times`."""
        times = self.times(layers, options)
        if depths is not None and self.first_trainable:
            depths = np.where(self._stage_hosts.is_frozen(layers), np.inf, depths)
        return StepSeconds(
            forward=times.forward,
            backward=times.backward,
            input_gradient=times.input_gradient if split else times.backward,
            activations=self.outward,
            gradients=self.gradients_of(layers),
            latency=self.latency,
            num_micro_batches=float(self.num_micro_batches),
            depths=depths,
            relay_s=self.relay_s(layers),
            carries=self.carries(layers) if self.first_trainable else None,
            devices=self.devices,
        )

    def likely_s(self, layers: Array, depths: Array, *, split: bool) -> Array:
        """Seconds by which divisions, [N, P], are ranked: the bound with one option for each stage, and the updates.

        With room for one micro-batch in flight each has its fastest option, or that with the shortest update; the
        faster of both.
        """
        if len(self.needs) == 1:
            return np.zeros(len(layers))
        fits = np.array([needs.fits(layers, np.ones_like(layers)) for needs in self.needs])
        rows = [needs.times(layers) for needs in self.needs]
        compute = np.array([self.num_micro_batches * (each.forward + each.backward) for each in rows])
        update = np.array([needs.update_s(layers) for needs in self.needs])
        found = []
        for weight in (1.0, 1e3):
            options = np.argmin(np.where(fits, compute + weight * update, math.inf), axis=0)
            step = self.step_seconds(layers, depths, split=split, options=options)
            found.append(step_bound(step) + _picked([*update], options).max(axis=-1))
        likely: Array = np.min(found, axis=0)
        return likely

    def update_s(self, layers: Array, options: Numbers) -> float:
        """Seconds of the slowest stage's copies of an update."""
        return float(_picked([needs.update_s(layers) for needs in self.needs], options).max())

    def peak_nbytes(self, layers: Array, in_flight: Array, options: Numbers) -> Array:
        """On the device, by stage."""
        rows = [each.fixed_nbytes(layers) + each.nbytes_in_flight(layers, in_flight) for each in self.needs]
        return _picked(rows, options)

    def least_nbytes(self, layers: Array, in_flight: Array) -> Array:
        """On the device under the option that takes least, by stage."""
        rows = [each.fixed_nbytes(layers) + each.nbytes_in_flight(layers, in_flight) for each in self.needs]
        least: Array = np.min(rows, axis=0)
        return least

    def depth_limits(self, layers: Array, *, split: bool = False) -> Array:
        """Most micro-batches in flight that fit each stage's memory, never more than upstream; below 1: none fits."""
        usable = [needs for needs in self.needs if needs.option.splits or not split]
        most = np.max([needs.depths(layers) for needs in usable], axis=0) if usable else np.zeros_like(layers)
        limits: Array = np.minimum.accumulate(most, axis=-1)
        return limits

    def depths_by_option(self, layers: Array) -> list[Array]:
        """The limits of each option alone where it fits, if there are several."""
        found = [np.minimum.accumulate(needs.depths(layers)) for needs in self.needs]
        return [each for each in found if each[-1] >= 1] if len(found) > 1 else []

    def _direction(self, number: int, codecs: Sequence[str], ends: tuple[Array, Array]) -> DirectionSeconds:
        table, size, (sources, targets) = self.table, self.micro_batch, ends
        num = 1 if number else table.problem.model.num_forwards
        nbytes = np.array([table.problem.frame_nbytes(codec, size, num) for codec in codecs])
        self.nbytes[:, number] = nbytes
        encode, decode = (
            num
            * np.array([table.codec_s(int(host), each, size)[index] for host, each in zip(hosts, codecs, strict=True)])
            for index, hosts in enumerate(ends)
        )
        return DirectionSeconds(
            encode=encode,
            decode=decode,
            uplink=transmission_s(nbytes, table.up[sources]),
            path=transmission_s(nbytes, table.path_rate[ends]),
            downlink=transmission_s(nbytes, table.down[targets]),
        )


def plan_bound_s(table: ClusterTable, plan: PipelinePlan) -> float:
    """The bound of a plan's step in seconds; 0.0 under an interleaved schedule."""
    if plan.chunks_per_stage > 1:
        return 0.0
    depths = np.array(plan.depths, dtype=float) if plan.depths else None
    stages, layers = StageCosts.of(table, plan), np.array(plan.layers, dtype=float)
    split, options = plan.schedule == "zero-bubble", stages.options_of(plan)
    return float(step_bound(stages.step_seconds(layers, depths, split=split, options=options)))


def _undominated(seconds: Array) -> list[int]:
    """Rows of [O, N] that are finite and not above another in every column."""
    kept: list[int] = []
    for number in np.lexsort(seconds.T[::-1]):
        if np.isfinite(seconds[number, 0]) and not any((seconds[each] <= seconds[number]).all() for each in kept):
            kept.append(int(number))
    return kept


def _picked(rows: Sequence[Array], options: Numbers) -> Array:
    """Of rows by option, [O, ..., P], the one that each stage has."""
    picked: Array = np.take_along_axis(np.array(rows), options[None], axis=0)[0]
    return picked


_LAST = np.array([0.5, 0.75, 0.875, 1.0])
"""Forwards of the last stage before its first backward behind slow links, of all."""


def depth_profiles(stages: StageCosts, layers: Sequence[float], schedule: str) -> tuple[Depths, ...]:
    """Depths to try under a schedule, the fewest first; none where memory has no room for the schedule at all.

    The schedule's own, P − r; what covers a round trip, that is, from a forward to its gradient's return at the pace of
    the slowest resource, and a little more; steeper ones, 1 + c·(P − 1 − r), which let the last stage begin its
    backwards while activations still come in slowly; all that memory holds, and the same with fewer on the last stage,
    for slow links; what each memory option holds, as a faster one may hold less. A stage may never have fewer
    micro-batches in flight than the one after it, or both would wait for each other.
    """
    blocks = np.array(layers, dtype=float)
    limits = stages.depth_limits(blocks, split=schedule == "zero-bubble")
    if limits[-1] < 1:
        return ()
    if schedule == "gpipe":
        return ((),) if limits[-1] >= stages.num_micro_batches else ()
    later: Array = np.arange(len(blocks) - 1, -1.0, -1.0)
    if schedule == "interleaved":
        # depths count chunks, which keep less each
        chunks = stages.table.problem.chunks_per_stage
        own = 2 * later + (chunks - 1) * len(blocks) + 1
        return tuple(each for each in _capped([own, 2 * own], limits * chunks) if min(each) >= chunks)
    last = _LAST * stages.num_micro_batches
    if schedule == "zero-bubble":
        # weight gradients that lag behind count as in flight, and no more than all micro-batches ever are
        limits = np.where(limits >= stages.num_micro_batches, limits + len(blocks), limits)
        last += len(blocks) - 1
    most = (stages.num_micro_batches - 1) / max(1, len(blocks) - 1)
    steep = [1 + np.ceil(slope * later) for slope in (1, 2, 3, 4, (1 + most) / 2, most)]
    flat = [np.where(later > 0, np.inf, each) for each in (*np.ceil(last), np.inf)]
    return _capped([*steep, *_covering(stages, blocks), *flat, *stages.depths_by_option(blocks)], limits)


def _capped(profiles: Sequence[Array], limits: Array) -> tuple[Depths, ...]:
    found = dict.fromkeys(tuple(int(depth) for depth in np.minimum(profile, limits)) for profile in profiles)
    return tuple(sorted(found, key=sum))


def _covering(stages: StageCosts, layers: Array) -> Iterator[Array]:
    """Depths that let a stage go on while its oldest micro-batch travels."""
    times = stages.times(layers)
    out, back = stages.outward, stages.inward
    hops = out.encode + out.alone + out.decode + back.encode + back.alone + back.decode + 2 * stages.latency
    own = times.forward + times.backward
    later = np.concatenate([np.cumsum((own[1:] + hops)[::-1])[::-1], [0.0]])
    pace = max([1e-12, float(own.max()), *(float(each.alone.max(initial=0.0)) for each in (out, back))])
    for share, extra in ((1.0, 0), (1.0, 1), (1.0, 2), (1.5, 2), (2.0, 4)):
        yield np.maximum(1.0, np.ceil(share * (own + later) / pace - 1e-9) + extra)


def best_divisions(stages: StageCosts, num_layers: int, keep: int, *, split: bool) -> list[tuple[Array, float]]:
    """At most `keep` divisions of least bound that fit the hosts' memory, with their bounds in seconds, best first.

    Each stage has at least one layer. `split`: backwards may be split.
    """
    num_stages = len(stages.hosts)
    most = MAX_ALL_SHARED if shared_devices(stages.devices) else MAX_ALL
    every = math.comb(num_layers - 1, num_stages - 1) <= most
    fill = _filled_in_order if stages.first_trainable else _filled
    layers = all_divisions(num_layers, num_stages) if every else fill(stages, num_layers)
    depths = stages.depth_limits(layers)
    fits = depths[:, -1] >= 1
    layers, depths = layers[fits], depths[fits]
    if not len(layers):
        return []
    bounds_s = step_bound(stages.step_seconds(layers, depths, split=split))
    likely_s = stages.likely_s(layers, depths, split=split)
    return [(layers[index], float(bounds_s[index])) for index in np.lexsort((bounds_s, likely_s))[:keep]]


@cache
def all_divisions(num_layers: int, num_stages: int) -> Array:
    """All divisions, [N, P]."""
    cuts = combinations(range(1, num_layers), num_stages - 1)
    return np.diff(np.array([(0, *inner, num_layers) for inner in cuts], dtype=float))


def _filled(stages: StageCosts, num_layers: int) -> Array:
    """A division for each limit of compute time and each depth that memory may have to hold."""
    each, ends = stages.block_s, stages.ends_s
    rooms = np.unique([_most_layers(stages, depths, num_layers) for depths in _wanted_depths(stages)], axis=0)
    found = [np.zeros((0, len(each)))]
    for room in rooms:
        if room.min() >= 1 and room.sum() >= num_layers:
            limits = _limits(each, ends, room, num_layers)
            found.append(_fill(_capacity(limits[:, None], each, ends, room), each, num_layers))
    layers: Array = np.unique(np.concatenate(found), axis=0)
    return layers


def _filled_in_order(stages: StageCosts, num_layers: int) -> Array:
    """Divisions where blocks before the first that is trained cost less: each stage takes in turn what a limit allows.

    Limits are of compute time, from the least that suffices to twice that, and of memory, by the depths to reserve it
    for.
    """
    found = [np.zeros((0, len(stages.hosts)))]
    for depths in _wanted_depths(stages):
        taken = partial(_taken_in_order, stages, depths, num_layers)
        low, high = 0.0, float(num_layers * stages.block_s.max() + stages.ends_s.max())
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if taken(middle).sum() >= num_layers else (middle, high)
        found += [taken(limit_s) for limit_s in np.linspace(high, 2 * high, _NUM_LIMITS)]
    layers = np.unique(np.vstack(found), axis=0)
    whole: Array = layers[(layers.sum(axis=1) == num_layers) & (layers.min(axis=1) >= 1)]
    return whole


def _taken_in_order(stages: StageCosts, depths: Array, num_layers: int, limit_s: float) -> Array:
    """Blocks by stage, [P]; fewer than there are in all if they do not fit under the limit."""
    hosts, first = stages.block_seconds, stages.first_trainable
    rooms = [_most_layers(stages, depths, num_layers, are_trained=each) for each in (False, True)]
    num_stages, start, taken = len(stages.hosts), 0, list[int]()
    for stage in range(num_stages):
        most = num_layers - start - (num_stages - stage - 1)  # each stage behind it needs one
        left_s, share, count = limit_s - float(stages.ends_s[stage]), 1.0, 0
        while count < most:
            is_trained = start + count >= first
            left_s -= float(hosts[is_trained][stage])
            share -= 1 / max(1e-9, float(rooms[is_trained][stage]))
            if count and (left_s < -1e-12 or share < -1e-9):
                break
            count += 1
        taken.append(count)
        start += count
    return np.array(taken, dtype=float)


def _capacity(limit_s: Array, each: Array, ends: Array, room: Array) -> Array:
    """Blocks that each stage may have under a limit of its compute time, at least one."""
    capacity: Array = np.clip(np.floor((limit_s - ends) / each + 1e-9), 1, room)
    return capacity


def _wanted_depths(stages: StageCosts) -> list[Array]:
    """Depths to reserve memory for, from one micro-batch in flight to all; only one where memory is no limit."""
    num_stages = len(stages.hosts)
    if np.isinf(stages.memory).all():
        return [np.ones(num_stages)]
    natural = np.arange(num_stages, 0, -1).astype(float)
    same = [np.full(num_stages, float(2**power)) for power in range(stages.num_micro_batches.bit_length())]
    return [np.minimum(depths, stages.num_micro_batches) for depths in (natural, 2 * natural, *same)]


def _most_layers(stages: StageCosts, depths: Array, num_layers: int, *, are_trained: bool = True) -> Array:
    """Blocks that fit each stage's memory at these depths."""
    rooms = []
    for needs in stages.needs:
        base, of_block = needs.of_blocks(depths, are_trained=are_trained)
        rooms.append(whole_quotient(stages.memory - base, of_block))
    most: Array = np.clip(np.max(rooms, axis=0), 0, num_layers - len(depths) + 1)
    return most


def _limits(each: Array, ends: Array, room: Array, num_layers: int) -> Array:
    """Limits in seconds of the busiest stage's compute: the least that suffices, those just above, some far above."""
    values = np.unique(np.arange(1, int(room.max()) + 1)[:, None] * each + ends)
    least = (each + ends).max()
    values = values[values >= least - 1e-12] if values[-1] >= least - 1e-12 else np.array([least])
    low = bisect_left(
        range(len(values) - 1), True, key=lambda at: _capacity(values[at], each, ends, room).sum() >= num_layers
    )
    above = values[low:]
    half = _NUM_LIMITS // 2
    if len(above) <= _NUM_LIMITS:
        return above
    return np.concatenate([above[:half], above[np.linspace(half, len(above) - 1, half).astype(int)]])


def _fill(capacity: Array, each: Array, num_layers: int) -> Array:
    """Give every stage one block, then the rest to the fastest hosts first."""
    order = np.argsort(each, kind="stable")
    extra = (capacity - 1)[:, order]
    before = np.cumsum(extra, axis=1) - extra
    layers = np.ones_like(capacity)
    layers[:, order] += np.clip(num_layers - len(each) - before, 0, extra)
    whole: Array = layers[layers.sum(axis=1) == num_layers]
    return whole
