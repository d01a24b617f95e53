"""Error against bits of every codec, on what crosses the cuts of a real model, and what it does to weight gradients.

    python benchmarks/bench_frontier.py [--data FILE-OR-FOLDER] [--draws 64] [--output FILE.md]

Both directions, three cuts, every codec at several settings, peers where they are installed (bitsandbytes, hivemind).
`frontier_measures` says what the figures are. Beside the result, a plot and all figures as JSON.

What was predicted is `PREDICTIONS`, written before the first run of `eden`, `wf` and of the weight gradients; the
result says what held.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path

from boundary_tensors import DIRECTIONS, add_data_option, load_cuts
from frontier_codecs import SPECS, our_candidates, peer_candidates
from frontier_measures import Bound, Figures, measure
from frontier_plot import draw
from harness import describe

from tahq.randomness import derive_seed

RESULT = Path(__file__).parent / "results" / "frontier_epyc2_202611.md"
PACE_SETTERS = ("tah", "tah:tau=0", "fixed:bits=4", "bitsandbytes nf4", "tah:low=2,high=3")
OUR_CURVES: Mapping[str, Callable[[str], bool]] = {
    "wf": lambda label: label.startswith("wf:") and "center" not in label,
    "eden": lambda label: label.startswith("eden:") and "group" not in label,
}

Means = Mapping[tuple[str, str], Figures]
"""(direction, label) to the means over the cuts."""


def means(measured: Sequence[Figures]) -> Means:
    """Over cuts, of every figure."""
    groups: dict[tuple[str, str], list[Figures]] = {}
    for each in measured:
        groups.setdefault((each.direction, each.label), []).append(each)
    return {key: _mean(group) for key, group in groups.items()}


def _mean(group: Sequence[Figures]) -> Figures:
    values = {field.name: [getattr(each, field.name) for each in group] for field in fields(Figures)}
    averaged = {name: statistics.fmean(column) if isinstance(column[0], float) else column[0]
                for name, column in values.items()}  # fmt: skip
    return Figures(**averaged)


# -- predictions ------------------------------------------------------------------------------------


def _keyed(table: Means, start: str) -> list[Figures]:
    return [each for each in table.values() if each.draws > 1 and each.label.startswith(start)]


def _is_unbiased(figures: Figures) -> bool:
    return abs(figures.mean_error / figures.noise_alone - 1) < 0.02


def _pairs(table: Means, direction: str, bits: Sequence[str]) -> list[tuple[Figures, Figures]]:
    return [(table[direction, f"wf:bits={b}"], table[direction, f"eden:bits={b}"]) for b in bits]


PREDICTIONS: tuple[tuple[str, Callable[[Means], bool]], ...] = (
    (
        "eden has no bias: the mean of the draws is off by what noise alone leaves, within 2 %, at all bits.",
        lambda table: all(map(_is_unbiased, _keyed(table, "eden"))),
    ),
    (
        "Nor has stochastic rounding.",
        lambda table: all(map(_is_unbiased, _keyed(table, "fixed"))),
    ),
    (
        "wf:bits=3.5 errs less than tah on activations, with 0.7 bits fewer.",
        lambda table: table["activations", "wf:bits=3.5"].error < table["activations", "tah"].error,
    ),
    (
        "wf lies 0.5 to 0.8 bits above the bound on activations, at all bits (Lloyd-Max: 0.36 to 0.64; metadata: 0.1).",
        lambda table: all(0.5 < f.bits_above_bound < 0.8 for (d, label), f in table.items()
                          if d == "activations" and OUR_CURVES["wf"](label)),
    ),
    (
        "Errors of eden average out in the weight gradient: coherence 1 within 3 %, both ways.",
        lambda table: all(abs(each.coherence - 1) < 0.03 for each in _keyed(table, "eden")),
    ),
    (
        "Those of tah on gradients don't quite: coherence above 1.1.",
        lambda table: table["gradients", "tah"].coherence > 1.1,
    ),
    (
        "One batch's weight gradient does not tell eden from wf on gradients (within 25 % at equal bits), though "
        "training does: what adds up over batches is small beside the noise of one.",
        lambda table: all(abs(eden.weight_error / wf.weight_error - 1) < 0.25
                          for wf, eden in _pairs(table, "gradients", ("2", "2.5", "3", "4"))),
    ),
    (
        "fixed needs at least half a bit more than wf for the same error on activations, at 4 bits.",
        lambda table: bits_for(table, "activations", "wf", "error", table["activations", "fixed:bits=4"].error)
        < table["activations", "fixed:bits=4"].bits - 0.5,
    ),
    (
        "An ideal entropy coder would save 0.1 to 0.35 bits of the codes of tah, eden and wf from 2 bits on.",
        lambda table: all(0.1 < f.saved_by_entropy < 0.35 for (_, label), f in table.items()
                          if label == "tah" or (f.bits > 2.04 and any(own(label) for own in OUR_CURVES.values()))),
    ),
)  # fmt: skip


def bits_for(table: Means, direction: str, family: str, figure: str, value: float) -> float:
    """Bits at which one of our curves has this error, linear in its logarithm; NaN outside of what was measured."""
    points = sorted(
        (each.bits, math.log(getattr(each, figure)))
        for (its_direction, label), each in table.items()
        if its_direction == direction and OUR_CURVES[family](label)
    )
    wanted = math.log(value)
    for (bits, high), (next_bits, low) in pairwise(points):
        if low <= wanted <= high:
            return bits + (next_bits - bits) * (high - wanted) / (high - low)
    return math.nan


# -- the result file --------------------------------------------------------------------------------


def report(table: Means, measured: Sequence[Figures], about: Sequence[str], stem: str) -> str:
    """As Markdown."""
    lines = [
        "# Error against bits, at the boundary of a GPT-2 small",
        "",
        *about,
        "",
        f"![error against bits]({stem}.png)",
    ]
    lines += ["", "## Predictions, and whether they held", "", "| predicted before the first run | held |", "|---|---|"]
    lines += [f"| {text} | {'yes' if holds(table) else '**no**'} |" for text, holds in PREDICTIONS]
    lines += ["", "## Bits at equal error", "", *_equal_error(table)]
    for direction in DIRECTIONS:
        lines += ["", f"## {direction.capitalize()}", "", *_table(table, direction)]
    lines += ["", "## By cut", "", *_by_cut(measured)]
    return "\n".join([*lines, ""])


def _equal_error(table: Means) -> list[str]:
    lines = [
        "What `wf` and `eden` need for the error of another codec, between their measured settings, means over cuts. – "
        "means outside of them.",
        "",
        "| direction | codec | bits | error | wf | eden | error of ΔW | wf | eden |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for direction in DIRECTIONS:
        for label in (label for label in PACE_SETTERS if (direction, label) in table):
            each = table[direction, label]
            cells = [direction, f"`{label}`", f"{each.bits:.2f}"]
            for figure in ("error", "weight_error"):
                value = getattr(each, figure)
                needed = [bits_for(table, direction, family, figure, value) for family in OUR_CURVES]
                cells += [f"{value:.4f}", *(_figure(bits, ".2f") for bits in needed)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _table(table: Means, direction: str) -> list[str]:
    lines = [
        "| codec | bits | error | bound | bits above it | cosine | mean of draws | noise alone | ΔW error "
        "| mean of draws | ΔW cosine | coherence | code bits | entropy |",
        "|---" * 14 + "|",
    ]
    rows = [each for (its_direction, _), each in table.items() if its_direction == direction]
    return lines + [_row(each) for each in rows]


def _row(each: Figures) -> str:
    is_drawn = each.draws > 1
    cells = [
        f"`{each.label}`",
        f"{each.bits:.3f}",
        f"{each.error:.4f}",
        f"{each.bound:.4f}",
        _figure(each.bits_above_bound, ".2f"),
        f"{each.cosine:.5f}",
        f"{each.mean_error:.4f}" if is_drawn else "",
        f"{each.noise_alone:.4f}" if is_drawn else "",
        f"{each.weight_error:.4f}",
        f"{each.weight_mean_error:.4f}" if is_drawn else "",
        f"{each.weight_cosine:.5f}",
        _figure(each.coherence, ".3f"),
        _figure(each.code_bits, ".3f"),
        _figure(each.entropy, ".3f"),
    ]
    return f"| {' | '.join(cells)} |"


def _figure(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _by_cut(measured: Sequence[Figures]) -> list[str]:
    labels = (
        "tah",
        "tah:tau=0",
        "fixed:bits=4",
        "bitsandbytes nf4",
        "wf:bits=3",
        "wf:bits=3.5",
        "eden:bits=2",
        "eden:bits=3",
    )
    blocks = sorted({each.block for each in measured})
    lines = [
        "Relative error; all other figures by cut are in the JSON file.",
        "",
        f"| direction | codec | {' | '.join(f'behind block {block}' for block in blocks)} |",
        "|---" * (2 + len(blocks)) + "|",
    ]
    errors = {(each.direction, each.label, each.block): each.error for each in measured}
    for direction in DIRECTIONS:
        for label in (label for label in labels if (direction, label, blocks[0]) in errors):
            row = " | ".join(f"{errors[direction, label, block]:.4f}" for block in blocks)
            lines.append(f"| {direction} | `{label}` | {row} |")
    return lines


def _about(options: argparse.Namespace, peers: Sequence[str], seconds: float) -> list[str]:
    return [
        f"{describe()}. `python benchmarks/bench_frontier.py`, {seconds:.0f} s. Peers: {'; '.join(peers)}.",
        "",
        "gpt2small_boundary.safetensors: activation X and gradient G behind blocks 2, 5 and 8, [2, 512, 768] in bf16; "
        "figures are means over the three cuts. *Bits* count all that is sent, scales and headers too. *Bound*: least "
        "error at these bits were values Gaussian, of known variance in each tile of 64 channels. "
        f"*Mean of draws*: error of the mean over {options.draws} keys of a randomised codec, and beside it what "
        "*noise alone* would leave, the error over the root of the draws: more would be bias. A codec that draws "
        "nothing has all of its error as bias. *ΔW*: weight gradient Xᵀ·G of a linear map at the cut over the 1,024 "
        "tokens, with X or G as it arrives. *Coherence*: its error relative to what independent errors of the tokens "
        "would make of it; above 1 they add up. *Entropy*: what an ideal coder would need for the codes, given their "
        "frequencies by width. `aqsgd:bits=4` is a first visit, which goes in fp16.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    parser.add_argument("--draws", type=int, default=64, help="keys for codecs that look at them")
    parser.add_argument("--backend", default="auto", help="of our codecs")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    begin = time.perf_counter()
    cuts = load_cuts(options.data)
    keys = [derive_seed(0, "frontier", draw) for draw in range(options.draws)]
    peers, said = peer_candidates()
    candidates = [*our_candidates(SPECS, options.backend), *peers]
    measured = []
    for cut in cuts:
        for direction in DIRECTIONS:
            bound = Bound(cut.of(direction))
            measured += [measure(candidate, cut, direction, keys, bound) for candidate in candidates]
            print(f"{direction} behind block {cut.block}: {time.perf_counter() - begin:.0f} s", file=sys.stderr)
    table, stem = means(measured), options.output.stem
    text = report(table, measured, _about(options, said, time.perf_counter() - begin), stem)
    options.output.write_text(text)
    options.output.with_suffix(".json").write_text(_json(measured))
    draw(options.output.with_suffix(".png"), cuts, list(table.values()))
    print(text)


def _json(measured: Sequence[Figures]) -> str:
    rows = [{name: _plain(value) for name, value in asdict(each).items()} for each in measured]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def _plain(value: object) -> object:
    """Six digits of a number, null for none."""
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else float(f"{value:.6g}")


if __name__ == "__main__":
    main()
