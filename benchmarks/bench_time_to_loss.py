"""Time to loss, TAH-Quant's Figure 2 (bottom): GPT-2 on real text over slow links, loss against wall-clock.

    python benchmarks/bench_time_to_loss.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt --limit 500
    python benchmarks/bench_time_to_loss.py --model tiny --device cpu --steps 30 --out /tmp/try   # shows that it works

GPT-2 small (124 million), four stages, 32 × 1,024 tokens a step; raw fp16, AQ-SGD with its cache, TAH-Quant's pair, and
the project's own. Call it again until nothing is left: one wire's run is one unit, and is not made again.

**How wall-clock is had: it is put together, not waited for.** What a step learns does not depend on the network, so
nobody has to wait for the loss of step 300 at 100 Mbit/s. Each wire trains once, with the links open; twice on the way,
early in the first epoch and after it, the links of the same run are shaped to each rate for a few steps, and these are
timed. A curve's time is then the sum of its steps' times: the mean of the first windows for steps of the first epoch,
of the second ones for the others. The difference matters for AQ-SGD alone, which sends fp16 until it has seen a sample.
Nothing but the start is left out: data, optimizer and commit are in a step's time. The timed steps themselves are in
the results as `windows`, and the table says how far apart they are.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from harness import need_gpu

from tahq.data.dataset import load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq_netem.backends.network import Network
from tahq_netem.measure.machine import describe_machine, one_line
from tahq_netem.network.description import NetworkPlan, plan_network, uniform
from tahq_netem.runtimes.session import Session, SessionRequest, StepRecord
from tahq_netem.sweep.networks import apply_plan, calibrate_quickly, open_network
from tahq_netem.sweep.plots import draw_plots
from tahq_netem.sweep.points import SessionKey
from tahq_netem.sweep.results import DONE, ResultFile, read_results
from tahq_netem.sweep.runner import RUNTIMES
from tahq_netem.sweep.spec import SweepConfig, split_wire
from tahq_netem.sweep.workload import session_config

RESULTS = Path(__file__).parent / "results"
MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2": {"family": "gpt2", "num_layers": 12, "hidden_size": 768, "num_heads": 12},
    "gpt2-medium": {"family": "gpt2", "num_layers": 24, "hidden_size": 1024, "num_heads": 16},
    "tiny": {"family": "gpt2", "num_layers": 4, "hidden_size": 64, "num_heads": 2},
}
WIRES = ("tah / fixed:bits=6", "wf / eden", "aqsgd:bits=4 / fixed:bits=8", "raw:dtype=fp16")
SMOOTHED_STEPS = 5
"""A loss is reached when the mean of so many steps is below it."""
RISEN = 0.1
"""A loss that ends so far above its lowest has risen again, and not only wavered."""

Row = Mapping[str, Any]
Curve = list[tuple[int, float, float]]
"""Step, seconds since the start, and the mean of the losses of the last steps."""


@dataclass(frozen=True, slots=True)
class Window:
    """Steps of a run that were timed under one rate."""

    mbits: float
    is_first_epoch: bool
    seconds: list[float]

    @property
    def step_s(self) -> float:
        return statistics.fmean(self.seconds)


class Training:
    """One wire's run: a session, the network under it, and what it has learned so far."""

    def __init__(self, session: Session, network: Network, options: argparse.Namespace) -> None:
        self._session = session
        self._network = network
        self._options = options
        self.losses: list[float] = []
        self.windows: list[Window] = []

    def step(self) -> StepRecord:
        """Wait for a step, and keep its loss."""
        record = self._session.next_step(self._options.timeout)
        self._keep([record])
        return record

    def time_windows(self, *, is_first_epoch: bool) -> None:
        """Shape the links to each rate, the fastest first, let a step go by, and time the next ones."""
        for mbits in sorted(self._options.rates, reverse=True):
            self._shape(1e6 * mbits)
            self.step()
            seconds = [self.step().seconds for _ in range(self._options.window)]
            self.windows.append(Window(mbits, is_first_epoch, seconds))
            texts = ", ".join(f"{value:.2f}" for value in seconds)
            print(f"  after step {len(self.losses)}, {mbits:g} Mbit/s: {texts} s a step", flush=True)
        self._shape(None)

    def train_until(self, num_steps: int, deadline_s: float) -> None:
        """Take steps with open links; no more after the deadline."""
        while len(self.losses) < num_steps and time.monotonic() < deadline_s:
            self.step()
        print(f"  step {len(self.losses)}, loss {self.losses[-1]:.3f}", flush=True)

    def _shape(self, rate: float | None) -> None:
        apply_plan(self._network, rate_plan(self._options.stages, rate))
        # A step that ended meanwhile has its loss, and no time that would mean anything.
        self._keep(self._session.take_finished())

    def _keep(self, records: Sequence[StepRecord]) -> None:
        self.losses += [math.nan if record.loss is None else record.loss for record in records]


