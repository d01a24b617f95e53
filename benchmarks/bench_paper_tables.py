"""TAH-Quant's ablations done again: Tables 4, 7, 8, 9, 10 and Figure 3, as training loss of one GPT-2 small.

    python benchmarks/bench_paper_tables.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib

The paper fine-tunes Qwen2.5-3B and Gemma2-2B and reports benchmark scores (Table 4) or loss at some steps; here one
model trains from a random start, cut in four, three seeds a row, everything else equal. Gradients go in
`fixed:bits=8` but in Table 10. Some 60 runs of 400 steps, four minutes on four H200.

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
from cut_training import BATCH, SEQ_LEN, data_config
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
MODEL = "gpt2"
FIXED = "fixed:bits=8"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One table of the paper: what it varies and, by row, the codec of activations and of gradients."""

    title: str
    rows: tuple[tuple[str, str, str], ...]


EXPERIMENTS = (
    Experiment(
        "Table 4: tile size",
        tuple((f"{size}", f"tah:group={size}", FIXED) for size in (8, 32, 64, 128)),
    ),
    Experiment(
        "Table 7: outlier threshold",
        tuple((f"τ = {tau}", f"tah:tau={tau}", FIXED) for tau in ("0", "2", "4", "inf")),
    ),
    Experiment(
        "Table 8: INT4 to INT3",
        tuple((f"{share} % INT4", f"tah:int4={share / 100}", FIXED) for share in (100, 80, 50, 0)),
    ),
    Experiment("Table 9: INT2", (("80 % INT2, 20 % INT3", "tah:low=2,high=3,int4=0.2", FIXED),)),
    Experiment(
        "Table 10: 4-bit gradients",
        (
            ("uncompressed gradients", "tah", NONE),
            ("TAH, all tiles of 4 bits", "tah", "tah:low=4"),
            ("fixed point, a scale for 64 channels", "tah", "fixed:bits=4"),
            *((name, "tah", name) for name in EXTRA_TRANSFERS),
        ),
    ),
    Experiment(
        "Figure 3: what is in it",
        (
            ("all of TAH", "tah", FIXED),
            ("a: no adaptive allocation", "tah:adaptive=off", FIXED),
            ("a: reverse, INT4 to the low-entropy tiles", "tah:select=low", FIXED),
            ("a: token-level allocation", "tah:alloc=token", FIXED),
            ("b: no Hadamard", "tah:tau=inf", FIXED),
        ),
    ),
)


def plan(seeds: int, steps: int) -> Iterator[Run]:
    """The uncompressed run and every row, for each seed."""
    for seed in range(seeds):
        yield Run(MODEL, NONE, NONE, seed, steps)
        for experiment in EXPERIMENTS:
            yield from (
                Run(MODEL, brief(activations), brief(gradients), seed, steps)
                for _, activations, gradients in experiment.rows
            )


def report(results: Sequence[Result], steps: int) -> Iterator[str]:
    """The result file, as Markdown."""
    table, marks = Table(results), [step for step in (100, 200, 300, 400, 500, 600) if step <= steps]
    base = (MODEL, NONE, NONE)
    mean = statistics.fmean(table.losses(base))
    yield f"# TAH-Quant's ablations on GPT-2 small\n\n{machine.describe_device()}\n"
    yield (
        f"benchmarks/bench_paper_tables.py: {steps} steps of {BATCH} × {SEQ_LEN} tokens from a random start, codecs at "
        f"three cuts.\nUncompressed: {mean:.4f}, mean of the last {LAST_STEPS} steps, nats a token. Gap: difference to "
        "it at equal seed,\n± half of its 95 % interval. Loss at a step: mean over the ten steps before it and over "
        "the seeds. Curves of every run:\npaper_tables_curves_h200_202611.jsonl.\n"
    )
    for experiment in EXPERIMENTS:
        yield f"## {experiment.title}\n\n| | bits | gap | ± | {' | '.join(f'step {mark}' for mark in marks)} |"
        yield "|---" * (4 + len(marks)) + "|"
        for name, activations, gradients in experiment.rows:
            key = (MODEL, brief(activations), brief(gradients))
            if key in table:
                yield _row(table, name, key, marks)
        yield ""


def _row(table: Table, name: str, key: tuple[str, str, str], marks: Sequence[int]) -> str:
    gap, curve = table.gap(key), table.curve(key)
    varied = key[1] if key[2] == brief(FIXED) else key[2]
    losses = " | ".join(f"{curve[mark // CURVE_STEP - 1]:.3f}" for mark in marks)
    bits = bits_an_element(varied, (BATCH, SEQ_LEN, 768))
    return f"| {name} | {bits:.2f} | {gap.mean:+.4f} | {gap.half_width:.4f} | {losses} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["stdlib"], help="text files, folders, globs, or stdlib")
    parser.add_argument("--tokens", type=Path, help="uint16 token file, instead of --text")
    parser.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="a device")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which to stop with what there is")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    done = run_all(
        list(dict.fromkeys(plan(arguments.seeds, arguments.steps))),
        data_config(arguments.text, arguments.tokenizer, arguments.tokens),
        arguments.out / "paper_tables_curves_h200_202611.jsonl",
        processes_a_device=arguments.processes,
        limit_s=arguments.limit,
        on_result=lambda count, result: print(f"{result.run} {result.loss:.4f} {result.seconds} s", flush=True),
    )
    if not done:
        raise SystemExit("no run was finished: give more time (--limit) or fewer steps")
    text = "\n".join(report(done, arguments.steps))
    (arguments.out / "paper_tables_h200_202611.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
