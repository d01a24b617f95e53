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

import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tahq.comm.network_config import NetworkConfig
from tahq.errors import TahqError, message_of
from tahq_netem.backends.network import Network
from tahq_netem.measure.calibration import calibrate
from tahq_netem.measure.machine import BusyMeter, describe_machine
from tahq_netem.runtimes.gloo import GlooSession
from tahq_netem.runtimes.session import RuntimeSession, SessionRequest, StartSession, TahqSession
from tahq_netem.sweep.measurement import (
    check_busy,
    check_faults,
    measure_point,
    open_network,
    prediction_of,
)
from tahq_netem.sweep.points import NetworkChoice, Point, SessionKey, by_network_kind, by_session, demands, sweep_points
from tahq_netem.sweep.results import DONE, FAILED, ResultFile
from tahq_netem.sweep.spec import AUTO, SweepConfig, load_sweep
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

RUNTIMES: Mapping[str, StartSession] = {
    "tahq": TahqSession,
    "torch": partial(GlooSession, module="tahq_netem.runtimes.torch_pipelining"),
    "bare": partial(GlooSession, module="tahq_netem.runtimes.bare_async"),
}
OPEN_LINKS = NetworkChoice()
"""Workers start on an unshaped network: the first step, which is not measured, may be much larger (AQ-SGD's is)."""
PLANNED_STEPS = 12
"""Steps that tahq under `auto` is given to search for a schedule, after the fourth, and to take a bad change back."""


def run_sweep_file(path: Path, results: Path | None = None, limit_s: float | None = None) -> "SweepOutcome":
    """Measure the points of a sweep.yaml that have no result yet.

    `results` defaults to the sweep's name beside the file; no point is started that is expected to end after `limit_s`.
    """
    config = load_sweep(path)
    return run_sweep(config, results or path.parent / f"{config.name}.jsonl", limit_s)


