"""The file of a sweep's results: JSON lines, one a finished point, each on disk before the next point begins.

Invariants:
- a line is written whole and synced; one that a crash cut short is cut off when the file is opened again;
- only one sweep writes to a file at a time;
- the newest line of a point counts: one that failed may be followed by one that did not.
"""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tahq.errors import ConfigError

DONE = "done"
FAILED = "failed"


class ResultFile:
    """Results as they come in.

    Args:
        path: the file; made if it is not there, with its folder.

    Raises:
        ConfigError: another sweep is writing to it, or it is none of ours.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab")
        try:
            self._lock()
            _cut_off_torn_line(path)
            self.rows = read_results(path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write a point's row; it is on disk when this returns."""
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[row["id"]] = row

    def is_done(self, id: str) -> bool:
        """Whether a point was measured; one that failed was not."""
        return self.rows.get(id, {}).get("status") == DONE

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self._path} is being written by another sweep; wait for it, or name another") from None


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The newest row of every point, by id, in the order in which points were first written.

    Raises:
        ConfigError: the file cannot be read, or a line is not a result.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the .jsonl that a sweep wrote") from error
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            raise ConfigError(f"{path}:{number}: not a sweep's result; is this the .jsonl that a sweep wrote?")
        rows[row["id"]] = row
    return rows


def read_all(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The rows of several files; of a point in two of them the later file's counts."""
    rows: dict[str, dict[str, Any]] = {}
    for path in paths:
        rows |= read_results(path)
    return list(rows.values())


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and {"id", "status", "point"} <= row.keys() else None


def _cut_off_torn_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
