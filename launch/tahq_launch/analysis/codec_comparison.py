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
from tahq.quant.comparison import USUAL_SPECS, CodecReport, check_comparable, compare
from tahq.quant.gaussian_bound import relative_error_bound
from tahq.quant.tiling import ENCODABLE
from tahq.units import format_size
from tahq_launch.analysis.codec_inspection import mistakes_of
from tahq_launch.tables import print_table

_TITLES = [
    "codec",
    "bytes",
    "bits",
    "error",
    "bound",
    "max error",
    "cosine",
    "bias",
    "worst token",
    "enc M/s",
    "dec M/s",
]


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
    """Measure, and print a tensor's reports as soon as they are there; on stderr, which tensors were left out.

    Raises:
        UserError: a file, name, spec, backend, device or tensor that cannot be used, or a plot without matplotlib.
    """
    if request.plot is not None:
        require_matplotlib()
    check_backend(request.backend)
    specs = [str(CodecSpec.parse(spec)) for spec in request.specs or USUAL_SPECS]
    device = _device(request.device)
    tensors = _comparable(request)
    reports = {name: _measure(request, name, x.to(device), specs) for name, x in tensors.items()}
    if request.plot is not None:
        draw_frontier(request.plot, tensors, reports)


def _comparable(request: ComparisonRequest) -> dict[str, torch.Tensor]:
    """The tensors; without those that nothing can be measured on, if they are not asked for by name."""
    loaded = load_tensors(request.file, request.names)
    reasons = {name: reason for name, x in loaded.taken.items() if (reason := _why_not(x))}
    if reasons and (request.names or len(reasons) == len(loaded.taken)):
        name, reason = next(iter(reasons.items()))
        raise UserError(f"{request.file}: {name}: {reason}")
    for name, reason in {**loaded.left_out, **reasons}.items():
        print(f"{request.file}: {name} is left out: {reason}", file=sys.stderr, flush=True)
    return {name: x for name, x in loaded.taken.items() if name not in reasons}


def _why_not(x: torch.Tensor) -> str:
    try:
        check_comparable(x)
    except CodecError as error:
        return str(error)
    return ""


def _measure(request: ComparisonRequest, name: str, x: torch.Tensor, specs: Sequence[str]) -> list[CodecReport]:
    with mistakes_of(f"{request.file}: {name}"):
        reports = compare(x, specs, draws=request.draws, backend=request.backend)
    if request.json_lines:
        _print_json(name, x, reports)
    else:
        _print_table(name, x, reports)
    return reports


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"--device {text} cannot be used: {reason}") from error
    return device


def _print_json(name: str, x: torch.Tensor, reports: Sequence[CodecReport]) -> None:
    for report in reports:
        about: dict[str, object] = {
            "tensor": name,
            "shape": list(x.shape),
            "dtype": str(x.dtype).removeprefix("torch."),
        }
        print(json.dumps(about | _finite(asdict(report)), allow_nan=False), flush=True)


def _finite(numbers: Mapping[str, object]) -> dict[str, object]:
    """The same with null for an infinity, which JSON lacks: the error of a codec whose range was exceeded."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}


def _print_table(name: str, x: torch.Tensor, reports: Sequence[CodecReport]) -> None:
    print(f"{name}: {list(x.shape)}, {str(x.dtype).removeprefix('torch.')}, {x.device}")
    print_table(_TITLES, [_cells(report) for report in reports], left=(0,))
    print(flush=True)


def _cells(report: CodecReport) -> list[str]:
    errors = (report.relative_error, report.gaussian_bound, report.max_error)
    speeds = (report.encode_elements_per_s, report.decode_elements_per_s)
    return [
        CodecSpec.parse(report.spec).brief(),
        format_size(report.nbytes),
        f"{report.bits_per_element:.3f}",
        *(f"{error:.3g}" for error in errors),
        f"{report.cosine:.5f}",
        f"{report.bias:.3g}",
        f"{report.worst_token_error:.3g}",
        *(f"{speed / 1e6:,.0f}" for speed in speeds),
    ]


@dataclass(frozen=True, slots=True)
class LoadedTensors:
    """By name; of what was left out, the reason."""

    taken: dict[str, torch.Tensor]
    left_out: dict[str, str]


def load_tensors(file: Path, names: Sequence[str] = ()) -> LoadedTensors:
    """Tensors of one dimension or more that a codec takes; fp64 as fp32.

    Args:
        file: .safetensors; .npy, whose one array is named like the file.
        names: which; all floating-point ones if empty.

    Raises:
        UserError: a file that cannot be read, a name that is not in it, or nothing that a codec takes.
    """
    read = _READERS.get(file.suffix)
    if read is None:
        raise UserError(f"{file}: tensors are read from {', '.join(_READERS)} files; got {file.suffix or 'no suffix'}")
    try:
        tensors = read(file)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror or error}") from error
    except (SafetensorError, ValueError, EOFError) as error:
        raise UserError(f"{file} is no readable {file.suffix} file: {error}") from error
    except MemoryError as error:
        raise UserError(f"{file} does not fit into memory, or is damaged: {error}") from error
    return _chosen(file, tensors, names)


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    return dict(sorted(load_file(file).items()))


def _read_npy(file: Path) -> dict[str, torch.Tensor]:
    array = np.load(file, allow_pickle=False)
    if not isinstance(array, np.ndarray):
        raise ValueError("it is an archive of several arrays")
    try:
        return {file.stem: torch.from_numpy(array)}
    except TypeError as error:
        raise ValueError(
            f"torch has no such type as its {array.dtype}; convert it to float32 first (bf16, which numpy does not "
            "know, it writes as V2: a .safetensors file keeps it)"
        ) from error


_TAKEN = "codecs take fp32, bf16 and fp16 tensors [..., C]"

_READERS: dict[str, Callable[[Path], dict[str, torch.Tensor]]] = {
    ".safetensors": _read_safetensors,
    ".npy": _read_npy,
}


def _chosen(file: Path, tensors: dict[str, torch.Tensor], names: Sequence[str]) -> LoadedTensors:
    if missing := [name for name in names if name not in tensors]:
        raise UserError(f"{file} has no tensor {missing[0]!r}; there are {', '.join(tensors) or 'none'}")
    wanted = {name: tensors[name] for name in names} if names else tensors
    floats = {name: x.float() if x.dtype == torch.float64 else x for name, x in wanted.items()}
    taken = {name: x for name, x in floats.items() if x.dtype in ENCODABLE and x.dim()}
    got = {name: f"{x.dtype} {list(x.shape)}" for name, x in floats.items() if name not in taken}
    if not taken or (names and got):
        listed = ", ".join(f"{name} {kind}" for name, kind in got.items())
        raise UserError(f"{file}: {_TAKEN}; got {listed or 'no tensors'}")
    return LoadedTensors(taken, {name: f"{_TAKEN}; it is {kind}" for name, kind in got.items()})


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
    """Write the plot: relative error, logarithmic, against bits per element, codecs by colour.

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
    axes.set(title=name, xlabel="bits per element, metadata included", ylabel="relative error", yscale="log")
    axes.grid(alpha=0.3)


def _draw_bound(axes: "Axes", x: torch.Tensor, most_bits: float) -> None:
    rates = torch.linspace(1, max(most_bits, 1.5), _BOUND_POINTS).tolist()
    bounds = [relative_error_bound(x, rate) for rate in rates]
    axes.plot(rates, bounds, "--", color="black", label="Gaussian bound")
