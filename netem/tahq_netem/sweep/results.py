"""A sweep's results: a file of JSON lines, one per finished point, and its rows as tables and plots group them.

Invariants:
- a line is written whole and synced; a torn last line (after a crash) is removed when the file is opened again;
- only one sweep writes to a file at a time;
- the newest line of a point counts: a failure may be followed by a success.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tahq.errors import ConfigError
from tahq.units import format_rate, write_duration

DONE = "done"
FAILED = "failed"


class ResultFile:
    """The file while a sweep writes it; created with its folder if necessary.

    Raises:
        ConfigError: another sweep is writing to it, or it is not a file of results.
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

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path} is being written by another sweep; wait for it, or choose another file"
            ) from None


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
    """The rows of several files; if two have a point, the later file's row counts."""
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


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
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
        """As a heading."""
        delay = f"round trip {write_duration(self.round_trip_s)}" if self.round_trip_s else "no delay"
        return (
            f"{self.stages} stages, micro-batches of {self.micro_batch}, compute {self.compute}, "
            f"{'profiles' if self.has_profiles else delay}, {self.congestion_control}"
        )


@dataclass(frozen=True, slots=True)
class Series:
    """What the points of a line have in common."""

    runtime: str
    schedule: str
    wire: str

    @property
    def label(self) -> str:
        """As a legend."""
        return f"{self.runtime} {self.schedule}, {self.wire}"


def done(rows: Iterable[Row]) -> list[Row]:
    """The rows with a measurement."""
    return [row for row in rows if row["status"] == DONE]


def setting_of(row: Row) -> Setting:
    """Which table a row belongs to."""
    point = row["point"]
    return Setting(
        row["sweep"],
        point["compute"],
        point["stages"],
        point["micro_batch"],
        _congestion_control(row),
        point["profile"] is not None,
        point["round_trip_s"],
    )


def _congestion_control(row: Row) -> str:
    """As configured; earlier versions stored only the one in force, beside the calibration."""
    network = (row.get("calibration") or {}).get("network", {})
    control = str(row["point"].get("congestion_control") or network.get("congestion_control", "unknown"))
    after_idle = row["point"].get("tcp_slow_start_after_idle")
    return control if after_idle is None else f"{control}, {'' if after_idle else 'no '}slow start after pauses"


def series_of(row: Row) -> Series:
    """Which line of it."""
    point = row["point"]
    activations, gradients = point["activations"], point["gradients"]
    wire = activations if activations == gradients else f"{activations} / {gradients}"
    depth = point.get("in_flight")
    schedule = point["schedule"] if depth is None else f"{point['schedule']} {depth} in flight"
    return Series(point["runtime"], schedule, wire)


def network_label(row: Row) -> str:
    """A profile's name, or a rate."""
    point = row["point"]
    if point["profile"] is not None:
        return str(point["profile"])
    return "unshaped" if point["rate_bits_per_s"] is None else format_rate(point["rate_bits_per_s"])


def network_labels(rows: Sequence[Row]) -> list[str]:
    """The networks of a table: unshaped, rates from fast to slow, then profiles."""

    def place(row: Row) -> tuple[bool, float]:
        point = row["point"]
        return point["profile"] is not None, -(point["rate_bits_per_s"] or math.inf)

    return list(dict.fromkeys(map(network_label, sorted(rows, key=place))))


def bits_an_element(row: Row) -> tuple[float, float]:
    """Bits per element on the first cut: activations, gradients."""
    elements = row["elements_a_step"]
    return 8 * row["activation_nbytes"][0] / elements, 8 * row["gradient_nbytes"][0] / elements
