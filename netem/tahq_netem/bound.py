"""The shortest time that a step could take: what compute and bytes leave open, whatever the schedule or the runtime.

A synchronous step has to bring a micro-batch through all earlier stages before stage s has anything to do, and
after the last that s does, it has to go back through all of them:

    before_s = Σ_{r<s} (f_r + x_r + d)        after_s = Σ_{r<s} (b_r + y_r + d)

    compute of s:   T ≥ before_s + m·(f_s + b_s) + after_s
    uplink of s:    T ≥ before_s + f_s + m·(x_s + y_{s−1}) + after_s − y_{s−1}     (of the last stage, + b_s)
    downlink of s:  T ≥ before_s − x_{s−1} + m·(x_{s−1} + y_s) + b_s + after_s     (of the last stage, + f_s)

with f and b the seconds of a forward and a backward, m micro-batches, d the one-way delay, and x_r, y_r the seconds
that the activation and the gradient of cut r take at the links' goodput. Stage 0 sends activations only, and the
last of them has to go all the way and back, `trip`; its gradients come in no sooner than the first did so:

    uplink of 0:    T ≥ f_0 + m·x_0 + trip + y_0 + b_0
    downlink of 0:  T ≥ f_0 + x_0 + trip + m·y_0 + b_0

The largest of all of these is the bound. No schedule and no transport can be faster with these bytes; that
one can be as fast is not said. Codecs, optimizer and commit are not in it.

A backward that is split, i_s seconds for the gradient of the input and the rest for that of the weights, lets a
gradient go on after i_s, and the weights wait. Then the way back has i in place of b, but where it ends, since a
stage that gets a gradient still has all of its own backward to do; and what a stage computes need not be over when the
last gradient leaves it:

    after_0 = 0        after_{s+1} = y_s + d + max(i_s + after_s, b_s)

    compute of s:   T ≥ before_s + m·(f_s + i_s) + after_s   and   T ≥ before_s + m·(f_s + b_s)

and above max(i_s + after_s, b_s) in place of b_s + after_s, and i in `trip`. With i = b it is all as above.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tahq.plan.simulate.costs import StepWork
from tahq_netem.measure.figures import GOODPUT_SHARE
from tahq_netem.network.description import NetworkPlan


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What all hosts have at best; an infinite rate never limits."""

    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf
    delay_s: float = 0.0

    @classmethod
    def of(cls, plan: NetworkPlan) -> "LinkSpeed":
        """The fastest host's rates and the shortest delay, so that the bound stays one where hosts differ."""
        shapes = plan.host_shapes.values()
        return cls(
            max(shape.up_bits_per_s or math.inf for shape in shapes),
            max(shape.down_bits_per_s or math.inf for shape in shapes),
            min(path.delay_s for path in plan.paths.values()),
        )


def step_bound_s(work: StepWork, speed: LinkSpeed) -> float:
    """The bound, in seconds.

    Example:
        Two stages, f = 1 s, b = 2 s, m = 4, frames of 1 s each way, no delay: compute of stage 0 asks for 12 s, of
        stage 1 for 2 + 12 + 3 = 17 s; the uplink of host 0 for 1 + 4 + 3 + 1 + 2 = 11 s. The bound is 17 s.
    """
    return max(_compute_bounds(work, speed) + _link_bounds(work, speed))


def _compute_bounds(work: StepWork, speed: LinkSpeed) -> list[float]:
    count = work.num_micro_batches
    computes = zip(work.forward_s, work.backward_s, work.returns_s, strict=True)
    return [
        before_s + count * forward_s + max(count * return_s + after_s, count * backward_s)
        for (before_s, after_s), (forward_s, backward_s, return_s) in zip(
            _before_and_after(work, speed), computes, strict=True
        )
    ]


def _before_and_after(work: StepWork, speed: LinkSpeed) -> Iterator[tuple[float, float]]:
    """What must pass before a stage has something to do, and after it has done all; by stage."""
    slower = min(speed.up_bits_per_s, speed.down_bits_per_s)
    before_s = after_s = 0.0
    yield before_s, after_s
    for cut in range(len(work.activation_nbytes)):
        before_s += work.forward_s[cut] + _seconds(work.activation_nbytes[cut], slower) + speed.delay_s
        after_s = _tail_s(work, cut, after_s) + _seconds(work.gradient_nbytes[cut], slower) + speed.delay_s
        yield before_s, after_s


def _tail_s(work: StepWork, stage: int, after_s: float) -> float:
    """What is left of the step when a stage gets its last gradient."""
    return max(work.returns_s[stage] + after_s, work.backward_s[stage])


def _link_bounds(work: StepWork, speed: LinkSpeed) -> list[float]:
    """Of every host's uplink and downlink."""
    bounds = list(_first_host_bounds(work, speed))
    for stage, span in enumerate(_before_and_after(work, speed)):
        if stage > 0:
            bounds += _later_host_bounds(work, speed, stage, *span)
    return bounds


def _first_host_bounds(work: StepWork, speed: LinkSpeed) -> tuple[float, float]:
    slower = min(speed.up_bits_per_s, speed.down_bits_per_s)
    out, back = work.activation_nbytes, work.gradient_nbytes
    frames_s = math.fsum(_seconds(nbytes, slower) for nbytes in (*out[1:], *back[1:]))
    trip_s = math.fsum(work.forward_s[1:]) + math.fsum(work.returns_s[1:]) + frames_s + 2 * len(out) * speed.delay_s
    own_s = work.forward_s[0] + work.backward_s[0]
    count = work.num_micro_batches
    up_s = own_s + count * _seconds(out[0], speed.up_bits_per_s) + trip_s + _seconds(back[0], slower)
    down_s = own_s + _seconds(out[0], slower) + trip_s + count * _seconds(back[0], speed.down_bits_per_s)
    return up_s, down_s


def _later_host_bounds(
    work: StepWork, speed: LinkSpeed, stage: int, before_s: float, after_s: float
) -> tuple[float, float]:
    slower = min(speed.up_bits_per_s, speed.down_bits_per_s)
    is_last = stage == len(work.activation_nbytes)
    outgoing = 0.0 if is_last else work.activation_nbytes[stage]
    returning = 0.0 if is_last else work.gradient_nbytes[stage]
    incoming, leaving = work.activation_nbytes[stage - 1], work.gradient_nbytes[stage - 1]
    count, forward_s, return_s = work.num_micro_batches, work.forward_s[stage], work.returns_s[stage]
    # What the last stage sends first is a gradient, after a backward; what it gets last still has to go forward.
    up_s = count * _seconds(outgoing + leaving, speed.up_bits_per_s) + (return_s if is_last else 0.0)
    down_s = count * _seconds(incoming + returning, speed.down_bits_per_s) + (forward_s if is_last else 0.0)
    return (
        before_s + forward_s + up_s + after_s - _seconds(leaving, slower),
        before_s - _seconds(incoming, slower) + down_s + _tail_s(work, stage, after_s),
    )


def _seconds(nbytes: float, rate_bits_per_s: float) -> float:
    return 8 * nbytes / (GOODPUT_SHARE * rate_bits_per_s)
