"""A sweep's results as plots: throughput and share of the bound against bandwidth, loss against wall-clock time."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tahq.errors import UserError
from tahq_netem.sweep.results import Row, Series, Setting, done, network_label, series_of, setting_of

SIZE = (5.2, 4.2)
"""Of a panel, in inches."""
Panel = tuple[Setting, str]
"""The setting of a panel, and its title."""
PanelOf = Callable[[Row], Panel]
Draw = Callable[[Any, Sequence[Row]], None]


def draw_plots(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw the plots for which there are rows.

    Args:
        rows: results of sweeps.
        stem: start of the files' names.

    Returns:
        The files: `<stem>-throughput.png`, `<stem>-share.png`, `<stem>-loss.png`.

    Raises:
        UserError: matplotlib is not installed.
    """
    measured = done(rows)
    shaped = [row for row in measured if row["point"]["profile"] is None]
    wanted: list[tuple[str, Sequence[Row], PanelOf, Draw]] = [
        ("throughput", shaped, _by_setting, _draw_throughput),
        ("share", [row for row in shaped if row["share_of_bound"] is not None], _by_setting, _draw_share),
        ("loss", [row for row in measured if _has_losses(row)], _by_network, _draw_losses),
    ]
    return [
        _draw(found, panel_of, draw, stem.with_name(f"{stem.name}-{name}.png"))
        for name, found, panel_of, draw in wanted
        if found
    ]


def _by_setting(row: Row) -> Panel:
    setting = setting_of(row)
    return setting, setting.title


def _by_network(row: Row) -> Panel:
    setting = setting_of(row)
    return setting, f"{network_label(row)}, {setting.title}"


def _draw(rows: Sequence[Row], panel_of: PanelOf, draw: Draw, path: Path) -> Path:
    pyplot = _pyplot()
    panels = sorted(set(map(panel_of, rows)))
    columns = min(3, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure, axes = pyplot.subplots(lines, columns, figsize=(SIZE[0] * columns, SIZE[1] * lines), squeeze=False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        axis.set_title(panel[1], fontsize=7)
        draw(axis, [row for row in rows if panel_of(row) == panel])
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=6)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_throughput(axis: Any, rows: Sequence[Row]) -> None:
    _draw_against_rate(axis, rows, "tokens_per_s")
    axis.set_ylabel("tokens/s")
    axis.set_ylim(bottom=0)


def _draw_share(axis: Any, rows: Sequence[Row]) -> None:
    _draw_against_rate(axis, rows, "share_of_bound")
    axis.set_ylabel("share of the bound")
    axis.set_ylim(0, 1.05)


def _draw_against_rate(axis: Any, rows: Sequence[Row], key: str) -> None:
    """One line per series; unshaped points are at the right, behind a gap."""
    rates = sorted({row["point"]["rate_bits_per_s"] for row in rows} - {None})
    unshaped = 4 * (rates[-1] if rates else 1e9)
    for series in dict.fromkeys(map(series_of, rows)):
        points = {row["point"]["rate_bits_per_s"] or unshaped: row[key] for row in rows if series_of(row) == series}
        places = sorted(points)
        axis.plot([rate / 1e6 for rate in places], [points[rate] for rate in places], marker="o", **_style(series))
    axis.set_xscale("log")
    ticks = [*rates, unshaped]
    axis.set_xticks([rate / 1e6 for rate in ticks], [*(f"{rate / 1e6:g}" for rate in rates), "unshaped"], fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel("Mbit/s of each host, up and down")


def _draw_losses(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        seconds = list(accumulate(step["seconds"] for step in row["steps"]))
        axis.plot(seconds, [step["loss"] for step in row["steps"]], **_style(series_of(row)))
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss (nats per token)")


def _has_losses(row: Row) -> bool:
    """Whether losses mean something: real compute, and at least ten steps."""
    return row["point"]["compute"] == "real" and len(row["steps"]) >= 10 and all(step["loss"] for step in row["steps"])


def _style(series: Series) -> dict[str, Any]:
    dashes = {"tahq": "-", "torch": "--", "bare": ":"}
    return {"label": series.label, "linestyle": dashes[series.runtime], "linewidth": 1.2, "markersize": 3}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install 'tahq[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
