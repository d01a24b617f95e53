"""A sweep's results as Markdown and plots.

The Markdown has a table for each setting, real against sleeping compute, and failures; the plots show throughput and
share of the bound against bandwidth, and loss against wall-clock time.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from tahq.errors import UserError, file_errors
from tahq.units import write_duration
from tahq_netem.measure.machine import one_line
from tahq_netem.sweep.results import (
    DONE,
    Row,
    Series,
    Setting,
    done,
    network_label,
    read_results,
    series_of,
    setting_of,
)

EXPLANATION = """
Tokens per second and, in brackets, the share of the bound: the shortest time that compute and bytes leave
open for a step, whatever the runtime. Real compute counts with its time in these steps (tahq only).
Bits are per element on the wire, activations + gradients.
"""
SIZE = (5.2, 4.2)
"""Of a panel, in inches."""
Draw = Callable[[Any, Sequence[Row]], None]
"""Draws rows onto a pair of axes."""
TitleOf = Callable[[Row], str]
"""Gives the title of the panel that a row belongs to."""
DASHES = {"tahq": "-", "torch": "--", "bare": ":"}


def plot_results(results: Sequence[Path], out: Path) -> list[Path]:
    """Write the table of result files to `out`, such as table.md, and the plots beside it; return the written files."""
    # If two files have a point, the later file's row counts.
    rows = list({id: row for path in results for id, row in read_results(path).items()}.values())
    with file_errors("write", out):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(sweep_report(rows), encoding="utf-8")
    return [out, *draw_plots(rows, out.with_suffix(""))]


def sweep_report(rows: Sequence[Row]) -> str:
    """The report of one sweep or several."""
    measured = done(rows)
    settings = [_table(setting, measured) for setting in sorted(set(map(setting_of, measured)))]
    sections = [*settings, _comparison(measured), _conditions(measured), _failures(rows)]
    lines = [
        f"# {', '.join(dict.fromkeys(row['sweep'] for row in rows)) or 'no results'}",
        "",
        *dict.fromkeys(f"{one_line(row['machine'])}." for row in rows),
        *EXPLANATION.splitlines(),
        "",
        *(line for section in sections for line in section),
    ]
    return "\n".join(lines) + "\n"


def _table(setting: Setting, measured: Sequence[Row]) -> Iterator[str]:
    rows = [row for row in measured if setting_of(row) == setting]
    # Unshaped, rates from fast to slow, then profiles.
    points = {network_label(row): row["point"] for row in rows}
    networks = sorted(
        points, key=lambda label: (bool(points[label]["profile"]), -(points[label]["rate_bits_per_s"] or math.inf))
    )
    yield from (f"## {setting.sweep}: {setting.title}", "")
    yield f"| runtime | wire | bits | {' | '.join(networks)} |"
    yield f"|---|---|---|{'---|' * len(networks)}"
    for series in dict.fromkeys(map(series_of, rows)):
        runtime, schedule, wire = series
        cells = {network_label(row): row for row in rows if series_of(row) == series}
        bits = " + ".join(_bits(cells.values(), key) for key in ("activation_nbytes", "gradient_nbytes"))
        texts = [_cell(cells[network]) if network in cells else "" for network in networks]
        yield f"| {runtime} {schedule} | `{wire}` | {bits} | {' | '.join(texts)} |"
    yield ""


def _bits(rows: Iterable[Row], key: str) -> str:
    """Bits per element of these points; the least to the most, where default settings chose by network."""
    bits = [8 * row[key][0] / row["elements_a_step"] for row in rows]
    least, most = f"{min(bits):.2f}", f"{max(bits):.2f}"
    return least if least == most else f"{least} to {most}"


def _cell(row: Row) -> str:
    share = f" ({row['share_of_bound']:.0%})" if row["share_of_bound"] is not None else ""
    return f"{row['tokens_per_s']:,.0f}{share}"


def _label(series: Series) -> str:
    runtime, schedule, wire = series
    return f"{runtime} {schedule}, {wire}"


def _comparison(rows: Sequence[Row]) -> Iterator[str]:
    """Points that were measured with both real and sleeping compute: the difference."""
    by_place: dict[tuple[Series, Setting, str], dict[bool, Row]] = {}
    for row in rows:
        setting = setting_of(row)
        place = (series_of(row), setting._replace(compute=""), network_label(row))
        by_place.setdefault(place, {})[setting.compute == "real"] = row
    both = {place: found for place, found in by_place.items() if len(found) == 2}
    if not both:
        return
    yield from ("## Real compute against sleeping", "")
    yield from ("| point | real | sleeping | sleeping against real |", "|---|---|---|---|")
    for (series, setting, network), found in both.items():
        real, sleeping = found[True]["tokens_per_s"], found[False]["tokens_per_s"]
        delay = f", {write_duration(setting.round_trip_s)}" if setting.round_trip_s else ""
        what = f"{_label(series)}, {setting.stages} stages of {setting.micro_batch}, {network}{delay}"
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
        for row in failed:
            yield f"- {_label(series_of(row))}, {setting_of(row).title}, {network_label(row)}: {row['error']}"
        yield ""


def draw_plots(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw the plots for which there are rows: `<stem>-throughput.png`, `<stem>-share.png`, `<stem>-loss.png`."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'tahq[plots]'") from None
    matplotlib.use("Agg")
    measured = done(rows)
    shaped = [row for row in measured if row["point"]["profile"] is None]
    with_share = [row for row in shaped if row["share_of_bound"] is not None]

    def title(row: Row) -> str:
        return setting_of(row).title

    wanted: list[tuple[str, Sequence[Row], TitleOf, Draw]] = [
        ("throughput", shaped, title, partial(_draw_against_rate, "tokens_per_s", "tokens/s", None)),
        ("share", with_share, title, partial(_draw_against_rate, "share_of_bound", "share of the bound", 1.05)),
        ("loss", list(filter(_has_losses, measured)), lambda row: f"{network_label(row)}, {title(row)}", _draw_losses),
    ]
    return [
        _draw(found, title_of, draw, stem.with_name(f"{stem.name}-{name}.png"))
        for name, found, title_of, draw in wanted
        if found
    ]


def _draw(rows: Sequence[Row], title_of: TitleOf, draw: Draw, path: Path) -> Path:
    from matplotlib import pyplot

    panels = sorted({(setting_of(row), title_of(row)) for row in rows})
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(SIZE[0] * columns, SIZE[1] * lines), squeeze=False)
    for axis, (setting, title) in zip(axes.flat, panels, strict=False):
        axis.set_title(title, fontsize=7)
        draw(axis, [row for row in rows if (setting_of(row), title_of(row)) == (setting, title)])
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_against_rate(key: str, label: str, top: float | None, axis: Any, rows: Sequence[Row]) -> None:
    """One line per series; unshaped points are at the right, behind a gap."""
    rates = sorted({row["point"]["rate_bits_per_s"] for row in rows} - {None})
    unshaped = 4 * (rates[-1] if rates else 1e9)
    for series in dict.fromkeys(map(series_of, rows)):
        points = {row["point"]["rate_bits_per_s"] or unshaped: row[key] for row in rows if series_of(row) == series}
        places = sorted(points)
        style = {"label": _label(series), "linestyle": DASHES[series[0]], "linewidth": 1.2, "markersize": 3}
        axis.plot([rate / 1e6 for rate in places], [points[rate] for rate in places], marker="o", **style)
    axis.set_xscale("log")
    ticks = {rate / 1e6: f"{rate / 1e6:g}" for rate in rates} | {unshaped / 1e6: "unshaped"}
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel("Mbit/s of each host, up and down")
    axis.set_ylabel(label)
    axis.set_ylim(0, top)


def _draw_losses(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        series = series_of(row)
        seconds = list(accumulate(step["seconds"] for step in row["steps"]))
        losses = [step["loss"] for step in row["steps"]]
        axis.plot(seconds, losses, label=_label(series), linestyle=DASHES[series[0]], linewidth=1.2)
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss (nats per token)")


def _has_losses(row: Row) -> bool:
    """Whether losses mean something: real compute, and at least ten steps."""
    return row["point"]["compute"] == "real" and len(row["steps"]) >= 10 and all(step["loss"] for step in row["steps"])
