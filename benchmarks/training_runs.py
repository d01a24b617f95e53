"""Many short trainings spread over the devices of a machine, their curves, and what can be said of differences.

A *setting* names the codecs of the two directions; a *run* is a setting with a model and a seed. Runs are
independent processes' work: each process holds one model and takes the next run from a queue, so that a
result does not depend on which device it came from more than by rounding. Finished runs are lines of a JSON
file; runs that are in it already are not made again.
"""

import json
import math
import queue
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from cut_training import CutTraining, Transfer, Wire
from scipy.stats import t as student_t

from tahq.data.config import DataConfig
from tahq.pipeline.probe import codec_cut
from tahq.quant import CodecSpec, get_codec

CURVE_STEP = 10
"""Curves are kept as means of this many steps."""
LAST_STEPS = 50
"""A run's result is the mean loss of so many last steps; equal seeds have equal batches there."""
NONE = "none"


@dataclass(frozen=True, slots=True)
class Run:
    """What to train; `activations` and `gradients` are codec specs, names in EXTRA_TRANSFERS, or `none`."""

    model: str
    activations: str
    gradients: str
    seed: int
    steps: int


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a run.

    Attributes:
        loss: mean of the last steps, nats a token; NaN where the run diverged.
        curve: means of every ten steps.
        seconds: of the run, on a device that others may share.
    """

    run: Run
    loss: float
    curve: list[float]
    seconds: float


def naive_4bit(x: torch.Tensor, key: int) -> torch.Tensor:
    """Fixed point of 4 bits with one scale a tensor, its largest magnitude."""
    return _naive(x, x.abs().amax())


def naive_4bit_signed_maximum(x: torch.Tensor, key: int) -> torch.Tensor:
    """The same with the fault that the authors' removed compressor had: the maximum of x, not of |x|."""
    return _naive(x, x.amax())


