"""Error against bits, a panel a tensor, with the Gaussian bound drawn. Needs matplotlib, the extra `plots`."""

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tahq.errors import UserError
from tahq.quant import CodecSpec
from tahq.quant.comparison import CodecReport
from tahq.quant.gaussian_bound import relative_error_bound

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 3
_PANEL_INCHES = (5.0, 4.0)
_MARKERS = "os^vD*PX<>"
_BOUND_POINTS = 33


def require_matplotlib() -> None:
    """Say early that a plot cannot be drawn.

    Raises:
        UserError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'tahq[plots]', or leave --plot out")


def draw_frontier(out: Path, tensors: Mapping[str, torch.Tensor], reports: Mapping[str, Sequence[CodecReport]]) -> None:
    """Write the plot: relative error, logarithmic, against bits an element, codecs by colour.

    Codecs without error, or whose error is infinite, have no place on a logarithmic axis and are left out.

    Args:
        out: its suffix says the format.
        tensors: by name; the bound depends on the distribution of their energy.
        reports: of each of them.

    Raises:
        UserError: the file cannot be written, or in no such format.
    """
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(reports))
    rows = math.ceil(len(reports) / columns)
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for panel, (name, measured) in zip(panels, reports.items(), strict=False):
        _draw_panel(panel, name, tensors[name], [each for each in measured if 0 < each.relative_error < math.inf])
    for unused in panels[len(reports) :]:
        unused.set_visible(False)
    handles = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 * columns)
    try:
        figure.savefig(out, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {out} cannot be written: {error}") from error


def _draw_panel(axes: "Axes", name: str, x: torch.Tensor, reports: Sequence[CodecReport]) -> None:
    """Points, a colour a codec and a marker for each of its specs, and the bound up to the most bits."""
    specs = {report.spec: CodecSpec.parse(report.spec) for report in reports}
    codecs = list(dict.fromkeys(spec.name for spec in specs.values()))
    for report in reports:
        spec = specs[report.spec]
        nth = [other for other in specs.values() if other.name == spec.name].index(spec)
        marker, color = _MARKERS[nth % len(_MARKERS)], f"C{codecs.index(spec.name)}"
        axes.plot(report.bits_per_element, report.relative_error, marker, color=color, label=spec.brief())
    if reports:
        _draw_bound(axes, x, max(report.bits_per_element for report in reports))
    axes.set(title=name, xlabel="bits an element, metadata included", ylabel="relative error", yscale="log")
    axes.grid(alpha=0.3)


def _draw_bound(axes: "Axes", x: torch.Tensor, most_bits: float) -> None:
    rates = torch.linspace(1, max(most_bits, 1.5), _BOUND_POINTS).tolist()
    bounds = [relative_error_bound(x, rate) for rate in rates]
    axes.plot(rates, bounds, "--", color="black", label="Gaussian bound")
