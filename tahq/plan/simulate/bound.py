"""The shortest time that a step could take on hosts and paths that differ, resource by resource.

For every resource: the earliest that the first micro-batch can reach it, plus what all micro-batches need of it, plus
the shortest way from it to the end of the step. No schedule that computes micro-batches whole, stage after stage, is
faster; the largest of the terms is the bound. With f and b the seconds of a forward and a backward (i: of the input
gradient alone, where the backward is split), and X_r, Y_r those of a whole hop across cut r, forward and backward
(encoding, the bytes at the path's own rate, latency, decoding),

    before_s = Σ_{r<s} (f_r + X_r)      after_s = Σ_{r<s} (i_r + Y_r) + (b_0 − i_0)
    trip_s = Σ_{r>s} (f_r + i_r) + Σ_{r≥s} (X_r + Y_r)

    compute of s:   T ≥ before_s + m·(f_s + i_s) + after_s     and     T ≥ before_s + m·(f_s + b_s)
    uplink, downlink, path, encoder, decoder: the same with the seconds of their frames in place of f_s + i_s
    depth d of s:   T ≥ before_s + ⌈m / d⌉·(f_s + trip_s + b_s) − (b_s − i_s) + after_s

the last because micro-batch k + d starts on s after the backward of k. Without a split i = b, and the two terms of a
stage's compute are one. Every quantity may be an array over many candidates, of shape [..., P] by stage and
[..., P − 1] by cut, so that thousands of divisions are bounded at once. All times are seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Resource = tuple[str, int]
"""What limits: compute, uplink, downlink, encoder, decoder, depth of a stage; activations, gradients on a cut."""


@dataclass(frozen=True, slots=True)
class WayCosts:
    """One direction of all cuts: seconds of a frame, by cut.

    alone: its bytes at the slowest of uplink, path and downlink. uplink, path, downlink: at each of them.
    """

    encode: Array
    decode: Array
    alone: Array
    uplink: Array
    path: Array
    downlink: Array


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step is made of, for one micro-batch: seconds by stage and by cut.

    `input_gradient` is `backward` where backwards are whole; `depths` None: unlimited.
    """

    forward: Array
    backward: Array
    input_gradient: Array
    activations: WayCosts
    gradients: WayCosts
    latency: Array
    num_micro_batches: float
    depths: Array | None = None


def step_bounds(costs: StepCosts) -> dict[Resource, Array]:
    """The bound that each resource sets, in seconds.

    Example:
        Two stages, f = 1, b = 2, m = 4, frames of 1 s each way: compute of stage 0 asks for 12 s, of stage 1 for
        2 + 12 + 3 = 17 s.
    """
    return dict(_Bounds(costs).all())


def step_bound(costs: StepCosts) -> Array:
    """The largest of `step_bounds`."""
    largest: Array | None = None
    for _, bound in _Bounds(costs).all():
        largest = bound if largest is None else np.maximum(largest, bound)
    assert largest is not None, "a step has a stage"
    return largest


