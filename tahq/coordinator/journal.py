"""The coordinator's memory on disk: what it must know to go on if it is killed and started again.

Every decision is here, durable, before any worker hears of it: so a coordinator that comes back can give the answer
that some have and others have not. SQLite, write-ahead log, full synchronisation; one file in the run's folder. Rows
are kept since the base: the oldest snapshot at which a lost stage may begin again.

::

    facts        one row of JSON: run, configuration, where the run began, restore point, epoch, whether it has ended
    steps        step, COMMIT and every PREPARE as they were on the wire, seconds
    evaluations  step, EVALUATED
    holders      stage, whose it is (routing id), HELLO
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
from tahq.errors import RemoteProtocolError, SnapshotError
from tahq.units import format_size

FORMAT = 1
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


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """What a run is, and where its lost stages begin again.

    `next_sample` is the number of the sample that `start_step` begins with, `num_train_samples` those of an epoch;
    `codecs` is what `LinkCodecs.saved` says of the links at `step`, `snapshot` its folder as seen from the run's. If
    there is a newer snapshot, `newest` has its step, snapshot and files.
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
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class JournalledStep:
    """A decision, and what it was made of, by stage."""

    commit: Commit
    prepares: tuple[Prepare, ...]
    step_time_s: float


@dataclass(frozen=True, slots=True)
class JournalledHolder:
    """Who held a stage."""

    stage: int
    identity: bytes
    hello: Hello
    host: str
    pid: int
    worker_id: str


