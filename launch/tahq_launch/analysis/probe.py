"""`tahq probe`: before a long run, what its codecs do to its gradients."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tahq.config.file import placed_errors
from tahq.errors import OutOfMemoryError, UserError
from tahq.observe import figures
from tahq.pipeline.probe.gradient_probe import GradientProbe
from tahq.pipeline.probe.result import ProbedStep, WireResult, collect
from tahq_launch.analysis import probe_report as report
from tahq_launch.analysis.probe_report import ProbeFacts
from tahq_launch.analysis.probe_setup import ProbeRequest, ProbeSetup, open_setup
from tahq_launch.tables import print_table


def probe(request: ProbeRequest, json_path: Path | None = None) -> None:
    """Measure, print the report, and write it as JSON if asked to.

    Raises:
        UserError: whatever in the request or its files does not fit.
        NonFiniteError: the gradient without codecs is NaN or infinite.
        OutOfMemoryError: model, gradients and their sums do not fit.
    """
    if json_path is not None:
        _check_writable(json_path)
    with placed_errors(request.config_path, request.overrides), _out_of_memory_in_words():
        setup = open_setup(request)
        probed = measure(setup, request)
    facts, results = facts_of(setup, request, probed), collect(setup.wires, probed)
    _print(facts, results)
    if json_path is not None:
        _write_json(json_path, facts, results)


def measure(setup: ProbeSetup, request: ProbeRequest) -> list[ProbedStep]:
    """Warm up, then probe; how far it is stands on stderr meanwhile."""
    first = setup.start_step + request.warm_up
    gradients = gradients_of(setup.start_step, request.warm_up, request.steps, request.batches, len(setup.wires))
    progress = progress_of(gradients)
    probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update, progress.advance)
    with progress:
        for step in range(setup.start_step, first):
            probe.train(step)
        return [probe.probe(step, request.batches) for step in range(first, first + request.steps)]


def facts_of(setup: ProbeSetup, request: ProbeRequest, probed: list[ProbedStep]) -> ProbeFacts:
    """The head of the report."""
    plural = "s" if request.warm_up > 1 else ""
    warmed = f", then {request.warm_up} step{plural} without codecs" if request.warm_up else ""
    training = setup.config.training
    moved = f", moved by AdamW in place of {training.optimizer}" if training.is_low_rank else ""
    return ProbeFacts(
        title=setup.config.run.name,
        num_parameters=sum(parameter.numel() for parameter in setup.model.parameters.values()),
        num_cuts=setup.model.num_cuts,
        weights=setup.weights + warmed + moved,
        trained=setup.weights != "random" or request.warm_up > 0,
        boundary=setup.boundary,
        global_batch=setup.config.training.global_batch,
        first_step=probed[0].step,
        num_batches=request.batches,
        losses=tuple(step.loss for step in probed),
    )


def _print(facts: ProbeFacts, results: list[WireResult]) -> None:
    print(*report.head(facts), "", "Relative error of the gradient, ‖ĝ − g‖² / ‖g‖²", sep="\n")
    print_table(report.ERROR_TITLES, report.error_rows(facts, results), report.TEXT_COLUMNS)
    print("\nThe same by part of the model, over all batches")
    print_table(report.group_titles(results), report.group_rows(results), (0,))
    print()
    for number, result in enumerate(results, start=1):
        print(f"{number}  {report.sentence(result)}")
    print("", *report.notes(facts, results), sep="\n")


def _check_writable(path: Path) -> None:
    """Before the work: a report that cannot be written afterwards would be lost."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UserError(f"--json {path}: expected a file in a folder that exists")


def _write_json(path: Path, facts: ProbeFacts, results: list[WireResult]) -> None:
    text = json.dumps(report.as_json(facts, results), indent=1, allow_nan=False)
    try:
        path.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path} cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def _out_of_memory_in_words() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(
            f"the probe is out of memory ({str(error).partition('.')[0]}): it holds the whole model, its gradients, "
            "and one more copy of them a --wire; try one --wire, --batches 1, a smaller training.micro_batch, "
            "training.activation_checkpointing=block, or --device cpu"
        ) from error


QUIET_S = 5.0


def gradients_of(first_step: int, warm_up: int, steps: int, batches: int, num_wires: int) -> list[str]:
    """What each gradient of a probe is for, in the order that `GradientProbe` computes them: batches last to first.

    Args:
        first_step: steps of training that were taken before the probe.
        warm_up: steps of training before the first that is probed.
        steps: probed ones.
        batches: at each of them.
        num_wires: tried on each batch, after its gradient without codecs.
    """
    wires = ("without codecs", *(f"wire {number} of {num_wires}" for number in range(1, num_wires + 1)))
    probed = range(first_step + warm_up, first_step + warm_up + steps)
    trained = [f"step {step}, warm-up" for step in range(first_step, probed.start)]
    numbers = range(batches, 0, -1)
    return trained + [f"step {s}, batch {n} of {batches}, {wire}" for s in probed for n in numbers for wire in wires]


def progress_of(gradients: Sequence[str]) -> "ProgressBar | ProgressLines":
    """What tells on stderr which of `gradients` is computed, inside a `with`."""
    return ProgressBar(gradients) if sys.stderr.isatty() else ProgressLines(gradients, sys.stderr)


class ProgressBar:
    """A bar of rich, which is gone when all is done."""

    def __init__(self, gradients: Sequence[str]) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._names = iter([*gradients, "done"])
        self._task = self._bar.add_task(next(self._names), total=len(gradients))

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        """One more is done."""
        self._bar.update(self._task, advance=1, description=next(self._names))


@dataclass(slots=True)
class ProgressLines:
    """Lines such as ``12 of 32 gradients, 40 s left: step 20, batch 2 of 2, wire 1 of 5``; the first at once."""

    gradients: Sequence[str]
    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _num_done: int = 0
    _begun_s: float = 0.0
    _said_s: float = 0.0

    def __enter__(self) -> Self:
        self._begun_s = self.clock()
        self._say("")
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self) -> None:
        """One more is done."""
        self._num_done += 1
        num_left, now_s = len(self.gradients) - self._num_done, self.clock()
        if num_left and now_s - self._said_s >= QUIET_S:
            left_s = num_left * (now_s - self._begun_s) / self._num_done
            self._say(f", {figures.duration(round(left_s))} left")

    def _say(self, left: str) -> None:
        self._said_s = self.clock()
        count = f"{self._num_done} of {len(self.gradients)} gradients{left}"
        print(f"{count}: {self.gradients[self._num_done]}", file=self.stream, flush=True)
