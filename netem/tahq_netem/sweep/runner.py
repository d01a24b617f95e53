"""Runs a sweep: builds and measures networks, starts sessions, measures points, stores results.

    for each kind of network (rates alone, with delays, with losses)
        build it, and calibrate it under every setting of its points
        for each session with missing points
            start the workers; for each point: change the network, let steps pass, measure, write

Invariants:
- a point with a result is never measured again; one that failed is tried once per call;
- a result is on disk before the next point begins, so an interruption costs one point;
- no point is measured on a network that is off (unless `calibrate: false`).
"""

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tahq.errors import TahqError, message_of
from tahq_netem.backends.network import Network
from tahq_netem.measure.machine import BusyMeter, describe_machine
from tahq_netem.network.description import NetworkConfig, NetworkPlan
from tahq_netem.runtimes.bare_async import start_bare
from tahq_netem.runtimes.session import Session, SessionRequest, StartSession
from tahq_netem.runtimes.tahq_runtime import TahqSession
from tahq_netem.runtimes.torch_pipelining import start_torch
from tahq_netem.sweep.measurement import Measurement, check_busy, check_faults, measure_point, prediction_of
from tahq_netem.sweep.networks import apply_plan, by_network_kind, calibrate_quickly, demands, open_network
from tahq_netem.sweep.points import NetworkChoice, Point, SessionKey, by_session, sweep_points
from tahq_netem.sweep.progress import SweepProgress
from tahq_netem.sweep.results import DONE, FAILED, ResultFile
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.stage_times import calibrate as calibrate_compute
from tahq_netem.sweep.workload import (
    START_S,
    expected_point_s,
    expected_step_s,
    expected_sweep_s,
    planned_work,
    session_config,
)

RUNTIMES: Mapping[str, StartSession] = {"tahq": TahqSession, "torch": start_torch, "bare": start_bare}
"""Each starts a session; torch and bare run over gloo."""
OPEN_LINKS = NetworkChoice()
"""Workers start on an unshaped network: the first step, which is not measured, may be much larger (AQ-SGD's is)."""


@dataclass(frozen=True, slots=True)
class Outside:
    """The I/O of a sweep; tests replace it.

    `calibrate_network` returns what is stored beside results, and raises where the network is off.
    """

    runtimes: Mapping[str, StartSession] = field(default_factory=lambda: RUNTIMES)
    open_network: Callable[[NetworkConfig, SweepConfig], Network] = open_network
    calibrate_network: Callable[[Network], dict[str, Any]] = calibrate_quickly
    clock: Callable[[], float] = time.monotonic
    busy_meter: Callable[[], BusyMeter] = BusyMeter
    is_ending: Callable[[], bool] = lambda: False
    """Whether to start no further point."""


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """The points of a sweep after a call."""

    num_done: int
    """Points with a result, from earlier calls too."""
    num_failed: int
    num_left: int
    """Points not started, for lack of time."""


