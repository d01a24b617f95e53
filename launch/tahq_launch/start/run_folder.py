"""A run's folder, `runs/<name>/`: its files, and the lock that lets one launcher write them.

::

    config.yaml      the configuration as resolved     snapshots/  checkpoints to resume and export from
    metrics.jsonl    one object per step                 logs/       launcher.log, stage-N.log
    trace/           step-000010.json: pictures of the steps of run.trace_steps
    journal.sqlite   state for a restarted coordinator
    network.json     under hosts: namespaces, the network and its measurements
    source/          what `tahq export` needs of model.path and data.tokenizer

Invariants:
- one launcher at a time writes a run folder (a lock that the kernel drops with the process);
- results are never overwritten: a folder with steps in it is resumed or refused.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tahq.errors import UserError
from tahq.pipeline.checkpoint.manifest import LATEST, MANIFEST


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Names inside one run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as resolved."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.path / "metrics.jsonl"

    @property
    def network(self) -> Path:
        """The network of the workers, and its measurements before the start."""
        return self.path / "network.json"

    @property
    def journal(self) -> Path:
        """State for a restarted coordinator."""
        return self.path / "journal.sqlite"

    @property
    def traces(self) -> Path:
        """Folder of traced steps."""
        return self.path / "trace"

    @property
    def snapshots(self) -> Path:
        """Folder of checkpoints; `latest` names the newest."""
        return self.path / "snapshots"

    @property
    def source(self) -> Path:
        """Copies of the model's config.json and generation_config.json and of the tokenizer."""
        return self.path / "source"

    @property
    def logs(self) -> Path:
        """Folder of logs."""
        return self.path / "logs"

    @property
    def launcher_log(self) -> Path:
        """Log of the coordinator's process."""
        return self.logs / "launcher.log"

    def stage_log(self, stage: int) -> Path:
        """Log of a stage's worker, over all starts of the run."""
        return self.logs / f"stage-{stage}.log"

    def has_steps(self) -> bool:
        """Whether a run has already written metrics or a checkpoint here."""
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        return has_metrics or self.has_snapshot()

    def has_snapshot(self) -> bool:
        """Whether there is a complete checkpoint."""
        return (self.snapshots / LATEST).exists() or any(self.snapshots.glob(f"*/{MANIFEST}"))

    def check_startable(self, *, resume: bool) -> None:
        """Refuse a start that would overwrite a run, or a resumption of nothing.

        Raises:
            UserError: it would; the message says what to do instead.
        """
        if resume and not self.has_snapshot():
            if not self.journal.exists():
                raise UserError(f"--resume: {self.path} has no checkpoint to resume from; start it without --resume")
            if not self.config.exists():
                raise UserError(
                    f"--resume: {self.path} has no checkpoint, and its journal needs config.yaml, which is missing; "
                    "start it again under another name (--set run.name=…)"
                )
        if not resume and self.has_snapshot():
            raise UserError(
                f"{self.path} already holds a run; continue it with --resume, "
                f"choose another name (--set run.name=…), or remove the folder"
            )
        if not resume and self.has_steps():
            raise UserError(
                f"{self.path} already holds the metrics of a run that left no checkpoint; "
                f"choose another name (--set run.name=…), or remove the folder"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the folder, and create it if needed; the kernel releases the lock if this process dies.

        Returns:
            As a context: the number of this start of the run, from 1.

        Raises:
            UserError: another process is writing it, or it cannot be created.
        """
        with self._lock_file() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being written by another run (process {_recorded(lock)[1]}); "
                    "wait for it, stop it, or choose another name (--set run.name=…)"
                ) from None
            start = _recorded(lock)[0] + 1
            lock.truncate(0)
            lock.write(f"{start} {os.getpid()}")
            lock.flush()
            yield start

    def _lock_file(self) -> TextIO:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            return (self.path / ".lock").open("a+", encoding="ascii")
        except OSError as error:
            raise UserError(f"cannot write the run folder {self.path}: {error.strerror}; see run.dir") from error


def _recorded(lock: TextIO) -> tuple[int, str]:
    """Number of the newest start, and the process that made it."""
    lock.seek(0)
    start, _, process = lock.read().partition(" ")
    return (int(start) if start.isdecimal() else 0), process or "unknown"
