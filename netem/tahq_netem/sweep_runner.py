"""A sweep from its first missing point to its last: networks built and measured, sessions started, results kept.

    for each kind of network that is needed        (rates alone, delays, losses: no more than what it takes)
        build it, and measure it under every setting that its points have
        for each session with points left
            start the workers; for each point: change the network, let steps go by, measure, write

Invariants:
- a point that is done is never measured again, one that failed is tried once a call;
- a result is on disk before the next point begins, so an interruption costs one point;
- no point is measured on a network that is not what it says (unless `calibrate: false`).
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
from tahq_netem.busy_cores import BusyMeter
from tahq_netem.compute import StageTimes
from tahq_netem.compute import calibrate as calibrate_compute
from tahq_netem.description import NetworkConfig, NetworkPlan
from tahq_netem.machine import describe_machine
from tahq_netem.network import Network
from tahq_netem.prediction import prediction_of
from tahq_netem.runtimes.session import Session, SessionRequest, StartSession
from tahq_netem.session_config import planned_work, session_config
from tahq_netem.sweep_durations import START_S, expected_point_s, expected_step_s, expected_sweep_s
from tahq_netem.sweep_measurement import Measurement, apply_plan, check_busy, check_faults, measure_point
from tahq_netem.sweep_networks import by_network_kind, demands
from tahq_netem.sweep_points import NetworkChoice, Point, SessionKey, by_session, sweep_points
from tahq_netem.sweep_progress import SweepProgress
from tahq_netem.sweep_results import DONE, FAILED, ResultFile
from tahq_netem.sweep_spec import SweepConfig

OPEN_LINKS = NetworkChoice()
"""Workers start on these: a first step may be many times as large as the others (AQ-SGD's), and is not measured."""


@dataclass(frozen=True, slots=True)
class Outside:
    """What a sweep uses of the world; tests put something else in place.

    `calibrate_network` returns what is stored beside results, and raises where the network is off.
    """

    runtimes: Mapping[str, StartSession]
    open_network: Callable[[NetworkConfig, SweepConfig], Network]
    calibrate_network: Callable[[Network], dict[str, Any]]
    clock: Callable[[], float] = time.monotonic
    busy_meter: Callable[[], BusyMeter] = BusyMeter
    is_ending: Callable[[], bool] = lambda: False
    """Whether no further point is to be begun."""


@dataclass(frozen=True, slots=True)
class SweepOutcome:
    """How a call ended."""

    num_done: int
    """Points of the sweep that have a result, those of earlier calls included."""
    num_failed: int
    num_left: int
    """Points that there was no time for."""


@dataclass
class SweepRun:
    """One call of a sweep.

    Args:
        config: what is measured.
        results: where it is kept.
        progress: told what happens.
        outside: networks, runtimes and the clock.
        limit_s: begin no point that is expected to end after so many seconds; None: measure all.
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
        """Measure what is missing.

        Raises:
            TahqError: nothing can be measured at all, such as a network that cannot be built.
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
        """Points whose hosts are as many, and that need the same of the kernel."""
        hosts = points[0].session.stages
        hardest = max((point.network for point in points), key=lambda choice: demands(choice, hosts))
        config = hardest.config(hosts, self.config.congestion_control, self.config.tcp_slow_start_after_idle)
        with self.outside.open_network(config, self.config) as network:
            caution = "" if network.describe()["shows_tcp_dynamics"] else ", which shows no TCP dynamics"
            self.progress.say(
                f"network of {hosts} hosts, backend {network.backend}{caution}, {network.congestion_control}"
            )
            self._calibrations.clear()
            for session_points in by_session(points).values():
                self._measure_session(network, session_points)

    def _calibrate(self, network: Network, choice: NetworkChoice, plan: NetworkPlan) -> None:
        """Measure the network under this plan, while nothing else uses it; once, but for one that was off.

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
        """Calibrate what its points need, then measure them, the fastest first; its failure is theirs."""
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
        """A session to its end, or to its first failure: that of its start is one of all its points."""
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
        row["elements_a_step"] = measured.tokens_a_step * (self.config.model.hidden_size or 0)
        row["calibration"] = self._calibrations.get((key.stages, point.network))
        error = self._objection(measured, times)
        if error is not None:
            row |= {"status": FAILED, "error": str(error)}
        self.results.append(row)
        self.progress.finish(point, row, expected_point_s(self.config, point, times))

    def _objection(self, measured: Measurement, times: StageTimes | None) -> TahqError | None:
        """Why this is no measurement of the point."""
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
        """How long stages sleep; measured the first time that it is needed. None: they compute."""
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
        """A core for each stage that really computes on the CPU, where there are as many."""
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
        """What all points have, as far as tables want it."""
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