def _naive(x: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    step = largest / 7
    return (x / step).round().clamp(-8, 7) * step


EXTRA_TRANSFERS: Mapping[str, Transfer] = {
    "naive 4-bit": naive_4bit,
    "naive 4-bit, max(x)": naive_4bit_signed_maximum,
}


def transfer(name: str) -> Transfer | None:
    """What a cut does to a tensor under this setting: through the codec's bytes and back.

    By the reference backend: what is measured is the codec, and no kernel's mistake can pass for it.
    """
    if name == NONE:
        return None
    if name in EXTRA_TRANSFERS:
        return EXTRA_TRANSFERS[name]
    return partial(codec_cut.transfer, get_codec(name, backend="reference"))


def brief(name: str) -> str:
    """One text for all that mean the same codec, so that it is trained once."""
    return name if name == NONE or name in EXTRA_TRANSFERS else CodecSpec.parse(name).brief()


def bits_an_element(name: str, shape: Sequence[int]) -> float:
    """Bits on the wire for each element of a tensor of this shape, headers and scales included."""
    if name in EXTRA_TRANSFERS:
        return 4.0
    if name == NONE:
        return 32.0
    return get_codec(name).encoded_nbytes(shape) * 8 / math.prod(shape)


def run_all(
    runs: Sequence[Run],
    data: DataConfig,
    results_path: Path,
    *,
    processes_a_device: int,
    limit_s: float,
    on_result: Callable[[int, Result], None],
) -> list[Result]:
    """Every run's result, those of earlier calls included; stops early, with what there is, after `limit_s`."""
    results = read_results(results_path)
    known = {result.run for result in results}
    missing = [run for run in runs if run not in known]
    deadline = time.monotonic() + limit_s
    for result in _train(missing, data, processes_a_device, deadline):
        results.append(result)
        _append(results_path, result)
        on_result(len(missing), result)
    wanted = set(runs)
    return [result for result in results if result.run in wanted]


def read_results(path: Path) -> list[Result]:
    """The results in a file of `run_all`; none if there is no file."""
    if not path.exists():
        return []
    rows = map(json.loads, path.read_text().splitlines())
    return [Result(Run(**row.pop("run")), **row) for row in rows]


def _append(path: Path, result: Result) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _train(runs: Sequence[Run], data: DataConfig, processes_a_device: int, deadline: float) -> Iterable[Result]:
    if not runs or time.monotonic() >= deadline:
        return
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for run in runs:
        todo.put(run)
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    places = [device for device in devices for _ in range(processes_a_device)][: len(runs)]
    workers = [context.Process(target=_work, args=(place, data, todo, done), daemon=True) for place in places]
    for worker in workers:
        worker.start()
    try:
        yield from _collect(len(runs), workers, done, deadline)
    finally:
        for worker in workers:
            worker.kill()


def _collect(count: int, workers: Sequence[SpawnProcess], done: Any, deadline: float) -> Iterable[Result]:
    while count and time.monotonic() < deadline:
        try:
            answer = done.get(timeout=1.0)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                raise RuntimeError(f"all workers ended with {count} runs to go; see above") from None
            continue
        if isinstance(answer, str):
            raise RuntimeError(answer)
        count -= 1
        yield answer


def _work(device: str, data: DataConfig, todo: Any, done: Any) -> None:
    torch.set_num_threads(2)
    torch.backends.cuda.matmul.allow_tf32 = False
    model, training = "", None
    while True:
        try:
            run = todo.get(timeout=1.0)
        except queue.Empty:
            return
        if training is None or run.model != model:
            model, training = run.model, None  # the old model's memory first
            training = CutTraining(model, data, torch.device(device))
        done.put(_one(training, run))


def _one(training: CutTraining, run: Run) -> Result:
    begin = time.perf_counter()
    losses = training.run(Wire(transfer(run.activations), transfer(run.gradients)), seed=run.seed, steps=run.steps)
    seconds = time.perf_counter() - begin
    blocks = [losses[start : start + CURVE_STEP] for start in range(0, len(losses), CURVE_STEP)]
    curve = [round(statistics.fmean(block), 4) for block in blocks]
    return Result(run, statistics.fmean(losses[-LAST_STEPS:]), curve, round(seconds, 1))


@dataclass(frozen=True, slots=True)
class Difference:
    """Of paired runs: mean, sample standard deviation, and the 95 % interval of the mean by Student's t."""

    count: int
    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference":
        """From one difference a seed."""
        deviation = statistics.stdev(values) if len(values) > 1 else math.nan
        return cls(len(values), statistics.fmean(values), deviation)

    @property
    def half_width(self) -> float:
        """Half of the two-sided 95 % interval."""
        if self.count < 2:
            return math.nan
        return float(student_t.ppf(0.975, self.count - 1)) * self.deviation / math.sqrt(self.count)

    @property
    def upper(self) -> float:
        """The interval's upper end."""
        return self.mean + self.half_width


class Table:
    """Results by setting and seed."""

    def __init__(self, results: Iterable[Result]) -> None:
        self._losses: dict[tuple[str, str, str], dict[int, float]] = {}
        self._curves: dict[tuple[str, str, str], dict[int, list[float]]] = {}
        for result in results:
            key = (result.run.model, result.run.activations, result.run.gradients)
            self._losses.setdefault(key, {})[result.run.seed] = result.loss
            self._curves.setdefault(key, {})[result.run.seed] = result.curve

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return key in self._losses

    def losses(self, key: tuple[str, str, str]) -> list[float]:
        """One loss a seed."""
        return list(self._losses[key].values())

    def curve(self, key: tuple[str, str, str]) -> list[float]:
        """Mean curve over the seeds."""
        return [statistics.fmean(values) for values in zip(*self._curves[key].values(), strict=True)]

    def gap_curve(self, key: tuple[str, str, str]) -> list[float]:
        """Mean difference to the uncompressed curve of the same model, over the seeds that both have."""
        mine, base = self._curves[key], self._curves[(key[0], NONE, NONE)]
        pairs = [zip(mine[seed], base[seed], strict=True) for seed in sorted(mine.keys() & base.keys())]
        return [statistics.fmean(a - b for a, b in points) for points in zip(*pairs, strict=True)]

    def difference(self, key: tuple[str, str, str], other: tuple[str, str, str]) -> Difference:
        """key's loss minus other's, over the seeds that both have."""
        mine, theirs = self._losses[key], self._losses[other]
        return Difference.of([mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())])

    def gap(self, key: tuple[str, str, str]) -> Difference:
        """Difference to the uncompressed run of the same model and seeds."""
        return self.difference(key, (key[0], NONE, NONE))
