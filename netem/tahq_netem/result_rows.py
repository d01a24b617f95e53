"""Rows of a sweep as tables and plots see them: which measurements belong on one line, and in which order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tahq.units import format_rate, write_duration
from tahq_netem.sweep_results import DONE

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """What a table or a panel has in common."""

    sweep: str
    compute: str
    stages: int
    micro_batch: int
    congestion_control: str
    has_profiles: bool
    round_trip_s: float
    """0 for profiles, which have delays of their own."""

    @property
    def title(self) -> str:
        """For a heading."""
        delay = f"round trip {write_duration(self.round_trip_s)}" if self.round_trip_s else "no delay"
        return (
            f"{self.stages} stages, micro-batches of {self.micro_batch}, compute {self.compute}, "
            f"{'profiles' if self.has_profiles else delay}, {self.congestion_control}"
        )


@dataclass(frozen=True, slots=True)
class Series:
    """What a line has in common."""

    runtime: str
    schedule: str
    wire: str

    @property
    def label(self) -> str:
        """For a legend."""
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
    """As asked for; earlier versions stored only what was in force, and that only beside what they measured."""
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
    """What crossed the first cut in a step, in bits for each number: activations, gradients."""
    elements = row["elements_a_step"]
    return 8 * row["activation_nbytes"][0] / elements, 8 * row["gradient_nbytes"][0] / elements
