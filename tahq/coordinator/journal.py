"""The coordinator's state on disk, from which a restarted coordinator continues if this process is killed.

Every decision is durable here before it is sent to any worker, so a restarted coordinator gives the same answer to
workers that had received it and to workers that had not. SQLite, write-ahead log, full synchronisation; one file in
the run's folder. Rows are kept since the base: the oldest checkpoint at which a lost stage may begin again.

::

    facts        one row of JSON: run, configuration, where the run began, base, epoch, whether it has ended
    steps        step, COMMIT as it was on the wire, seconds
    prepares     step, stage, PREPARE as it was on the wire
    evaluations  step, EVALUATED
    holders      stage, routing id of its worker, HELLO
"""

import errno
import json
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from tahq.comm.control.encoding import decode_message, encode_message
from tahq.comm.control.messages import Commit, Evaluated, Hello, Message, Prepare
from tahq.errors import RemoteProtocolError, SnapshotError, UserError
from tahq.units import format_size

FORMAT = 1
_BUSY_S = 0.1
"""How long SQLite itself waits for another program's lock; heartbeats must go out meanwhile."""
_PROBE_NBYTES = 1 << 16
M = TypeVar("M", bound=Message)

_TABLES = """
CREATE TABLE facts (id INTEGER PRIMARY KEY CHECK (id = 0), json TEXT NOT NULL) STRICT;
CREATE TABLE steps (step INTEGER PRIMARY KEY, decision BLOB NOT NULL, seconds REAL NOT NULL) STRICT;
CREATE TABLE prepares (step INTEGER, stage INTEGER, message BLOB NOT NULL, PRIMARY KEY (step, stage)) STRICT;
CREATE TABLE evaluations (step INTEGER PRIMARY KEY, message BLOB NOT NULL) STRICT;
CREATE TABLE holders (stage INTEGER PRIMARY KEY, identity BLOB NOT NULL, hello BLOB NOT NULL,
    host TEXT NOT NULL, pid INTEGER NOT NULL, worker_id TEXT NOT NULL) STRICT;
"""
_BY_STEP = ("steps", "prepares", "evaluations")


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """A run, and where its lost stages begin again.

    `next_sample` is the number of the sample that `start_step` begins with, `num_train_samples` those of an epoch;
    `codecs` is what `LinkCodecs.saved` returned at `step`, `snapshot` its folder relative to the run's. If there is a
    newer checkpoint, `newest` has its step, folder and files. `has_relay`: some links go over the coordinator's relay.
    """

    run_id: int
    config_hash: str
    epoch: int
    start_step: int = 0
    next_sample: int = 0
    num_train_samples: int = 0
    num_steps: int = 0
    global_batch: int = 0
    step: int = 0
    snapshot: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    codecs: Mapping[str, Any] = field(default_factory=dict)
    newest: Mapping[str, Any] = field(default_factory=dict)
    is_over: bool = False
    has_relay: bool = False
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class JournalledStep:
    """A decision, and every stage's PREPARE, by stage."""

    commit: Commit
    prepares: tuple[Prepare, ...]
    step_time_s: float


@dataclass(frozen=True, slots=True)
class JournalledHolder:
    """The worker that held a stage."""

    stage: int
    identity: bytes
    hello: Hello
    host: str
    pid: int
    worker_id: str


class NotWrittenError(SnapshotError):
    """A write that failed for now."""

    def __init__(self, message: str, wanted: str) -> None:
        super().__init__(message)
        self.wanted = wanted
        """What has to change before it can succeed."""


