"""Rows of a sweep against the theoretical maximum, for bench_engine.py and bench_gpt2_xl.py.

    share = bound / step        share with the commit = (bound + one round trip to the coordinator) / step

The bound is that of `tahq.plan.simulate.bound`, with the bytes that crossed. tahq commits a step when every stage has
reported that it is done, which may take a round trip to the coordinator. Here the coordinator is on the first stage's
host, where steps end and begin, so that round trip is hidden; the share with it stands beside.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from harness import Table, say

from tahq.plan.simulate.costs import StepWork
from tahq_netem.measure.machine import one_line
from tahq_netem.sweep.points import NetworkChoice, SessionKey
from tahq_netem.sweep.results import DONE, Row, done, read_results
from tahq_netem.sweep.runner import run_sweep
from tahq_netem.sweep.spec import SweepConfig
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, input_gradients, predicted_step_s, session_schedule


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measured point of a sweep."""

    row: Row

    @property
    def point(self) -> Row:
        point: Row = self.row["point"]
        return point

    @property
    def place(self) -> tuple[int, float | None, float]:
        """Stages, rate and round trip."""
        return self.point["stages"], self.point["rate_bits_per_s"], self.point["round_trip_s"]

    @property
    def micro_batches(self) -> int:
        return int(self.point["global_batch"]) // int(self.point["micro_batch"])

    @property
    def wire(self) -> str:
        return wire_text(self.point["activations"], self.point["gradients"])

    @property
    def series(self) -> str:
        """Runtime, schedule, wire and size of a micro-batch."""
        size = self.point["micro_batch"]
        return f"{self.point['runtime']} {self.point['schedule']} `{self.wire}`{size_text(size)}"

    @property
    def depth(self) -> tuple[int, ...] | int | None:
        """Micro-batches in flight, of all stages or by stage; None: the schedule's own."""
        depth = self.point.get("in_flight")
        return tuple(depth) if isinstance(depth, list) else depth

    @property
    def step_s(self) -> tuple[float, float, float]:
        """Quartiles of the counted steps' seconds: lower, median, upper."""
        return quartiles([float(step["seconds"]) for step in self.row["steps"]])

    @property
    def tokens_per_s(self) -> float:
        """By the median step."""
        return float(self.point["global_batch"] * self.point["seq_len"]) / self.step_s[1]

    @property
    def share(self) -> float:
        """Of the bound."""
        return float(self.row["bound_s"]) / self.step_s[1]

    @property
    def share_with_commit(self) -> float:
        commit_s = self.point["round_trip_s"] if self.point["runtime"] == "tahq" else 0.0
        return float(self.row["bound_s"] + commit_s) / self.step_s[1]

    def prediction_cells(self) -> tuple[str, str]:
        """Predicted seconds, and by how much they are off."""
        predicted_s = predicted_again(self.row)
        if predicted_s is None:
            return "", ""
        return f"{predicted_s:.3f}", f"{predicted_s / self.step_s[1] - 1:+.1%}"

    def step_cell(self) -> str:
        low_s, median_s, high_s = self.step_s
        return f"{median_s:.3f} ({low_s:.3f}–{high_s:.3f})"


def measure(configs: Iterable[SweepConfig], results: Path) -> list[Row]:
    """Measure the points that the file of results does not have yet; returns all rows of the file."""
    for config in configs:
        outcome = run_sweep(config, results)
        if outcome.num_failed:
            say(f"{outcome.num_failed} points failed; run the script again to try them again")
    return list(read_results(results).values())


def engine_rows(rows: Iterable[Row]) -> list[EngineRow]:
    """The newest measurement of every point; depth does not distinguish points."""
    newest = {}
    for row in sorted(done(rows), key=lambda row: row["when"]):
        made = EngineRow(row)
        newest[made.place, made.micro_batches, made.series] = made
    return list(newest.values())


def machines(rows: Iterable[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{one_line(row['machine'])}, {row['when'][:10]}" for row in rows))


def failures(rows: Sequence[Row]) -> Iterator[Table]:
    """What could not be measured, with the reason."""
    failed = [EngineRow(row) for row in rows if row["status"] != DONE]
    if failed:
        cells = [(row.series, NetworkChoice(*row.place[1:]).label, row.row["error"][:160]) for row in failed]
        yield Table(("series", "network", "error"), cells, heading="Not measured")


def predicted_again(row: Row) -> float | None:
    """The step by today's simulator, from the row's compute, bytes and codecs; None: not predicted."""
    point, codec = row["point"], row.get("codec_s")
    times = row.get("stage_times") or row.get("compute_times")
    if times is None or codec is None:
        return row.get("predicted_step_s")
    key = SessionKey(**{field.name: _as_tuple(point.get(field.name)) for field in fields(SessionKey)})
    forward_s, backward_s = zip(*times, strict=True)
    compute = StageTimes(forward_s, backward_s)
    work = step_work(row, compute, input_gradients(key, compute))
    schedule = session_schedule(key, work.num_micro_batches)
    if schedule is None:
        return None
    plan = NetworkChoice(point["rate_bits_per_s"], point["round_trip_s"]).plan(key.stages)
    has_coordinator = key.runtime == "tahq"
    return predicted_step_s(schedule, work, plan, CodecSeconds(**codec), has_coordinator=has_coordinator)


def step_work(row: Row, times: StageTimes, input_gradient_s: Sequence[float] | None = None) -> StepWork:
    """A step with these times of compute, and the bytes that crossed in the row's step."""
    count = row["point"]["global_batch"] // row["point"]["micro_batch"]
    activation_nbytes, gradient_nbytes = (
        [nbytes / count for nbytes in row[name]] for name in ("activation_nbytes", "gradient_nbytes")
    )
    return StepWork(times.forward_s, times.backward_s, activation_nbytes, gradient_nbytes, count, input_gradient_s)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile; three times the same of a single value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def size_text(micro_batch: int) -> str:
    """The suffix of a wire's name in tables; empty for one sample."""
    return "" if micro_batch == 1 else f", micro-batches of {micro_batch}"


def wire_text(activations: str, gradients: str) -> str:
    """`activations / gradients`, or one of them where they are alike."""
    return activations if activations == gradients else f"{activations} / {gradients}"
