"""A run's files as messages for the page: first all that they hold, then what they gain.

A message has the new `steps` as [step, loss, tokens/s, validation loss], the new `events`, and the whole `view`: state,
stages and links as they are now, in words. Nothing is read between two calls of `news`.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tahq.coordinator.observer import LinkRecord, StageRecord, StepRecord
from tahq.errors import UserError
from tahq.observe import figures
from tahq.observe.bottleneck import diagnose
from tahq.observe.metrics_reader import RECENT_STEPS, WRONG, median_step, step_record
from tahq.units import format_size
from tahq_launch.runs.found import writer_of

MAX_READ_NBYTES = 1 << 24
"""Read of a file at once, so that a long run appears piece by piece."""


def check_run(folder: Path) -> None:
    """UserError unless a folder is a run's."""
    if not (folder / "metrics.jsonl").exists():
        raise UserError(f"{folder} is not a run's folder: it has no metrics.jsonl")


class Tail:
    """The complete lines that a file gains; of those that it has at first, only those in its last `last_nbytes`."""

    def __init__(self, path: Path, last_nbytes: float = math.inf) -> None:
        self._path, self._last_nbytes = path, last_nbytes
        self._inode = self._offset = 0
        self.has_more = False

    def read(self) -> list[bytes] | None:
        """The next lines; None: the file was cut or replaced, so that its readers begin anew."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return []
        with file:
            status = os.fstat(file.fileno())
            if self._inode not in (0, status.st_ino) or status.st_size < self._offset:
                return None
            if not self._inode and status.st_size > self._last_nbytes:
                file.seek(status.st_size - int(self._last_nbytes))
                file.readline()  # the rest of a line
                self._offset = file.tell()
            self._inode = status.st_ino
            file.seek(self._offset)
            data = file.read(MAX_READ_NBYTES)
        self.has_more = len(data) == MAX_READ_NBYTES
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].splitlines()


class RunFeed:
    """Follows the files of one run, for one page.

    Args:
        folder: the run's.
        last_nbytes: of the steps that are there already, only those in so many last bytes.
        is_written: whether the run is live; None: whether a process here holds the folder's lock.
    """

    def __init__(
        self, folder: Path, last_nbytes: float = math.inf, is_written: Callable[[], bool] | None = None
    ) -> None:
        self._folder, self._last_nbytes = folder, last_nbytes
        self._is_written = is_written or (lambda: writer_of(folder) is not None)
        self._begin()

    def _begin(self) -> None:
        self._metrics = Tail(self._folder / "metrics.jsonl", self._last_nbytes)
        self._log = Tail(self._folder / "events.jsonl")
        self._is_new, self.has_more = True, False
        self.is_over = self._was_over = False
        self._num_damaged = self._step = 0
        self._recent: deque[Any] = deque(maxlen=RECENT_STEPS)
        self._validation = self._checkpoint = self._best = ""
        self._start()

    def _start(self) -> None:
        """A start of the run, which knows nothing of the one before."""
        self._seen: dict[str, Mapping[str, Any]] = {}
        self._workers: dict[int, str] = {}
        self._away: dict[int, str] = {}
        self._degraded: dict[tuple[int, int], str] = {}

    def news(self) -> dict[str, Any] | None:
        """What was written since the last call; None: nothing."""
        is_written = self._is_written()  # before the files, whose last lines are then there
        steps, events = self._metrics.read(), self._log.read()
        if steps is None or events is None:
            self._begin()
            return self.news()
        is_new, self._is_new = self._is_new, False
        message = {
            "anew": is_new,
            "steps": [step for step in map(self._take_step, steps) if step is not None],
            "events": [event for event in map(self._take_event, events) if event is not None],
        }
        self.has_more = self._metrics.has_more or self._log.has_more
        self.is_over = not self.has_more and ("ended" in self._seen or not is_written)
        if not (is_new or steps or events or self.is_over != self._was_over):
            return None
        self._was_over = self.is_over
        return message | {"view": None if self.has_more else self._view()}

    # -- lines -----------------------------------------------------------------------------------

    def _take_step(self, line: bytes) -> list[float | None] | None:
        try:
            row = json.loads(line)
            self._step = int(row["step"])
            validation = row.get("validation", {}).get("loss")
            if validation is not None:
                sets = row.get("validations", {"": row["validation"]}).items()
                losses = ", ".join(f"{name} {figures.loss(float(each['loss']))}".strip() for name, each in sets)
                unit = "pair" if "rewards" in row else "token"
                self._validation = f"{losses} nats per {unit} after step {self._step}"
            values = [self._step, *(_finite(row.get(key)) for key in ("loss", "tokens_per_s")), _finite(validation)]
        except WRONG:
            self._num_damaged += 1
            return None
        self._recent.append(row)
        return values

    def _take_event(self, line: bytes) -> dict[str, Any] | None:
        try:
            row = json.loads(line)
            name, stage = str(row["event"]), row.get("stage", -1)
            event = {"time": float(row["time"]), "step": int(row["step"]), "event": name, "text": str(row["text"])}
            if name == "started":
                self._start()
            elif name == "joined":
                self._workers[stage] = f"{row['host']}, {row['device']}"
                if stage in self._away:
                    self._away[stage] = "returning"
            elif name == "lost":
                self._away[stage] = "lost"
                self._degraded = {key: why for key, why in self._degraded.items() if key[0] != stage}
            elif name == "returned":
                self._away.pop(stage, None)
            elif name == "link":
                self._degraded[stage, row["link"]] = str(row["reason"])
        except WRONG:
            self._num_damaged += 1
            return None
        before = self._seen.get(name, {})
        self._seen[name] = row
        if name == "checkpoint" and "of_step" in row:
            self._checkpoint = f"after step {row['of_step']}, {event['text']}"
            self._best = f"after step {row['of_step']}" if row.get("is_best") else self._best
        # the stages that a phase waits for change often, and are part of the state
        return event if name != "phase" or before.get("phase") != row["phase"] else None

    # -- the view --------------------------------------------------------------------------------

    def _view(self) -> dict[str, Any]:
        records, problem = [], f"{self._num_damaged} damaged lines are left out" if self._num_damaged else ""
        try:
            records = [step_record(row) for row in self._recent]
        except WRONG as error:
            problem = f"metrics.jsonl has steps that this tahq cannot read: {error}"
        step, state = median_step(records) if records else None, self._state()
        total_steps = int(self._seen.get("planned", {}).get("total_steps", 0))
        limit = diagnose(step) if step is not None else None
        return {
            "name": self._folder.resolve().name,
            "state": state,
            "is_over": self.is_over,
            "has_trouble": not state.startswith("done") if self.is_over else bool(self._away),
            "problem": problem,
            "step": self._step,
            "total_steps": max(total_steps, self._step),
            "tokens_per_s": records[-1].tokens_per_s if records else None,
            "since": self._seen.get("started", {}).get("time"),
            "figures": self._figures(records, total_steps) if records else {},
            "limit": "unknown: no step was measured" if limit is None else limit.sentence,
            "stages": self._stages(step),
            "links": [self._link(link, step.step_time_s) for link in step.links] if step is not None else [],
        }

    def _state(self) -> str:
        ended, phase = self._seen.get("ended"), self._seen.get("phase")
        if ended is not None:
            if ended.get("exit_status") != 0:
                return f"ended {ended['text']}"
            return str(ended["text"]).replace("all steps are done", "done").replace("with status 0:", "done:")
        if self.is_over:
            return "not running" if phase is None else "not running: it was killed; continue it with --resume"
        return "starting" if phase is None else str(phase["text"])

    def _figures(self, records: Sequence[StepRecord], total_steps: int) -> dict[str, str]:
        """Of the last step; its time is the median of recent ones."""
        last, step_s = records[-1], median(record.step_time_s for record in records)
        left_s = step_s * (total_steps - last.step)
        depths = f", in flight {' '.join(map(str, last.in_flight))}" if last.in_flight else ""
        values = {
            "loss": f"{figures.loss(last.loss)} {last.loss_unit}",
            "rewards": figures.rewards(last.rewards),
            "validation loss": self._validation,
            "speed": figures.tokens_rate(last.tokens_per_s),
            "time per step": f"{figures.duration(step_s)}",
            "time left": figures.duration(round(left_s)) if left_s > 0 and not self.is_over else "",
            "sent per step": format_size(sum(link.wire_bytes for link in last.links)),
            "gradient norm": f"{last.grad_norm:.4g}" if math.isfinite(last.grad_norm) else "–",
            "learning rate": f"{last.lr:.3g}",
            "schedule": f"{last.schedule}{depths}",
            "skipped": f"the last step: {last.skipped_for}" if last.skipped else "",
            "checkpoint": self._checkpoint,
            "best checkpoint": self._best,
        }
        return {name: value for name, value in values.items() if value}

    def _stages(self, step: StepRecord | None) -> list[dict[str, Any]]:
        records = {} if step is None else {stage.stage: stage for stage in step.stages}
        step_s = 0.0 if step is None else step.step_time_s
        num_stages = max(int(self._seen.get("started", {}).get("stages", 0)), *(n + 1 for n in records), 0)
        return [
            {
                "stage": number,
                "worker": self._workers.get(number, ""),
                "state": "" if self.is_over else self._away.get(number, "ok" if number in self._workers else "missing"),
                **(_split(records[number], step_s) if number in records and step_s > 0 else {}),
            }
            for number in range(num_stages)
        ]

    def _link(self, link: LinkRecord, step_s: float) -> dict[str, Any]:
        use = (link.wire_s or link.sending_s) / step_s if step_s > 0 else 0.0
        away = [f"stage {end} is {self._away[end]}" for end in (link.sender, link.receiver) if end in self._away]
        reports = (why for (_, number), why in self._degraded.items() if number == link.link)
        degraded = [f"degraded: {why}" for why in reports if why]
        trip = f", round trip {figures.duration(link.round_trip_s)}" if link.round_trip_s > 0 else ""
        return {
            "from": link.sender,
            "to": link.receiver,
            "carries": link.direction,
            "use": use,
            "use_text": figures.share(use),
            "rate": f"{figures.goodput(link)}{trip}",
            "codec": f"{link.codec.replace(',', ', ')}: {link.bits_per_element:.2f} bits per element",
            "state": "closed" if self.is_over else "; ".join(away or degraded) or "ok",
        }


def _split(record: StageRecord, step_s: float) -> dict[str, Any]:
    """Shares of the step by part, and memory, of one stage."""
    split = record.split
    sender = max(split.wait_s, key=split.wait_s.__getitem__, default=None)
    most = {} if sender is None else {"waits for frames": f", most from stage {sender}"}
    parts = {
        "forward": split.forward_s,
        "backward": split.backward_s,
        "codecs": split.encode_s + split.decode_s,
        "waits for frames": split.frames_s + split.wait_codec_s,
        "waits for room": split.wait_memory_s,
        "commit": split.commit_s,
        "other": split.data_s + split.optimizer_s + split.snapshot_s + split.other_s,
    }
    beside = {name: figures.share(seconds / step_s) for name, seconds in split.beside_s.items() if seconds > 0}
    peak, limit = record.peak_bytes, record.memory_bytes
    return {
        "parts": [
            [name, seconds / step_s, f"{figures.share(seconds / step_s)}{most.get(name, '')}"]
            for name, seconds in parts.items()
        ],
        "beside": ", ".join(f"{name} {share}" for name, share in beside.items()),
        "memory": f"{format_size(peak) if peak else 'unknown'} of {format_size(limit) if limit else 'unknown'}",
        "memory_share": peak / limit if limit else 0.0,
    }


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
