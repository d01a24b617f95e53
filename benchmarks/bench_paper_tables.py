"""TAH-Quant's ablations: Tables 4, 7, 8, 9, 10 and Figure 3, as training and held-out loss of one small model.

    python benchmarks/bench_paper_tables.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib

The paper fine-tunes Qwen2.5-3B and Gemma2-2B and reports benchmark scores (Table 4) or loss at some steps; here one
model trains from a random start, or is fine-tuned (`--model FOLDER`, such as make_checkpoint.py writes, `--records`),
cut in four, three seeds per row, everything else equal. Gradients use `fixed:bits=8` except in Table 10. Some 60 runs
of 400 steps, four minutes on four H200 (--model tiny --steps 30 shows that it works). Runs are kept beside the result
file; call the script again to continue.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from codec_schedule import EXTRA_CODECS, NONE, bits_per_element
from harness import Table, main
from scipy.stats import t as student_t
from training_runs import ARGUMENTS, CURVE_STEP, METHOD, Losses, Result, Run, Setting, picture, run_all

from tahq.quant import CodecSpec

FIXED = "fixed:bits=8"
MARKS = (100, 200, 300, 400)
"""Steps whose loss is shown, as the paper does."""


def _brief(name: str) -> str:
    """One text for all that mean the same codec, so that it is trained once."""
    return name if name == NONE or name in EXTRA_CODECS else CodecSpec.parse(name).brief()


class Experiment(NamedTuple):
    """One table of the paper: the codecs of activations and of gradients by row.

    `against` is the row that the others are compared with.
    """

    title: str
    against: str
    rows: dict[str, tuple[str, str]]

    def settings(self, model: str) -> dict[str, Setting]:
        return {
            name: (model, _brief(activations), _brief(gradients))
            for name, (activations, gradients) in self.rows.items()
        }


EXPERIMENTS = (
    Experiment("Table 4: tile size", "64", {f"{size}": (f"tah:group={size}", FIXED) for size in (8, 32, 64, 128)}),
    Experiment(
        "Table 7: outlier threshold",
        "τ = 2",
        {f"τ = {tau}": (f"tah:tau={tau}", FIXED) for tau in ("0", "2", "4", "inf")},
    ),
    Experiment(
        "Table 8: INT4 to INT3",
        "80 % INT4",
        {f"{share} % INT4": (f"tah:int4={share / 100}", FIXED) for share in (100, 80, 50, 0)},
    ),
    Experiment(
        "Table 9: INT2",
        "80 % INT4, 20 % INT3",
        {"80 % INT4, 20 % INT3": ("tah", FIXED), "80 % INT2, 20 % INT3": ("tah:low=2,high=3,int4=0.2", FIXED)},
    ),
    Experiment(
        "Table 10: 4-bit gradients",
        "TAH, all tiles of 4 bits",
        {
            "uncompressed gradients": ("tah", NONE),
            "TAH, all tiles of 4 bits": ("tah", "tah:low=4"),
            "fixed point, a scale for 64 channels": ("tah", "fixed:bits=4"),
            **{name: ("tah", name) for name in EXTRA_CODECS},
        },
    ),
    Experiment(
        "Figure 3: parts of TAH",
        "all of TAH",
        {
            "all of TAH": ("tah", FIXED),
            "a: no adaptive allocation": ("tah:adaptive=off", FIXED),
            "a: reverse, INT4 to the low-entropy tiles": ("tah:select=low", FIXED),
            "a: token-level allocation": ("tah:alloc=token", FIXED),
            "b: no Hadamard": ("tah:tau=inf", FIXED),
        },
    ),
)


def plan(model: str, options: argparse.Namespace) -> Iterator[Run]:
    """The uncompressed run and every row, for each seed."""
    for seed in range(options.seeds):
        for setting in ((model, NONE, NONE), *(s for each in EXPERIMENTS for s in each.settings(model).values())):
            yield Run(*setting, seed, options.steps)


def residual_spread(results: Sequence[Result]) -> tuple[float, int]:
    """Standard deviation of a loss around the effects of its row and its seed, and its degrees of freedom.

    Pooled over all rows but the naive ones, which vary more.
    """
    seeds: dict[int, list[float]] = {}
    for result in results:
        if result.run.gradients not in EXTRA_CODECS:
            seeds.setdefault(result.run.seed, []).append(result.loss)
    if len(seeds) < 2:
        return math.nan, 1
    losses = torch.tensor(list(seeds.values()), dtype=torch.float64)
    rest = losses - losses.mean(0) - losses.mean(1, keepdim=True) + losses.mean()
    freedom = (losses.shape[0] - 1) * (losses.shape[1] - 1)
    return math.sqrt(rest.square().sum().item() / freedom), freedom


def rows(losses: Losses, experiment: Experiment, model: str, marks: Sequence[int]) -> Iterator[list[str]]:
    settings = experiment.settings(model)
    against = settings[experiment.against]
    for name, setting in settings.items():
        gap, curve = losses.gap(setting), losses.curve(setting)
        both = [losses.difference(setting, against, figure) for figure in ("loss", "held_out")]
        varied = setting[1] if setting[2] == _brief(FIXED) else setting[2]
        compared = [text for each in both for text in (f"{each.mean:+.4f}", f"{each.half_width:.4f}")]
        compared = compared if setting != against else [""] * 4
        steps = [f"{curve[mark // CURVE_STEP - 1]:.3f}" for mark in marks]
        gaps = [f"{gap.mean:+.4f}", f"{gap.half_width:.4f}"]
        yield [name, f"{bits_per_element(varied):.2f}", *gaps, *compared, *steps]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    [model] = options.model
    results = run_all(plan(model, options), options)
    losses = Losses(results)
    deviation, freedom = residual_spread(results)
    least = float(student_t.ppf(0.975, freedom)) * deviation * math.sqrt(2 / options.seeds)
    base = losses.losses((model, NONE, NONE))
    yield (
        f"{model}, {len(results)} runs of {options.steps} steps. {METHOD} Differences to one row of a table are paired "
        "by seed, too, in training and in the loss of the final weights on held-out data. Loss at a step: mean over "
        "the ten steps before it and over the seeds."
    )
    yield (
        f"Uncompressed: {statistics.fmean(base):.4f}. The standard deviation of a loss around the effects of its row "
        f"and its seed is {deviation:.4f} ({freedom} degrees of freedom). By that, unpaired, two rows of "
        f"{options.seeds} seeds differ by more than chance from {least:.4f} on (95 %, one comparison)."
    )

    def draw(panels: list[object]) -> None:
        for axes, experiment in zip(panels, EXPERIMENTS, strict=True):
            losses.draw_gaps(axes, experiment.settings(model), experiment.title)

    yield from picture(options.output, 2, 3, draw)
    marks = [step for step in MARKS if step <= options.steps]
    for each in EXPERIMENTS:
        compared = f"minus '{each.against}'", "±", "held out", "±"
        columns = ("", "bits", "gap", "±", *compared, *(f"step {mark}" for mark in marks))
        yield Table(columns, rows(losses, each, model, marks), heading=each.title)


if __name__ == "__main__":
    model = {"--model": {**ARGUMENTS["--model"], "nargs": 1, "default": ["gpt2"]}}
    main(__doc__, tables, {**ARGUMENTS, **model})
