"""The shortest time that a step could take on hosts and paths that differ, resource by resource.

For every resource: the earliest that the first micro-batch can reach it, plus all that micro-batches need of it, plus
the shortest time from it to the end of the step. No schedule that computes micro-batches whole, stage after stage, is
faster; the largest of the terms is the bound. With f and b the seconds of a forward and a backward (i: of the input
gradient alone, where the backward is split), and X_r, Y_r those of a whole hop across cut r, forward and backward
(encoding, the bytes at the path's own rate, latency, decoding),

    before_s = Σ_{r<s} (f_r + X_r)      after_s = Σ_{r<s} (i_r + Y_r) + (b_0 − i_0)
    trip_s = Σ_{r>s} (f_r + i_r) + Σ_{r≥s} (X_r + Y_r)

    compute of s:   T ≥ before_s + m·(f_s + i_s) + after_s     and     T ≥ before_s + m·(f_s + b_s)
    uplink, downlink, path, encoder, decoder: the same with the seconds of their frames in place of f_s + i_s
    depth d of s:   T ≥ before_s + ⌈m / d⌉·(f_s + trip_s + b_s) − (b_s − i_s) + after_s

the last because micro-batch k + d starts on s after the backward of k. Without a split i = b, and the two terms of a
stage's compute are the same. Optimizer and commit are not in it. Every quantity may be an array over many candidates,
of shape [..., P] by stage and [..., P − 1] by cut, so that thousands of divisions are bounded at once. All times are
seconds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from tahq.comm.network_model import transmission_s
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.plan.simulate.costs import Costs

Array = NDArray[np.float64]

Resource = tuple[str, int]
"""A limit: compute, uplink, downlink, encoder, decoder, depth of a stage; activations, gradients on a cut."""


@dataclass(frozen=True, slots=True)
class DirectionSeconds:
    """One direction of all cuts: seconds of a frame, by cut, to encode, to decode, and on each line that it crosses."""

    encode: Array
    decode: Array
    uplink: Array
    path: Array
    downlink: Array
    alone: Array = field(init=False)
    """On the slowest of them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", np.maximum(np.maximum(self.uplink, self.path), self.downlink))


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A step's seconds, for one micro-batch, by stage and by cut.

    `input_gradient` is `backward` where backwards are whole; `depths` None: unlimited.
    """

    forward: Array
    backward: Array
    input_gradient: Array
    activations: DirectionSeconds
    gradients: DirectionSeconds
    latency: Array
    num_micro_batches: float
    depths: Array | None = None


def step_seconds(costs: Costs, num_micro_batches: int, depths: Array | None = None, *, split: bool) -> StepSeconds:
    """The simulator's costs of a step with one chunk per stage; `split`: backwards are split into I and W."""
    stages = range(len(costs.hosts))
    seconds = {kind: np.array([costs.compute_s[stage, kind] for stage in stages]) for kind in ActionKind}
    up = np.array([host.uplink_bits_per_s for host in costs.hosts])
    down = np.array([host.downlink_bits_per_s for host in costs.hosts])

    def by_cut(name: str) -> Array:
        return np.array([getattr(cut, name) for cut in costs.cuts], dtype=float)

    def direction(name: str, sources: slice, targets: slice) -> DirectionSeconds:
        nbytes = by_cut(f"{name}_nbytes")
        rates = up[sources], by_cut(f"{name}_bits_per_s"), down[targets]
        lines = (transmission_s(nbytes, rate) for rate in rates)
        return DirectionSeconds(by_cut(f"{name}_encode_s"), by_cut(f"{name}_decode_s"), *lines)

    return StepSeconds(
        forward=seconds[ActionKind.F],
        backward=seconds[ActionKind.I] + seconds[ActionKind.W] if split else seconds[ActionKind.B],
        input_gradient=seconds[ActionKind.I if split else ActionKind.B],
        activations=direction("forward", slice(None, -1), slice(1, None)),
        gradients=direction("backward", slice(1, None), slice(None, -1)),
        latency=by_cut("latency_s"),
        num_micro_batches=num_micro_batches,
        depths=depths,
    )


def step_bounds(costs: StepSeconds) -> dict[Resource, Array]:
    """The bound that each resource sets, in seconds.

    Example:
        Two stages, f = 1, b = 2, m = 4, frames of 1 s each way: compute of stage 0 asks for 12 s, of stage 1 for
        2 + 12 + 3 = 17 s.
    """
    return dict(_Bounds(costs).all())


def step_bound(costs: StepSeconds) -> Array:
    """The largest of `step_bounds`."""
    return reduce(np.maximum, (bound for _, bound in _Bounds(costs).all()))


