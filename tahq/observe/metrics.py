"""metrics.jsonl: one JSON object per step, in order, each line written as soon as it is complete.

The line of a step that is evaluated is held back until its validation loss and samples have come in, so that there
is one object per step and nothing else. NaN and infinity, which JSON does not have, become null. When a
run continues from a checkpoint, what the file says about later steps is cut off first. Lines that a full disk does
not take are kept, and written when there is room again.

`tokens` counts the labels of a step, over which the loss is a mean: with prompts and responses, only the responses.
`computed_tokens` counts all positions that were computed, and `tokens_per_s` is `computed_tokens / step_time_s`. Files
of version 0.1 have no `computed_tokens`, and their `tokens_per_s` is `tokens / step_time_s`. Of DPO the loss is a mean
over pairs, and its reference's positions are not counted.
"""

import errno
import json
import logging
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from tahq.coordinator.observer import (
    LinkRecord,
    RunEnd,
    RunObserver,
    SamplesRecord,
    StageRecord,
    StageSplit,
    StepRecord,
    ValidationRecord,
)
from tahq.coordinator.steps import BESIDE
from tahq.errors import UserError

MAX_UNWRITTEN_NBYTES = 64 * 1024 * 1024
"""Of lines that wait for room on the disk; beyond it the file is given up."""

log = logging.getLogger(__name__)


class LinesFile(RunObserver):
    """Appends JSON objects to a file, one per line; keeps lines that a full disk does not take."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""
        self._has_no_room = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line, after those that wait for room."""
        self._unwritten += json.dumps(line, allow_nan=False).encode() + b"\n"
        self.write()

    def ended(self, end: RunEnd) -> None:
        """Close the file; OSError if the disk is still full."""
        with self._file:
            self.write()
            if self._unwritten:
                num_lines = len(self._unwritten.splitlines())
                raise OSError(errno.ENOSPC, f"no room for the last {num_lines} lines of {self._file.name}")

    def write(self) -> None:
        """As much as the disk takes; a line may be cut, and is completed by the next call."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or len(self._unwritten) > MAX_UNWRITTEN_NBYTES:
                raise
            if not self._has_no_room:
                log.warning("%s: %s; its lines are kept until there is room", self._file.name, error.strerror)
            self._has_no_room = True
        else:
            self._has_no_room = False


class MetricsFile(LinesFile):
    """Writes metrics.jsonl; lines of steps after `start_step`, those of the run's checkpoint, are cut off first."""

    def __init__(self, path: Path, start_step: int = 0) -> None:
        keep_until(path, start_step)
        super().__init__(path)
        self._held: dict[str, Any] | None = None
        self._waits_for: set[str] = set()

    def step_committed(self, record: StepRecord) -> None:
        """Write the step's line, or hold it back until its validation loss and samples are there."""
        self._release()
        self._held = step_object(record)
        parts = {"validation": record.evaluating, "samples": record.sampling}
        self._waits_for = {name for name, follows in parts.items() if follows}
        if not self._waits_for:
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
        self._complete(record.step, "validation", validation_object(record))

    def sampled(self, record: SamplesRecord) -> None:
        """Complete the line that was held back."""
        texts = [{"prompt": prompt, "text": text} for prompt, text in record.texts]
        self._complete(record.step, "samples", {"samples": texts})

    def _complete(self, step: int, name: str, values: Mapping[str, Any]) -> None:
        if self._held is not None and self._held["step"] == step:
            self._held |= values
            self._waits_for.discard(name)
        if not self._waits_for:
            self._release()

    def ended(self, end: RunEnd) -> None:
        """Write what was held back, and close the file; OSError if the disk is still full."""
        with self._file:
            self._release()
            super().ended(end)

    def _release(self) -> None:
        if self._held is not None:
            line, self._held = self._held, None
            self.append(line)

    def write(self) -> None:
        """As of other files; UserError if the file was removed meanwhile."""
        if self._unwritten and not os.fstat(self._file.fileno()).st_nlink:
            self._unwritten = b""
            raise UserError(
                f"{self._file.name} was removed while the run was using it; put the run's folder back and resume, or "
                "start the run anew"
            )
        super().write()


