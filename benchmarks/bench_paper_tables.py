"""TAH-Quant's ablations done again: Tables 4, 7, 8, 9, 10 and Figure 3, as training loss of one GPT-2 small.

    python benchmarks/bench_paper_tables.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib

The paper fine-tunes Qwen2.5-3B and Gemma2-2B and reports benchmark scores (Table 4) or loss at some steps; here one
model trains from a random start, cut in four, three seeds a row, everything else equal. Gradients go in
`fixed:bits=8` but in Table 10. Some 60 runs of 400 steps, four minutes on four H200 (--model tiny --steps 30 shows
that it works).

Predictions, written before the runs: Table 4: smaller groups are better, in order. Table 7: τ = 2 is not better
than 0, and inf is the worst or equal to 2. Table 8: more INT4 is better. Table 9: worse, without instability. Table
10: TAH at 4 bits costs 0.04 to 0.08; group-wise fixed point of 4 bits does not diverge; one scale for the whole
tensor is bad, the maximum of x instead of |x| worse. Figure 3a: adaptive allocation makes no difference beyond the
spread; the reverse rule is a little better; 3b: τ = inf against 2 as in Table 7.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import machine
import torch
from cut_training import BATCH, MODELS, SEQ_LEN, data_config
from scipy.stats import t as student_t
from training_runs import (
    CURVE_STEP,
    EXTRA_TRANSFERS,
    LAST_STEPS,
    NONE,
    Result,
    Run,
    Table,
    bits_an_element,
    brief,
    run_all,
)

RESULTS = Path(__file__).parent / "results"
FIXED = "fixed:bits=8"
MARKS = (100, 200, 300, 400)
"""Steps whose loss is shown, as the paper does."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """One table of the paper: what it varies and, by row, the codec of activations and of gradients.

    `against` is the row that the others are compared with.
    """

    title: str
    against: str
    rows: tuple[tuple[str, str, str], ...]


EXPERIMENTS = (
    Experiment(
        "Table 4: tile size",
        "64",
        tuple((f"{size}", f"tah:group={size}", FIXED) for size in (8, 32, 64, 128)),
    ),
    Experiment(
        "Table 7: outlier threshold",
        "τ = 2",
        tuple((f"τ = {tau}", f"tah:tau={tau}", FIXED) for tau in ("0", "2", "4", "inf")),
    ),
    Experiment(
        "Table 8: INT4 to INT3",
        "80 % INT4",
        tuple((f"{share} % INT4", f"tah:int4={share / 100}", FIXED) for share in (100, 80, 50, 0)),
    ),
    Experiment(
        "Table 9: INT2",
        "80 % INT4, 20 % INT3",
        (("80 % INT4, 20 % INT3", "tah", FIXED), ("80 % INT2, 20 % INT3", "tah:low=2,high=3,int4=0.2", FIXED)),
    ),
    Experiment(
        "Table 10: 4-bit gradients",
        "TAH, all tiles of 4 bits",
        (
            ("uncompressed gradients", "tah", NONE),
            ("TAH, all tiles of 4 bits", "tah", "tah:low=4"),
            ("fixed point, a scale for 64 channels", "tah", "fixed:bits=4"),
            *((name, "tah", name) for name in EXTRA_TRANSFERS),
        ),
    ),
    Experiment(
        "Figure 3: what is in it",
        "all of TAH",
        (
            ("all of TAH", "tah", FIXED),
            ("a: no adaptive allocation", "tah:adaptive=off", FIXED),
            ("a: reverse, INT4 to the low-entropy tiles", "tah:select=low", FIXED),
            ("a: token-level allocation", "tah:alloc=token", FIXED),
            ("b: no Hadamard", "tah:tau=inf", FIXED),
        ),
    ),
)


def plan(model: str, seeds: int, steps: int) -> Iterator[Run]:
    """The uncompressed run and every row, for each seed."""
    for seed in range(seeds):
        yield Run(model, NONE, NONE, seed, steps)
        for experiment in EXPERIMENTS:
            yield from (Run(*key, seed, steps) for key in _keys(model, experiment))


def _keys(model: str, experiment: Experiment) -> list[tuple[str, str, str]]:
    return [(model, brief(activations), brief(gradients)) for _, activations, gradients in experiment.rows]


def complete(results: Sequence[Result], experiment: Experiment) -> list[Result]:
    """The runs of those seeds that have every row of the experiment, so that its rows can be compared."""
    model = results[0].run.model
    wanted = {(model, NONE, NONE), *_keys(model, experiment)}
    seeds: dict[int, set[tuple[str, str, str]]] = {}
    for result in results:
        run = result.run
        seeds.setdefault(run.seed, set()).add((run.model, run.activations, run.gradients))
    return [result for result in results if wanted <= seeds[result.run.seed]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a run's loss about what its row and its seed explain: standard deviation, and degrees of freedom of it."""

    deviation: float
    freedom: int

    @classmethod
    def of(cls, results: Sequence[Result]) -> "Spread":
        """Pooled over all rows but the naive ones, which stray more, and over the seeds that have every row."""
        whole = set.intersection(*({each.run.seed for each in complete(results, table)} for table in EXPERIMENTS))
        seeds: dict[int, dict[tuple[str, str], float]] = {seed: {} for seed in whole}
        for result in results:
            run = result.run
            if run.seed in whole and run.gradients not in EXTRA_TRANSFERS:
                seeds[run.seed][run.activations, run.gradients] = result.loss
        if len(seeds) < 2:
            return cls(math.nan, 1)
        losses = torch.tensor([[row[key] for key in seeds[min(seeds)]] for row in seeds.values()], dtype=torch.float64)
        rest = losses - losses.mean(0) - losses.mean(1, keepdim=True) + losses.mean()
        freedom = (losses.shape[0] - 1) * (losses.shape[1] - 1)
        return cls(math.sqrt(rest.square().sum().item() / freedom), freedom)

    def least_difference(self, count: int) -> float:
        """From where on two rows of `count` seeds differ beyond chance, at 95 % for one comparison."""
        return float(student_t.ppf(0.975, self.freedom)) * self.deviation * math.sqrt(2 / count)