class _Bounds:
    """The sums that all terms share."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._count = costs.num_micro_batches
        self._last = costs.forward.shape[-1] - 1
        out, back = costs.activations, costs.gradients
        hop_out = out.encode + out.alone + costs.latency + out.decode
        hop_back = back.encode + back.alone + costs.latency + back.decode
        self._weights = costs.backward - costs.input_gradient
        self._before = _running(costs.forward[..., :-1] + hop_out)
        self._after = _running(costs.input_gradient[..., :-1] + hop_back)
        self._after[..., 1:] += self._weights[..., :1]
        later = _running((costs.forward[..., 1:] + costs.input_gradient[..., 1:] + hop_out + hop_back)[..., ::-1])
        self._trip = later[..., ::-1]

    def all(self) -> Iterator[tuple[Resource, Array]]:
        for stage in range(self._last + 1):
            yield ("compute", stage), self._compute(stage)
            if self._last:
                yield ("uplink", stage), self._uplink(stage)
                yield ("downlink", stage), self._downlink(stage)
                yield ("encoder", stage), self._encoder(stage)
                yield ("decoder", stage), self._decoder(stage)
            if self._costs.depths is not None:
                yield ("depth", stage), self._depth(stage, self._costs.depths)
        for cut in range(self._last):
            yield ("activations", cut), self._activations(cut)
            yield ("gradients", cut), self._gradients(cut)

    def _compute(self, stage: int) -> Array:
        forward, backward = self._costs.forward[..., stage], self._costs.backward[..., stage]
        before, first = self._before[..., stage], self._costs.input_gradient[..., stage]
        whole: Array = before + self._count * (forward + backward)
        if stage == 0:
            return whole
        return np.maximum(whole, before + self._count * (forward + first) + self._after[..., stage])

    def _uplink(self, stage: int) -> Array:
        out, back, costs = self._costs.activations, self._costs.gradients, self._costs
        start, frames = self._before[..., stage] + costs.forward[..., stage], np.zeros(())
        if stage < self._last:
            start, frames = start + out.encode[..., stage], frames + out.uplink[..., stage]
        else:
            start = start + costs.input_gradient[..., stage] + back.encode[..., stage - 1]
        if stage == 0:
            return (
                start
                + self._count * frames
                + self._trip[..., 0]
                - out.encode[..., 0]
                - out.alone[..., 0]
                + self._end(0)
            )
        frames = frames + back.uplink[..., stage - 1]
        tail = self._after[..., stage] - back.encode[..., stage - 1] - back.alone[..., stage - 1]
        total: Array = start + self._count * frames + tail
        return total

    def _downlink(self, stage: int) -> Array:
        out, back, costs = self._costs.activations, self._costs.gradients, self._costs
        if stage == 0:
            start = costs.forward[..., 0] + self._trip[..., 0] - back.decode[..., 0] - back.alone[..., 0]
            return start + self._count * back.downlink[..., 0] + back.decode[..., 0] + self._end(0)
        start = self._before[..., stage] - out.decode[..., stage - 1] - out.alone[..., stage - 1]
        frames = out.downlink[..., stage - 1]
        tail = costs.input_gradient[..., stage] + self._after[..., stage]
        if stage < self._last:
            frames, tail = frames + back.downlink[..., stage], tail + back.decode[..., stage]
        else:
            tail = tail + out.decode[..., stage - 1] + costs.forward[..., stage]
        total: Array = start + self._count * frames + tail
        return total

    def _encoder(self, stage: int) -> Array:
        out, back, costs = self._costs.activations, self._costs.gradients, self._costs
        start = self._before[..., stage] + costs.forward[..., stage]
        if stage == 0:
            tail = self._trip[..., 0] - out.encode[..., 0] + self._end(0)
            return start + self._count * out.encode[..., 0] + tail
        frames = back.encode[..., stage - 1]
        if stage < self._last:
            frames = frames + out.encode[..., stage]
        else:
            start = start + costs.input_gradient[..., stage]
        total: Array = start + self._count * frames + self._after[..., stage] - back.encode[..., stage - 1]
        return total

    def _decoder(self, stage: int) -> Array:
        out, back, costs = self._costs.activations, self._costs.gradients, self._costs
        if stage == 0:
            start = costs.forward[..., 0] + self._trip[..., 0] - back.decode[..., 0]
            return start + self._count * back.decode[..., 0] + self._end(0)
        start, frames = self._before[..., stage] - out.decode[..., stage - 1], out.decode[..., stage - 1]
        tail = costs.input_gradient[..., stage] + self._after[..., stage]
        if stage < self._last:
            frames = frames + back.decode[..., stage]
        else:
            tail = tail + costs.forward[..., stage]
        total: Array = start + self._count * frames + tail
        return total

    def _depth(self, stage: int, depths: Array) -> Array:
        costs = self._costs
        turn = costs.forward[..., stage] + self._trip[..., stage] + costs.backward[..., stage]
        turns = np.ceil(self._count / depths[..., stage])
        tail = self._after[..., stage] - (self._weights[..., stage] if stage else 0.0)
        total: Array = self._before[..., stage] + turns * turn + tail
        return total

    def _activations(self, cut: int) -> Array:
        way = self._costs.activations
        start = self._before[..., cut] + self._costs.forward[..., cut] + way.encode[..., cut]
        tail = self._trip[..., cut] - way.encode[..., cut] - way.alone[..., cut] + self._end(cut)
        total: Array = start + self._count * way.path[..., cut] + tail
        return total

    def _gradients(self, cut: int) -> Array:
        way = self._costs.gradients
        there = self._before[..., cut] + self._costs.forward[..., cut] + self._trip[..., cut]
        start = there - way.decode[..., cut] - way.alone[..., cut] - self._costs.latency[..., cut]
        tail = self._costs.latency[..., cut] + way.decode[..., cut] + self._end(cut)
        total: Array = start + self._count * way.path[..., cut] + tail
        return total

    def _end(self, stage: int) -> Array:
        """From the arrival of the last gradient on a stage to the end of the step."""
        own = self._costs.backward if stage == 0 else self._costs.input_gradient
        end: Array = own[..., stage] + self._after[..., stage]
        return end


def _running(terms: Array) -> Array:
    """Sums over the stages before each stage: 0, then one term more for each."""
    shape = (*terms.shape[:-1], terms.shape[-1] + 1)
    sums = np.zeros(shape)
    np.cumsum(terms, axis=-1, out=sums[..., 1:])
    return sums