def rate_plan(stages: int, rate: float | None) -> NetworkPlan:
    return plan_network(uniform(stages, rate=rate))


def sweep_config(options: argparse.Namespace) -> SweepConfig:
    """Model, data and machine, as a sweep has them."""
    data: dict[str, Any] = {"seq_len": options.seq_len, "validation": 0.0, "tokenizer": options.tokenizer}
    data |= {"tokens": str(options.tokens)} if options.tokens else {"text": options.text}
    return SweepConfig.model_validate(
        {
            "name": "time-to-loss",
            "model": {**MODELS[options.model]},
            "data": data,
            "global_batch": options.batch,
            "micro_batches": [options.micro_batch],
            "stages": [options.stages],
            "runtimes": [{"name": "tahq", "wires": list(options.wires)}],
            "device": options.device,
            "threads": options.threads,
            "backend": options.backend,
        }
    )


def num_epoch_steps(sweep: SweepConfig) -> int:
    """Steps until every sample has been seen."""
    if sweep.data is None:
        raise AssertionError("this benchmark always says its data")
    samples = load_dataset(sweep.data, load_tokenizer(sweep.data)).num_train_samples
    return math.ceil(samples / sweep.global_batch)


def train(
    sweep: SweepConfig, key: SessionKey, network: Network, options: argparse.Namespace, deadline_s: float
) -> Training:
    """One wire from its start to its last step, or as far as its time and that of all wires allow."""
    epoch_steps = num_epoch_steps(sweep)
    with tempfile.TemporaryDirectory(prefix="tahq-time-to-loss-") as name:
        config = session_config(sweep, key, Path(name), None)
        training = config.training.model_copy(update={"lr": options.lr, "warmup_steps": options.warmup})
        request = SessionRequest(
            config.model_copy(update={"training": training}),
            key.schedule,
            network,
            tuple(network.plan.hosts),
            Path(name),
        )
        apply_plan(network, rate_plan(options.stages, None))
        with RUNTIMES["tahq"](request) as session:
            run = Training(session, network, options)
            run.step()
            deadline_s = min(deadline_s, time.monotonic() + options.wire_limit)
            run.time_windows(is_first_epoch=True)
            run.train_until(min(options.steps, epoch_steps + 1), deadline_s)
            if len(run.losses) > epoch_steps:
                run.time_windows(is_first_epoch=False)
            run.train_until(options.steps, deadline_s)
            return run