def step_object(record: StepRecord) -> dict[str, Any]:
    """A step as metrics.jsonl has it."""
    names = (
        *("step", "loss", "tokens", "computed_tokens", "tokens_per_s", "step_time_s"),
        *("grad_norm", "clip_factor", "skipped", "lr"),
    )
    values: dict[str, Any] = {name: getattr(record, name) for name in names}
    values |= {
        "relayed_bytes": record.relayed_bytes,
        "links": [_link_object(link) for link in record.links],
        "stages": [_stage_object(stage) for stage in record.stages],
        "codec_changes": [asdict(change) for change in record.codec_changes],
        "schedule_change": record.schedule_change,
        "schedule": record.schedule,
        "in_flight": list(record.in_flight),
        "computing": list(record.computing),
        "abandoned": record.abandoned,
    }
    if record.router_loss is not None:
        values["router_loss"] = record.router_loss
    if record.rewards:
        values["rewards"] = dict(record.rewards)
    if record.loss_scale:
        values["loss_scale"] = record.loss_scale
    return {name: _strict(value) for name, value in values.items()}


def _strict(value: Any) -> Any:
    """The same without numbers that JSON does not have; keys are text."""
    if isinstance(value, Mapping):
        return {str(key): _strict(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _link_object(link: LinkRecord) -> dict[str, Any]:
    names = (
        *("frames", "payload_bytes", "wire_bytes", "elements"),
        *("busy_s", "sending_s", "queued_s", "idle_s", "wire_s"),
        *("bits_per_element", "goodput_bits_per_s", "codec", "relative_error", "round_trip_s", "relayed_bytes"),
    )
    ends = {"link": link.link, "from": link.sender, "to": link.receiver, "direction": link.direction}
    return ends | {name: getattr(link, name) for name in names}


def _stage_object(stage: StageRecord) -> dict[str, Any]:
    """One stage's time, in parts that add up to its step, and what its codecs remember."""
    timing_s: dict[str, float] = defaultdict(float)
    for name, seconds in stage.timing.items():  # whichever thread did it, and for whichever stage it waited
        timing_s[name.removeprefix(BESIDE).partition(":")[0]] += seconds
    return {
        "stage": stage.stage,
        "waiting_share": stage.waiting_share,
        "timing_s": timing_s,
        "codec_state_bytes": stage.codec_state_bytes,
        "memory_bytes": stage.memory_bytes,
        "peak_bytes": stage.peak_bytes,
        **{field.name: getattr(stage.split, field.name) for field in fields(StageSplit)},
    }


def validation_object(record: ValidationRecord) -> dict[str, Any]:
    """Validation losses as metrics.jsonl has them: that of the first set, and those of all sets that have names."""
    named = {each.name: _losses_object(each) for each in record.sets if each.name}
    return {"validation": _losses_object(record), **({"validations": named} if named else {})}


def _losses_object(record: ValidationRecord) -> dict[str, Any]:
    """A validation loss in nats per token, and as a perplexity; or per pair, and with the accuracy."""
    values: dict[str, Any]
    if record.accuracy is not None:
        values = {"pairs": record.tokens, "loss": record.loss, "loss_raw": record.loss_raw, "accuracy": record.accuracy}
    else:
        values = {"tokens": record.tokens, "loss": record.loss, "perplexity": perplexity(record.loss)}
        values |= {"loss_raw": record.loss_raw, "perplexity_raw": perplexity(record.loss_raw)}
    return {name: _strict(value) for name, value in values.items()}


def perplexity(loss: float) -> float:
    """e^loss; infinity where that is too large for a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def keep_until(path: Path, last_step: int) -> None:
    """Remove the lines of later steps from a metrics file, and lines that are damaged or not UTF-8.

    The new content is on disk before it takes the old one's place. A missing file is not created.
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
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
    return isinstance(step, int) and step <= last_step
