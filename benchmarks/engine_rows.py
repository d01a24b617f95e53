"""What bench_engine makes of a sweep's rows: against the bound, beside the prediction, and held to the targets.

    share = bound / step        share with the commit = (bound + one round trip to the coordinator) / step

The bound is `tahq.plan.simulate.bound`'s, of the bytes that crossed. tahq decides a step when every stage has said that
it is done, which may take a round trip to the coordinator; targets were written down with it. Here the coordinator
is on the first stage's host, where the step ends and the next one begins, so that round trip passes unseen and the
sum of both is no bound. So targets are held to the stricter share, and the other stands beside.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from engine_points import FP32, MICRO_BATCH, PLACES, SEQ_LEN, TAH, Place

from tahq.plan.simulate.costs import StepWork
from tahq_netem.sweep.points import NetworkChoice, SessionKey
from tahq_netem.sweep.prediction import CodecSeconds, predicted_step_s, session_schedule
from tahq_netem.sweep.results import Row, done
from tahq_netem.sweep.spec import split_wire
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import input_gradients

MIN_SHARE = {TAH: 0.95, FP32: 0.92}
MIN_SHARE_OF_EIGHT = 0.92
MIN_TIMES_GPIPE = 1.6
MAX_PREDICTION_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One measured point. Times in seconds; the step's are the median and the quartiles of those that count."""

    runtime: str
    schedule: str
    depth: int | tuple[int, ...] | None
    """Micro-batches under way, for all stages or by stage; None: as the schedule has it."""
    wire: str
    stages: int
    micro_batches: int
    rate_bits_per_s: float | None
    round_trip_s: float
    congestion_control: str
    slow_start_after_idle: bool | None
    num_steps: int
    step_s: float
    step_low_s: float
    step_high_s: float
    step_mean_s: float
    tokens_per_s: float
    """By the median."""
    bound_s: float
    commit_s: float
    """One round trip to the coordinator, where there is one."""
    predicted_s: float | None
    codec_s: dict[str, float] | None
    """Of a micro-batch, at a cut."""
    busy_cores: float
    busy_cores_of_others: float
    """Of programs that are no part of the measurement: above a tenth of a core the point should be measured again."""

    @property
    def share(self) -> float:
        """Of the bound."""
        return self.bound_s / self.step_s

    @property
    def share_with_commit(self) -> float:
        """Of the bound and the commit's round trip."""
        return (self.bound_s + self.commit_s) / self.step_s

    @property
    def prediction_error(self) -> float | None:
        """How much longer the predicted step is than the measured one, as a share of the latter."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s - 1

    def as_dict(self) -> dict[str, Any]:
        """Fit for JSON, with what follows from it."""
        derived = ("share", "share_with_commit", "prediction_error")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and what was measured of it; None: nothing was."""

    target: str
    measured: float | None
    is_met: bool | None
    note: str = ""

    def line(self) -> str:
        """For people."""
        if self.measured is None:
            return f"{self.target}: not measured"
        word = "met" if self.is_met else "MISSED"
        return f"{self.target}: {self.measured:.3f}, {word}{f' ({self.note})' if self.note else ''}"


def engine_row(row: Row) -> EngineRow:
    """A sweep's row of a point that was measured."""
    point = row["point"]
    seconds = [float(step["seconds"]) for step in row["steps"]]
    low_s, step_s, high_s = quartiles(seconds)
    network = (row.get("calibration") or {}).get("network", {})
    depth = point.get("in_flight")
    tokens = point["global_batch"] * point["seq_len"]
    return EngineRow(
        runtime=point["runtime"],
        schedule=point["schedule"],
        depth=tuple(depth) if isinstance(depth, list) else depth,
        wire=wire_text(point["activations"], point["gradients"]),
        stages=point["stages"],
        micro_batches=point["global_batch"] // point["micro_batch"],
        rate_bits_per_s=point["rate_bits_per_s"],
        round_trip_s=point["round_trip_s"],
        congestion_control=network.get("congestion_control", point["congestion_control"]),
        slow_start_after_idle=point["tcp_slow_start_after_idle"],
        num_steps=len(seconds),
        step_s=step_s,
        step_low_s=low_s,
        step_high_s=high_s,
        step_mean_s=statistics.fmean(seconds),
        tokens_per_s=tokens / step_s,
        bound_s=float(row["bound_s"]),
        commit_s=point["round_trip_s"] if point["runtime"] == "tahq" else 0.0,
        predicted_s=predicted_again(row),
        codec_s=row.get("codec_s"),
        busy_cores=float(row["busy_cores"]),
        busy_cores_of_others=float(row["busy_cores_of_others"]),
    )