class Journal:
    """One run's; used by one thread.

    Args:
        path: the file; made if it is not there.

    Raises:
        SnapshotError: it is there, and is no journal of this version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.wait_for_room: Callable[[Callable[[], SnapshotError | None], SnapshotError], None] | None = None
        """Told of a full disk: tries again until it is written, or raises; None: a full disk is an error."""
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            with closing(self._database.execute("SELECT name FROM sqlite_master WHERE name = 'facts'")) as found:
                if found.fetchone() is None:
                    self._database.executescript(f"BEGIN; {_TABLES} COMMIT;")
        except sqlite3.OperationalError as error:
            raise SnapshotError(f"cannot open {path}: {error}; {_free(path.parent)}") from error
        except sqlite3.DatabaseError as error:
            raise SnapshotError(
                f"{path} is no journal of a run ({error}); remove it to resume from the snapshot"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    # What happens

    def begin(self, facts: JournalFacts) -> None:
        """A run begins, or goes on from a snapshot: nothing of before is of use."""
        self._write(
            *((f"DELETE FROM {table}", ()) for table in ("steps", "prepares", "evaluations", "holders")),
            _put_facts(facts),
        )

    def note(self, **changes: Any) -> None:
        """Fields of the facts that are otherwise from now on."""
        self._write(_put_facts(replace(self.facts, **changes)))

    def decided(self, commit: Commit, prepares: Sequence[Prepare], step_time_s: float) -> None:
        """A step is decided; to be called before anybody is told."""
        self._write(
            ("INSERT OR REPLACE INTO steps VALUES (?, ?, ?)", (commit.step, encode_message(commit), step_time_s)),
            *(
                ("INSERT OR REPLACE INTO prepares VALUES (?, ?, ?)", (p.step, p.stage, encode_message(p)))
                for p in prepares
            ),
        )

    def evaluated(self, evaluated: Evaluated) -> None:
        """The validation loss of a step has come in."""
        self._write(("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", (evaluated.step, encode_message(evaluated))))

    def published(self, step: int, snapshot: str, files: Mapping[str, str], codecs: Mapping[str, Any]) -> None:
        """A snapshot is the base: what was decided before it is of no use any more."""
        facts = replace(self.facts, step=step, snapshot=snapshot, files=dict(files), codecs=dict(codecs))
        tables = ("steps", "prepares", "evaluations")
        self._write(*((f"DELETE FROM {table} WHERE step < ?", (step,)) for table in tables), _put_facts(facts))

    def held(self, holder: JournalledHolder) -> None:
        """A worker trains a stage."""
        values = (
            holder.stage,
            holder.identity,
            encode_message(holder.hello),
            holder.host,
            holder.pid,
            holder.worker_id,
        )
        self._write(("INSERT OR REPLACE INTO holders VALUES (?, ?, ?, ?, ?, ?)", values))

    def lost(self, stage: int) -> None:
        """Nobody trains a stage any more: who did may not come back to it."""
        self._write(("DELETE FROM holders WHERE stage = ?", (stage,)))

    # What has happened

    @property
    def has_run(self) -> bool:
        """Whether a run has begun that has not ended in order."""
        with closing(self._database.execute("SELECT json FROM facts")) as rows:
            return rows.fetchone() is not None and not self.facts.is_over

    @property
    def facts(self) -> JournalFacts:
        """Raises SnapshotError if there are none, or if they are of another version."""
        with closing(self._database.execute("SELECT json FROM facts")) as rows:
            row = rows.fetchone()
        try:
            facts = JournalFacts(**json.loads(row[0]))
        except (TypeError, ValueError) as error:
            raise SnapshotError(
                f"{self._path} cannot be read ({error}); remove it to resume from the snapshot"
            ) from error
        if facts.format != FORMAT:
            raise SnapshotError(
                f"{self._path} has format {facts.format}, expected {FORMAT}; use the tahq that wrote it"
            )
        return facts

    def steps(self) -> Iterator[JournalledStep]:
        """All decisions since the restore point, in order."""
        for step, decision, seconds in self._rows("SELECT step, decision, seconds FROM steps ORDER BY step"):
            rows = self._rows("SELECT message FROM prepares WHERE step = ? ORDER BY stage", (step,))
            prepares = tuple(self._decoded(message, Prepare) for (message,) in rows)
            yield JournalledStep(self._decoded(decision, Commit), prepares, seconds)

    def evaluations(self) -> dict[int, Evaluated]:
        """Validation losses since the restore point, by step."""
        rows = self._rows("SELECT step, message FROM evaluations")
        return {step: self._decoded(message, Evaluated) for step, message in rows}

    def holders(self) -> dict[int, JournalledHolder]:
        """Who held each stage."""
        rows = self._rows("SELECT stage, identity, hello, host, pid, worker_id FROM holders")
        return {
            stage: JournalledHolder(stage, identity, self._decoded(hello, Hello), *rest)
            for stage, identity, hello, *rest in rows
        }

    def _rows(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with closing(self._database.execute(query, values)) as rows:
            return rows.fetchall()

    def _decoded(self, data: bytes, expected: type[M]) -> M:
        try:
            message = decode_message(data, str(self._path))
        except RemoteProtocolError as error:
            raise SnapshotError(f"{error}; remove it to resume from the snapshot") from error
        if not isinstance(message, expected):
            raise SnapshotError(f"{self._path} has a {type(message).__name__} where {expected.__name__} should be")
        return message

    def _write(self, *statements: tuple[str, Sequence[Any]]) -> None:
        """All of it, or nothing; durable when this returns, which may be when there is room for it.

        Raises:
            SnapshotError: the disk takes no more; the message names the file.
        """
        error = self._try_to_write(statements)
        if error is not None and self.wait_for_room is None:
            raise error
        if error is not None and self.wait_for_room is not None:
            self.wait_for_room(partial(self._try_to_write, statements), error)

    def _try_to_write(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> SnapshotError | None:
        """Write, or say that there is no room; may be called again with the same, even if it was written after all.

        Raises:
            SnapshotError: it cannot be written, and more room would not help.
        """
        try:
            self._database.execute("BEGIN IMMEDIATE")
            for statement, values in statements:
                self._database.execute(statement, values)
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            folder = self._path.parent
            failure = SnapshotError(f"cannot write {self._path}: {error}; {_free(folder)}")
            if _is_for_want_of_room(error, folder):
                return failure
            raise failure from error
        return None


def _is_for_want_of_room(error: sqlite3.Error, folder: Path) -> bool:
    """Whether there is no room, or the quota is used up, which SQLite calls an I/O error."""
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return True
    if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_IOERR:
        return False
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as probe:
            return probe.write(bytes(_PROBE_NBYTES)) < _PROBE_NBYTES
    except OSError as failure:
        return failure.errno in (errno.ENOSPC, errno.EDQUOT)


def _free(folder: Path) -> str:
    """What the disk has left, in words."""
    try:
        return f"{format_size(shutil.disk_usage(folder).free)} free in {folder}"
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"


def _put_facts(facts: JournalFacts) -> tuple[str, Sequence[Any]]:
    return "INSERT OR REPLACE INTO facts VALUES (0, ?)", (json.dumps(asdict(facts)),)
