"""A sweep's results as Markdown: a table for each setting, real against sleeping compute, and failures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tahq.units import write_duration
from tahq_netem.measure.machine import one_line
from tahq_netem.sweep.results import (
    DONE,
    Row,
    Series,
    Setting,
    bits_an_element,
    done,
    network_label,
    network_labels,
    series_of,
    setting_of,
)

EXPLANATION = """
Tokens per second and, in brackets, the share of the bound: the shortest time that compute and bytes leave
open for a step, whatever the runtime. Real compute counts with its time in these steps (tahq only).
Bits are per element on the wire, activations + gradients.
"""


def sweep_report(rows: Sequence[Row]) -> str:
    """The report of one sweep or several."""
    measured = done(rows)
    machines = dict.fromkeys(one_line(row["machine"]) for row in rows)
    settings = [_table(setting, measured) for setting in sorted(set(map(setting_of, measured)))]
    sections = [*settings, _comparison(measured), _conditions(measured), _failures(rows)]
    lines = [
        f"# {', '.join(dict.fromkeys(row['sweep'] for row in rows)) or 'no results'}",
        "",
        *(f"{machine}." for machine in machines),
        *EXPLANATION.splitlines(),
        "",
        *(line for section in sections for line in section),
    ]
    return "\n".join(lines) + "\n"


def _table(setting: Setting, measured: Sequence[Row]) -> Iterator[str]:
    rows = [row for row in measured if setting_of(row) == setting]
    networks = network_labels(rows)
    yield from (f"## {setting.sweep}: {setting.title}", "")
    yield f"| runtime | wire | bits | {' | '.join(networks)} |"
    yield f"|---|---|---|{'---|' * len(networks)}"
    for series in dict.fromkeys(map(series_of, rows)):
        cells = {network_label(row): row for row in rows if series_of(row) == series}
        forward, backward = bits_an_element(next(iter(cells.values())))
        texts = [_cell(cells[network]) if network in cells else "" for network in networks]
        head = f"{series.runtime} {series.schedule} | `{series.wire}` | {forward:.2f} + {backward:.2f}"
        yield f"| {head} | {' | '.join(texts)} |"
    yield ""


def _cell(row: Row) -> str:
    share = f" ({row['share_of_bound']:.0%})" if row["share_of_bound"] is not None else ""
    return f"{row['tokens_per_s']:,.0f}{share}"


def _comparison(rows: Sequence[Row]) -> Iterator[str]:
    """Points that were measured with both real and sleeping compute: the difference."""
    by_place: dict[tuple[Series, Setting, str], dict[bool, Row]] = {}
    for row in rows:
        setting = setting_of(row)
        place = (series_of(row), replace(setting, compute=""), network_label(row))
        by_place.setdefault(place, {})[setting.compute == "real"] = row
    both = {place: found for place, found in by_place.items() if len(found) == 2}
    if not both:
        return
    yield from ("## Real compute against sleeping", "")
    yield from ("| point | real | sleeping | sleeping against real |", "|---|---|---|---|")
    for (series, setting, network), found in both.items():
        real, sleeping = found[True]["tokens_per_s"], found[False]["tokens_per_s"]
        delay = f", {write_duration(setting.round_trip_s)}" if setting.round_trip_s else ""
        what = f"{series.label}, {setting.stages} stages of {setting.micro_batch}, {network}{delay}"
        yield f"| {what} | {real:,.0f} | {sleeping:,.0f} | {sleeping / real - 1:+.1%} |"
    yield ""


def _conditions(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    busy = [row["busy_cores"] for row in rows]
    others = max(row["busy_cores_of_others"] for row in rows)
    spread = max(row["step_s_spread"] / row["step_s"] for row in rows)
    networks = [row["calibration"]["network"] for row in rows if row.get("calibration")]
    names = sorted({f"{network['backend']}, {network['congestion_control']}" for network in networks})
    yield from ("## Conditions", "")
    yield f"- {len(rows)} points, {sum(len(row['steps']) for row in rows)} steps."
    yield f"- Busy cores: {min(busy):.2f} to {max(busy):.2f}; of other programs, {others:.2f} at most."
    yield f"- Longest minus shortest step of a point: {spread:.1%} of their mean at most."
    if names:
        yield f"- Networks (backend, congestion control): {'; '.join(names)}; measured beside each result."
    yield ""


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    failed = [row for row in rows if row["status"] != DONE]
    if failed:
        yield from ("## Not measured", "")
        yield from (
            f"- {series_of(row).label}, {setting_of(row).title}, {network_label(row)}: {row['error']}" for row in failed
        )
        yield ""