def result_rows(
    run: Training, sweep: SweepConfig, key: SessionKey, options: argparse.Namespace, calibrations: Mapping[float, Any]
) -> Iterator[dict[str, Any]]:
    """A row for each rate, in the form of a sweep's, its steps' seconds put together from the windows."""
    epoch_steps = num_epoch_steps(sweep)
    for mbits in options.rates:
        times = {window.is_first_epoch: window.step_s for window in run.windows if window.mbits == mbits}
        early_s, later_s = times[True], times.get(False, times[True])
        seconds = [early_s if step < epoch_steps else later_s for step in range(len(run.losses))]
        yield {
            "id": _id(key, mbits, options),
            "sweep": sweep.name,
            "status": DONE,
            "point": {
                "runtime": key.runtime,
                "schedule": key.schedule,
                "compute": "real",
                "profile": None,
                "activations": key.activations,
                "gradients": key.gradients,
                "stages": key.stages,
                "micro_batch": key.micro_batch,
                "rate_bits_per_s": 1e6 * mbits,
                "round_trip_s": 0.0,
                "global_batch": sweep.global_batch,
                "seq_len": sweep.sample_len,
                "congestion_control": sweep.congestion_control,
            },
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(options.device),
            "steps": [
                {"step": number, "seconds": round(s, 4), "loss": None if math.isnan(loss) else round(loss, 5)}
                for number, (s, loss) in enumerate(zip(seconds, run.losses, strict=True), 1)
            ],
            "tokens_per_s": sweep.global_batch * sweep.sample_len / later_s,
            "share_of_bound": None,
            "epoch_steps": epoch_steps,
            "model": options.model,
            "text": _text(options),
            "training": {"lr": options.lr, "warmup_steps": options.warmup},
            "windows": [asdict(window) for window in run.windows],
            "calibration": calibrations.get(mbits),
        }


def _id(key: SessionKey, mbits: float, options: argparse.Namespace) -> str:
    learned = f"{'+'.join(_text(options))}-lr{options.lr:g}-warmup{options.warmup}"
    return f"{options.model}-{options.seq_len}-{options.batch}-{learned}-{key.stages}-{key.wire}-{mbits:g}"


def _text(options: argparse.Namespace) -> list[str]:
    """The names of what is learned from, without their folders."""
    if options.tokens is not None:
        return [options.tokens.name]
    return [Path(path).name for path in ([options.text] if isinstance(options.text, str) else options.text)]


def measure(options: argparse.Namespace, results: ResultFile) -> int:
    """Train wires that have no result yet until time is up; returns how many are left."""
    deadline_s = time.monotonic() + options.limit
    sweep = sweep_config(options)
    keys = [
        SessionKey("tahq", "1f1b", *split_wire(wire), options.stages, options.micro_batch, "real")
        for wire in options.wires
    ]
    left = [key for key in keys if not all(results.is_done(_id(key, mbits, options)) for mbits in options.rates)]
    if not left:
        return 0
    with open_network(uniform(options.stages, congestion_control=sweep.congestion_control), sweep) as network:
        calibrations = {} if options.no_calibration else _calibrations(network, options)
        while left and time.monotonic() < deadline_s:
            key = left.pop(0)
            print(f"training with {key.wire}", flush=True)
            run = train(sweep, key, network, options, deadline_s)
            for row in result_rows(run, sweep, key, options, calibrations):
                results.append(row)
    return len(left)


def _calibrations(network: Network, options: argparse.Namespace) -> dict[float, Any]:
    found = {}
    for mbits in options.rates:
        apply_plan(network, rate_plan(options.stages, 1e6 * mbits))
        found[mbits] = calibrate_quickly(network)
    return found


def newest(rows: Sequence[Row]) -> list[Row]:
    """Of a wire that was trained again, with another text or learning rate, the last run counts."""
    ordered = sorted(rows, key=lambda row: row["when"])
    return list({(_wire(row), row["point"]["rate_bits_per_s"]): row for row in ordered}.values())


