"""Training loss by codec: one model cut in four, by codec, direction and seed.

    python benchmarks/bench_convergence.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib

GPT-2 small (12 blocks of 768) and a Llama of the same size, random start, WikiText-2 and Python sources in GPT-2 BPE,
16 × 512 tokens per step; a codec at the three cuts, through its real bytes. About 160 runs of 400 steps: twelve minutes
on four H200, more than a day on CPUs (--model tiny --steps 30 shows that it works). Runs are kept beside the result
file; call the script again to continue.
"""

import argparse
import statistics
from collections.abc import Iterator

from harness import Table, main
from training_runs import ARGUMENTS, METHOD, NONE, Losses, Run, bits_per_element, picture, run_all

PAPER = ("tah", "fixed:bits=6")
PAIRS = (
    PAPER,
    ("wf:bits=4", "eden:bits=3"),
    ("wf:bits=4", "eden:bits=2"),
    ("wf:bits=4", "eden:bits=1.5"),
    ("wf:bits=3.5", "eden:bits=2"),
    ("wf:bits=3", "eden:bits=2"),
    ("wf:bits=3", "eden:bits=1.5"),
    ("wf:bits=2.5", "eden:bits=1.5"),
)
GRADIENTS = (
    "fixed:bits=6",
    "fixed:bits=4,round=stochastic",
    "tah",
    "tah:tau=0",
    "eden:bits=4",
    "eden:bits=3",
    "eden:bits=2",
    "eden:bits=2,group=64",
    "eden:bits=1.5",
    "eden:bits=1",
)
ACTIVATIONS = (
    "tah",
    "tah:tau=0,int4=1",
    "wf:bits=4",
    "wf:bits=3.5",
    "wf:bits=3",
    "wf:bits=3,center=off",
    "wf:bits=2.5",
    "eden:bits=3",
)
FEW_GRADIENTS = ("fixed:bits=6", "eden:bits=2")
FEW_ACTIVATIONS = ("tah", "wf:bits=3.5", "wf:bits=3")
MARGIN = 0.01
"""Nats per token by which a pair may be worse than the paper's, at 95 %, and still count as no worse."""


def plan(options: argparse.Namespace) -> Iterator[Run]:
    """Every run, the pairs first; single directions in full for the first model only."""
    for model in options.model:
        for seed in range(options.pair_seeds):
            yield from (Run(model, *pair, seed, options.steps) for pair in ((NONE, NONE), *PAIRS))
        is_first = model == options.model[0]
        for seed in range(options.seeds):
            for name in ACTIVATIONS if is_first else FEW_ACTIVATIONS:
                yield Run(model, name, NONE, seed, options.steps)
            for name in GRADIENTS if is_first else FEW_GRADIENTS:
                yield Run(model, NONE, name, seed, options.steps)


def single_rows(losses: Losses, model: str, direction: str) -> Iterator[list[object]]:
    for name in ACTIVATIONS if direction == "activations" else GRADIENTS:
        setting = (model, name, NONE) if direction == "activations" else (model, NONE, name)
        if setting in losses:
            gap = losses.gap(setting)
            bits = f"{bits_per_element(name):.2f}"
            yield [f"`{name}`", bits, f"{gap.mean:+.4f}", f"{gap.half_width:.4f}", gap.count]


def pair_rows(losses: Losses, model: str) -> Iterator[list[object]]:
    for pair in PAIRS:
        gap, bits = losses.gap((model, *pair)), [bits_per_element(name) for name in pair]
        against = losses.difference((model, *pair), (model, *PAPER))
        upper = against.mean + against.half_width
        compared = [f"{against.mean:+.4f}", f"{upper:+.4f}", "yes" if upper < MARGIN else "no"]
        yield [
            *(f"`{name}`" for name in pair),
            *(f"{each:.2f}" for each in (sum(bits), max(bits))),
            f"{gap.mean:+.4f}",
            f"{gap.half_width:.4f}",
            *([""] * 3 if pair == PAPER else compared),
            gap.count,
        ]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    results = run_all(plan(options), options)
    losses = Losses(results)
    yield f"{len(results)} runs of {options.steps} steps. {METHOD}"

    def draw(panels: list[object]) -> None:
        for axes, model in zip(panels, options.model, strict=True):
            losses.draw_gaps(axes, {" + ".join(pair): (model, *pair) for pair in PAIRS}, model)

    yield from picture(options.output, 1, len(options.model), draw)
    for model in options.model:
        base = losses.losses((model, NONE, NONE))
        span = f"{min(base):.4f} to {max(base):.4f}"
        yield f"## {model}\n\nUncompressed: {statistics.fmean(base):.4f} over {len(base)} seeds ({span})."
        for direction in ("gradients", "activations"):
            columns = (f"{direction} only", "bits", "gap", "±", "seeds")
            yield Table(columns, single_rows(losses, model, direction))
        columns = ("activations", "gradients", "bits", "larger direction", "gap", "±", "minus the paper's pair")
        yield Table((*columns, "upper 95 % limit", f"below {MARGIN}", "seeds"), pair_rows(losses, model))


if __name__ == "__main__":
    models = {"--model": {**ARGUMENTS["--model"], "default": ["gpt2", "llama"]}}
    pair_seeds = {"--pair-seeds": {"type": int, "default": 5}}
    main(__doc__, tables, {**ARGUMENTS, **models, **pair_seeds})
