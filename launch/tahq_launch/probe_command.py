"""`tahq probe`: before a long run, what its codecs do to its gradients."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch

from tahq.config.file import placed_errors
from tahq.errors import OutOfMemoryError, UserError
from tahq.pipeline.probe.gradient_probe import GradientProbe
from tahq.pipeline.probe.result import ProbedStep, WireResult, collect
from tahq_launch import probe_report as report
from tahq_launch.probe_progress import gradients_of, progress_of
from tahq_launch.probe_report import ProbeFacts
from tahq_launch.probe_setup import ProbeRequest, ProbeSetup, open_setup
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
