"""What a codec does to training: the loss of one model cut in four, by codec, direction and seed.

    python benchmarks/bench_convergence.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib

GPT-2 small (12 blocks of 768) and a Llama of the same size, random start, WikiText-2 and Python sources in
GPT-2 BPE, 16 × 512 tokens a step; a codec at the three cuts, through its real bytes. About 160 runs of 400
steps: some twelve minutes on four H200, more than a day on CPUs (--model tiny --steps 30 shows that it works).

Predictions, written before the runs, from prototypes of two seeds and 300 steps: the gap of the paper's pair
is about 0.04, nearly all of it from the activations; `eden` of 2 bits costs nothing that can be seen, of 1 bit
0.02; centring is worth half a bit to `wf`; `wf:bits=3` with `eden:bits=1.5`, 4.7 bits in all, is no worse than
the paper's pair of 10.7.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import machine
from cut_training import BATCH, MODELS, SEQ_LEN, data_config
from training_runs import LAST_STEPS, NONE, Result, Run, Table, bits_an_element, run_all

RESULTS = Path(__file__).parent / "results"
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


def plan(models: Sequence[str], seeds: int, pair_seeds: int, steps: int) -> Iterator[Run]:
    """Every run: the pairs first, since they are what the result rests on."""
    for model in models:
        pairs = ((NONE, NONE), *PAIRS)
        yield from (Run(model, *pair, seed, steps) for seed in range(pair_seeds) for pair in pairs)
        is_first = model == models[0]
        for seed in range(seeds):
            activations = ACTIVATIONS if is_first else FEW_ACTIVATIONS
            gradients = GRADIENTS if is_first else FEW_GRADIENTS
            yield from (Run(model, name, NONE, seed, steps) for name in activations)
            yield from (Run(model, NONE, name, seed, steps) for name in gradients)


def report(results: Sequence[Result], steps: int, machines: str) -> Iterator[str]:
    """The result file, as Markdown."""
    table = Table(results)
    yield f"# Training loss by codec\n\n{machines}\n"
    yield (
        f"benchmarks/bench_convergence.py: {len(results)} runs of {steps} steps of {BATCH} × {SEQ_LEN} tokens. Loss is "
        f"the\nmean of the last {LAST_STEPS} steps, nats a token. A gap is the difference to the uncompressed run of "
        "the same\nseed; ± is the half width of its 95 % interval (Student's t over seeds). Bits an element of\n"
        f"[{BATCH}, {SEQ_LEN}, 768], all included. Curves of every run: convergence_curves_h200_202611.jsonl.\n"
    )
    for model in dict.fromkeys(result.run.model for result in results):
        yield from _model_report(table, model)


def _model_report(table: Table, model: str) -> Iterator[str]:
    losses = table.losses((model, NONE, NONE))
    mean = sum(losses) / len(losses)
    yield f"## {model}\n\nUncompressed: {mean:.4f} over {len(losses)} seeds ({min(losses):.4f} to {max(losses):.4f}).\n"
    for title, keys in (
        ("gradients only", [(model, NONE, name) for name in GRADIENTS]),
        ("activations only", [(model, name, NONE) for name in ACTIVATIONS]),
    ):
        yield f"| {title} | bits | gap | ± | seeds |\n|---|---|---|---|---|"
        yield from (_gap_row(table, key) for key in keys if key in table)
        yield ""
    yield from _pair_rows(table, model)


def _gap_row(table: Table, key: tuple[str, str, str]) -> str:
    gap, name = table.gap(key), key[1] if key[2] == NONE else key[2]
    return f"| `{name}` | {_bits(name):.2f} | {gap.mean:+.4f} | {gap.half_width:.4f} | {gap.count} |"


def _pair_rows(table: Table, model: str) -> Iterator[str]:
    yield (
        "| activations | gradients | bits | larger direction | gap | ± | minus the paper's pair | upper 95 % limit "
        f"| below {MARGIN} | seeds |\n|---|---|---|---|---|---|---|---|---|---|"
    )
    for pair in PAIRS:
        key = (model, *pair)
        if key not in table:
            continue
        gap, bits = table.gap(key), [_bits(name) for name in pair]
        against = table.difference(key, (model, *PAPER))
        verdict = "" if pair == PAPER else "yes" if against.upper < MARGIN else "no"
        compared = "" if pair == PAPER else f"{against.mean:+.4f} | {against.upper:+.4f}"
        yield (
            f"| `{pair[0]}` | `{pair[1]}` | {sum(bits):.2f} | {max(bits):.2f} | {gap.mean:+.4f} | {gap.half_width:.4f} "
            f"| {compared or '| '} | {verdict} | {gap.count} |"
        )
    yield ""


def _bits(name: str) -> float:
    return bits_an_element(name, (BATCH, SEQ_LEN, 768))


def plot(results: Sequence[Result], path: Path) -> None:
    """Gap to the uncompressed run along the training, one line a pair, one panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table, models = Table(results), list(dict.fromkeys(result.run.model for result in results))
    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for pair in PAIRS:
            if (model, *pair) in table:
                gaps = table.gap_curve((model, *pair))
                axis.plot([10 * i + 5 for i in range(len(gaps))], gaps, label=" + ".join(pair), linewidth=1)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set(title=model, xlabel="step", ylabel="loss minus uncompressed (nats)", ylim=(-0.05, 0.2))
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", nargs="+", default=["stdlib"], help="text files, folders, globs, or stdlib")
    parser.add_argument("--tokens", type=Path, help="uint16 token file, instead of --text")
    parser.add_argument("--tokenizer", default="bytes", help="folder of a Hugging Face tokenizer")
    parser.add_argument("--model", nargs="+", default=["gpt2", "llama"], choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3, help="of the single directions")
    parser.add_argument("--pair-seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2, help="a device")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which to stop with what there is")
    parser.add_argument("--measured-on", help="what runs that are known already were made on, for a report of these")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    runs = list(dict.fromkeys(plan(arguments.model, arguments.seeds, arguments.pair_seeds, arguments.steps)))
    done = run_all(
        runs,
        data_config(arguments.text, arguments.tokenizer, arguments.tokens),
        arguments.out / "convergence_curves_h200_202611.jsonl",
        processes_a_device=arguments.processes,
        limit_s=arguments.limit,
        on_result=lambda count, result: print(f"{result.run} {result.loss:.4f} {result.seconds} s", flush=True),
    )
    if not done:
        raise SystemExit("no run was finished: give more time (--limit) or fewer steps")
    text = "\n".join(report(done, arguments.steps, arguments.measured_on or machine.describe()))
    (arguments.out / "convergence_h200_202611.md").write_text(text)
    plot(done, arguments.out / "convergence_h200_202611.png")
    print(text)


if __name__ == "__main__":
    main()
