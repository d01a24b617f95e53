"""A sweep's results as plots: throughput and share of the bound against bandwidth, loss against wall-clock time."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from tahq.errors import UserError
from tahq_netem.sweep.results import Row, Setting, done, network_label, series_of, setting_of

SIZE = (5.2, 4.2)
"""Of a panel, in inches."""
PanelOf = Callable[[Row], tuple[Setting, str]]
"""Gives the setting and title of the panel that a row belongs to."""
DASHES = {"tahq": "-", "torch": "--", "bare": ":"}


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
    throughput = partial(_draw_against_rate, key="tokens_per_s", label="tokens/s", top=None)
    share = partial(_draw_against_rate, key="share_of_bound", label="share of the bound", top=1.05)
    wanted: list[tuple[str, Sequence[Row], PanelOf, Callable[[Any, Sequence[Row]], None]]] = [
        ("throughput", shaped, _by_setting, throughput),
        ("share", with_share, _by_setting, share),
        ("loss", [row for row in measured if _has_losses(row)], _by_network, _draw_losses),
    ]
    return [
        _draw(found, panel_of, draw, stem.with_name(f"{stem.name}-{name}.png"))
        for name, found, panel_of, draw in wanted
        if found
    ]


def _by_setting(row: Row) -> tuple[Setting, str]:
    return setting_of(row), setting_of(row).title


def _by_network(row: Row) -> tuple[Setting, str]:
    return setting_of(row), f"{network_label(row)}, {setting_of(row).title}"


def _draw(rows: Sequence[Row], panel_of: PanelOf, draw: Callable[[Any, Sequence[Row]], None], path: Path) -> Path:
    from matplotlib import pyplot

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


def _draw_against_rate(axis: Any, rows: Sequence[Row], key: str, label: str, top: float | None) -> None:
    """One line per series; unshaped points are at the right, behind a gap."""
    rates = sorted({row["point"]["rate_bits_per_s"] for row in rows} - {None})
    unshaped = 4 * (rates[-1] if rates else 1e9)
    for series in dict.fromkeys(map(series_of, rows)):
        points = {row["point"]["rate_bits_per_s"] or unshaped: row[key] for row in rows if series_of(row) == series}
        places = sorted(points)
        style = {"label": series.label, "linestyle": DASHES[series.runtime], "linewidth": 1.2, "markersize": 3}
        axis.plot([rate / 1e6 for rate in places], [points[rate] for rate in places], marker="o", **style)
    axis.set_xscale("log")
    ticks = [*rates, unshaped]
    axis.set_xticks([rate / 1e6 for rate in ticks], [*(f"{rate / 1e6:g}" for rate in rates), "unshaped"], fontsize=7)
    axis.minorticks_off()
    axis.set_xlabel("Mbit/s of each host, up and down")
    axis.set_ylabel(label)
    axis.set_ylim(0, top)


def _draw_losses(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        series = series_of(row)
        seconds = list(accumulate(step["seconds"] for step in row["steps"]))
        losses = [step["loss"] for step in row["steps"]]
        axis.plot(seconds, losses, label=series.label, linestyle=DASHES[series.runtime], linewidth=1.2)
    axis.set_xlabel("seconds")
    axis.set_ylabel("loss (nats per token)")


def _has_losses(row: Row) -> bool:
    """Whether losses mean something: real compute, and at least ten steps."""
    return row["point"]["compute"] == "real" and len(row["steps"]) >= 10 and all(step["loss"] for step in row["steps"])
