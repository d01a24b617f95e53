"""The plot of `bench_frontier`: above, error against bits with the Gaussian bound; below, error of weight gradients."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boundary_tensors import DIRECTIONS, Cut
from frontier_measures import Figures

from tahq.quant.gaussian_bound import relative_error_bound

STYLES = {
    "wf": ("C0", "o"),
    "eden": ("C1", "s"),
    "tah": ("C2", "^"),
    "fixed": ("C3", "v"),
    "fixed, stochastic": ("C4", "x"),
    "aqsgd": ("C5", "D"),
    "bitsandbytes": ("C6", "P"),
    "hivemind": ("C7", "X"),
}
JOINED = ("wf", "eden")
NAMED = {"tah": (7, 7), "fixed:bits=8": (-62, -4)}
"""The paper's pair, and where its labels go, in points from their marks."""
MOST_BITS = 8.6


def draw(out: Path, cuts: Sequence[Cut], figures: Sequence[Figures]) -> None:
    """Write the plot; figures are means over the cuts, and so is the bound."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), layout="constrained")
    panels = figure.subplots(2, 2, sharex=True)
    for column, direction in enumerate(DIRECTIONS):
        mine = [each for each in figures if each.direction == direction and each.bits <= MOST_BITS]
        above, below = panels[0][column], panels[1][column]
        _draw_points(above, mine, "error")
        _draw_bound(above, cuts, direction)
        above.set(title=direction, ylabel="relative error")
        _draw_points(below, mine, "weight_error")
        below.set(xlabel="bits an element, all included", ylabel="relative error of the weight gradient")
    for panel in panels.flatten():
        panel.set_yscale("log")
        panel.grid(which="both", alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(out, dpi=110)


def _draw_points(axes: Any, figures: Sequence[Figures], name: str) -> None:
    for family, (color, marker) in STYLES.items():
        points = sorted((each.bits, getattr(each, name)) for each in figures if _is_of(each, family))
        if points:
            line = "-" if family in JOINED else "none"
            axes.plot(*zip(*points, strict=True), ls=line, color=color, marker=marker, markersize=5, label=family)
    for each in figures:
        if each.label in NAMED:
            place = (each.bits, getattr(each, name))
            axes.annotate(each.label, place, NAMED[each.label], textcoords="offset points", fontsize=8)


def _is_of(each: Figures, family: str) -> bool:
    """Of joined families only settings that differ in bits alone."""
    is_variant = family in JOINED and "," in each.label
    return each.family == family and not is_variant


def _draw_bound(axes: Any, cuts: Sequence[Cut], direction: str) -> None:
    rates = [1 + 0.1 * step for step in range(int((MOST_BITS - 1) * 10) + 1)]
    bound = [statistics.fmean(relative_error_bound(cut.of(direction), rate) for cut in cuts) for rate in rates]
    axes.plot(rates, bound, "--", color="black", label="Gaussian bound")
