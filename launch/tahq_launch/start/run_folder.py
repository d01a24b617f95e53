"""A run's folder, `runs/<name>/`: its files, and the lock that lets one launcher write them.

::

    config.yaml      the configuration as resolved       snapshots/  checkpoints to resume and export from
    metrics.jsonl    one object per step                 logs/       launcher.log, stage-N.log
    events.jsonl     one object per event: a stage lost, another codec, a warning
    trace/           step-000010.json: traces of the steps of run.trace_steps
    journal.sqlite   state for a restarted coordinator
    members.sqlite   keys admitted while it runs (`tahq allow`, `tahq invite`), if there are any
    network.json     under hosts: namespaces, the network and its measurements before each start
    source/          what `tahq export` needs of model.path and data.tokenizer

Invariants:
- one launcher at a time writes a run folder (a lock that the kernel drops with the process);
- results are never overwritten: a folder with steps in it is resumed or refused.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from tahq.comm.control.members import Members
from tahq.errors import UserError
from tahq.pipeline.checkpoint.manifest import LATEST, MANIFEST


def members_of(target: Path) -> Members:
    """The members of a cluster.yaml, in a file beside it, or of a run's folder."""
    return Members(RunFolder(target).members if target.is_dir() else target.with_suffix(".members.sqlite"))


class RunFolder:
    """Paths inside one run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.network = path / "network.json"
        self.journal = path / "journal.sqlite"
        self.members = path / "members.sqlite"
        self.traces = path / "trace"
        self.snapshots = path / "snapshots"
        self.source = path / "source"
        self.logs = path / "logs"
        self.launcher_log = self.logs / "launcher.log"

    def stage_log(self, stage: int) -> Path:
        """Log of a stage's worker, over all starts of the run."""
        return self.logs / f"stage-{stage}.log"

    def check_startable(self, *, resume: bool) -> None:
        """Refuse a start that would overwrite a run, or a resumption of nothing; UserError says what to do instead."""
        has_checkpoint = (self.snapshots / LATEST).exists() or any(self.snapshots.glob(f"*/{MANIFEST}"))
        if resume and not has_checkpoint:
            if not self.journal.exists():
                raise UserError(f"--resume: {self.path} has no checkpoint to resume from; start it without --resume")
            if not self.config.exists():
                raise UserError(
                    f"--resume: {self.path} has no checkpoint, and its journal needs config.yaml, which is missing; "
                    "start it again under another name (--set run.name=…)"
                )
        if not resume and has_checkpoint:
            raise UserError(
                f"{self.path} already holds a run; continue it with --resume, "
                f"choose another name (--set run.name=…), or remove the folder"
            )
        if not resume and self.metrics.exists() and self.metrics.stat().st_size > 0:
            raise UserError(
                f"{self.path} already holds the metrics of a run that left no checkpoint; "
                f"choose another name (--set run.name=…), or remove the folder"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the folder, and create it if needed; yields the number of this start of the run, from 1.

        UserError if another process is writing it, or it cannot be created.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+", encoding="ascii", errors="replace")
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write the run folder {self.path}: {reason}; see run.dir") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.path} is being written by another run (process {_recorded(lock)[1]}); "
                    "wait for it, stop it, or choose another name (--set run.name=…)"
                ) from None
            number = _recorded(lock)[0] + 1
            lock.truncate(0)
            print(number, os.getpid(), end="", file=lock, flush=True)
            yield number


def _recorded(lock: TextIO) -> tuple[int, str]:
    """Number of the newest start, and its process id."""
    lock.seek(0)
    start, _, process = lock.read().partition(" ")
    return (int(start) if start.isdecimal() else 0), process or "unknown"
