"""metrics.jsonl: one JSON object per step, in order, each line written as soon as it is complete.

The line of a step that is evaluated is held back until its validation loss has come in, so that there
is one object per step and nothing else. NaN and infinity, which JSON does not have, become null. When a
run continues from a snapshot, what the file says about later steps is cut off first. Lines that a full disk does
not take are kept, and written when there is room again.
"""

import errno
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunObserver,
    StageRecord,
    StageSplit,
    StepRecord,
    ValidationRecord,
)
from tahq.coordinator.step_report import BESIDE
from tahq.errors import UserError

MAX_UNWRITTEN_NBYTES = 64 * 1024 * 1024
"""Of lines that wait for room on the disk; beyond it the file is given up."""

log = logging.getLogger(__name__)


class MetricsFile(RunObserver):
    """Writes metrics.jsonl.

    Args:
        path: the file; made if it is not there.
        start_step: steps that the run's snapshot has behind it; lines of later steps are cut off.
    """

    def __init__(self, path: Path, start_step: int = 0) -> None:
        keep_until(path, start_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._has_no_room = False
        self._held: dict[str, Any] | None = None

    def step_committed(self, record: StepRecord) -> None:
        """Write the step's line, or hold it back until its validation loss is there."""
        self._release()
        self._held = step_object(record)
        if not record.evaluating:
            self._release()

    def turned_back(self, step: int) -> None:
        """Cut off the lines of later steps."""
        self._held, self._unwritten = None, b""
        path = Path(self._file.name)
        self._file.close()
        keep_until(path, step)
        self._file = path.open("ab", buffering=0)

    def validated(self, record: ValidationRecord) -> None:
        """Complete the line that was held back."""
        if self._held is not None and self._held["step"] == record.step:
            self._held["validation"] = validation_object(record)
        self._release()

    def ended(self, end: RunEnd) -> None:
        """Write what was held back, and close the file; OSError if the disk is still full."""
        with self._file:
            self._release()
            self._write()
            if self._unwritten:
                num_lines = len(self._unwritten.splitlines())
                raise OSError(errno.ENOSPC, f"no room for the last {num_lines} lines of {self._file.name}")

    def _release(self) -> None:
        if self._held is not None:
            self._unwritten += json.dumps(self._held, allow_nan=False).encode() + b"\n"
            self._held = None
            self._write()

    def _write(self) -> None:
        """As much as the disk takes; a line may be cut, and is completed by the next call."""
        had_no_room = self._has_no_room
        if self._unwritten and not os.fstat(self._file.fileno()).st_nlink:
            self._unwritten = b""
            raise UserError(
                f"{self._file.name} was removed while the run was using it; put the run's folder back and resume, or "
                "start the run anew"
            )
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(self._unwritten) > MAX_UNWRITTEN_NBYTES:
                raise
            self._has_no_room = True
            if not had_no_room:
                log.warning("%s: %s; its lines are kept until there is room", self._file.name, error.strerror)
        else:
            self._has_no_room = False


def step_object(record: StepRecord) -> dict[str, Any]:
    """A step as metrics.jsonl has it."""
    return {
        "step": record.step,
        "loss": finite(record.loss),
        "tokens": record.tokens,
        "tokens_per_s": finite(record.tokens_per_s),
        "step_time_s": finite(record.step_time_s),
        "grad_norm": finite(record.grad_norm),
        "clip_factor": finite(record.clip_factor),
        "skipped": record.skipped,
        "lr": finite(record.lr),
        "links": [link_object(link) for link in record.links],
        "stages": [stage_object(stage) for stage in record.stages],
        "codec_changes": [asdict(change) for change in record.codec_changes],
    }


def link_object(link: LinkRecord) -> dict[str, Any]:
    """One link and direction as metrics.jsonl has it."""
    return {
        "link": link.link,
        "from": link.sender,
        "to": link.receiver,
        "direction": link.direction,
        "frames": link.frames,
        "payload_bytes": link.payload_bytes,
        "wire_bytes": link.wire_bytes,
        "elements": link.elements,
        "busy_s": finite(link.busy_s),
        "sending_s": finite(link.sending_s),
        "queued_s": finite(link.queued_s),
        "idle_s": finite(link.idle_s),
        "wire_s": finite(link.wire_s),
        "bits_per_element": finite(link.bits_per_element),
        "goodput_bits_per_s": finite(link.goodput_bits_per_s),
        "codec": link.codec,
        "relative_error": finite(link.relative_error) if link.relative_error is not None else None,
    }


def stage_object(stage: StageRecord) -> dict[str, Any]:
    """One stage's time, and what its codecs remember, as metrics.jsonl has it."""
    return {
        "stage": stage.stage,
        "waiting_share": finite(stage.waiting_share),
        "timing_s": {name: finite(seconds) for name, seconds in timing_by_activity(stage.timing).items()},
        "codec_state_bytes": stage.codec_state_bytes,
        **split_object(stage.split),
    }


def split_object(split: StageSplit) -> dict[str, Any]:
    """A stage's step in parts that add up to it; waits for frames by the stage they come from."""
    values: dict[str, Any] = {}
    for field in fields(split):
        value = getattr(split, field.name)
        by_key = isinstance(value, Mapping)
        values[field.name] = {str(key): finite(s) for key, s in value.items()} if by_key else finite(value)
    return values


def timing_by_activity(timing: Mapping[str, float]) -> dict[str, float]:
    """Seconds by activity, whichever thread did it and whomever it waited for."""
    sums: dict[str, float] = {}
    for name, seconds in timing.items():
        activity = name.removeprefix(BESIDE).partition(":")[0]
        sums[activity] = sums.get(activity, 0.0) + seconds
    return sums


def validation_object(record: ValidationRecord) -> dict[str, Any]:
    """A validation loss as metrics.jsonl has it: nats a token, and e to their power."""
    return {
        "tokens": record.tokens,
        "loss": finite(record.loss),
        "perplexity": finite(perplexity(record.loss)),
        "loss_raw": finite(record.loss_raw),
        "perplexity_raw": finite(perplexity(record.loss_raw)),
    }


def perplexity(loss: float) -> float:
    """e^loss; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def finite(number: float) -> float | None:
    """The number itself, or None where JSON has none for it."""
    return number if math.isfinite(number) else None


def keep_until(path: Path, last_step: int) -> None:
    """Remove the lines of later steps from a metrics file, and lines that are damaged or not UTF-8.

    The new content is on disk before it takes the old one's place. A file that is not there stays so.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _is_kept(line, last_step)]
    if kept == lines:
        return
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _is_kept(line: bytes, last_step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(step, int) and step <= last_step
