"""A sweep's results: a file of JSON lines, one per finished point, and its rows as tables and plots group them.

A line is written whole and synced; a torn last line (after a crash) is removed when the file is opened again. One sweep
at a time writes to a file. The newest line of a point counts: a failure may be followed by a success.
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
    """The file while a sweep writes it; created with its folder if necessary."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            content = path.read_bytes()
            os.truncate(path, content.rfind(b"\n") + 1)
            self.rows = read_results(path)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"{path} is being written by another sweep; wait, or choose another file") from None
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
        """A heading."""
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
    # As configured; earlier versions stored only the congestion control in force, beside the calibration.
    network = (row.get("calibration") or {}).get("network", {})
    control = str(point.get("congestion_control") or network.get("congestion_control", "unknown"))
    after_idle = point.get("tcp_slow_start_after_idle")
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
    return Series(point["runtime"], schedule, wire)


def network_label(row: Row) -> str:
    """A profile's name, or a rate."""
    point = row["point"]
    if point["profile"] is not None:
        return str(point["profile"])
    return "unshaped" if point["rate_bits_per_s"] is None else format_rate(point["rate_bits_per_s"])


def network_labels(rows: Sequence[Row]) -> list[str]:
    """The networks of a table: unshaped, rates from fast to slow, then profiles."""
    points = {network_label(row): row["point"] for row in rows}

    def place(label: str) -> tuple[bool, float]:
        return points[label]["profile"] is not None, -(points[label]["rate_bits_per_s"] or math.inf)

    return sorted(points, key=place)


def bits_an_element(row: Row) -> tuple[float, float]:
    """Bits per element on the first cut: activations, gradients."""
    elements = row["elements_a_step"]
    return 8 * row["activation_nbytes"][0] / elements, 8 * row["gradient_nbytes"][0] / elements
