"""`tahq trace`: where a run's steps spend their time, from metrics.jsonl; and traced steps as one file for Perfetto."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tahq.config.file import load_config
from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.errors import TahqError, UserError
from tahq.observe import figures
from tahq.observe.bottleneck import limit_and_advice
from tahq.observe.metrics_reader import RECENT_STEPS, median_step, read_steps
from tahq.observe.trace_file import merged, read_picture, trace_path
from tahq_launch.command_line import print_table, write_text
from tahq_launch.plan.advice import advice
from tahq_launch.start.run_folder import RunFolder

STAGE_TITLES = ("stage", "forward", "backward", "encode", "decode", "wait", "from", "memory", "other", "commit")
LINK_TITLES = ("link", "carries", "sending", "queued", "idle", "on the wire", "busy")


def print_trace(run: Path, step: int | None, output: Path | None) -> None:
    """Print how a step's time is spent, and what limits it; write the traced steps if `output` is given.

    Without `step` (from 1) the table has the medians of the last few, and the file all traced steps.
    """
    folder = RunFolder(run)
    chosen = _chosen(read_steps(folder.metrics), step, folder)
    record = median_step(chosen)
    took = figures.duration(record.step_time_s)
    if len(chosen) == 1:
        print(f"step {record.step}: {took}; shares of it:")
    else:
        print(f"steps {chosen[0].step} to {record.step}: {took} in median; median shares:")
    print_table(STAGE_TITLES, [_stage_cells(stage, record.step_time_s) for stage in record.stages], left=(6,))
    if record.links:
        print_table(LINK_TITLES, [_link_cells(link, record.step_time_s) for link in record.links], left=(0, 1))
    try:
        advise = partial(advice, load_config(folder.config))
    except TahqError:  # it cannot be read any more
        advise = None
    print(limit_and_advice(record, advise) or "the limit of the step is unknown: nothing was measured")
    if output is not None:
        pictures = _pictures(folder, step)
        write_text(output, json.dumps(merged(pictures)))
        steps = ", ".join(str(picture["otherData"]["step"]) for picture in pictures)
        print(f"{output}: step {steps}, for https://ui.perfetto.dev")


def _chosen(steps: list[StepRecord], step: int | None, folder: RunFolder) -> list[StepRecord]:
    if not steps:
        raise UserError(f"{folder.metrics} has no step yet")
    if step is None:
        return steps[-RECENT_STEPS:]
    chosen = [record for record in steps if record.step == step]
    if not chosen:
        raise UserError(f"{folder.metrics} has steps {steps[0].step} to {steps[-1].step}; there is no step {step}")
    return chosen


def _stage_cells(stage: StageRecord, step_s: float) -> tuple[str, ...]:
    split, beside_s = stage.split, stage.split.beside_s
    senders = " ".join(f"{sender}:{_share(s, step_s)}" for sender, s in split.wait_s.items() if s > 0)
    encode_s, decode_s = split.encode_s + beside_s.get("encode", 0.0), split.decode_s + beside_s.get("decode", 0.0)
    parts_s = (split.forward_s, split.backward_s, encode_s, decode_s, split.frames_s + split.wait_codec_s)
    other_s = split.data_s + split.optimizer_s + split.snapshot_s + split.other_s
    rest_s = (split.wait_memory_s, other_s, split.commit_s)
    shares, rest = ([_share(seconds, step_s) for seconds in part] for part in (parts_s, rest_s))
    return (str(stage.stage), *shares, senders, *rest)


def _link_cells(link: LinkRecord, step_s: float) -> tuple[str, ...]:
    seconds = (link.sending_s, link.queued_s, link.idle_s, link.wire_s, link.busy_s)
    return (f"{link.sender} → {link.receiver}", link.direction, *(_share(s, step_s) for s in seconds))


def _share(seconds: float, step_s: float) -> str:
    return figures.share(seconds / step_s) if step_s > 0 else "–"


def _pictures(folder: RunFolder, step: int | None) -> list[dict[str, Any]]:
    """Of one step or of all, in order; damaged ones are named and left out. UserError if none is whole."""
    paths = sorted(folder.traces.glob("step-*.json")) if step is None else [trace_path(folder.traces, step)]
    pictures, damaged = [], []
    for path in filter(Path.exists, paths):
        try:
            pictures.append(read_picture(path))
        except UserError as error:
            damaged.append(str(error))
    if damaged and not pictures:
        raise UserError("; ".join(damaged))
    if not pictures:
        wanted = "any step" if step is None else f"step {step}"
        raise UserError(
            f"{folder.traces} has no trace of {wanted}; set run.trace_steps, e.g. --set 'run.trace_steps=[10, 12]'"
        )
    for reason in damaged:
        print(f"tahq trace: {reason}; it is left out", file=sys.stderr)
    return pictures
