"""Many trainings of one model cut in four, spread over a machine's devices, for the tables about codecs and loss.

A *setting* is a pair of schedules of codecs (`codec_schedule`), of activations and of gradients; a *run* is a setting
with a model and a seed. Each process holds one model and takes the next run from a queue. Finished runs are JSON lines
beside the result file, and are not made again; one that `--seconds` interrupts goes on from its file in `--state`.
"""

import argparse
import hashlib
import json
import math
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from codec_schedule import NONE, Wire
from corpus_questions import exact_matches
from cut_training import BATCH, MODELS, SEQ_LEN, CutTraining, split_name
from harness import append_row, read_rows, rows_path, say
from scipy.stats import t as student_t
from stored_training import REDUCE, ReplicaTraining

from tahq.data.config import DataConfig

CURVE_STEP = 10
"""Curves are kept as means of this many steps."""
LAST_STEPS = 50
"""A run's result is the mean loss of this many last steps; equal seeds have equal batches there."""
METHOD = (
    f"{BATCH} × {SEQ_LEN} tokens per step, weights drawn or those of the folder that is named, codecs at three cuts. "
    f"Loss is the mean of the last {LAST_STEPS} steps, nats per token. A gap is the difference to the uncompressed run "
    "of the same seed; ± is the half width of its 95 % interval (Student's t over seeds)."
)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "--text": {"nargs": "+", "default": ["stdlib"], "help": "text files, folders, globs, or stdlib"},
    "--tokenizer": {"default": "bytes", "help": "folder of a Hugging Face tokenizer"},
    "--model": {"nargs": "+", "help": f"{', '.join(MODELS)}, or folders of checkpoints"},
    "--steps": {"type": int, "default": 400},
    "--seeds": {"type": int, "default": 3},
    "--processes": {"type": int, "default": 2, "help": "processes per device"},
    "--backend": {"default": "reference", "help": "of the codecs; the reference cannot have a kernel's bug"},
    "--tokens": {"nargs": "+", "help": "token files (make_corpus.py) instead of --text"},
    "--records": {"nargs": "+", "help": "prompts with responses instead of --text"},
    "--questions": {"type": Path, "help": "records that are answered at the end, for the share of exact matches"},
    "--lr": {"type": float, "help": "peak learning rate"},
    "--held-out": {"default": 0.05, "help": "files for the held-out loss, else a share of the data"},
    "--compile": {"action": "store_true", "help": "blocks by torch.compile, not by CUDA graphs"},
    "--seconds": {"type": float, "help": "stop by then; the same command goes on"},
    "--state": {"type": Path, "help": "folder for runs that --seconds interrupts; without it they begin anew"},
}
Setting = tuple[str, str, str]
"""Model, codec of activations, codec of gradients."""


@dataclass(frozen=True, slots=True)
class Run:
    """What to train; `activations` and `gradients` are schedules of codecs."""

    model: str
    activations: str
    gradients: str
    seed: int
    steps: int

    @property
    def setting(self) -> Setting:
        return self.model, self.activations, self.gradients


@dataclass(frozen=True, slots=True)
class Result:
    """Mean loss of a run's last steps (NaN where it diverged), means of every ten steps, and that on held-out data.

    `held_out` is without codecs, `held_out_coded` with those of the last step; `exact` is the share
    of questions that the final weights answer exactly.
    """

    run: Run
    loss: float
    curve: list[float]
    held_out: float = math.nan
    held_out_coded: float = math.nan
    tokens_per_s: float = math.nan
    exact: float = math.nan


def data_config(options: argparse.Namespace) -> DataConfig:
    """The data that `--text`, `--tokens` or `--records`, and `--held-out` name."""
    held_out = str(options.held_out)
    validation = float(held_out) if held_out.replace(".", "", 1).isdigit() else held_out
    kind = "tokens" if options.tokens else "records" if options.records else "text"
    source = {kind: getattr(options, kind)}
    return DataConfig.model_validate(
        {**source, "tokenizer": options.tokenizer, "seq_len": SEQ_LEN, "validation": validation}
    )


def run_all(runs: Iterable[Run], options: argparse.Namespace, *, some_suffice: bool = False) -> list[Result]:
    """Every run's result, including those of earlier calls.

    Where `--seconds` was too short, `some_suffice` gives those that there are; else the program ends.
    """
    path, wanted = rows_path(options), list(dict.fromkeys(runs))
    rows = [{**row, "run": Run(**row["run"])} for row in read_rows(path)]
    found = {row["run"]: Result(**row) for row in rows}
    for result in _train([run for run in wanted if run not in found], options):
        found[result.run] = result
        append_row(path, asdict(result))
        say(f"{result.run} {result.loss:.4f}, {result.tokens_per_s:,.0f} tokens/s")
    if (left := len(wanted) - len(found.keys() & wanted)) and not some_suffice:
        sys.exit(f"{left} runs are left; call again to continue")
    return [found[run] for run in wanted if run in found]


def _train(runs: Sequence[Run], options: argparse.Namespace) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for run in runs:
        todo.put(run)
    deadline_s = None if options.seconds is None else time.time() + options.seconds
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    places = [device for device in devices for _ in range(options.processes)][: len(runs)]
    workers = [
        context.Process(target=_work, args=(place, options, deadline_s, todo, done), daemon=True) for place in places
    ]
    for worker in workers:
        worker.start()
    try:
        for number in range(len(runs)):
            while True:
                try:
                    yield done.get(timeout=1.0)
                    break
                except queue.Empty:
                    if any(worker.is_alive() for worker in workers):
                        continue
                    left = len(runs) - number
                    if deadline_s is not None and time.time() > deadline_s:
                        return
                    raise RuntimeError(f"all workers ended with {left} runs to go; see above") from None
    finally:
        for worker in workers:
            worker.kill()