def predicted_again(row: Row) -> float | None:
    """The step by the simulator as it is now, from what the row has of compute, bytes and codecs; None: not predicted.

    A row also keeps what the simulator of its day said.
    """
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
    """A step that takes these seconds to compute, and the bytes that crossed in the row's."""
    count = row["point"]["global_batch"] // row["point"]["micro_batch"]
    activation_nbytes, gradient_nbytes = (
        [nbytes / count for nbytes in row[name]] for name in ("activation_nbytes", "gradient_nbytes")
    )
    return StepWork(times.forward_s, times.backward_s, activation_nbytes, gradient_nbytes, count, input_gradient_s)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one; of a single value, that."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def engine_rows(rows: Iterable[Row]) -> list[EngineRow]:
    """The newest measurement of every point: one whose depth was chosen otherwise is the same point."""
    newest: dict[tuple[Any, ...], EngineRow] = {}
    for row in sorted(done(rows), key=lambda row: row["when"]):
        made = engine_row(row)
        newest[_place_of(made), made.micro_batches, made.runtime, made.schedule, made.wire] = made
    return list(newest.values())


def verdicts(rows: Sequence[EngineRow]) -> list[Verdict]:
    """Every target, whether or not it was measured."""
    return [
        *_shares(rows),
        _times_gpipe(rows),
        _prediction(rows, "tahq"),
        _prediction(rows, "bare"),
    ]


def _shares(rows: Sequence[EngineRow]) -> Iterator[Verdict]:
    """Of the best of tahq's schedules at each network, size of a step, and wire."""
    for place in PLACES:
        for count in place.micro_batches:
            for name in place.wires:
                wire = {"tah": TAH, "fp32": FP32}[name]
                least = MIN_SHARE_OF_EIGHT if place.stages == 8 else MIN_SHARE[wire]
                found = [row for row in find(rows, place, count, wire) if row.runtime == "tahq"]
                target = f"{place.title}, {count} micro-batches, {name}: at least {least} of the bound"
                yield _share_verdict(target, found, least)


def _share_verdict(target: str, rows: Sequence[EngineRow], least: float) -> Verdict:
    """A schedule that splits backwards has a lower bound: it may be the fastest and not the nearest to its own."""
    if not rows:
        return Verdict(target, None, None)
    best, fastest = max(rows, key=lambda row: row.share), max(rows, key=lambda row: row.tokens_per_s)
    notes = [best.schedule]
    if best.commit_s:
        notes.append(f"{best.share_with_commit:.3f} with the commit's round trip")
    if fastest is not best:
        notes.append(f"{fastest.schedule} is faster, {fastest.tokens_per_s / best.tokens_per_s:.3f} ×")
    return Verdict(target, best.share, best.share >= least, "; ".join(notes))


def _times_gpipe(rows: Sequence[EngineRow]) -> Verdict:
    place = next(place for place in PLACES if place.name == "100")
    found = find(rows, place, min(place.micro_batches), FP32)
    ours = max((row.tokens_per_s for row in found if row.runtime == "tahq"), default=math.nan)
    theirs = max(
        (row.tokens_per_s for row in found if (row.runtime, row.schedule) == ("torch", "gpipe")), default=math.nan
    )
    target = f"{place.title}, {min(place.micro_batches)} micro-batches, fp32: at least {MIN_TIMES_GPIPE} × torch GPipe"
    return _verdict(target, ours / theirs, lambda times: times >= MIN_TIMES_GPIPE)


def _prediction(rows: Sequence[EngineRow], runtime: str) -> Verdict:
    errors = [row.prediction_error for row in rows if row.runtime == runtime and row.prediction_error is not None]
    target = f"prediction of every row of {runtime} off by at most {MAX_PREDICTION_ERROR}"
    worst = max(map(abs, errors), default=math.nan)
    return _verdict(target, worst, lambda error: error <= MAX_PREDICTION_ERROR, f"the worst of {len(errors)}")


def _verdict(target: str, measured: float, is_good: Callable[[float], bool], note: str = "") -> Verdict:
    return Verdict(target, None, None) if math.isnan(measured) else Verdict(target, measured, is_good(measured), note)


