"""The shortest time that a step could take on hosts and paths that differ, resource by resource.

For every resource: the earliest that the first micro-batch can reach it, plus all that micro-batches need of it, plus
the shortest time from it to the end of the step. No schedule that computes micro-batches whole, stage after stage, is
faster; the largest of the terms is the bound. With f and b the seconds of a forward and a backward (i: of the input
gradient alone, where the backward is split), and X_r, Y_r those of a whole hop across cut r, forward and backward
(encoding, the bytes at the path's own rate, latency, decoding),

    before_s = Σ_{r<s} (f_r + X_r)      after_s = Σ_{r<s} (i_r + Y_r) + (b_0 − i_0)
    trip_s = Σ_{r>s} (f_r + i_r) + Σ_{r≥s} (X_r + Y_r)

    compute of s:   T ≥ before_s + m·(f_s + i_s) + after_s     and     T ≥ before_s + m·(f_s + b_s)
    GPU of stages G:  T ≥ min before_s + m·Σ (f_s + b_s), s in G
    uplink, downlink, path, encoder, decoder: the same with the seconds of their frames in place of f_s + i_s
    relay:          T ≥ m · the seconds of all relayed frames on the slower of the relaying host's two lines
    depth d of s:   T ≥ before_s + ⌈m / d⌉·(f_s + trip_s + b_s) − (b_s − i_s) + after_s

the last because micro-batch k + d starts on s after the backward of k. Stages in which nothing is trained have b = i =
0, cuts before the first that is trained Y = 0, and

    compute of s:   T ≥ before_s + m·f_s + trip_s

Without a split i = b, and the two terms of a
stage's compute are the same. Optimizer and commit are not in it. Every quantity may be an array over many candidates,
of shape [..., P] by stage and [..., P − 1] by cut, so that thousands of divisions are bounded at once. All times are
seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from tahq.comm.network_model import transmission_s
from tahq.pipeline.schedule.schedule import ActionKind
from tahq.plan.simulate.costs import Costs

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

Resource = tuple[str, int]
"""A limit: compute, uplink, downlink, encoder, decoder, depth of a stage; activations, gradients on a cut; relay 0;
gpu, of the first stage on it where several share it."""

_Use = tuple[Array, Array, Array]
"""One direction's use of a line or lane, by cut: when the first frame reaches it, a frame's time, the time after it."""


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

    def where(self, carries: Flags) -> "DirectionSeconds":
        """The same at these cuts, and nothing at others."""
        rows = (self.encode, self.decode, self.uplink, self.path, self.downlink)
        return DirectionSeconds(*(np.where(carries, each, 0.0) for each in rows))


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """A step's seconds, for one micro-batch, by stage and by cut.

    `input_gradient` is `backward` where backwards are whole; `depths` None: unlimited. `carries`: whether gradients
    cross a cut, by cut; None: all. `devices`: as of `Costs`.
    """

    forward: Array
    backward: Array
    input_gradient: Array
    activations: DirectionSeconds
    gradients: DirectionSeconds
    latency: Array
    num_micro_batches: float
    depths: Array | None = None
    relay_s: Array | float = 0.0
    carries: Flags | None = None
    devices: Sequence[int] = ()


def step_seconds(
    costs: Costs, num_micro_batches: int, depths: Array | None = None, *, split: bool, num_frozen: int = 0
) -> StepSeconds:
    """The simulator's costs of a step with one chunk per stage; `split`: backwards are split into I and W.

    `num_frozen`: stages, from the first on, without a backward.
    """
    stages = range(len(costs.hosts))
    has_backward = np.arange(len(costs.hosts)) >= num_frozen
    seconds = {
        kind: np.array([costs.compute_s[stage, kind] for stage in stages]) * (has_backward | (kind is ActionKind.F))
        for kind in ActionKind
    }
    carries = has_backward[:-1]
    depths = depths if depths is None else np.where(has_backward, depths, np.inf)
    up = np.array([host.uplink_bits_per_s for host in costs.hosts])
    down = np.array([host.downlink_bits_per_s for host in costs.hosts])

    def by_cut(name: str) -> Array:
        return np.array([getattr(cut, name) for cut in costs.cuts], dtype=float)

    def direction(name: str, sources: slice, targets: slice) -> DirectionSeconds:
        nbytes = by_cut(f"{name}_nbytes")
        rates = up[sources], by_cut(f"{name}_bits_per_s"), down[targets]
        lines = (transmission_s(nbytes, rate) for rate in rates)
        return DirectionSeconds(by_cut(f"{name}_encode_s"), by_cut(f"{name}_decode_s"), *lines)

    relayed_nbytes = sum(
        cut.forward_nbytes + cut.backward_nbytes * has_gradients
        for cut, has_gradients in zip(costs.cuts, carries, strict=True)
        if cut.is_relayed
    )
    relay = costs.hosts[costs.relay] if isinstance(costs.relay, int) else costs.relay
    relay_s = 0.0
    if relay is not None and relayed_nbytes:
        relay_s = float(transmission_s(relayed_nbytes, min(relay.uplink_bits_per_s, relay.downlink_bits_per_s)))

    return StepSeconds(
        forward=seconds[ActionKind.F],
        backward=seconds[ActionKind.I] + seconds[ActionKind.W] if split else seconds[ActionKind.B],
        input_gradient=seconds[ActionKind.I if split else ActionKind.B],
        activations=direction("forward", slice(None, -1), slice(1, None)),
        gradients=direction("backward", slice(1, None), slice(None, -1)).where(carries),
        latency=by_cut("latency_s"),
        num_micro_batches=num_micro_batches,
        depths=depths,
        relay_s=relay_s,
        carries=carries,
        devices=costs.devices,
    )


def step_bound(costs: StepSeconds) -> Array:
    """The largest of `step_bounds`."""
    return reduce(np.maximum, step_bounds(costs).values())


def step_bounds(costs: StepSeconds) -> dict[Resource, Array]:
    """The bound that each resource sets, in seconds.

    Example:
        Two stages, f = 1, b = 2, m = 4, frames of 1 s each way: compute of stage 0 asks for 12 s, of stage 1 for
        2 + 12 + 3 = 17 s.
    """
    count, (hop_out, hop_back) = costs.num_micro_batches, _hops(costs)
    weights = costs.backward - costs.input_gradient
    before = _running(costs.forward[..., :-1] + hop_out)
    after = _running(costs.input_gradient[..., :-1] + hop_back)
    after[..., 1:] += weights[..., :1]
    later = costs.forward[..., 1:] + costs.input_gradient[..., 1:] + (hop_out + hop_back)
    trip = _running(later[..., ::-1])[..., ::-1]

    compute = np.maximum(
        before + count * (costs.forward + costs.backward),
        before + count * (costs.forward + costs.input_gradient) + after,
    )
    is_frozen = costs.backward == 0
    if is_frozen.any():
        compute = np.where(is_frozen, np.maximum(compute, before + count * costs.forward + trip), compute)
    by_stage = {"compute": compute}
    if costs.depths is not None:
        tail = after.copy()
        tail[..., 1:] -= weights[..., 1:]
        turn = costs.forward + trip + costs.backward
        by_stage["depth"] = before + np.ceil(count / costs.depths) * turn + tail
    bounds = {(kind, stage): each[..., stage] for stage in range(compute.shape[-1]) for kind, each in by_stage.items()}
    for stages in shared_devices(costs.devices):
        work = (costs.forward + costs.backward)[..., stages].sum(axis=-1)
        bounds["gpu", stages[0]] = before[..., stages[0]] + count * work
    if compute.shape[-1] == 1:
        return bounds
    if np.any(costs.relay_s):
        bounds["relay", 0] = np.broadcast_to(count * np.asarray(costs.relay_s), before.shape[:-1])
    end = (costs.input_gradient + after)[..., :-1]
    end[..., 0] += weights[..., 0]
    return bounds | _wire_bounds(costs, (before + costs.forward)[..., :-1], trip[..., :-1], end)


def shared_devices(devices: Sequence[int]) -> list[list[int]]:
    """The stages of each device that several share, ascending."""
    stages = [[stage for stage, each in enumerate(devices) if each == device] for device in dict.fromkeys(devices)]
    return [each for each in stages if len(each) > 1]


def _wire_bounds(costs: StepSeconds, ready: Array, trip: Array, end: Array) -> dict[Resource, Array]:
    """Bounds of each line and codec lane.

    Args:
        costs: the step's seconds.
        ready: when the first activation of each cut is computed, [..., P − 1] like the others.
        trip: seconds from there until its gradient is decoded.
        end: seconds from a decoded gradient to the end of the step.
    """
    out, back, count, (hop_out, hop_back) = costs.activations, costs.gradients, costs.num_micro_batches, _hops(costs)
    reached, returned = ready + hop_out - out.decode, ready + trip
    computed, home = returned - hop_back, trip + end
    left, left_back = home - out.encode - out.alone, hop_back - back.encode - back.alone + end
    senders: dict[str, tuple[_Use, _Use]] = {
        "encoder": (
            (ready, out.encode, home - out.encode),
            (computed, back.encode, hop_back - back.encode + end),
        ),
        "uplink": ((ready + out.encode, out.uplink, left), (computed + back.encode, back.uplink, left_back)),
    }
    receivers: dict[str, tuple[_Use, _Use]] = {
        "downlink": (
            (reached - out.alone, out.downlink, home - hop_out + out.decode),
            (returned - back.decode - back.alone, back.downlink, back.decode + end),
        ),
        "decoder": ((reached, out.decode, home - hop_out), (returned - back.decode, back.decode, end)),
    }
    bounds: dict[Resource, Array] = {}
    for each, cuts in ((senders, (0, -1)), (receivers, (-1, 0))):
        for kind, uses in each.items():
            bounds |= _shared(kind, uses, cuts, count)
    paths = {
        "activations": ready + out.encode + count * out.path + left,
        "gradients": computed + back.encode + count * back.path + left_back,
    }
    return bounds | {(kind, cut): path[..., cut] for kind, path in paths.items() for cut in range(ready.shape[-1])}


def _hops(costs: StepSeconds) -> tuple[Array, Array]:
    """A frame's seconds from the sender's encoder to the end of the receiver's decoder, forward and backward."""
    out, back = costs.activations, costs.gradients
    hop_out = out.encode + out.alone + costs.latency + out.decode
    latency = costs.latency if costs.carries is None else np.where(costs.carries, costs.latency, 0.0)
    return hop_out, back.encode + back.alone + latency + back.decode


def _shared(kind: str, uses: tuple[_Use, _Use], cuts: tuple[int, int], count: float) -> dict[Resource, Array]:
    """Bounds of a resource that activations and gradients share: stage s handles those of cuts s + `cuts`."""
    num_cuts = uses[0][0].shape[-1]
    bounds: dict[Resource, Array] = {}
    for stage in range(num_cuts + 1):
        mine = [
            [each[..., stage + cut] for each in use]
            for use, cut in zip(uses, cuts, strict=True)
            if 0 <= stage + cut < num_cuts
        ]
        bounds[kind, stage] = mine[0][0] + count * sum(seconds for _, seconds, _ in mine) + mine[-1][2]
    return bounds


def _running(terms: Array) -> Array:
    """Sums over the stages before each stage: 0, then one more term for each."""
    sums = np.zeros((*terms.shape[:-1], terms.shape[-1] + 1))
    np.cumsum(terms, axis=-1, out=sums[..., 1:])
    return sums