def report(rows: Sequence[Row]) -> Iterator[str]:
    """The result file, as Markdown."""
    yield "# Time to loss\n"
    for line in dict.fromkeys(one_line(row["machine"]) for row in rows):
        yield f"{line}.\n"
    yield from _setting(rows)
    yield (
        "benchmarks/bench_time_to_loss.py. Each wire trained once, with open links. Steps were timed in the same\n"
        "run with the links shaped, in its first epoch and after it; the time of a curve is the sum of its steps'\n"
        "times (the script says more). ± is half of what these steps differ by. Losses are those of training, means\n"
        f"of {SMOOTHED_STEPS} steps, nats a token.\n"
    )
    yield (
        "The first target is the lowest loss that every wire reaches, the second the lowest that all but one reach. A\n"
        "curve is flat near its lowest loss, so the wire that sets a target is slow to it. – is a target not reached.\n"
    )
    yield from _risen(rows)
    for mbits in sorted({row["point"]["rate_bits_per_s"] / 1e6 for row in rows}, reverse=True):
        at_rate = [row for row in rows if row["point"]["rate_bits_per_s"] == 1e6 * mbits]
        yield f"## {mbits:g} Mbit/s\n"
        yield from _steps_table(at_rate, mbits)
        yield from _targets_table({_wire(row): _curve(row) for row in at_rate})


def _setting(rows: Sequence[Row]) -> Iterator[str]:
    """What was trained on what, and over which network; what only newer rows say is taken from these."""
    points = [row["point"] for row in rows]
    backends = [row["calibration"]["network"]["backend"] for row in rows if row["calibration"]]
    said = {key: _each(point[key] for point in points) for key in ("stages", "schedule", "congestion_control")}
    batch = _each(f"{point['global_batch']} samples of {point['seq_len']:,} tokens a step" for point in points)
    parts = _each(f"micro-batches of {point['micro_batch']}" for point in points)
    yield (
        f"{_each(map(_model, rows))}; text: {_each(map(_said_text, rows))}; {_each(map(_training, rows))}.\n"
        f"{batch}, in {parts}; {_each(row['epoch_steps'] for row in rows)} steps an epoch. {said['stages']} stages,\n"
        f"tahq's {said['schedule']}. The networks have rates and no delay: backend {_each(backends)}, "
        f"TCP is {said['congestion_control']}.\n"
    )
    silent = dict.fromkeys(f"`{_wire(row)}`" for row in rows if row.get("text") is None)
    if silent:
        yield f"The rows of {' and '.join(silent)} are older and do not say model, text and learning rate themselves.\n"


def _each(values: Iterable[Any]) -> str:
    """Every value that there is, once."""
    return " and ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "not recorded"


def _model(row: Row) -> str | None:
    sizes = MODELS.get(row.get("model", ""))
    return (
        None if sizes is None else f"{row['model']} ({sizes['num_layers']} blocks of {sizes['hidden_size']} channels)"
    )


def _said_text(row: Row) -> str | None:
    text = row.get("text")
    return text and ", ".join([text] if isinstance(text, str) else text)


def _training(row: Row) -> str | None:
    said = row.get("training")
    return said and f"learning rate {said['lr']:g} after {said['warmup_steps']} steps of warm-up"


def _risen(rows: Sequence[Row]) -> Iterator[str]:
    """Wires whose loss was lower before their end."""
    for wire, curve in {_wire(row): _curve(row) for row in rows}.items():
        step, _, lowest = min(curve, key=lambda point: point[2])
        if curve[-1][2] > lowest + RISEN:
            yield f"The loss of `{wire}` rises again: {lowest:.3f} at step {step}, {curve[-1][2]:.3f} at its last.\n"


def _steps_table(rows: Sequence[Row], mbits: float) -> Iterator[str]:
    yield "| wire | steps | epochs | s a step, first epoch | later | lowest loss | last |\n" + "|---" * 7 + "|"
    for row in rows:
        count, losses = len(row["steps"]), [loss for *_, loss in _curve(row)]
        yield (
            f"| `{_wire(row)}` | {count} | {count / row['epoch_steps']:.1f} | {_step_text(row, mbits, True)} "
            f"| {_step_text(row, mbits, False)} | {min(losses):.3f} | {losses[-1]:.3f} |"
        )
    yield ""


