"""One point measured: the network is changed under a running session, some steps pass, the next steps count.

A row has a step's time, its tokens per second, the bytes that crossed, the busy cores, and the share of the bound.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tahq.comm.network_config import NetworkConfig
from tahq.errors import TahqError
from tahq.plan.simulate.costs import StepWork
from tahq_netem.backends.choice import build_network
from tahq_netem.backends.network import Network
from tahq_netem.measure.machine import BusyCores, BusyMeter, num_usable_cores
from tahq_netem.network.description import NetworkPlan, plan_network
from tahq_netem.network.faults import FaultEvent, NetworkFault, conditions, play
from tahq_netem.runtimes.session import RuntimeSession, RuntimeStep
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, num_steps, predicted_step_s, session_schedule, step_bound_s

PATIENCE = 4.0
"""A session counts as stuck after this many times a step's bound, beyond `timeout`."""
BUSY_SHARE = 0.6
"""Of the cores: if more are busy, the codecs of sleeping stages would have delayed each other."""


class RejectedMeasurementError(TahqError):
    """A measurement that does not count: a fault did not happen, or too many cores were busy."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured steps of a point."""

    steps: tuple[RuntimeStep, ...]
    busy: BusyCores
    work: StepWork | None
    """With the measured bytes and compute times; None if the latter are not known."""
    bound_s: float | None
    tokens_per_step: int
    faults: tuple[FaultEvent, ...] = ()
    missed: tuple[NetworkFault, ...] = ()
    """Faults that should have happened meanwhile and did not."""

    @property
    def step_s(self) -> float:
        """Mean over the steps that count."""
        return statistics.fmean(step.seconds for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The measurement, fit for JSON."""
        seconds = [step.seconds for step in self.steps]
        work = self.work
        return {
            "tokens_per_s": self.tokens_per_step / self.step_s,
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


def open_network(config: NetworkConfig, sweep: SweepConfig) -> Network:
    """Build a network, by the kernel alone where that is enough, since it costs least."""
    faulty = [conditions(plan_network(config), faults)[0] for faults in ([], *([fault] for fault in sweep.faults))]
    rates_only = not any(plan.needs_netem for plan in faulty)
    return build_network(config, backend=sweep.backend, rates_only=rates_only)


def measure_point(
    session: RuntimeSession,
    config: SweepConfig,
    network: Network,
    planned: StepWork,
    times: StageTimes | None,
    busy_meter: Callable[[], BusyMeter] = BusyMeter,
) -> Measurement:
    """Take the steps of one point, under a network that has just been changed and has no faults.

    `planned` is the expected step, `times` how long stages sleep (None: they compute); `busy_meter` counts busy cores
    from its creation on.
    """
    plan = network.plan
    expected_s = step_bound_s(planned, plan)
    timeout_s = config.timeout + PATIENCE * expected_s
    session.take_finished()
    for _ in range(config.steps.settle):
        session.next_step(timeout_s)
    meter = busy_meter()
    steps: list[RuntimeStep] = []
    with play(config.timeline, network, step_source=lambda: len(steps)) as faults:
        while len(steps) < num_steps(config.steps, expected_s):
            steps.append(session.next_step(timeout_s))
        missed, busy = tuple(faults.waiting), meter.read()
    work = _work_done(steps, planned, times)
    bound_s = step_bound_s(work, plan) if work is not None else None
    tokens = config.global_batch * config.sample_len
    return Measurement(tuple(steps), busy, work, bound_s, tokens, tuple(faults.log), missed)


def _work_done(steps: Sequence[RuntimeStep], planned: StepWork, times: StageTimes | None) -> StepWork | None:
    count = planned.num_micro_batches
    if times is None:
        if not all(step.compute_s for step in steps):
            return None
        means = np.mean([step.compute_s for step in steps], axis=0) / count  # [stages, 2]
        times = StageTimes(*map(tuple, means.T.tolist()))
    return replace(
        planned,
        forward_s=times.forward_s,
        backward_s=times.backward_s,
        activation_nbytes=[nbytes / count for nbytes in steps[-1].activation_nbytes],
        gradient_nbytes=[nbytes / count for nbytes in steps[-1].gradient_nbytes],
    )


def prediction_of(key: SessionKey, planned: StepWork, plan: NetworkPlan, measured: Measurement) -> dict[str, Any]:
    """The simulator's step with the measured bytes, compute and codec times, fit for JSON; None: not predicted."""
    schedule = session_schedule(key, planned.num_micro_batches)
    codec = CodecSeconds.measured(measured.steps, planned.num_micro_batches)
    if schedule is None or codec is None or measured.work is None:
        return {"codec_s": None, "predicted_step_s": None, "predicted_tokens_per_s": None}
    work = replace(measured.work, input_gradient_s=planned.input_gradient_s)
    step_s = predicted_step_s(schedule, work, plan, codec, has_coordinator=key.runtime == "tahq")
    predicted = {"predicted_step_s": step_s, "predicted_tokens_per_s": measured.tokens_per_step / step_s}
    return {"codec_s": asdict(codec), **predicted}


def check_faults(measured: Measurement) -> None:
    """Refuse a measurement during which a fault did not happen."""
    if measured.missed:
        first, seconds = measured.missed[0], sum(step.seconds for step in measured.steps)
        raise RejectedMeasurementError(
            f"{first.what} of {first.link} did not happen within {len(measured.steps)} steps ({seconds:.1f} s); raise "
            "steps.at_least and steps.at_most"
        )


def check_busy(busy: BusyCores, limit: float | None) -> None:
    """Refuse a measurement with sleeping stages during which more than `limit` cores were busy (None: 60 % of all)."""
    cores = num_usable_cores()
    limit = BUSY_SHARE * cores if limit is None else limit
    if busy.own > limit:
        raise RejectedMeasurementError(
            f"{busy.own:.2f} of {cores} cores were busy, the limit is {limit:.2f}: this would measure the machine; "
            "take fewer stages, a larger micro-batch or a cheaper codec, or a machine with more cores"
        )
