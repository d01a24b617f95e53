"""`tahq codec compare`: tensors from a file, measured with every codec, as a table, JSON lines and a plot."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tahq.errors import CodecError, UserError
from tahq.quant import CodecSpec
from tahq.quant.backends import check_backend
from tahq.quant.comparison import USUAL_SPECS, CodecReport, check_comparable, compare
from tahq.units import format_size
from tahq_launch.codec_inspection import mistakes_of
from tahq_launch.codec_plot import draw_frontier, require_matplotlib
from tahq_launch.tables import print_table
from tahq_launch.tensor_files import load_tensors

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
