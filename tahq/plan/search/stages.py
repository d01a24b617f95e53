"""What stages cost on the hosts of one order, for one size of micro-batch: seconds and bytes, by division.

Layers may be one division, of shape [P], or many, [N, P]; what depends on them has the same shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tahq.comm.network_model import transmission_s
from tahq.plan.search.table import Array, ClusterTable
from tahq.plan.simulate.bound import DirectionSeconds, StepSeconds


@dataclass(frozen=True, slots=True)
class Wires:
    """Codec of each cut, forward and backward."""

    activations: tuple[str, ...]
    gradients: tuple[str, ...]

    @classmethod
    def same(cls, activations: str, gradients: str, num_stages: int) -> "Wires":
        """One codec a direction on all cuts."""
        return cls((activations,) * (num_stages - 1), (gradients,) * (num_stages - 1))


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a micro-batch by stage; `input_gradient` is the part of `backward` that the stage before waits for."""

    forward: Array
    backward: Array
    input_gradient: Array


class StageCosts:
    """The hosts of one order, in order.

    Args:
        table: the cluster.
        hosts: index of each stage's host.
        micro_batch: samples.
        wires: codecs of the cuts.
    """

    def __init__(self, table: ClusterTable, hosts: Sequence[int], micro_batch: int, wires: Wires) -> None:
        self._table = table
        self.hosts = np.array(hosts)
        self.micro_batch = micro_batch
        self.num_micro_batches = table.problem.model.global_batch // micro_batch
        self.wires = wires
        self.chunks_per_stage = table.problem.chunks_per_stage
        self._first, self._last = np.zeros(len(hosts)), np.zeros(len(hosts))
        self._first[0] = self._last[-1] = 1.0
        times = table.times(micro_batch)
        own = {name: getattr(times, name)[self.hosts] for name in times.__slots__}
        self.block = StageTimes(own["block_forward"], own["block_backward"], own["block_input_gradient"])
        ends_backward = self._first * own["first_backward"] + self._last * own["last_backward"]
        self.ends = StageTimes(
            self._first * own["first_forward"] + self._last * own["last_forward"],
            ends_backward,
            # an embedding has no input whose gradient anybody waits for; of the head's two products one is
            self._last * own["last_backward"] / 2,
        )
        self._held_block = own["held_block"]
        self.latency = table.latency_s[self.hosts[:-1], self.hosts[1:]]
        self.forward_way = self._way(wires.activations, self.hosts[:-1], self.hosts[1:])
        self.backward_way = self._way(wires.gradients, self.hosts[1:], self.hosts[:-1])

    def times(self, layers: Array) -> StageTimes:
        """Seconds by stage."""
        return StageTimes(
            *(
                layers * getattr(self.block, name) + getattr(self.ends, name)
                for name in ("forward", "backward", "input_gradient")
            )
        )

    def bound_costs(self, layers: Array, depths: Array | None, *, split: bool) -> StepSeconds:
        """What `tahq.plan.simulate.bound` takes; `split`: whether backwards are."""
        times = self.times(layers)
        return StepSeconds(
            forward=times.forward,
            backward=times.backward,
            input_gradient=times.input_gradient if split else times.backward,
            activations=self.forward_way,
            gradients=self.backward_way,
            latency=self.latency,
            num_micro_batches=float(self.num_micro_batches),
            depths=depths,
        )

    def fixed_nbytes(self, layers: Array) -> Array:
        """Weights, gradients and optimizer, and what is there once."""
        model, held = self._table.problem.model, self._table.problem.model.held[self.micro_batch]
        ends = self._first * model.first_nbytes + self._last * model.last_nbytes
        once = np.where(self._last > 0, max(held.workspace, held.again), held.again)
        # a gradient received, a gradient to send
        cuts = (1 - self._first) + (1 - self._last)
        nbytes: Array = layers * model.block_nbytes + ends + cuts * held.tensor + once
        return nbytes

    def held_nbytes(self, layers: Array) -> Array:
        """What a micro-batch in flight keeps."""
        held = self._table.problem.model.held[self.micro_batch]
        blocks = np.where(self._held_block > 0, self._held_block, held.block)
        ends = self._first * held.first + self._last * held.last + (1 - self._last) * held.tensor
        nbytes: Array = layers * blocks + ends + held.stage + self._frame_nbytes()
        return nbytes

    def memory(self) -> Array:
        """What each host has."""
        memory: Array = self._table.memory[self.hosts]
        return memory

    def depth_limits(self, layers: Array) -> Array:
        """Most micro-batches in flight that fit each stage's memory, never more than upstream; below 1: none does."""
        room = self.memory() - self.fixed_nbytes(layers)
        held = self.held_nbytes(layers)
        with np.errstate(divide="ignore", invalid="ignore"):
            fit = np.where(held > 0, np.floor(room / held), np.where(room >= 0, np.inf, 0.0))
        limits: Array = np.minimum.accumulate(np.clip(fit, 0, self.num_micro_batches), axis=-1)
        return limits

    def _frame_nbytes(self) -> Array:
        nbytes = np.zeros(len(self.hosts))
        for codecs in (self.wires.activations, self.wires.gradients):
            frames = np.array([self._table.problem.frame_nbytes(codec, self.micro_batch) for codec in codecs])
            nbytes[:-1] += frames
            nbytes[1:] += frames
        return nbytes

    def _way(self, codecs: Sequence[str], sources: Array, targets: Array) -> DirectionSeconds:
        table, size = self._table, self.micro_batch
        nbytes = np.array([table.problem.frame_nbytes(codec, size) for codec in codecs])
        pairs = list(zip(codecs, sources, targets, strict=True))
        return DirectionSeconds(
            encode=np.array([table.codec_s(int(source), codec, size)[0] for codec, source, _ in pairs]),
            decode=np.array([table.codec_s(int(target), codec, size)[1] for codec, _, target in pairs]),
            uplink=transmission_s(nbytes, table.up[sources]),
            path=transmission_s(nbytes, table.path_rate[sources, targets]),
            downlink=transmission_s(nbytes, table.down[targets]),
        )
