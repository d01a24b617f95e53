"""Error against bits of every codec, at three cuts of a GPT-2 small, and the error of the weight gradients.

The weight gradient is that of a linear map at the cut, ΔW = Xᵀ·G over 1,024 tokens, with activation X or gradient G
as it arrives. *Coherence* is its error over that of independent errors of the tokens: above 1 they add up.
*Mean of draws* is the error of the mean over the keys of a randomised codec; without bias it is error/√draws (*noise
alone*). *Bound* is the least error at these bits if values were Gaussian. Beside the result, a plot.

    python benchmarks/bench_frontier.py [--data FOLDER] [--draws 64] [--output benchmarks/results/frontier_<hw>.md]
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from harness import Table, main
from safetensors.torch import load_file

from tahq.quant import get_codec
from tahq.quant.comparison import relative_error_bound
from tahq.randomness import derive_seed

DATA = Path(__file__).parents[2] / "shared" / "data"
BLOCKS = (2, 5, 8)
DIRECTIONS = {"activations": "act", "gradients": "grad"}
CURVES = {
    "wf": [f"wf:bits={bits}" for bits in ("2", "2.5", "3", "3.5", "4", "5")],
    "eden": [f"eden:bits={bits}" for bits in ("1", "1.5", "2", "2.5", "3", "4")],
}
SPECS = (
    *(f"fixed:bits={bits}" for bits in range(3, 11)),
    *(f"fixed:bits={bits},group={group}" for bits in (3, 4) for group in (16, 256)),
    *(f"fixed:bits={bits},round=stochastic" for bits in (3, 4, 6)),
    *("tah:low=2,high=2", "tah:low=2,high=3", "tah:low=3,high=3", "tah", "tah:low=4,high=4", "tah:low=5,high=6"),
    *("tah:group=32", "tah:group=128", "tah:tau=0", "tah:select=low"),
    *("aqsgd:bits=4,cache=none", "aqsgd:bits=8,cache=none"),
    *CURVES["eden"],
    "eden:bits=2,group=64",
    *CURVES["wf"],
    "wf:bits=3.5,center=off",
)
PACE_SETTERS = ("tah", "tah:tau=0", "fixed:bits=4", "tah:low=2,high=3")
COLUMNS = ("bits", "error", "bound", "mean of draws", "noise alone", "ΔW error", "coherence")

Figures = Mapping[str, float]


def measure(spec: str, x: torch.Tensor, other: torch.Tensor, keys: Sequence[int], *, is_activation: bool) -> Figures:
    """Encode and decode under every key; errors are relative root mean squares over the keys."""
    codec = get_codec(spec)
    keys = keys if codec.is_keyed else keys[:1]
    rows, others = (tensor.reshape(-1, tensor.shape[-1]).float() for tensor in (x, other))

    def weight(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor.T @ others if is_activation else others.T @ tensor).double()

    squared = weight_squared = independent = 0.0
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for key in keys:
        buf = codec.encode(x, key=key)
        error = codec.decode(buf, x.shape, key=key).reshape(rows.shape).float() - rows
        total += error
        squared += float(error.double().square().sum())
        weight_squared += float(weight(error).square().sum())
        independent += float(error.double().square().sum(1) @ others.double().square().sum(1))
    norm, bits = float(rows.double().norm()), 8 * buf.numel() / x.numel()
    error_ = math.sqrt(squared / len(keys)) / norm
    return {
        "bits": bits,
        "error": error_,
        "bound": relative_error_bound(x, bits),
        "mean of draws": float(total.norm()) / len(keys) / norm if len(keys) > 1 else math.nan,
        "noise alone": error_ / math.sqrt(len(keys)) if len(keys) > 1 else math.nan,
        "ΔW error": math.sqrt(weight_squared / len(keys)) / float(weight(rows).norm()),
        "coherence": math.sqrt(weight_squared / independent),
    }


def means(cuts: Sequence[tuple[torch.Tensor, torch.Tensor]], direction: str, keys: Sequence[int]) -> dict[str, Figures]:
    """Of every codec, over the cuts."""
    is_activation = direction == "activations"
    pairs = cuts if is_activation else [(gradient, activation) for activation, gradient in cuts]
    table = {}
    for spec in SPECS:
        found = [measure(spec, x, other, keys, is_activation=is_activation) for x, other in pairs]
        table[spec] = {name: statistics.fmean(each[name] for each in found) for name in COLUMNS}
    return table


def bits_for(table: Mapping[str, Figures], family: str, error: float) -> str:
    """Bits at which one of our curves has this error, linear in its logarithm; – outside the measured settings."""
    points = [(table[spec]["bits"], math.log(table[spec]["error"])) for spec in CURVES[family]]
    for (bits, high), (more_bits, low) in pairwise(points):
        if low <= math.log(error) <= high:
            return f"{bits + (more_bits - bits) * (high - math.log(error)) / (high - low):.2f}"
    return "–"


def equal_error(tables: Mapping[str, Mapping[str, Figures]]) -> Iterator[Sequence[str]]:
    for direction, table in tables.items():
        for spec in PACE_SETTERS:
            each = table[spec]
            needed = [bits_for(table, family, each["error"]) for family in CURVES]
            yield direction, f"`{spec}`", f"{each['bits']:.2f}", f"{each['error']:.4f}", *needed


def draw(out: Path, tables: Mapping[str, Mapping[str, Figures]]) -> None:
    """Error against bits of all codecs, with the Gaussian bound at their bits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    for axes, (direction, table) in zip(figure.subplots(1, 2), tables.items(), strict=True):
        for family in ("tah", "fixed", "aqsgd", "eden", "wf"):
            points = sorted((each["bits"], each["error"]) for spec, each in table.items() if spec.startswith(family))
            axes.plot(*zip(*points, strict=True), "o" if family not in CURVES else "o-", label=family)
        bound = sorted((each["bits"], each["bound"]) for each in table.values())
        axes.plot(*zip(*bound, strict=True), "k--", label="Gaussian bound")
        axes.set(title=direction, xlabel="bits per element", ylabel="relative error", yscale="log")
        axes.legend()
    figure.savefig(out, dpi=110)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    tensors = load_file(options.data / "gpt2small_boundary.safetensors")
    cuts = [(tensors[f"act_after_block_{block}"], tensors[f"grad_after_block_{block}"]) for block in BLOCKS]
    keys = [derive_seed(0, "frontier", number) for number in range(options.draws)]
    measured = {direction: means(cuts, direction, keys) for direction in DIRECTIONS}
    if options.output:
        draw(options.output.with_suffix(".png"), measured)
        yield f"![error against bits]({options.output.stem}.png)"
    columns = ("direction", "codec", "bits", "error", "bits of wf for that error", "of eden")
    yield Table(columns, equal_error(measured), heading="Bits at equal error")
    for direction, table in measured.items():
        rows = (
            [f"`{spec}`", *("" if math.isnan(each[name]) else f"{each[name]:.4f}" for name in COLUMNS)]
            for spec, each in table.items()
        )
        yield Table(("codec", *COLUMNS), rows, heading=direction.capitalize())


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--data": {"type": Path, "default": DATA, "help": "folder with gpt2small_boundary.safetensors"},
            "--draws": {"type": int, "default": 64, "help": "keys for randomised codecs"},
        },
    )
