"""`tahq probe`: the error that a run's codecs cause in its gradients, before a long run."""

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tahq.config.file import placed_errors
from tahq.errors import OutOfMemoryError
from tahq.observe import figures
from tahq.pipeline.probe.gradient_probe import GradientProbe
from tahq.pipeline.probe.result import ProbedStep, collect
from tahq_launch.analysis import probe_report as report
from tahq_launch.analysis.probe_report import ProbeFacts
from tahq_launch.analysis.probe_setup import ProbeRequest, ProbeSetup, open_setup
from tahq_launch.command_line import check_writable, print_table, write_text

_QUIET_S = 5.0


def probe(request: ProbeRequest, json_path: Path | None = None) -> None:
    """Measure, print the report, and write it as JSON if asked to.

    Raises:
        UserError: the request or its files are invalid.
        NonFiniteError: the gradient without codecs is NaN or infinite.
        OutOfMemoryError: model, gradients and their sums do not fit.
    """
    if json_path is not None:
        check_writable(json_path)
    with placed_errors(request.config_path, request.overrides), _memory_advice():
        setup = open_setup(request)
        probed = measure(setup, request)
    facts, results = _facts(setup, request, probed), collect(setup.wires, probed)
    print(*report.head(facts), "", "Relative error of the gradient, ‖ĝ − g‖² / ‖g‖²", sep="\n")
    print_table(report.ERROR_TITLES, report.error_rows(facts, results), report.TEXT_COLUMNS)
    print("\nThe same by part of the model, over all batches")
    print_table(["part of the model", *map(str, range(1, len(results) + 1))], report.group_rows(results), (0,))
    print()
    for number, result in enumerate(results, start=1):
        print(f"{number}  {report.sentence(result)}")
    print("", *report.notes(facts, results), sep="\n")
    if json_path is not None:
        write_text(json_path, json.dumps(report.as_json(facts, results), indent=1, allow_nan=False) + "\n")


def measure(setup: ProbeSetup, request: ProbeRequest) -> list[ProbedStep]:
    """Warm up, then probe; progress is shown on stderr."""
    first = setup.start_step + request.warm_up
    gradients = gradients_of(setup.start_step, request.warm_up, request.steps, request.batches, len(setup.wires))
    with progress_of(gradients, sys.stderr) as advance:
        probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update, advance)
        for step in range(setup.start_step, first):
            probe.train(step)
        return [probe.probe(step, request.batches) for step in range(first, first + request.steps)]


def _facts(setup: ProbeSetup, request: ProbeRequest, probed: list[ProbedStep]) -> ProbeFacts:
    warmed = f", then {request.warm_up} step{'s' * (request.warm_up > 1)} without codecs" if request.warm_up else ""
    training = setup.config.training
    moved = f", updated by AdamW in place of {training.optimizer}" if training.is_low_rank else ""
    return ProbeFacts(
        title=setup.config.run.name,
        num_parameters=sum(parameter.numel() for parameter in setup.model.parameters.values()),
        num_cuts=setup.model.num_cuts,
        weights=setup.weights + warmed + moved,
        trained=setup.weights != "random" or request.warm_up > 0,
        boundary=setup.boundary,
        global_batch=training.global_batch,
        first_step=probed[0].step,
        num_batches=request.batches,
        losses=tuple(step.loss for step in probed),
    )


@contextlib.contextmanager
def _memory_advice() -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(
            f"the probe is out of memory ({str(error).partition('.')[0]}): it holds the whole model, its gradients, "
            "and one more copy of them per --wire; try one --wire, --batches 1, a smaller training.micro_batch, "
            "training.activation_checkpointing=block, or --device cpu"
        ) from error


def gradients_of(first_step: int, warm_up: int, steps: int, batches: int, num_wires: int) -> list[str]:
    """The name of each gradient of a probe, in the order that `GradientProbe` computes them: batches last to first."""
    wires = ("without codecs", *(f"wire {number} of {num_wires}" for number in range(1, num_wires + 1)))
    probed = range(first_step + warm_up, first_step + warm_up + steps)
    trained = [f"step {step}, warm-up" for step in range(first_step, probed.start)]
    numbers = range(batches, 0, -1)
    return trained + [f"step {s}, batch {n} of {batches}, {wire}" for s in probed for n in numbers for wire in wires]


def progress_of(
    gradients: Sequence[str], stream: TextIO, clock: Callable[[], float] = time.monotonic
) -> AbstractContextManager[Callable[[], None]]:
    """Show which of `gradients` is computed; as a context, gives a function to call after each."""
    return _bar(gradients, stream) if stream.isatty() else _lines(gradients, stream, clock)


@contextlib.contextmanager
def _bar(gradients: Sequence[str], stream: TextIO) -> Iterator[Callable[[], None]]:
    """A bar, removed at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    names = iter([*gradients, "done"])
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(next(names), total=len(gradients))
        yield lambda: bar.update(task, advance=1, description=next(names))


@contextlib.contextmanager
def _lines(gradients: Sequence[str], stream: TextIO, clock: Callable[[], float]) -> Iterator[Callable[[], None]]:
    """Lines such as ``12 of 32 gradients, 40 s left: step 20, batch 2 of 2, wire 1 of 5``; the first at once."""
    num_done, begin_s, printed_s = 0, clock(), clock()

    def say(left: str) -> None:
        count = f"{num_done} of {len(gradients)} gradients{left}"
        print(f"{count}: {gradients[num_done]}", file=stream, flush=True)

    def advance() -> None:
        nonlocal num_done, printed_s
        num_done += 1
        num_left, now_s = len(gradients) - num_done, clock()
        if num_left and now_s - printed_s >= _QUIET_S:
            left_s = num_left * (now_s - begin_s) / num_done
            say(f", {figures.duration(round(left_s))} left")
            printed_s = now_s

    say("")
    yield advance
