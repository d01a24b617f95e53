"""`tahq codec compare`: tensors from a file, measured with every codec, as a table, JSON lines and a plot."""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tahq.errors import CodecError, UserError
from tahq.quant import CodecSpec
from tahq.quant.backends import check_backend
from tahq.quant.comparison import USUAL_SPECS, CodecReport, check_comparable, compare, relative_error_bound
from tahq.quant.tiling import ENCODABLE
from tahq.units import format_size
from tahq_launch.analysis.codec_inspection import codec_errors
from tahq_launch.command_line import print_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TITLES = ("codec", "bytes", "bits", "error", "bound", "max error", "cosine", "bias", "worst token")
_COLUMNS = 3
_PANEL_INCHES = (5.0, 4.0)
_MARKERS = "os^vD*PX<>"
_BOUND_POINTS = 33


@dataclass(frozen=True, slots=True)
class ComparisonRequest:
    """One command line of `tahq codec compare`; no names means all tensors, no specs the usual ones."""

    file: Path
    names: tuple[str, ...]
    specs: tuple[str, ...]
    draws: int
    backend: str
    device: str
    plot: Path | None
    json_lines: bool


def run_comparison(request: ComparisonRequest) -> None:
    """Measure, and print a tensor's reports as soon as they exist; on stderr, the tensors that were left out."""
    if request.plot is not None and find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'tahq[plots]', or leave --plot out")
    check_backend(request.backend)
    specs = [str(CodecSpec.parse(spec)) for spec in request.specs or USUAL_SPECS]
    try:
        device = torch.empty(1, device=torch.device(request.device)).device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {request.device} cannot be used: {str(error).splitlines()[0]}") from error
    tensors, left_out = load_tensors(request.file, request.names)
    for name, reason in left_out.items():
        print(f"{request.file}: {name} is left out: {reason}", file=sys.stderr, flush=True)
    reports = {}
    for name, x in tensors.items():
        with codec_errors(f"{request.file}: {name}"):
            reports[name] = compare(x.to(device), specs, draws=request.draws, backend=request.backend)
        (_print_json if request.json_lines else _print_table)(name, x.to(device), reports[name])
    if request.plot is not None:
        draw_frontier(request.plot, tensors, reports)


def _print_json(name: str, x: torch.Tensor, reports: Sequence[CodecReport]) -> None:
    about = {"tensor": name, "shape": list(x.shape), "dtype": str(x.dtype).removeprefix("torch.")}
    for report in reports:
        # JSON has no infinity, the error of a codec whose range was exceeded: it becomes null
        values = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(report).items()}
        print(json.dumps(about | values, allow_nan=False), flush=True)


def _print_table(name: str, x: torch.Tensor, reports: Sequence[CodecReport]) -> None:
    print(f"{name}: {list(x.shape)}, {str(x.dtype).removeprefix('torch.')}, {x.device}")
    rows = []
    for report in reports:
        errors = [f"{error:.3g}" for error in (report.relative_error, report.gaussian_bound, report.max_error)]
        sizes = CodecSpec.parse(report.spec).brief(), format_size(report.nbytes), f"{report.bits_per_element:.3f}"
        others = f"{report.cosine:.5f}", f"{report.bias:.3g}", f"{report.worst_token_error:.3g}"
        speeds = [f"{each / 1e6:,.0f}" for each in (report.encode_elements_per_s, report.decode_elements_per_s)]
        rows.append((*sizes, *errors, *others, *speeds))
    print_table((*_TITLES, "enc M/s", "dec M/s"), rows, left=(0,))
    print(flush=True)


def load_tensors(file: Path, names: Sequence[str] = ()) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors that codecs can be compared on, fp64 as fp32; and the reasons for leaving the others out.

    Args:
        file: .safetensors; .npy, whose one array is named like the file.
        names: the tensors to load; none may be left out. Empty: all.

    Raises:
        UserError: the file cannot be read, it has no tensor of that name, or none that can be used.
    """
    read = _READERS.get(file.suffix)
    if read is None:
        raise UserError(f"{file}: tensors are read from {', '.join(_READERS)} files; got {file.suffix or 'no suffix'}")
    try:
        tensors = read(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, EOFError) as error:
        raise UserError(f"{file} is not a readable {file.suffix} file: {error}") from error
    except MemoryError as error:
        raise UserError(f"{file} does not fit into memory, or is damaged: {error}") from error
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{file} has no tensor {missing[0]!r}; there are {', '.join(tensors) or 'none'}")
    taken, left_out = {}, {}
    for name in names or tensors:
        x = tensors[name].float() if tensors[name].dtype == torch.float64 else tensors[name]
        reason = _obstacle(x)
        if reason:
            left_out[name] = reason
        else:
            taken[name] = x
    if not taken or (names and left_out):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise UserError(f"{file}: {reasons or 'it has no tensors'}")
    return taken, left_out


def _obstacle(x: torch.Tensor) -> str:
    """The reason that codecs cannot be compared on a tensor; empty: they can."""
    if x.dtype not in ENCODABLE or not x.dim():
        return f"codecs take fp32, bf16 and fp16 tensors [..., C]; it is {x.dtype} {list(x.shape)}"
    try:
        check_comparable(x)
    except CodecError as error:
        return str(error)
    return ""


def _read_npy(file: Path) -> dict[str, torch.Tensor]:
    array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive of several arrays")
    try:
        return {file.stem: torch.from_numpy(array)}
    except TypeError as error:
        raise ValueError(
            f"torch has no equivalent of its type {array.dtype}; convert it to float32 first (numpy writes bf16, which "
            "it does not know, as V2; a .safetensors file keeps it)"
        ) from error


_READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".safetensors": lambda file: dict(sorted(load_file(file).items())),
    ".npy": _read_npy,
}


def draw_frontier(out: Path, tensors: Mapping[str, torch.Tensor], reports: Mapping[str, Sequence[CodecReport]]) -> None:
    """Write the plot: relative error, logarithmic, against bits per element, codecs by colour.

    Codecs without error, or whose error is infinite, have no place on a logarithmic axis and are left out.
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
    """One point per spec (a colour per codec, a marker per spec), and the bound up to the most bits."""
    specs = {report.spec: CodecSpec.parse(report.spec) for report in reports}
    codecs = list(dict.fromkeys(spec.name for spec in specs.values()))
    for report in reports:
        spec = specs[report.spec]
        nth = [other for other in specs.values() if other.name == spec.name].index(spec)
        marker, color = _MARKERS[nth % len(_MARKERS)], f"C{codecs.index(spec.name)}"
        axes.plot(report.bits_per_element, report.relative_error, marker, color=color, label=spec.brief())
    if reports:
        rates = np.linspace(1, max(1.5, *(report.bits_per_element for report in reports)), _BOUND_POINTS).tolist()
        bounds = [relative_error_bound(x, rate) for rate in rates]
        axes.plot(rates, bounds, "--", color="black", label="Gaussian bound")
    axes.set(title=name, xlabel="bits per element, metadata included", ylabel="relative error", yscale="log")
    axes.grid(alpha=0.3)
