"""`tahq trace`: a run's steps in parts, from its metrics.jsonl; and the pictures of traced steps as one file."""

import json
import sys
from pathlib import Path
from typing import Any

from tahq.config.file import load_config
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.errors import TahqError, UserError
from tahq.observe import figures
from tahq.observe.bottleneck import WireFacts, diagnose
from tahq.observe.metrics_reader import median_step, read_steps
from tahq.observe.run_history import RECENT_STEPS
from tahq.observe.trace_file import merged, read_picture, trace_path
from tahq_launch.start.codec_choice import wire_facts
from tahq_launch.start.run_folder import RunFolder
from tahq_launch.tables import print_table

STAGE_TITLES = ("stage", "forward", "backward", "encode", "decode", "wait", "from", "memory", "other", "commit")
LINK_TITLES = ("link", "carries", "sending", "queued", "idle", "on the wire", "busy")


def trace(run: Path, step: int | None, output: Path | None) -> None:
    """Print the split of a step, and what limits it; write the picture if one is asked for.

    Args:
        run: the run's folder.
        step: which, from 1; None: the medians of the last few.
        output: file for the picture of that step, or of all traced steps.

    Raises:
        UserError: no such run or step, or no picture of it.
    """
    folder = RunFolder(run)
    chosen = _chosen(read_steps(folder.metrics), step, folder)
    record = median_step(chosen)
    print(_headline(chosen, record))
    print_stages(record)
    if record.links:
        print_links(record)
    diagnosis = diagnose(record, _facts(folder))
    print(diagnosis.sentence if diagnosis is not None else "what limits the step is not known: nothing was measured")
    if output is not None:
        _write_picture(folder, step, output)


def _chosen(steps: list[StepRecord], step: int | None, folder: RunFolder) -> list[StepRecord]:
    if not steps:
        raise UserError(f"{folder.metrics} has no step yet")
    if step is None:
        return steps[-RECENT_STEPS:]
    chosen = [record for record in steps if record.step == step]
    if not chosen:
        raise UserError(f"{folder.metrics} has steps {steps[0].step} to {steps[-1].step}; there is no step {step}")
    return chosen


def _headline(chosen: list[StepRecord], record: StepRecord) -> str:
    took = figures.duration(record.step_time_s)
    if len(chosen) == 1:
        return f"step {record.step}: {took}; shares of it:"
    return f"steps {chosen[0].step} to {record.step}: {took} in median; shares of it, in median:"


def print_stages(record: StepRecord) -> None:
    """One row a stage; shares of the step."""
    print_table(STAGE_TITLES, [_stage_cells(stage, record.step_time_s) for stage in record.stages], left=(6,))


def _stage_cells(stage: StageRecord, step_s: float) -> tuple[str, ...]:
    split = stage.split
    other_s = split.data_s + split.optimizer_s + split.snapshot_s + split.other_s
    senders = " ".join(f"{sender}:{_share(s, step_s)}" for sender, s in split.wait_s.items() if s > 0)
    waits_s = split.frames_s + split.wait_codec_s
    encode_s, decode_s = (
        own_s + split.beside_s.get(name, 0.0)
        for name, own_s in (("encode", split.encode_s), ("decode", split.decode_s))
    )
    parts = (split.forward_s, split.backward_s, encode_s, decode_s, waits_s)
    rest = (split.wait_memory_s, other_s, split.commit_s)
    shares = [_share(seconds, step_s) for seconds in (*parts, *rest)]
    return (str(stage.stage), *shares[:5], senders, *shares[5:])


def print_links(record: StepRecord) -> None:
    """One row a link and direction; shares of the step."""
    rows = [_link_cells(link, record.step_time_s) for link in record.links]
    print_table(LINK_TITLES, rows, left=(0, 1))


def _link_cells(link: LinkRecord, step_s: float) -> tuple[str, ...]:
    seconds = (link.sending_s, link.queued_s, link.idle_s, link.wire_s, link.busy_s)
    shares = [_share(s, step_s) for s in seconds]
    return (f"{link.sender} → {link.receiver}", link.direction, *shares)


def _share(seconds: float, step_s: float) -> str:
    return figures.share(seconds / step_s) if step_s > 0 else "–"


def _facts(folder: RunFolder) -> WireFacts | None:
    """None where the configuration, or the model's folder that it names, is not to be read any more."""
    try:
        return wire_facts(load_config(folder.config, []))
    except TahqError:
        return None


def _write_picture(folder: RunFolder, step: int | None, output: Path) -> None:
    pictures = _pictures(folder, step)
    try:
        output.write_text(json.dumps(merged(pictures)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from error
    steps = ", ".join(str(picture["otherData"]["step"]) for picture in pictures)
    print(f"{output}: step {steps}, for https://ui.perfetto.dev")


def _pictures(folder: RunFolder, step: int | None) -> list[dict[str, Any]]:
    """Of one step or of all, in order; those that are damaged are named and left out. UserError if none is whole."""
    paths = sorted(folder.traces.glob("step-*.json")) if step is None else [trace_path(folder.traces, step)]
    paths = [path for path in paths if path.exists()]
    if not paths:
        wanted = "a step" if step is None else f"step {step}"
        raise UserError(
            f"{folder.traces} has no picture of {wanted}; set run.trace_steps, e.g. --set 'run.trace_steps=[10, 12]'"
        )
    pictures, damaged = [], []
    for path in paths:
        try:
            pictures.append(read_picture(path))
        except UserError as error:
            damaged.append(str(error))
    if not pictures:
        raise UserError("; ".join(damaged))
    for reason in damaged:
        print(f"tahq trace: {reason}; it is left out", file=sys.stderr)
    return pictures