def find(rows: Iterable[EngineRow], place: Place, micro_batches: int, wire: str | None = None) -> list[EngineRow]:
    """The rows of a network and size of a step, and of a wire if one is named."""
    full = None if wire is None else wire_text(*split_wire(wire))
    return [
        row
        for row in rows
        if _place_of(row) == (place.stages, place.rate_bits_per_s, place.round_trip_s)
        and row.micro_batches == micro_batches
        and full in (None, row.wire)
    ]


def size_text(micro_batch: int) -> str:
    """What a table adds to a wire's name; nothing for one sample."""
    return "" if micro_batch == 1 else f", micro-batches of {micro_batch}"


def wire_text(activations: str, gradients: str) -> str:
    """`activations / gradients`, or one of them where they are alike."""
    return activations if activations == gradients else f"{activations} / {gradients}"


def _place_of(row: EngineRow) -> tuple[int, float | None, float]:
    return row.stages, row.rate_bits_per_s, row.round_trip_s


# -- the result files ----------------------------------------------------------------------------


def as_json(rows: Sequence[EngineRow], machine: str) -> str:
    """Rows and targets for programs."""
    found = {
        "machine": machine,
        "rows": [row.as_dict() for row in rows],
        "targets": [asdict(verdict) for verdict in verdicts(rows)],
    }
    return json.dumps(found, indent=1, allow_nan=False) + "\n"


def report(rows: Sequence[EngineRow], machine: str, failed: Sequence[Row] = ()) -> str:
    """The same for people, as Markdown."""
    return "\n".join(_lines(rows, machine, failed)) + "\n"


def _lines(rows: Sequence[EngineRow], machine: str, failed: Sequence[Row]) -> Iterator[str]:
    yield "# The engine against the bound\n"
    yield f"{machine}. `python benchmarks/bench_engine.py`\n"
    yield (
        f"Stages asleep for 73 and 152 ms a micro-batch of {MICRO_BATCH} × {SEQ_LEN} tokens, activations of 2.1 MB\n"
        "in fp32; network namespaces, rates of each host's uplink and downlink. A step is the median of those that\n"
        "count, in brackets the quartiles. *bound*: the shortest time that compute, bytes, rates and delays leave\n"
        "open; *share*: of that; *and commit*: of that and, for tahq, one round trip to the\n"
        "coordinator, which here passes unseen. *predicted*: by the simulator as it is, with the codecs' times of\n"
        "the same steps. *busy cores*: by the measurement, in brackets by anything else. No slow start after pauses.\n"
    )
    for place in PLACES:
        for count in place.micro_batches:
            found = find(rows, place, count)
            if found:
                yield from _table(place, count, found)
    yield "## Targets\n"
    yield from (f"- {verdict.line()}" for verdict in verdicts(rows))
    if failed:
        yield "\n## Not measured\n"
        yield from (f"- {_name_of(row)}: {row['error']}" for row in failed)


def _table(place: Place, count: int, rows: Sequence[EngineRow]) -> Iterator[str]:
    yield f"## {place.title}, {count} micro-batches, {rows[0].congestion_control}\n"
    titles = ["runtime", "in flight", "wire", "step, s", "tokens/s", "bound, s", "share", "and commit"]
    titles += ["predicted, s", "off by", "busy cores"]
    yield f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    for row in sorted(rows, key=lambda row: (row.runtime != "tahq", row.runtime, row.wire, row.schedule)):
        error, predicted = row.prediction_error, row.predicted_s
        cells = [
            f"{row.runtime} {row.schedule}",
            "as it has it" if row.depth is None else str(row.depth),
            f"`{row.wire}`",
            f"{row.step_s:.3f} ({row.step_low_s:.3f}–{row.step_high_s:.3f})",
            f"{row.tokens_per_s:,.0f}",
            f"{row.bound_s:.3f}",
            f"{row.share:.3f}",
            f"{row.share_with_commit:.3f}",
            "" if predicted is None else f"{predicted:.3f}",
            "" if error is None else f"{error:+.1%}",
            f"{row.busy_cores:.2f} ({row.busy_cores_of_others:.2f})",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _name_of(row: Row) -> str:
    point = row["point"]
    count = point["global_batch"] // point["micro_batch"]
    wire = wire_text(point["activations"], point["gradients"])
    network = NetworkChoice(point["rate_bits_per_s"], point["round_trip_s"]).label
    return f"{point['runtime']} {point['schedule']}, {wire}, {point['stages']} stages, {count} micro-batches, {network}"