def report(results: Sequence[Result], steps: int, machines: str) -> Iterator[str]:
    """The result file, as Markdown."""
    model, spread = results[0].run.model, Spread.of(results)
    yield f"# TAH-Quant's ablations: {model}\n\n{machines}\n"
    yield (
        f"benchmarks/bench_paper_tables.py: {len(results)} runs of {steps} steps of {BATCH} × {SEQ_LEN} tokens from a "
        f"random start, codecs at\nthree cuts. Loss is the mean of the last {LAST_STEPS} steps, nats a token. A gap is "
        "the difference to the uncompressed run of\nthe same seed; ± is the half width of a 95 % interval (Student's t "
        "over seeds). The differences to one row of\na table are paired by seed too. Loss at a step: mean over the ten "
        "steps before it and over the seeds. Curves of\nevery run: paper_tables_curves_h200_202611.jsonl.\n"
    )
    yield (
        f"A run strays by {spread.deviation:.4f} (standard deviation, {spread.freedom} degrees of freedom) from what "
        "its row and seed\nexplain, pooled over all rows but the naive ones. From that follows from where on two rows "
        "of a table are told apart,\nat 95 % for one comparison.\n"
    )
    for experiment in EXPERIMENTS:
        rows = complete(results, experiment)
        if rows:
            yield from _table(Table(rows), model, experiment, spread, [step for step in MARKS if step <= steps])


def _table(table: Table, model: str, experiment: Experiment, spread: Spread, marks: Sequence[int]) -> Iterator[str]:
    losses, keys = table.losses((model, NONE, NONE)), _keys(model, experiment)
    names = [name for name, _, _ in experiment.rows]
    against = keys[names.index(experiment.against)]
    yield (
        f"## {experiment.title}\n\n{len(losses)} seeds; uncompressed: {statistics.fmean(losses):.4f}; told apart "
        f"from {spread.least_difference(len(losses)):.4f} on.\n\n"
        f"| | bits | gap | ± | minus '{experiment.against}' | ± | {' | '.join(f'step {mark}' for mark in marks)} |"
    )
    yield "|---" * (6 + len(marks)) + "|"
    yield from (_row(table, name, key, against, marks) for name, key in zip(names, keys, strict=True))
    yield ""


def _row(
    table: Table, name: str, key: tuple[str, str, str], against: tuple[str, str, str], marks: Sequence[int]
) -> str:
    gap, curve, difference = table.gap(key), table.curve(key), table.difference(key, against)
    varied = key[1] if key[2] == brief(FIXED) else key[2]
    bits = bits_an_element(varied, (BATCH, SEQ_LEN, 768))
    compared = " | " if key == against else f"{difference.mean:+.4f} | {difference.half_width:.4f}"
    losses = " | ".join(f"{curve[mark // CURVE_STEP - 1]:.3f}" for mark in marks)
    return f"| {name} | {bits:.2f} | {gap.mean:+.4f} | {gap.half_width:.4f} | {compared} | {losses} |"


def plot(results: Sequence[Result], path: Path) -> None:
    """Gap to the uncompressed run along the training, one panel an experiment."""
    from matplotlib.figure import Figure

    model = results[0].run.model
    figure = Figure(figsize=(15, 8), layout="constrained")
    for axis, experiment in zip(figure.subplots(2, 3).flat, EXPERIMENTS, strict=True):
        rows = complete(results, experiment)
        if not rows:
            continue
        for (name, _, _), key in zip(experiment.rows, _keys(model, experiment), strict=True):
            gaps = Table(rows).gap_curve(key)
            axis.plot([CURVE_STEP * (i + 0.5) for i in range(len(gaps))], gaps, label=name, linewidth=1)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(title=experiment.title, xlabel="step", ylabel="loss minus uncompressed (nats)", ylim=(-0.05, 0.2))
        axis.legend(fontsize=7)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["stdlib"], help="text files, folders, globs, or stdlib")
    parser.add_argument("--tokens", type=Path, help="uint16 token file, instead of --text")
    parser.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--model", default="gpt2", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="a device")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which to stop with what there is")
    parser.add_argument("--measured-on", help="what runs that are known already were made on, for a report of these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    done = run_all(
        list(dict.fromkeys(plan(arguments.model, arguments.seeds, arguments.steps))),
        data_config(arguments.text, arguments.tokenizer, arguments.tokens),
        arguments.out / "paper_tables_curves_h200_202611.jsonl",
        processes_a_device=arguments.processes,
        limit_s=arguments.limit,
        on_result=lambda count, result: print(f"{result.run} {result.loss:.4f} {result.seconds} s", flush=True),
    )
    if not done:
        raise SystemExit("no run was finished: give more time (--limit) or fewer steps")
    text = "\n".join(report(done, arguments.steps, arguments.measured_on or machine.describe()))
    (arguments.out / "paper_tables_h200_202611.md").write_text(text)
    plot(done, arguments.out / "paper_tables_h200_202611.png")
    print(text)


if __name__ == "__main__":
    main()