def _targets_table(curves: Mapping[str, Curve]) -> Iterator[str]:
    yield "| target | wire | steps to it | s to it | times as fast as the slowest |\n" + "|---" * 5 + "|"
    for target in targets(list(curves.values())):
        reached = {wire: _way_to(curve, target) for wire, curve in curves.items()}
        slowest_s = max(way[1] for way in reached.values() if way is not None)
        for wire, way in reached.items():
            cells = ("–", "–", "–") if way is None else (str(way[0]), f"{way[1]:,.0f}", f"{slowest_s / way[1]:.2f}")
            yield f"| {target:.3f} | `{wire}` | {' | '.join(cells)} |"
    yield ""


def targets(curves: Sequence[Curve]) -> list[float]:
    """The lowest smoothed loss that every curve reaches, and the lowest that all but one reach."""
    lowest = sorted({min(loss for *_, loss in curve) for curve in curves}, reverse=True)
    return [loss for loss in lowest[:2] if math.isfinite(loss)]


def _step_text(row: Row, mbits: float, is_first_epoch: bool) -> str:
    """Such as `8.41 ± 0.02`."""
    kinds = [window for window in row["windows"] if window["mbits"] == mbits]
    seconds = [s for window in kinds if window["is_first_epoch"] is is_first_epoch for s in window["seconds"]]
    return f"{statistics.fmean(seconds):.2f} ± {(max(seconds) - min(seconds)) / 2:.2f}" if seconds else "–"


def _wire(row: Row) -> str:
    forward, backward = row["point"]["activations"], row["point"]["gradients"]
    return forward if forward == backward else f"{forward} / {backward}"


def _curve(row: Row) -> Curve:
    """From the first step on that has enough before it; infinite where a step had no loss."""
    seconds = list(accumulate(step["seconds"] for step in row["steps"]))
    losses = [math.inf if step["loss"] is None else step["loss"] for step in row["steps"]]
    count = min(SMOOTHED_STEPS, len(losses))
    return [
        (step, seconds[step - 1], statistics.fmean(losses[step - count : step]))
        for step in range(count, len(losses) + 1)
    ]


def _way_to(curve: Curve, target: float) -> tuple[int, float] | None:
    """Steps and seconds until the smoothed loss is there; None: it never is."""
    return next(((step, seconds) for step, seconds, loss in curve if loss <= target), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="gpt2")
    parser.add_argument("--text", nargs="+", default="stdlib", help="text files, folders, globs; default: stdlib")
    parser.add_argument("--tokens", type=Path, help="uint16 token file, instead of --text")
    parser.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--wires", nargs="+", default=list(WIRES), help="'activations / gradients'")
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 500], help="Mbit/s")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--window", type=int, default=2, help="steps that are timed at each rate")
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--device", default="auto", help="auto spreads the stages over the GPUs there are")
    parser.add_argument("--threads", type=int, default=1, help="of a worker")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds that a start or a step may take")
    parser.add_argument("--wire-limit", type=float, default=math.inf, help="seconds of training for each wire")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no wire is begun or trained")
    parser.add_argument("--backend", default="auto", help="of the network; see tahq-netem probe")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the networks first")
    parser.add_argument("--report", action="store_true", help="train nothing, write the table and the plot")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="time_to_loss_h200_202611")
    options = parser.parse_args()
    path = options.out / f"{options.name}.jsonl"
    left = 0
    if not options.report:
        need_gpu(options.device)
        with ResultFile(path) as results:
            left = measure(options, results)
    rows = newest(list(read_results(path).values()))
    text = "\n".join(report(rows))
    (options.out / f"{options.name}.md").write_text(text)
    draw_plots(rows, options.out / options.name)
    print(text)
    print(f"{left} wires are left; run it again" if left else "nothing is left")


if __name__ == "__main__":
    main()