class Journal:
    """One run's journal; used by one thread at a time.

    Args:
        path: the file, created if missing; None: in memory, for a run that is never continued.

    Raises:
        SnapshotError: the file is not a journal of this version, or cannot be opened.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.wait: Callable[[Callable[[], None], NotWrittenError], None] | None = None
        """Called when a write fails for now: repeats it until it succeeds, or raises. None: the failure is raised."""
        self._facts: JournalFacts | None = None
        try:
            self._database = sqlite3.connect(
                path or ":memory:", timeout=_BUSY_S, isolation_level=None, check_same_thread=path is not None
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            with closing(self._database.execute("SELECT name FROM sqlite_master WHERE name = 'facts'")) as found:
                if found.fetchone() is None:
                    self._database.executescript(f"BEGIN; {_TABLES} COMMIT;")
        except sqlite3.OperationalError as error:
            raise SnapshotError(f"cannot open {path}: {error}; {self._circumstances(error)}") from error
        except sqlite3.DatabaseError as error:
            raise SnapshotError(
                f"{path} is not the journal of a run ({error}); remove it to resume from the checkpoint"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    # -- writing ---------------------------------------------------------------------------------

    def begin(self, facts: JournalFacts) -> None:
        """Begin a run, or go on from a checkpoint: everything before is deleted."""
        self._put_facts(facts, *((f"DELETE FROM {table}", ()) for table in (*_BY_STEP, "holders")))

    def note(self, **changes: Any) -> None:
        """Change fields of the facts."""
        self._put_facts(replace(self.facts, **changes))

    def decided(self, commit: Commit, prepares: Sequence[Prepare], step_time_s: float) -> None:
        """Keep a step's decision; called before any worker is told."""
        step = (commit.step, encode_message(commit), step_time_s)
        rows = ((prepare.step, prepare.stage, encode_message(prepare)) for prepare in prepares)
        insert = "INSERT OR REPLACE INTO prepares VALUES (?, ?, ?)"
        self._write(("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", step), *((insert, row) for row in rows))

    def evaluated(self, evaluated: Evaluated) -> None:
        """Keep a validation loss."""
        self._write(("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", (evaluated.step, encode_message(evaluated))))

    def published(self, step: int, snapshot: str, files: Mapping[str, str], codecs: Mapping[str, Any]) -> None:
        """Make a checkpoint the base, and delete the decisions before it."""
        facts = replace(self.facts, step=step, snapshot=snapshot, files=dict(files), codecs=dict(codecs))
        self._put_facts(facts, *((f"DELETE FROM {table} WHERE step < ?", (step,)) for table in _BY_STEP))

    def held(self, holder: JournalledHolder) -> None:
        """Keep which worker trains a stage."""
        row = (holder.stage, holder.identity, encode_message(holder.hello), holder.host, holder.pid, holder.worker_id)
        self._write(("INSERT OR REPLACE INTO holders VALUES (?, ?, ?, ?, ?, ?)", row))

    def lost(self, stage: int) -> None:
        """Forget a stage's worker: it may not rejoin."""
        self._write(("DELETE FROM holders WHERE stage = ?", (stage,)))

    # -- reading ---------------------------------------------------------------------------------

    @property
    def has_run(self) -> bool:
        """Whether a run has begun that has not ended in order."""
        return (self._facts is not None or bool(self._rows("SELECT json FROM facts"))) and not self.facts.is_over

    def is_of(self, run_id: int, config_hash: str) -> bool:
        """Whether it is of this run, which has not ended in order."""
        return self.has_run and (self.facts.run_id, self.facts.config_hash) == (run_id, config_hash)

    @property
    def facts(self) -> JournalFacts:
        """Raises SnapshotError if there are none, or if they are of another version."""
        if self._facts is not None:
            return self._facts
        try:
            ((text,),) = self._rows("SELECT json FROM facts")
            facts = JournalFacts(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise SnapshotError(
                f"{self._path} cannot be read ({error}); remove it to resume from the checkpoint"
            ) from error
        if facts.format != FORMAT:
            raise SnapshotError(
                f"{self._path} has format {facts.format}, expected {FORMAT}; use the version of tahq that wrote it"
            )
        self._facts = facts
        return facts

    def steps(self) -> Iterator[JournalledStep]:
        """All decisions since the base, in order."""
        for step, decision, seconds in self._rows("SELECT step, decision, seconds FROM steps ORDER BY step"):
            rows = self._rows("SELECT message FROM prepares WHERE step = ? ORDER BY stage", (step,))
            prepares = tuple(self._decoded(message, Prepare) for (message,) in rows)
            yield JournalledStep(self._decoded(decision, Commit), prepares, seconds)

    def evaluations(self) -> dict[int, Evaluated]:
        """Validation losses since the base, by step."""
        rows = self._rows("SELECT step, message FROM evaluations")
        return {step: self._decoded(message, Evaluated) for step, message in rows}

    def holders(self) -> dict[int, JournalledHolder]:
        """The worker that held each stage."""
        rows = self._rows("SELECT stage, identity, hello, host, pid, worker_id FROM holders")
        return {
            stage: JournalledHolder(stage, identity, self._decoded(hello, Hello), *rest)
            for stage, identity, hello, *rest in rows
        }

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        try:
            with closing(self._database.execute(query, values)) as rows:
                return rows.fetchall()
        except sqlite3.Error as error:
            raise SnapshotError(f"cannot read {self._path}: {error}; {self._circumstances(error)}") from error

    def _decoded(self, data: bytes, expected: type[M]) -> M:
        try:
            message = decode_message(data, str(self._path))
        except RemoteProtocolError as error:
            raise SnapshotError(f"{error}; remove it to resume from the checkpoint") from error
        if not isinstance(message, expected):
            raise SnapshotError(f"{self._path}: got {type(message).__name__}, expected {expected.__name__}")
        return message

    # -- failing ---------------------------------------------------------------------------------

    def _put_facts(self, facts: JournalFacts, *statements: tuple[str, Sequence[Any]]) -> None:
        self._write(*statements, ("INSERT OR REPLACE INTO facts VALUES (0, ?)", (json.dumps(asdict(facts)),)))
        self._facts = facts

    def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """Write all of it or nothing, durably; waits while the disk is full or another program has the file locked.

        Raises:
            SnapshotError: the disk does not take it; the message names the file.
            UserError: the run's folder is gone.
        """
        try:
            self._write_now(statements)
        except NotWrittenError as failure:
            if self.wait is None:
                raise
            self.wait(partial(self._write_now, statements), failure)

    def _write_now(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """May be repeated even if the write succeeded after all; NotWrittenError if it may succeed later."""
        if self._path is not None and not self._path.exists():
            raise gone(self._path.parent)
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, values in statements:
                self._database.execute(statement, values)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            message = f"cannot write {self._path}: {error}; {self._circumstances(error)}"
            if _is_locked(error):
                raise NotWrittenError(message, "the lock to be released") from error
            if self._path is not None and _is_full(error, self._path.parent):
                raise NotWrittenError(message, "room") from error
            raise SnapshotError(message) from error

    def _circumstances(self, error: sqlite3.Error) -> str:
        if _is_locked(error):
            return "another program has it locked; close that program"
        if self._path is None:
            return "it is in memory"
        folder = self._path.parent
        try:
            return f"{format_size(shutil.disk_usage(folder).free)} free in {folder}"
        except OSError as failure:
            return f"{folder} cannot be read: {failure.strerror}"


def gone(folder: Path) -> UserError:
    """The error of a run whose folder, or a file in it, was removed."""
    return UserError(
        f"the run's folder {folder} or a file in it was removed while the run was using it; put it back and resume, "
        "or start the run anew"
    )


def _is_locked(error: sqlite3.Error) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _is_full(error: sqlite3.Error, folder: Path) -> bool:
    """Whether there is no room, or the quota is used up, which SQLite reports as an I/O error."""
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return True
    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_IOERR:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            return probe.write(bytes(_PROBE_NBYTES)) < _PROBE_NBYTES
    except OSError as failure:
        return failure.errno in (errno.ENOSPC, errno.EDQUOT)