def _work(device: str, options: argparse.Namespace, deadline_s: float | None, todo: Any, done: Any) -> None:
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, training, data = "", None, data_config(options)
    changes = {"training": {"compile": options.compile, **({"lr": options.lr} if options.lr else {})}}
    while deadline_s is None or time.time() < deadline_s:
        try:
            run = todo.get(timeout=1.0)
        except queue.Empty:
            break
        if training is None or run.model != model:
            model, training = run.model, None  # free the old model's memory first
            made = ReplicaTraining if split_name(model)[1] in REDUCE else CutTraining
            training = made(model, data, torch.device(device), changes)
        result = _result(training, run, options, deadline_s)
        if result is not None:
            done.put(result)
    time.sleep(1.0)  # until the last result is through the queue


def _result(training: CutTraining, run: Run, options: argparse.Namespace, deadline_s: float | None) -> Result | None:
    """None if the time is over before the run is."""
    state = None
    if options.state is not None:
        options.state.mkdir(parents=True, exist_ok=True)
        name = repr((run, options.lr, str(options.output)))
        state = options.state / f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.pt"
    wire, begin_s = Wire.parse(run.activations, run.gradients, options.backend), time.time()
    losses = training.run(wire, seed=run.seed, steps=run.steps, deadline_s=deadline_s, state=state)
    rate = training.steps_done * BATCH * SEQ_LEN / (time.time() - begin_s)
    if len(losses) < run.steps:
        print(f"{run}: {len(losses)} of {run.steps} steps, {rate:,.0f} tokens/s", file=sys.stderr, flush=True)
        return None
    blocks = [losses[start : start + CURVE_STEP] for start in range(0, len(losses), CURVE_STEP)]
    curve = [round(statistics.fmean(block), 4) for block in blocks]
    last, coded = statistics.fmean(losses[-LAST_STEPS:]), training.held_out_loss(with_codecs=True)
    exact = math.nan
    if options.questions is not None:
        records = [json.loads(line) for line in options.questions.read_text().splitlines()]
        exact = exact_matches(training.model, training.tokenizer, records)
    return Result(run, last, curve, training.held_out_loss(), coded, rate, exact)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of paired runs: how many, their mean, and half of the mean's 95 % interval by Student's t."""

    count: int
    mean: float
    half_width: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference":
        """From one difference per seed."""
        count, half_width = len(values), math.nan
        if count > 1 and math.isfinite(sum(values)):
            half_width = float(student_t.ppf(0.975, count - 1)) * statistics.stdev(values) / math.sqrt(count)
        return cls(count, statistics.fmean(values), half_width)


class Losses:
    """Results by setting and seed."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._results: dict[Setting, dict[int, Result]] = {}
        for result in results:
            self._results.setdefault(result.run.setting, {})[result.run.seed] = result

    def __contains__(self, setting: Setting) -> bool:
        return setting in self._results

    def losses(self, setting: Setting) -> list[float]:
        """One loss per seed."""
        return [result.loss for result in self._results[setting].values()]

    def curve(self, setting: Setting) -> list[float]:
        """Mean curve over the seeds."""
        curves = [result.curve for result in self._results[setting].values()]
        return [statistics.fmean(values) for values in zip(*curves, strict=True)]

    def difference(self, setting: Setting, other: Setting, figure: str = "loss") -> Difference:
        """The setting's loss, or another figure of its results, minus the other's, over the seeds that both have."""
        pairs = self._pairs(setting, other)
        return Difference.of([getattr(mine, figure) - getattr(theirs, figure) for mine, theirs in pairs])

    def gap(self, setting: Setting) -> Difference:
        """Difference to the uncompressed run of the same model and seeds."""
        return self.difference(setting, (setting[0], NONE, NONE))

    def draw_gaps(self, axes: Any, settings: Mapping[str, Setting], title: str, base: Setting | None = None) -> None:
        """Plot the gaps along the training, to `base` or to the uncompressed run of the same model."""
        for label, setting in settings.items():
            pairs = self._pairs(setting, base or (setting[0], NONE, NONE))
            gaps = [zip(mine.curve, base.curve, strict=True) for mine, base in pairs]
            means = [statistics.fmean(a - b for a, b in points) for points in zip(*gaps, strict=True)]
            axes.plot([CURVE_STEP * (i + 0.5) for i in range(len(means))], means, label=label, linewidth=1)
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set(title=title, xlabel="step", ylabel="loss minus uncompressed (nats)", ylim=(-0.05, 0.2))
        axes.legend(fontsize=7)

    def _pairs(self, setting: Setting, other: Setting) -> list[tuple[Result, Result]]:
        mine, theirs = self._results[setting], self._results[other]
        return [(mine[seed], theirs[seed]) for seed in sorted(mine.keys() & theirs.keys())]


def picture(path: Path | None, rows: int, columns: int, draw: Callable[[list[Any]], None]) -> Iterator[str]:
    """Draw panels beside the result file, if there is one; yields the line that shows the picture."""
    from matplotlib.figure import Figure

    if path is not None:
        figure = Figure(figsize=(5 * columns, 4 * rows), layout="constrained")
        draw(list(figure.subplots(rows, columns, squeeze=False).flat))
        figure.savefig(path.with_suffix(".png"))
        yield f"![gap along the training]({path.stem}.png)"
