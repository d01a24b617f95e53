"""A sweep's results: a file of JSON lines, one per finished point, and its rows as tables and plots group them.

A line is written whole and synced; a torn last line (after a crash) is removed when the file is opened again. One sweep
at a time writes to a file. The newest line of a point counts: a failure may be followed by a success.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

from tahq.errors import ConfigError, file_errors
from tahq.units import write_duration
from tahq_netem.sweep.points import NetworkChoice

DONE = "done"
FAILED = "failed"


class ResultFile:
    """The file while a sweep writes it; created with its folder if necessary."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as opened:
            with file_errors("write", path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = opened.enter_context(path.open("ab"))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"{path} is being written by another sweep; wait, or choose another file") from None
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
            self.rows = read_results(path)
            opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def append(self, row: dict[str, Any]) -> None:
        """Write a point's row and sync it to disk."""
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows[row["id"]] = row

    def is_done(self, id: str) -> bool:
        """Whether a point has a measurement; failures do not count."""
        return self.rows.get(id, {}).get("status") == DONE


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The newest row of every point, by id, in the order in which points were first written."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; give the .jsonl that a sweep wrote") from error
    rows: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows[row["id"]] = row
            _ = row["status"], row["point"]
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{path}:{number}: not a sweep's result; is this the .jsonl that a sweep wrote?"
            ) from None
    return rows


Row = Mapping[str, Any]
Series = tuple[str, str, str]
"""What the points of a line have in common: runtime, schedule, wire."""


class Setting(NamedTuple):
    """What the rows of a table or panel have in common."""

    sweep: str
    compute: str
    stages: int
    micro_batch: int
    congestion_control: str
    has_profiles: bool
    round_trip_s: float
    """0 for profiles, which have their own delays."""

    @property
    def title(self) -> str:
        """A heading."""
        delay = f"round trip {write_duration(self.round_trip_s)}" if self.round_trip_s else "no delay"
        return (
            f"{self.stages} stages, micro-batches of {self.micro_batch}, compute {self.compute}, "
            f"{'profiles' if self.has_profiles else delay}, {self.congestion_control}"
        )


def done(rows: Iterable[Row]) -> list[Row]:
    """The rows with a measurement."""
    return [row for row in rows if row["status"] == DONE]


def setting_of(row: Row) -> Setting:
    """Which table a row belongs to."""
    point = row["point"]
    control, after_idle = point.get("congestion_control", "unknown"), point.get("tcp_slow_start_after_idle")
    if after_idle is not None:
        control += f", {'' if after_idle else 'no '}slow start after pauses"
    sizes = point["stages"], point["micro_batch"]
    return Setting(row["sweep"], point["compute"], *sizes, control, point["profile"] is not None, point["round_trip_s"])


def series_of(row: Row) -> Series:
    """Which line of it."""
    point = row["point"]
    activations, gradients = point["activations"], point["gradients"]
    wire = activations if activations == gradients else f"{activations} / {gradients}"
    depth = point.get("in_flight")
    schedule = point["schedule"] if depth is None else f"{point['schedule']} {depth} in flight"
    return point["runtime"], schedule, wire


def network_label(row: Row) -> str:
    """A profile's name, or a rate."""
    point = row["point"]
    return NetworkChoice(point["rate_bits_per_s"], profile=point["profile"]).label
