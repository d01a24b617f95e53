"""What a step is made of, for the simulator and the bound: seconds of compute, bytes of traffic, rates and latency.

All times are seconds, all sizes bytes, all rates bits per second of the frames alone. `inf` is a rate that never
limits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tahq.comm.link.spec import First
from tahq.pipeline.schedule.schedule import ActionKind

ComputeSeconds = Mapping[tuple[int, ActionKind], float]
"""Seconds by (chunk, kind) for one micro-batch."""


@dataclass(frozen=True, slots=True)
class CutCosts:
    """The traffic across the cut between chunk c and chunk c + 1, each way, for one micro-batch, and its path.

    `latency_s` is one-way, the same both ways. The rates are those of the path in each direction, which may be below
    what its two hosts could send and receive.
    """

    forward_nbytes: float = 0.0
    backward_nbytes: float = 0.0
    forward_encode_s: float = 0.0
    forward_decode_s: float = 0.0
    backward_encode_s: float = 0.0
    backward_decode_s: float = 0.0
    latency_s: float = 0.0
    forward_bits_per_s: float = math.inf
    backward_bits_per_s: float = math.inf
    is_relayed: bool = field(default=False, kw_only=True)
    """Whether frames go to `Costs.relay`, which is at neither end, and from there on; each leg has half the latency."""


@dataclass(frozen=True, slots=True)
class HostCosts:
    """The limits of a stage's host; both directions of its traffic share each of the two."""

    uplink_bits_per_s: float = math.inf
    downlink_bits_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Costs:
    """Everything that the time of a step depends on, apart from the schedule.

    Each stage encodes in one thread beside its compute and decodes in another.

    Attributes:
        commit_s: from the end of the last stage's work to the commit's arrival everywhere.
        piece_nbytes: a frame's largest piece. On a downlink that two neighbours send into, pieces of
            their frames take turns, and on an uplink what goes first goes between pieces; None: whole frames do.
        first: which of the frames that wait for an uplink goes first; None: no order is kept, and links take
            turns piece by piece, about as TCP shares an uplink.
        queue_s: length of the queue before each downlink and path, as time at its rate; more waits in the sender.
        relay: the stage whose host relays cuts, or a host without a stage.
        acknowledged: bytes on the receiver's uplink for each that it gets; they go before the next piece there.
        devices: a number for each stage, the same for those that share a GPU; none: each has its own.
    """

    compute_s: ComputeSeconds
    cuts: Sequence[CutCosts]
    hosts: Sequence[HostCosts]
    commit_s: float = 0.0
    piece_nbytes: int | None = None
    first: First | None = "oldest"
    queue_s: float = math.inf
    acknowledged: float = 0.0
    relay: int | HostCosts | None = None
    devices: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step with one chunk per stage, whatever the network that it runs on.

    Attributes:
        forward_s, backward_s: seconds of a micro-batch, by stage.
        activation_nbytes, gradient_nbytes: of a micro-batch, by cut.
        num_micro_batches: per step.
        input_gradient_s: the part of `backward_s` after which the gradient can go on, by stage; None: all of it.
    """

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    activation_nbytes: Sequence[float]
    gradient_nbytes: Sequence[float]
    num_micro_batches: int
    input_gradient_s: Sequence[float] | None = None

    def compute_s(self) -> ComputeSeconds:
        """The simulator's compute times."""
        return compute_seconds(self.forward_s, self.backward_s, self.input_gradient_s or self.backward_s)

    def cuts(self, paths: Sequence[CutCosts]) -> list[CutCosts]:
        """Paths (codec times, latency and rates, by cut) with the bytes that cross them."""
        nbytes = zip(self.activation_nbytes, self.gradient_nbytes, strict=True)
        return [
            replace(path, forward_nbytes=out, backward_nbytes=back)
            for path, (out, back) in zip(paths, nbytes, strict=True)
        ]


def compute_seconds(
    forward_s: Sequence[float], backward_s: Sequence[float], input_gradient_s: Sequence[float]
) -> ComputeSeconds:
    """Seconds of every kind of action from those of each chunk's forward, backward, and input gradient."""
    seconds: dict[tuple[int, ActionKind], float] = {}
    for chunk, (forward, backward, own) in enumerate(zip(forward_s, backward_s, input_gradient_s, strict=True)):
        by_kind = {ActionKind.F: forward, ActionKind.B: backward, ActionKind.I: own, ActionKind.W: backward - own}
        seconds |= {(chunk, kind): value for kind, value in by_kind.items()}
    return seconds


def uniform_costs(
    num_chunks: int,
    num_stages: int,
    *,
    forward_s: float,
    backward_s: float,
    cut: CutCosts = CutCosts(),
    host: HostCosts = HostCosts(),
) -> Costs:
    """Costs that are the same for every chunk, cut and host; I and W take half a backward each."""
    compute_s = compute_seconds([forward_s] * num_chunks, [backward_s] * num_chunks, [backward_s / 2] * num_chunks)
    return Costs(compute_s, cuts=[cut] * (num_chunks - 1), hosts=[host] * num_stages)