class _Bounds:
    """All terms, which share a few sums."""

    def __init__(self, costs: StepSeconds) -> None:
        self._costs = costs
        self._count = costs.num_micro_batches
        self._num_cuts = costs.forward.shape[-1] - 1
        out, back = costs.activations, costs.gradients
        self._hop_out = out.encode + out.alone + costs.latency + out.decode
        self._hop_back = back.encode + back.alone + costs.latency + back.decode
        self._weights = costs.backward - costs.input_gradient
        self._before = _running(costs.forward[..., :-1] + self._hop_out)
        self._after = _running(costs.input_gradient[..., :-1] + self._hop_back)
        self._after[..., 1:] += self._weights[..., :1]
        hops = self._hop_out + self._hop_back
        later = _running((costs.forward[..., 1:] + costs.input_gradient[..., 1:] + hops)[..., ::-1])
        self._trip = later[..., ::-1]

    def all(self) -> Iterator[tuple[Resource, Array]]:
        for stage in range(self._num_cuts + 1):
            yield ("compute", stage), self._compute(stage)
            if self._costs.depths is not None:
                yield ("depth", stage), self._depth(stage, self._costs.depths)
        if self._num_cuts:
            yield from self._frames()

    def _compute(self, stage: int) -> Array:
        forward, backward = self._costs.forward[..., stage], self._costs.backward[..., stage]
        before, first = self._before[..., stage], self._costs.input_gradient[..., stage]
        whole: Array = before + self._count * (forward + backward)
        return np.maximum(whole, before + self._count * (forward + first) + self._after[..., stage])

    def _depth(self, stage: int, depths: Array) -> Array:
        costs = self._costs
        turn = costs.forward[..., stage] + self._trip[..., stage] + costs.backward[..., stage]
        turns = np.ceil(self._count / depths[..., stage])
        tail = self._after[..., stage] - (self._weights[..., stage] if stage else 0.0)
        total: Array = self._before[..., stage] + turns * turn + tail
        return total

    def _frames(self) -> Iterator[tuple[Resource, Array]]:
        """Of each line and codec lane: when the first frame reaches it, all frames, and the time after the last."""
        costs, out, back = self._costs, self._costs.activations, self._costs.gradients
        # by cut: when the first activation is computed and has arrived, when its gradient is computed and decoded
        ready = (self._before + costs.forward)[..., :-1]
        reached = ready + self._hop_out - out.decode
        returned = ready + self._trip[..., :-1]
        computed = returned - self._hop_back
        # from a decoded gradient, and from a computed activation, to the end of the step
        end = (costs.input_gradient + self._after)[..., :-1]
        end[..., 0] += self._weights[..., 0]
        home = self._trip[..., :-1] + end
        on_wire = home - out.encode - out.alone
        back_on_wire = self._hop_back - back.encode - back.alone + end
        # a stage encodes and sends the activations of its own cut and the gradients of the one before
        sent, received = (0, -1), (-1, 0)
        for kind, cuts, (first, seconds, left), (first_back, seconds_back, left_back) in (
            (
                "encoder",
                sent,
                (ready, out.encode, home - out.encode),
                (computed, back.encode, self._hop_back - back.encode + end),
            ),
            (
                "uplink",
                sent,
                (ready + out.encode, out.uplink, on_wire),
                (computed + back.encode, back.uplink, back_on_wire),
            ),
            (
                "downlink",
                received,
                (reached - out.alone, out.downlink, home - self._hop_out + out.decode),
                (returned - back.decode - back.alone, back.downlink, back.decode + end),
            ),
            (
                "decoder",
                received,
                (reached, out.decode, home - self._hop_out),
                (returned - back.decode, back.decode, end),
            ),
        ):
            for stage in range(self._num_cuts + 1):
                forth, again = stage + cuts[0], stage + cuts[1]
                goes, returns = 0 <= forth < self._num_cuts, 0 <= again < self._num_cuts
                start = first[..., forth] if goes else first_back[..., again]
                each = (seconds[..., forth] if goes else 0.0) + (seconds_back[..., again] if returns else 0.0)
                tail = left_back[..., again] if returns else left[..., forth]
                yield (kind, stage), start + self._count * each + tail
        yield from self._lines("activations", ready + out.encode + self._count * out.path + on_wire)
        yield from self._lines("gradients", computed + back.encode + self._count * back.path + back_on_wire)

    @staticmethod
    def _lines(kind: str, bounds: Array) -> Iterator[tuple[Resource, Array]]:
        for cut in range(bounds.shape[-1]):
            yield (kind, cut), bounds[..., cut]


def _running(terms: Array) -> Array:
    """Sums over the stages before each stage: 0, then one more term for each."""
    shape = (*terms.shape[:-1], terms.shape[-1] + 1)
    sums = np.zeros(shape)
    np.cumsum(terms, axis=-1, out=sums[..., 1:])
    return sums
