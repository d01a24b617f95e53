"""Many short trainings of one model cut in four, spread over a machine's devices, for the tables about codecs and loss.

A *setting* is a pair of codecs, of activations and of gradients; a *run* is a setting with a model and a seed. Each
process holds one model and takes the next run from a queue. Finished runs are JSON lines beside the result file, and
are not made again.
"""

import argparse
import math
import queue
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from cut_training import BATCH, MODELS, SEQ_LEN, CutTraining, Transfer, Wire
from harness import append_row, read_rows, rows_path, say
from option_training import OPTIONS, OptionTraining
from scipy.stats import t as student_t
from stored_training import StoredTraining

from tahq.data.config import DataConfig
from tahq.quant import Codec, CodecSpec, get_codec

CURVE_STEP = 10
"""Curves are kept as means of this many steps."""
LAST_STEPS = 50
"""A run's result is the mean loss of this many last steps; equal seeds have equal batches there."""
NONE = "none"
METHOD = (
    f"{BATCH} × {SEQ_LEN} tokens per step, random start, codecs at three cuts. Loss is the mean of the last "
    f"{LAST_STEPS} steps, nats per token. A gap is the difference to the uncompressed run of the same seed; ± is the "
    "half width of its 95 % interval (Student's t over seeds)."
)
ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "--text": {"nargs": "+", "default": ["stdlib"], "help": "text files, folders, globs, or stdlib"},
    "--tokenizer": {"default": "bytes", "help": "folder of a Hugging Face tokenizer"},
    "--model": {"nargs": "+", "choices": list(MODELS)},
    "--steps": {"type": int, "default": 400},
    "--seeds": {"type": int, "default": 3},
    "--processes": {"type": int, "default": 2, "help": "processes per device"},
    "--backend": {"default": "reference", "help": "of the codecs; the reference cannot have a kernel's bug"},
}
Setting = tuple[str, str, str]
"""Model, codec of activations, codec of gradients."""


@dataclass(frozen=True, slots=True)
class Run:
    """What to train; `activations` and `gradients` are codec specs, names in EXTRA_TRANSFERS, or `none`."""

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
    """Mean loss of a run's last steps (NaN where it diverged), means of every ten steps, and that on held-out data."""

    run: Run
    loss: float
    curve: list[float]
    held_out: float = math.nan


def naive_4bit(x: torch.Tensor, key: int, largest: torch.Tensor | None = None) -> torch.Tensor:
    """Fixed point of 4 bits with one scale per tensor, its largest magnitude."""
    step = (x.abs().amax() if largest is None else largest) / 7
    return (x / step).round().clamp(-8, 7) * step


def naive_4bit_signed_maximum(x: torch.Tensor, key: int) -> torch.Tensor:
    """The same with the fault that the authors' removed compressor had: the maximum of x, not of |x|."""
    return naive_4bit(x, key, x.amax())


EXTRA_TRANSFERS: Mapping[str, Transfer] = {
    "naive 4-bit": naive_4bit,
    "naive 4-bit, max(x)": naive_4bit_signed_maximum,
}


def transfer(name: str, backend: str = "reference") -> Transfer | None:
    """What a cut does to a tensor: encode and decode it."""
    if name == NONE or name in EXTRA_TRANSFERS:
        return EXTRA_TRANSFERS.get(name)
    return partial(coded, get_codec(name, backend=backend))


def coded(codec: Codec, x: torch.Tensor, key: int) -> torch.Tensor:
    """decode(encode(x))."""
    return codec.decode(codec.encode(x, key=key), x.shape, x.dtype, key=key)


def brief(name: str) -> str:
    """One text for all that mean the same codec, so that it is trained once."""
    return name if name == NONE or name in EXTRA_TRANSFERS else CodecSpec.parse(name).brief()


def bits_per_element(name: str) -> float:
    """On the wire, headers and scales included, of a boundary tensor of 768 channels."""
    if name == NONE or name in EXTRA_TRANSFERS:
        return 32.0 if name == NONE else 4.0
    shape = (BATCH, SEQ_LEN, 768)
    return get_codec(name).encoded_nbytes(shape) * 8 / math.prod(shape)


def run_all(runs: Iterable[Run], options: argparse.Namespace) -> list[Result]:
    """Every run's result, including those of earlier calls."""
    text = options.text[0] if len(options.text) == 1 else options.text
    data = DataConfig(text=text, tokenizer=options.tokenizer, seq_len=SEQ_LEN)
    path, wanted = rows_path(options), list(dict.fromkeys(runs))
    rows = [{**row, "run": Run(**row["run"])} for row in read_rows(path)]
    found = {row["run"]: Result(**row) for row in rows}
    for result in _train([run for run in wanted if run not in found], data, options):
        found[result.run] = result
        append_row(path, asdict(result))
        say(f"{result.run} {result.loss:.4f}")
    return [found[run] for run in wanted]


def _train(runs: Sequence[Run], data: DataConfig, options: argparse.Namespace) -> Iterator[Result]:
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for run in runs:
        todo.put(run)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    places = [device for device in devices for _ in range(options.processes)][: len(runs)]
    workers = [
        context.Process(target=_work, args=(place, data, options.backend, todo, done), daemon=True) for place in places
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
                    if not any(worker.is_alive() for worker in workers):
                        left = len(runs) - number
                        raise RuntimeError(f"all workers ended with {left} runs to go; see above") from None
    finally:
        for worker in workers:
            worker.kill()


def _work(device: str, data: DataConfig, backend: str, todo: Any, done: Any) -> None:
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, training = "", None
    while True:
        try:
            run = todo.get(timeout=1.0)
        except queue.Empty:
            time.sleep(1.0)  # until the last result is through the queue
            return
        if training is None or run.model != model:
            model, training = run.model, None  # free the old model's memory first
            training = _training_of(model)(model, data, torch.device(device))
        wire = Wire(*(transfer(name, backend) for name in (run.activations, run.gradients)))
        losses = training.run(wire, seed=run.seed, steps=run.steps)
        blocks = [losses[start : start + CURVE_STEP] for start in range(0, len(losses), CURVE_STEP)]
        curve = [round(statistics.fmean(block), 4) for block in blocks]
        done.put(Result(run, statistics.fmean(losses[-LAST_STEPS:]), curve, training.held_out_loss()))


def _training_of(model: str) -> type[CutTraining] | type[OptionTraining]:
    method = model.partition("/")[2]
    return OptionTraining if method in OPTIONS else StoredTraining if method else CutTraining


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
        if count > 1:
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

    def difference(self, setting: Setting, other: Setting) -> Difference:
        """The setting's loss minus the other's, over the seeds that both have."""
        return Difference.of([mine.loss - theirs.loss for mine, theirs in self._pairs(setting, other)])

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
