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


def sweep_report(rows: Sequence[Row]) -> str:
    """The report of one sweep or several."""
    return "\n".join(_lines(rows)) + "\n"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    measured = done(rows)
    yield f"# {', '.join(dict.fromkeys(row['sweep'] for row in rows)) or 'no results'}"
    yield ""
    for line in dict.fromkeys(one_line(row["machine"]) for row in rows):
        yield f"{line}."
    yield ""
    yield "Tokens per second and, in brackets, the share of the bound: the shortest time that compute and bytes leave"
    yield "open for a step, whatever the runtime. Real compute counts with its time in these steps (tahq only)."
    yield "Bits are per element on the wire, activations + gradients."
    yield ""
    for setting in sorted(set(map(setting_of, measured))):
        yield from _table(setting, [row for row in measured if setting_of(row) == setting])
    yield from _comparison(measured)
    yield from _conditions(measured)
    yield from _failures(rows)


def _table(setting: Setting, rows: Sequence[Row]) -> Iterator[str]:
    networks = network_labels(rows)
    yield f"## {setting.sweep}: {setting.title}"
    yield ""
    yield f"| runtime | wire | bits | {' | '.join(networks)} |"
    yield f"|---|---|---|{'---|' * len(networks)}"
    for series in dict.fromkeys(map(series_of, rows)):
        cells = {network_label(row): row for row in rows if series_of(row) == series}
        texts = [_cell(cells[network]) if network in cells else "" for network in networks]
        yield f"| {_head(series, next(iter(cells.values())))} | {' | '.join(texts)} |"
    yield ""


def _head(series: Series, row: Row) -> str:
    forward, backward = bits_an_element(row)
    return f"{series.runtime} {series.schedule} | `{series.wire}` | {forward:.2f} + {backward:.2f}"


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
    yield "## Real compute against sleeping"
    yield ""
    yield "| point | real | sleeping | sleeping against real |"
    yield "|---|---|---|---|"
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
    others = [row["busy_cores_of_others"] for row in rows]
    spread = [row["step_s_spread"] / row["step_s"] for row in rows]
    networks = [row["calibration"] for row in rows if row.get("calibration")]
    names = {f"{net['network']['backend']}, {net['network']['congestion_control']}" for net in networks}
    yield "## Conditions"
    yield ""
    yield f"- {len(rows)} points, {sum(len(row['steps']) for row in rows)} steps."
    yield f"- Busy cores: {min(busy):.2f} to {max(busy):.2f}; of other programs, {max(others):.2f} at most."
    yield f"- Longest minus shortest step of a point: {max(spread):.1%} of their mean at most."
    if names:
        yield f"- Networks (backend, congestion control): {'; '.join(sorted(names))}; measured beside each result."
    yield ""


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    failed = [row for row in rows if row["status"] != DONE]
    if not failed:
        return
    yield "## Not measured"
    yield ""
    for row in failed:
        yield f"- {series_of(row).label}, {setting_of(row).title}, {network_label(row)}: {row['error']}"
    yield ""