@dataclass
class SweepRun:
    """One call of a sweep.

    Args:
        config: the sweep.
        results: where results are stored.
        progress: shows the progress.
        outside: networks, runtimes and the clock.
        limit_s: start no point that is expected to end later; None: measure all.
    """

    config: SweepConfig
    results: ResultFile
    progress: SweepProgress
    outside: Outside
    limit_s: float | None = None
    _times: dict[tuple[int, int], StageTimes] = field(default_factory=dict)
    _calibrations: dict[tuple[int, NetworkChoice], dict[str, Any]] = field(default_factory=dict)
    _is_under_way: bool = False

    def run(self) -> SweepOutcome:
        """Measure the missing points.

        Raises:
            TahqError: nothing can be measured, for example because a network cannot be built.
            ConfigError: a fault names a host that a point does not have.
        """
        self._deadline_s = self.outside.clock() + self.limit_s if self.limit_s is not None else None
        points = sweep_points(self.config)
        for point in points:
            self.config.timeline.check(point.network.plan(point.session.stages))
        missing = [point for point in points if not self.results.is_done(point.id)]
        self._machine = describe_machine(self.config.device)
        self.progress.begin(len(points), len(missing), expected_sweep_s(self.config, missing))
        for network_points in by_network_kind(missing):
            if self._has_time():
                self._measure_on_one_network(network_points)
        return self._outcome(points)

    # -- networks --------------------------------------------------------------------------------

    def _measure_on_one_network(self, points: Sequence[Point]) -> None:
        """Measure points with the same number of hosts and the same needs."""
        hosts = points[0].session.stages
        hardest = max((point.network for point in points), key=lambda choice: demands(choice, hosts))
        config = hardest.config(hosts, self.config.congestion_control, self.config.tcp_slow_start_after_idle)
        with self.outside.open_network(config, self.config) as network:
            self.progress.say(f"network of {hosts} hosts, backend {network.backend}, {network.congestion_control}")
            self._calibrations.clear()
            for session_points in by_session(points).values():
                self._measure_session(network, session_points)

    def _calibrate(self, network: Network, choice: NetworkChoice, plan: NetworkPlan) -> None:
        """Measure the network under this plan while nothing else uses it; once, unless it was off.

        Raises:
            NetworkError: it is off.
        """
        key = (len(plan.hosts), choice)
        if key in self._calibrations:
            return
        if not self.config.calibrate:
            self._calibrations[key] = {"network": network.describe()}
            return
        self.progress.say(f"measuring the network: {choice.label}")
        apply_plan(network, plan)
        self._calibrations[key] = self.outside.calibrate_network(network)

    # -- sessions --------------------------------------------------------------------------------

    def _measure_session(self, network: Network, points: Sequence[Point]) -> None:
        """Calibrate the networks of a session's points, then measure them, the fastest first."""
        left = [point for point in points if self._is_calibrated(network, point)]
        key = points[0].session
        if not left or not self._has_time():
            return
        try:
            times = self._stage_times(key)
        except TahqError as error:
            self._fail_all(left, error)
            return
        left.sort(key=lambda point: expected_step_s(self.config, point, times))
        while fitting := [point for point in left if self._is_missing(point) and self._fits(point, times, START_S)]:
            self._run_until_lost(network, fitting, times)

    def _run_until_lost(self, network: Network, points: Sequence[Point], times: StageTimes | None) -> None:
        """Run a session to its end or first failure; a failed start fails all its points."""
        self._is_under_way = False
        try:
            self._run_session(network, points, times)
        except TahqError as error:
            left = [point for point in points if self._is_missing(point)]
            self._fail_all(left[:1] if self._is_under_way else left, error)

    def _is_calibrated(self, network: Network, point: Point) -> bool:
        if not self._has_time():
            return False
        try:
            self._calibrate(network, point.network, point.network.plan(point.session.stages))
        except TahqError as error:
            self._fail(point, error)
            return False
        return True

    def _run_session(self, network: Network, points: Sequence[Point], times: StageTimes | None) -> None:
        key = points[0].session
        self.progress.say(f"starting {key.label}")
        apply_plan(network, OPEN_LINKS.plan(key.stages))
        with tempfile.TemporaryDirectory(prefix="tahq-sweep-") as name:
            folder = Path(name)
            request = SessionRequest(
                config=session_config(self.config, key, folder, times),
                schedule=key.schedule,
                network=network,
                hosts=tuple(network.plan.hosts)[: key.stages],
                folder=folder,
                cores=self._cores(key),
            )
            with self.outside.runtimes[key.runtime](request) as session:
                session.next_step(self.config.timeout)
                self._is_under_way = True
                for point in points:
                    if self._fits(point, times):
                        self._measure(network, session, point, times)

    def _measure(self, network: Network, session: Session, point: Point, times: StageTimes | None) -> None:
        key = point.session
        plan = point.network.plan(key.stages)
        self.progress.start(point)
        apply_plan(network, plan)
        begin_s = self.outside.clock()
        work = planned_work(self.config, key, times)
        measured = measure_point(session, self.config, network, work, times, self.outside.busy_meter)
        seconds = self.outside.clock() - begin_s
        row = self._row(point, DONE) | measured.as_dict() | {"seconds": seconds, "stage_times": _as_rows(times)}
        row |= prediction_of(key, work, plan, measured)
        row["elements_a_step"] = measured.tokens_per_step * (self.config.model.hidden_size or 0)
        row["calibration"] = self._calibrations.get((key.stages, point.network))
        error = self._objection(measured, times)
        if error is not None:
            row |= {"status": FAILED, "error": str(error)}
        self.results.append(row)
        self.progress.finish(point, row, expected_point_s(self.config, point, times))

    def _objection(self, measured: Measurement, times: StageTimes | None) -> TahqError | None:
        """Why the measurement does not count; None if it does."""
        try:
            check_faults(measured)
            if times is not None:
                check_busy(measured.busy, self.config.max_busy_cores)
        except TahqError as error:
            return error
        return None

    def _fail(self, point: Point, error: TahqError) -> None:
        row = self._row(point, FAILED) | {"error": f"{type(error).__name__}: {message_of(error)}"}
        self.results.append(row)
        self.progress.finish(point, row, expected_point_s(self.config, point, None))

    def _fail_all(self, points: Sequence[Point], error: TahqError) -> None:
        for point in points:
            self._fail(point, error)

    # -- what a point takes ----------------------------------------------------------------------

    def _stage_times(self, key: SessionKey) -> StageTimes | None:
        """How long stages sleep, measured when first needed; None: they compute."""
        if key.compute == "real":
            return None
        if key.compute == "sleep":
            return StageTimes(key.forward_s, key.backward_s)
        size = (key.stages, key.micro_batch)
        if size not in self._times:
            self.progress.say(f"timing the compute of {key.stages} stages with micro-batches of {key.micro_batch}")
            with tempfile.TemporaryDirectory(prefix="tahq-sweep-") as name:
                self._times[size] = calibrate_compute(session_config(self.config, key, Path(name), None))
        return self._times[size]

    def _cores(self, key: SessionKey) -> tuple[int, ...]:
        """One core for each stage that computes on the CPU, if there are enough; else empty."""
        usable = sorted(os.sched_getaffinity(0))
        if key.compute != "real" or self.config.device != "cpu" or self.config.threads * key.stages > len(usable):
            return ()
        return tuple(usable[: key.stages]) if self.config.threads == 1 else ()

    def _has_time(self, expected_s: float = 0.0) -> bool:
        if self.outside.is_ending():
            return False
        return self._deadline_s is None or self.outside.clock() + expected_s < self._deadline_s

    def _fits(self, point: Point, times: StageTimes | None, before_s: float = 0.0) -> bool:
        return self._has_time(before_s + expected_point_s(self.config, point, times))

    def _is_missing(self, point: Point) -> bool:
        return point.id not in self.progress.seen

    # -- results ---------------------------------------------------------------------------------

    def _row(self, point: Point, status: str) -> dict[str, Any]:
        return {
            "id": point.id,
            "sweep": self.config.name,
            "status": status,
            "point": point.as_dict() | self._common(),
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
        }

    def _common(self) -> dict[str, Any]:
        """The settings of all points that tables need."""
        config = self.config
        return {
            "global_batch": config.global_batch,
            "seq_len": config.sample_len,
            "congestion_control": config.congestion_control,
            "tcp_slow_start_after_idle": config.tcp_slow_start_after_idle,
            "piece": config.piece,
        }

    def _outcome(self, points: Sequence[Point]) -> SweepOutcome:
        done = sum(self.results.is_done(point.id) for point in points)
        failed = sum(self.results.rows.get(point.id, {}).get("status") == FAILED for point in points)
        return SweepOutcome(done, failed, len(points) - done - failed)


def _as_rows(times: StageTimes | None) -> list[tuple[float, float]] | None:
    return None if times is None else list(zip(times.forward_s, times.backward_s, strict=True))
