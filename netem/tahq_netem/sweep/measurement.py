"""One point measured: the network is changed under a running session, some steps go by, the next ones count.

What is recorded is a step's time, its tokens a second, the bytes that crossed, how many cores were busy meanwhile,
and what share of the bound the step came to.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tahq.errors import TahqError
from tahq.plan.simulate.costs import StepWork
from tahq_netem.backends.network import Network
from tahq_netem.bound import LinkSpeed, step_bound_s
from tahq_netem.measure.machine import BusyCores, BusyMeter, num_usable_cores
from tahq_netem.network.fault_player import FaultEvent, play
from tahq_netem.network.faults import Fault
from tahq_netem.runtimes.session import Session, StepRecord
from tahq_netem.sweep.spec import StepsConfig, SweepConfig
from tahq_netem.sweep.stage_times import StageTimes

PATIENCE = 4.0
"""A step may take so many times its bound, beyond `timeout`, before its session counts as stuck."""
BUSY_SHARE = 0.6
"""Of the cores there are: above, sleeping stages would have met each other's codecs."""


class TooBusyError(TahqError):
    """More cores were busy than a measurement with sleeping stages may use."""


class MissedFaultError(TahqError):
    """The steps of a point ended before a fault that was to happen during them."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was seen of a point."""

    steps: tuple[StepRecord, ...]
    busy: BusyCores
    work: StepWork | None
    """With the bytes that crossed and the time that compute took; None where nobody knows the latter."""
    bound_s: float | None
    tokens_a_step: int
    faults: tuple[FaultEvent, ...] = ()
    missed: tuple[Fault, ...] = ()
    """Faults that should have happened meanwhile and did not."""

    @property
    def step_s(self) -> float:
        """Mean over the steps that count: their sum is what passed, whoever ended which step when."""
        return statistics.fmean(step.seconds for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON."""
        seconds = [step.seconds for step in self.steps]
        work = self.work
        return {
            "tokens_per_s": self.tokens_a_step / self.step_s,
            "step_s": self.step_s,
            "step_s_spread": max(seconds) - min(seconds),
            "steps": [{"step": step.step, "seconds": step.seconds, "loss": step.loss} for step in self.steps],
            "activation_nbytes": self.steps[-1].activation_nbytes,
            "gradient_nbytes": self.steps[-1].gradient_nbytes,
            "compute_times": None if work is None else list(zip(work.forward_s, work.backward_s, strict=True)),
            "bound_s": self.bound_s,
            "share_of_bound": self.bound_s / self.step_s if self.bound_s is not None else None,
            "busy_cores": self.busy.own,
            "busy_cores_of_others": self.busy.others,
            "faults": [event.as_dict() for event in self.faults],
        }


def num_steps(steps: StepsConfig, expected_step_s: float) -> int:
    """As many as fit into `about`, within the limits."""
    fitting = int(steps.about / expected_step_s) if expected_step_s > 0 else steps.at_most
    return max(steps.at_least, min(steps.at_most, fitting))


def measure_point(
    session: Session,
    config: SweepConfig,
    network: Network,
    planned: StepWork,
    times: StageTimes | None,
    busy_meter: Callable[[], BusyMeter] = BusyMeter,
) -> Measurement:
    """Take the steps of one point, under a network that has been changed just now.

    Args:
        session: running.
        config: says how many steps, how long to wait for one, and what happens to the links meanwhile.
        network: as it is without faults.
        planned: the step as expected.
        times: what stages sleep; None where they compute.
        busy_meter: begins to count busy cores when it is made.

    Raises:
        TahqError: the session was lost, or stands still; the network cannot do what a fault is.
    """
    plan = network.plan
    expected_s = step_bound_s(planned, LinkSpeed.of(plan))
    timeout_s = config.timeout + PATIENCE * expected_s
    session.take_finished()
    for _ in range(config.steps.settle):
        session.next_step(timeout_s)
    meter = busy_meter()
    steps: list[StepRecord] = []
    with play(config.timeline, network, step_source=lambda: len(steps)) as faults:
        while len(steps) < num_steps(config.steps, expected_s):
            steps.append(session.next_step(timeout_s))
        missed, busy = faults.waiting, meter.read()
    work = _work_done(steps, planned, times)
    bound_s = step_bound_s(work, LinkSpeed.of(plan)) if work is not None else None
    tokens = config.global_batch * config.sample_len
    return Measurement(tuple(steps), busy, work, bound_s, tokens, tuple(faults.log), missed)


def _work_done(steps: Sequence[StepRecord], planned: StepWork, times: StageTimes | None) -> StepWork | None:
    count = planned.num_micro_batches
    if times is None:
        if not all(step.compute_s for step in steps):
            return None
        times = _mean_times(steps, count)
    last = steps[-1]
    return replace(
        planned,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        activation_nbytes=[nbytes / count for nbytes in last.activation_nbytes],
        gradient_nbytes=[nbytes / count for nbytes in last.gradient_nbytes],
    )


def _mean_times(steps: Sequence[StepRecord], count: int) -> StageTimes:
    """Seconds of a micro-batch, as the stages themselves measured them."""
    stages = range(len(steps[0].compute_s))
    forward_s, backward_s = (
        tuple(statistics.fmean(step.compute_s[stage][way] for step in steps) / count for stage in stages)
        for way in (0, 1)
    )
    return StageTimes(forward_s, backward_s)


def check_faults(measured: Measurement) -> None:
    """Refuse a measurement during which not all happened that should have.

    Raises:
        MissedFaultError: a fault is still to come.
    """
    if measured.missed:
        first, seconds = measured.missed[0], sum(step.seconds for step in measured.steps)
        raise MissedFaultError(
            f"{first.what} of {first.link} did not happen within {len(measured.steps)} steps of together "
            f"{seconds:.1f} s; raise steps.at_least and steps.at_most"
        )


def check_busy(busy: BusyCores, limit: float | None) -> None:
    """Refuse a measurement with sleeping stages during which the cores were busy all the same.

    Raises:
        TooBusyError: more than `limit` were (None: `BUSY_SHARE` of those there are).
    """
    cores = num_usable_cores()
    limit = BUSY_SHARE * cores if limit is None else limit
    if busy.own > limit:
        raise TooBusyError(
            f"{busy.own:.2f} of {cores} cores were busy, the limit is {limit:.2f}: this would be a measurement of the "
            "machine; take fewer stages, a larger micro-batch or a cheaper codec, or a machine with more cores"
        )
