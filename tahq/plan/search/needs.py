"""Bytes and seconds of stages under one choice of `memory.recompute` and `memory.offload`.

Layers are of shape [P], or [N, P] for many divisions; results have the same shape. Copies between host and device run
beside the computing, each direction by itself, at the host's measured rate: a pass takes as long as the longest of the
three, and an update as its copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tahq.comm.network_model import transmission_s
from tahq.plan.problem import MemoryOption
from tahq.plan.simulate.bound import Array

Flags = npt.NDArray[np.bool_]


class StageCompute(NamedTuple):
    """Seconds of a micro-batch by stage; `input_gradient` is the part of `backward` that the stage before waits for."""

    forward: Array
    backward: Array
    input_gradient: Array


@dataclass(frozen=True, slots=True)
class StageHosts:
    """What is the same under every option, by stage.

    Attributes:
        first, last: 1 on the stage with this end of the model, else 0.
        block, ends: seconds of a block, and of what a stage has of the ends, without recomputation.
        held_block: bytes that a block was measured to keep of a micro-batch under the first option; 0: not measured.
        frame_nbytes: of a micro-batch on all cuts.
        out_nbytes: of an activation, by cut.
        first_trainable: the first block that is trained.
        link: bits per second of copies between host and device; 0: not measured.
    """

    micro_batch: int
    num_micro_batches: int
    first: Array
    last: Array
    block: StageCompute
    ends: StageCompute
    held_block: Array
    frame_nbytes: Array
    memory: Array
    host_memory: Array
    link: Array
    out_nbytes: Array
    first_trainable: int = 0

    def trained(self, layers: Array) -> Array:
        """Blocks of each stage from the first that is trained on."""
        if self.first_trainable == 0:
            return layers
        trained: Array = np.clip(np.cumsum(layers, axis=-1) - self.first_trainable, 0.0, layers)
        return trained

    def is_frozen(self, layers: Array) -> Flags:
        """Whether a stage has nothing that is trained; the last has the head."""
        frozen: Flags = (self.trained(layers) == 0) & (self.last == 0) & (self.first_trainable > 0)
        return frozen

    def ahead_nbytes(self, layers: Array) -> Array:
        """Encoded activations of a whole step, which a stage without a backward may send ahead, at both their ends."""
        ahead = np.where(self.is_frozen(layers)[..., :-1], self.num_micro_batches * self.out_nbytes, 0.0)
        none = np.zeros((*ahead.shape[:-1], 1))
        both: Array = np.concatenate([ahead, none], axis=-1) + np.concatenate([none, ahead], axis=-1)
        return both


class StageNeeds:
    """The needs of stages under one of some options; one that is set is used even where copies were not measured."""

    def __init__(self, options: Sequence[MemoryOption], number: int, hosts: StageHosts) -> None:
        option = options[number]
        is_set = len(options) == 1 or option.stages is not None
        self.option, self._hosts, self._held = option, hosts, option.held[hosts.micro_batch]
        self._held_block = kept_by_block(options, number, hosts.micro_batch, hosts.held_block)
        is_usable = (hosts.link > 0) | (not option.offload) | is_set
        if option.stages is not None:
            is_usable &= np.isin(np.arange(len(hosts.memory)), option.stages)
        self._memory = np.where(is_usable, hosts.memory, -1.0)
        link = np.where(hosts.link > 0, hosts.link, np.inf)
        again = option.repeated * hosts.block.forward
        self._block = StageCompute(
            hosts.block.forward, hosts.block.backward + again, hosts.block.input_gradient + again
        )
        self._forward_copy_s = transmission_s(max(option.fetched, self._held.streamed), link)
        self._backward_copy_s = transmission_s(option.fetched + self._held.streamed + option.exchanged, link)
        self._update_s = transmission_s(option.updated, link)
        self._ends_update_s = transmission_s(
            hosts.first * option.host_first_nbytes + hosts.last * option.host_last_nbytes, link
        )

    def times(self, layers: Array) -> StageCompute:
        """Seconds by stage."""
        trained = self._hosts.trained(layers)
        forward, backward, input_gradient = (
            count * block + end
            for count, block, end in zip((layers, trained, trained), self._block, self._hosts.ends, strict=True)
        )
        waits = np.maximum(0.0, trained * self._backward_copy_s - backward)
        return StageCompute(
            np.maximum(forward, layers * self._forward_copy_s), backward + waits, input_gradient + waits
        )

    def update_s(self, layers: Array) -> Array:
        """Seconds of the copies of an update."""
        seconds: Array = self._hosts.trained(layers) * self._update_s + self._ends_update_s
        return seconds

    def fixed_nbytes(self, layers: Array) -> Array:
        """Weights, gradients and optimizer, and what exists once."""
        option, hosts, held = self.option, self._hosts, self._held
        ends = hosts.first * option.first_nbytes + hosts.last * option.last_nbytes
        once = np.where(hosts.last > 0, max(held.workspace, held.again), held.again)
        # a gradient received, a gradient to send
        cuts = (1 - hosts.first) + (1 - hosts.last)
        trained = hosts.trained(layers)
        blocks = trained * option.block_nbytes + (layers - trained) * option.frozen_nbytes
        nbytes: Array = blocks + ends + cuts * held.tensor + once
        return nbytes if hosts.first_trainable == 0 else nbytes + hosts.ahead_nbytes(layers)

    def of_blocks(self, in_flight: Array, *, are_trained: bool) -> tuple[Array, Array]:
        """By stage, bytes without blocks, and of each block, with so many micro-batches in flight."""
        none = np.zeros_like(in_flight)
        base = self.fixed_nbytes(none) + self.nbytes_in_flight(none, in_flight)
        option, put_off = self.option, np.minimum(in_flight, self._most_put_off) * self._held.block_put_off
        trained: Array = option.block_nbytes + in_flight * self._held_block + put_off
        return base, trained if are_trained else np.full_like(in_flight, option.frozen_nbytes)

    def nbytes_in_flight(self, layers: Array, in_flight: Array) -> Array:
        """What so many micro-batches keep, of which zero-bubble puts off the last gradients of a few."""
        held, put_off = self._in_flight_nbytes(layers)
        nbytes: Array = in_flight * held + np.minimum(in_flight, self._most_put_off) * put_off
        return nbytes

    def host_nbytes(self, layers: Array, in_flight: Array) -> Array:
        """In host memory."""
        option, hosts = self.option, self._hosts
        ends = hosts.first * option.host_first_nbytes + hosts.last * option.host_last_nbytes
        trained = hosts.trained(layers)
        blocks = trained * (option.host_block_nbytes + in_flight * self._held.streamed)
        nbytes: Array = blocks + (layers - trained) * option.host_frozen_nbytes + ends
        return nbytes

    def fits(self, layers: Array, in_flight: Array) -> Flags:
        """Whether stages have the memory for so many micro-batches in flight."""
        nbytes = self.fixed_nbytes(layers) + self.nbytes_in_flight(layers, in_flight)
        return (nbytes <= self._memory) & (self.host_nbytes(layers, in_flight) <= self._hosts.host_memory)

    def depths(self, layers: Array) -> Array:
        """Most micro-batches in flight that fit each stage by itself, 0 to all."""
        free, (held, put_off), most = (
            self._memory - self.fixed_nbytes(layers), self._in_flight_nbytes(layers), self._most_put_off
        )  # fmt: skip
        few = whole_quotient(free, held + put_off)
        fit = np.where(few < most, few, whole_quotient(free - most * put_off, held))
        on_host = self._hosts.host_memory - self.host_nbytes(layers, np.zeros_like(layers))
        fit = np.minimum(fit, whole_quotient(on_host, self._hosts.trained(layers) * self._held.streamed))
        limits: Array = np.clip(fit, 0, self._hosts.num_micro_batches)
        return limits

    def _in_flight_nbytes(self, layers: Array) -> tuple[Array, Array]:
        """Of a micro-batch in flight, and what it keeps beyond that once only gradients of weights are missing."""
        hosts, held, trained = self._hosts, self._held, self._hosts.trained(layers)
        ends = hosts.first * held.first + hosts.last * held.last + (1 - hosts.last) * held.tensor
        put_off = trained * held.block_put_off + hosts.last * held.last_put_off
        nbytes = trained * self._held_block + ends + held.stage + hosts.frame_nbytes
        return (nbytes if hosts.first_trainable == 0 else np.where(hosts.is_frozen(layers), 0.0, nbytes)), put_off

    @property
    def _most_put_off(self) -> Array:
        """By stage, as `pipeline.schedule.generators` makes zero-bubble's rows."""
        return np.arange(1.0, len(self._hosts.memory) + 1)


def kept_by_block(options: Sequence[MemoryOption], number: int, micro_batch: int, measured: Array) -> Array:
    """Bytes that a block keeps by host; what was measured is of the first option, others are proportional to it."""
    first, own = (options[each].held[micro_batch].block for each in (0, number))
    kept: Array = np.where(measured > 0, measured * (own / first if first else 1.0), own)
    return kept


def whole_quotient(room: Array, each: Array) -> Array:
    """How many times `each` fits into `room`; what needs nothing fits infinitely often, unless the room is negative."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient: Array = np.where(each > 0, np.floor(room / each), np.where(room >= 0, np.inf, 0.0))
    return quotient