def run_sweep(config: SweepConfig, results: Path, limit_s: float | None = None) -> "SweepOutcome":
    """Measure the points of a configuration that have no result yet."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    with ResultFile(results) as file:
        try:
            with _unwinding() as has_begun:
                outcome = SweepRun(config, file, console, Outside(is_ending=has_begun), limit_s).run()
        except (KeyboardInterrupt, SystemExit):
            console.print(f"stopped; the results so far are in {results}, and the same command continues from there")
            raise
    console.print(f"{results}: {outcome.num_done} points done, {outcome.num_failed} failed, {outcome.num_left} left")
    return outcome


@contextmanager
def _unwinding() -> Iterator[Callable[[], bool]]:
    """Have SIGTERM and SIGHUP unwind as Ctrl-C does, so that sessions and networks are closed.

    An exception raised by a handler is lost in callbacks of Python itself (weak references), and becomes another error
    in an event loop. So the sweep asks between points whether a signal has arrived (the value of the context), and
    SystemExit is raised again at the end.
    """
    arrived: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield lambda: bool(arrived)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            raise SystemExit(128 + arrived[0])


def calibrate_quickly(network: Network) -> dict[str, Any]:
    """Measure a network between neighbours; return the figures, fit for JSON."""
    found = calibrate(network, quick=True)
    found.check()
    return found.as_dict()


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
    """One call of a sweep; it starts no point that is expected to end after `limit_s`."""

    config: SweepConfig
    results: ResultFile
    console: Console
    outside: Outside
    limit_s: float | None = None
    _seen: set[str] = field(default_factory=set)
    """Ids of the points measured by this call, failures included."""
    _times: dict[tuple[int, int], StageTimes] = field(default_factory=dict)
    _calibrations: dict[NetworkChoice, dict[str, Any]] = field(default_factory=dict)
    _is_under_way: bool = False

    def __post_init__(self) -> None:
        left = TextColumn("{task.fields[left]} left")
        columns = (TextColumn("{task.description}"), BarColumn(), left, TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def run(self) -> SweepOutcome:
        """Measure the missing points."""
        self._deadline_s = self.outside.clock() + self.limit_s if self.limit_s is not None else None
        points = sweep_points(self.config)
        for point in points:
            self.config.timeline.check(point.network.plan(point.session.stages))
        missing = [point for point in points if not self.results.is_done(point.id)]
        self._machine = describe_machine(self.config.device)
        expected_s = expected_sweep_s(self.config, missing)
        self._say(f"{len(points)} points, {len(missing)} to measure, about {expected_s / 60:.0f} min or more")
        with self._bar:
            # By the expected time, not the number of points: one at 20 Mbit/s takes as long as ten unshaped ones.
            self._task = self._bar.add_task("sweep", total=max(expected_s, 1e-9), left=len(missing))
            for network_points in by_network_kind(missing):
                if self._has_time():
                    self._measure_on_one_network(network_points)
        done = sum(self.results.is_done(point.id) for point in points)
        failed = sum(self.results.rows.get(point.id, {}).get("status") == FAILED for point in points)
        return SweepOutcome(done, failed, len(points) - done - failed)

    def _measure_on_one_network(self, points: Sequence[Point]) -> None:
        """Measure points with the same number of hosts and the same needs."""
        hosts = points[0].session.stages
        hardest = max((point.network for point in points), key=lambda choice: demands(choice, hosts))
        config = hardest.config(hosts, self.config.congestion_control, self.config.tcp_slow_start_after_idle)
        with self.outside.open_network(config, self.config) as network:
            self._say(f"network of {hosts} hosts, backend {network.backend}, {network.congestion_control}")
            self._calibrations.clear()
            for session_points in by_session(points):
                self._measure_session(network, session_points)

    def _is_calibrated(self, network: Network, point: Point) -> bool:
        """Measure the network of a point while nothing else uses it; once, unless it was off, which fails the point."""
        if not self._has_time():
            return False
        choice = point.network
        if not self.config.calibrate:
            self._calibrations[choice] = {"network": network.describe()}
        elif choice not in self._calibrations:
            self._say(f"measuring the network: {choice.label}")
            try:
                network.set_plan(choice.plan(point.session.stages))
                self._calibrations[choice] = self.outside.calibrate_network(network)
            except TahqError as error:
                self._fail([point], error)
                return False
        return True

    def _measure_session(self, network: Network, points: Sequence[Point]) -> None:
        """Calibrate the networks of a session's points, then measure them, the fastest first."""
        left = [point for point in points if self._is_calibrated(network, point)]
        if not left or not self._has_time():
            return
        try:
            times = self._stage_times(points[0].session)
        except TahqError as error:
            self._fail(left, error)
            return
        left.sort(key=lambda point: expected_step_s(self.config, point, times))
        while fitting := [point for point in self._unseen(left) if self._fits(point, times, START_S)]:
            self._is_under_way = False
            try:
                self._run_session(network, fitting, times)
            except TahqError as error:
                # A failed start fails all its points, a lost session the one that was being measured.
                failed = self._unseen(fitting)
                self._fail(failed[:1] if self._is_under_way else failed, error)

    def _run_session(self, network: Network, points: Sequence[Point], times: StageTimes | None) -> None:
        key = points[0].session
        self._say(f"starting {key.label}")
        first = points[0].network if key.schedule == AUTO else OPEN_LINKS
        network.set_plan(first.plan(key.stages))
        with tempfile.TemporaryDirectory(prefix="tahq-sweep-") as name:
            folder = Path(name)
            request = SessionRequest(
                config=session_config(self.config, key, folder, times),
                schedule=key.schedule,
                network=network,
                hosts=tuple(network.plan.hosts)[: key.stages],
                folder=folder,
            )
            with self.outside.runtimes[key.runtime](request) as session:
                for _ in range(PLANNED_STEPS if key.schedule == AUTO else 1):
                    session.next_step(self.config.timeout)
                self._is_under_way = True
                for point in points:
                    if self._fits(point, times):
                        self._measure(network, session, point, times)

    def _measure(self, network: Network, session: RuntimeSession, point: Point, times: StageTimes | None) -> None:
        key = point.session
        plan = point.network.plan(key.stages)
        self._bar.update(self._task, description=point.label)
        network.set_plan(plan)
        begin_s = self.outside.clock()
        work = planned_work(self.config, key, times)
        measured = measure_point(session, self.config, network, work, times, self.outside.busy_meter)
        seconds = self.outside.clock() - begin_s
        row = self._row(point, DONE) | measured.as_dict() | prediction_of(key, work, plan, measured)
        row |= {
            "seconds": seconds,
            "stage_times": None if times is None else list(zip(times.forward_s, times.backward_s, strict=True)),
            "elements_a_step": measured.tokens_per_step * (self.config.model.hidden_size or 0),
            "calibration": self._calibrations.get(point.network),
        }
        try:
            check_faults(measured)
            if times is not None:
                check_busy(measured.busy, self.config.max_busy_cores)
        except TahqError as error:
            row |= {"status": FAILED, "error": str(error)}
        self._finish(point, row, times)

    def _fail(self, points: Sequence[Point], error: TahqError) -> None:
        for point in points:
            row = self._row(point, FAILED) | {"error": f"{type(error).__name__}: {message_of(error)}"}
            self._finish(point, row, None)

    def _finish(self, point: Point, row: dict[str, Any], times: StageTimes | None) -> None:
        self.results.append(row)
        self._seen.add(point.id)
        left = self._bar.tasks[self._task].fields["left"] - 1
        self._bar.update(self._task, advance=expected_point_s(self.config, point, times), left=left)
        self._say(f"[{left} left] {point.label}: {_result_line(row)}")

    def _say(self, line: str) -> None:
        self.console.print(line)

    def _row(self, point: Point, status: str) -> dict[str, Any]:
        config = self.config
        keys = ("global_batch", "congestion_control", "tcp_slow_start_after_idle", "piece")
        common = {"seq_len": config.sample_len} | {key: getattr(config, key) for key in keys}
        return {
            "id": point.id,
            "sweep": config.name,
            "status": status,
            "point": point.as_dict() | common,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self._machine,
        }

    def _stage_times(self, key: SessionKey) -> StageTimes | None:
        """How long stages sleep, measured when first needed; None: they compute."""
        if key.compute == "real":
            return None
        if key.compute == "sleep":
            return StageTimes(key.forward_s, key.backward_s)
        size = (key.stages, key.micro_batch)
        if size not in self._times:
            self._say(f"timing the compute of {key.stages} stages with micro-batches of {key.micro_batch}")
            with tempfile.TemporaryDirectory(prefix="tahq-sweep-") as name:
                self._times[size] = calibrate_compute(session_config(self.config, key, Path(name), None))
        return self._times[size]

    def _has_time(self, expected_s: float = 0.0) -> bool:
        if self.outside.is_ending():
            return False
        return self._deadline_s is None or self.outside.clock() + expected_s < self._deadline_s

    def _fits(self, point: Point, times: StageTimes | None, before_s: float = 0.0) -> bool:
        return self._has_time(before_s + expected_point_s(self.config, point, times))

    def _unseen(self, points: Sequence[Point]) -> list[Point]:
        return [point for point in points if point.id not in self._seen]


def _result_line(row: Mapping[str, Any]) -> str:
    if row["status"] != DONE:
        return f"FAILED: {row['error']}"
    share = f", {row['share_of_bound']:.0%} of the bound" if row["share_of_bound"] is not None else ""
    busy = f"{row['busy_cores']:.2f} cores busy (others {row['busy_cores_of_others']:.2f})"
    return f"{row['tokens_per_s']:,.0f} tokens/s, {row['step_s']:.2f} s per step{share}, {busy}"
