"""Held-out loss by pair of codecs after 2,000 steps: the table from which `wire: auto` takes its fewest bits.

    python benchmarks/bench_quality_floor.py --tokenizer GPT2 --text wikitext2-valid.txt wikitext2-test.txt stdlib

GPT-2 small, random start, WikiText-2 and Python sources in GPT-2 BPE, 16 × 512 tokens per step, codecs at three cuts;
afterwards the loss of the weights, without codecs, on the 5 % of the data that were held out. With the codecs' kernels
a seed takes some minutes on two H100 (--model tiny --steps 30 --tokenizer bytes shows on a CPU that it works). Runs are
kept beside the result file; call the script again to continue.
"""

import argparse
import statistics
from collections.abc import Iterator

from cut_training import HELD_OUT_BATCHES
from harness import Table, main
from training_runs import ARGUMENTS, METHOD, NONE, Difference, Result, Run, bits_per_element, run_all

PAIRS = (
    (NONE, NONE),
    ("wf:bits=5", "eden:bits=1.5"),
    ("wf:bits=5", "eden:bits=2"),
    ("wf:bits=4", "eden:bits=3"),
    ("wf:bits=4", "eden:bits=1.5"),
    ("wf:bits=6", "eden:bits=2"),
    ("wf:bits=5", "eden:bits=3"),
    ("wf:bits=4", "eden:bits=2"),
    ("wf:bits=6", "eden:bits=3"),
    ("wf:bits=8", "eden:bits=4"),
    ("tah", "fixed:bits=6"),
    ("wf:bits=3", "eden:bits=2"),
)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    wanted = [Run(options.model[0], *pair, seed, options.steps) for seed in range(options.seeds) for pair in PAIRS]
    results = {(each.run.activations, each.run.gradients, each.run.seed): each for each in run_all(wanted, options)}
    yield (
        f"{len(results)} runs of {options.model[0]}, {options.steps} steps. {METHOD} Held-out: the same difference in "
        f"the loss of the final weights, without codecs, over {HELD_OUT_BATCHES} held-out batches."
    )
    base = [results[NONE, NONE, seed] for seed in range(options.seeds)]
    trained, held = (statistics.fmean(getattr(each, name) for each in base) for name in ("loss", "held_out"))
    yield f"Uncompressed: {trained:.4f} in training, {held:.4f} held out."
    columns = ("activations", "gradients", "bits", "larger direction", "gap", "±", "held-out gap", "±", "seeds")
    yield Table(columns, (_row(pair, results, base) for pair in PAIRS[1:]))


def _row(pair: tuple[str, str], results: dict[tuple[str, str, int], Result], base: list[Result]) -> list[object]:
    bits = [bits_per_element(name) for name in pair]
    cells: list[object] = [*(f"`{name}`" for name in pair), *(f"{each:.2f}" for each in (sum(bits), max(bits)))]
    for name in ("loss", "held_out"):
        pairs = ((getattr(results[(*pair, seed)], name), getattr(base[seed], name)) for seed in range(len(base)))
        gap = Difference.of([mine - theirs for mine, theirs in pairs])
        cells += [f"{gap.mean:+.4f}", f"{gap.half_width:.4f}"]
    return [*cells, len(base)]


if __name__ == "__main__":
    defaults = {"--model": ["gpt2"], "--steps": 2000, "--seeds": 1, "--processes": 3, "--backend": "auto"}
    main(__doc__, tables, ARGUMENTS | {name: {**ARGUMENTS[name], "default": value} for name, value in defaults.items()})
