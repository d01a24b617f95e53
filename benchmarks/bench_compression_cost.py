"""What compression costs in a real run: losses by pair of codecs, and the time to the same loss over slow links.

    python benchmarks/bench_compression_cost.py --tokenizer GPT2 --tokens train-0.bin --held-out held-out.bin \\
        --backend auto --processes 2 --seconds 540 --state /tmp/state --output FILE.md
    python benchmarks/bench_compression_cost.py ... --plan --rate 250000        # steps, tokens and seconds of each run
    python benchmarks/bench_compression_cost.py --model tiny tiny-llama --steps 60 --seeds 2     # on a CPU: no figures

A GPT-2 small and a Llama of its size, random start, 16 × 512 tokens per step, cut in four; pairs of schedules of codecs
(`codec_schedule.py`) at the cuts, each with the uncompressed run of its seed. Held-out loss is of the final weights,
with the codecs in the forward pass, as the run itself computes, and without, as users keep the model. `--pairs` names
others: 'tah + none'. All seeds of the first model come first. Fine-tuning: `--model CHECKPOINT --records
questions-train.jsonl --questions questions-test.jsonl --steps 500 --lr 3e-4` (`make_checkpoint.py`, `make_corpus.py`).

Time: a step takes as long as its computation (`--step-s`) or as the busiest uplink sends, whichever is longer; `none`
is counted as bf16, 16 bits. The loss to reach is the highest that any pair ends with. Tables and curves come from the
rows beside the result file; runs that are not there are left out, and the same command makes them.
"""

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from codec_schedule import NONE, Wire, bits_per_element
from cut_training import BATCH, HELD_OUT_BATCHES, SEQ_LEN, STAGES, split_name
from harness import Table, main, read_rows, rows_path
from training_runs import ARGUMENTS, CURVE_STEP, METHOD, Difference, Losses, Result, Run, Setting, picture, run_all

PAIRS = (
    (NONE, NONE),
    ("wf:bits=5", "eden:bits=1.5"),
    ("tah", "fixed:bits=6"),
    ("wf:bits=6", "eden:bits=2"),
    ("wf:bits=5", "eden:bits=2"),
    ("wf:bits=6", "eden:bits=1.5"),  # the default
    ("wf:bits=5", "eden:bits=3"),
    ("tah", "fixed:bits=8"),
    ("tah", "fixed:bits=10"),
    ("wf:bits=5 @0.9 none", "eden:bits=1.5"),
    ("wf:bits=4 @0.5 wf:bits=6 @0.8 wf:bits=8", "eden:bits=1.5"),
    ("wf:bits=6 / wf:bits=5 / wf:bits=4", "eden:bits=1.5"),
)
METRICS = ("loss", "held_out", "held_out_coded", "exact")
GOAL = 0.01
"""Nats per token that compression may cost."""
SMOOTHED = 5
"""Points of a curve whose mean is the loss there."""


def plan(options: argparse.Namespace) -> list[Run]:
    pairs = [text.split(" + ") for text in options.pairs] if options.pairs else PAIRS
    seeds = range(options.seeds)
    return [Run(model, *pair, seed, options.steps) for model, seed, pair in product(options.model, seeds, pairs)]


def plan_rows(runs: list[Run], options: argparse.Namespace) -> Iterator[list[object]]:
    done = {Run(**row["run"]) for row in read_rows(rows_path(options))}
    for run in runs:
        tokens = run.steps * BATCH * SEQ_LEN
        state = "done" if run in done else "to do"
        yield [
            *run.setting,
            run.seed,
            f"{run.steps:,}",
            f"{tokens / 1e6:.0f} M",
            f"{tokens / options.rate:,.0f}",
            state,
        ]


def gap_rows(results: dict[tuple[Setting, int], Result], settings: list[Setting]) -> Iterator[list[object]]:
    for setting in settings:
        seeds = [seed for each, seed in results if each == setting and ((setting[0], NONE, NONE), seed) in results]
        if setting[1:] == (NONE, NONE) or not seeds:
            continue
        wire = Wire.parse(*setting[1:])
        cells: list[object] = [f"`{name}`" for name in setting[1:]]
        cells += [f"{_mean_bits(wire, results[setting, seeds[0]].run.steps, stages):.2f}" for stages in (2, STAGES)]
        for name in METRICS:
            base = [results[(setting[0], NONE, NONE), seed] for seed in seeds]
            pairs = zip((results[setting, seed] for seed in seeds), base, strict=True)
            gap = Difference.of([getattr(mine, name) - getattr(theirs, name) for mine, theirs in pairs])
            cells += [f"{gap.mean:+.4f}", f"{gap.half_width:.4f}"] if math.isfinite(gap.mean) else ["–", "–"]
            if name == "held_out":
                cells.append("yes" if gap.mean + gap.half_width < GOAL else "no")
        yield [*cells, len(seeds)]


def _mean_bits(wire: Wire, steps: int, stages: int) -> float:
    return statistics.fmean(wire.uplink_bits(step, steps, stages, STAGES - 1) for step in range(steps))


def step_times_s(setting: Setting, steps: int, mbits: float, step_s: float, stages: int = STAGES) -> list[float]:
    """Seconds of each step over links of this rate."""
    wire, model = Wire.parse(*setting[1:]), split_name(setting[0])[0]
    hidden = model.hidden_size or json.loads((Path(model.path) / "config.json").read_text())["hidden_size"]
    numel = BATCH * SEQ_LEN * hidden
    sent = [wire.uplink_bits(step, steps, stages, STAGES - 1) for step in range(steps)]
    if setting[1:] == (NONE, NONE):
        sent = [bits / bits_per_element(NONE) * 16 for bits in sent]
    return [max(step_s, bits * numel / (1e6 * mbits)) for bits in sent]


def steps_to(curve: list[float], loss: float) -> int | None:
    """The first step with a loss of at most this, by means of SMOOTHED points."""
    points = range(SMOOTHED, len(curve) + 1)
    return next((CURVE_STEP * end for end in points if statistics.fmean(curve[end - SMOOTHED : end]) <= loss), None)


def time_rows(losses: Losses, settings: list[Setting], options: argparse.Namespace) -> Iterator[list[object]]:
    curves = {setting: losses.curve(setting) for setting in settings}
    ends = [statistics.fmean(curve[-SMOOTHED:]) for curve in curves.values()]
    target = max(filter(math.isfinite, ends))
    base_s: dict[float, float] = {}
    for setting, curve in curves.items():
        taken, steps = steps_to(curve, target), CURVE_STEP * len(curve)
        cells: list[object] = [*(f"`{name}`" for name in setting[1:]), f"{target:.3f}", taken or "–"]
        for mbits in options.links:
            seconds = sum(step_times_s(setting, steps, mbits, options.step_s, options.stages)[:taken])
            base_s.setdefault(mbits, seconds)
            cells.append("–" if taken is None else f"{seconds / 3600:.2f} h, {base_s[mbits] / seconds:.2f} ×")
        yield cells


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    runs = plan(options)
    if options.plan:
        columns = ("model", "activations", "gradients", "seed", "steps", "tokens", "seconds", "state")
        hours = len(runs) * options.steps * BATCH * SEQ_LEN / options.rate / 3600
        caption = f"{hours:.1f} h for all at {options.rate:,.0f} tokens/s, which all processes share."
        yield Table(columns, plan_rows(runs, options), caption)
        return
    found = run_all(runs, options, some_suffice=True)
    yield (
        f"{len(found)} of {len(runs)} runs of {options.steps} steps. {METHOD} Held-out: the same difference in the "
        f"loss of the final weights over {HELD_OUT_BATCHES} held-out batches. Bits: of an element, on the busiest "
        f"uplink of two and of {STAGES} stages, means over the steps."
    )
    losses, results = Losses(found), {(each.run.setting, each.run.seed): each for each in found}
    shown = {model: list(dict.fromkeys(run.setting for run in runs if run.model == model)) for model in options.model}
    there = {model: [each for each in settings if each in losses] for model, settings in shown.items()}
    there = {model: each for model, each in there.items() if (model, NONE, NONE) in each}

    def draw(panels: list[object]) -> None:
        for axes, (model, settings) in zip(panels, there.items(), strict=True):
            losses.draw_gaps(axes, {" + ".join(each[1:]): each for each in settings[1:]}, model)

    if there:
        yield from picture(options.output, 1, len(there), draw)
    for model, settings in there.items():
        base = [each for (setting, _), each in results.items() if setting == (model, NONE, NONE)]
        trained, held, _, exact = (statistics.fmean(getattr(each, name) for each in base) for name in METRICS)
        answered = f"{exact:.3f} of the questions answered exactly, " if math.isfinite(exact) else ""
        rate = statistics.fmean(each.tokens_per_s for each in found if each.run.model == model)
        yield (
            f"## {model}\n\nUncompressed: {trained:.4f} in training, {held:.4f} held out, {answered}{len(base)} seeds; "
            f"{rate:,.0f} tokens/s per process."
        )
        columns = ["activations", "gradients", "bits, 2 stages", f"{STAGES} stages", "training", "±", "held out", "±"]
        yield Table(
            (*columns, f"below {GOAL}", "held out, coded", "±", "exact", "±", "seeds"), gap_rows(results, settings)
        )
        rates = [f"{mbits:g} Mbit/s" for mbits in options.links]
        yield Table(
            ("activations", "gradients", "loss", "steps to it", *rates),
            time_rows(losses, settings, options),
            f"Time to the same training loss, a mean of {CURVE_STEP * SMOOTHED} steps and the seeds, and how many "
            f"times as fast as without compression; {options.stages} stages, {options.step_s:g} s of compute per step.",
        )


if __name__ == "__main__":
    changes = {
        "--model": {**ARGUMENTS["--model"], "default": ["gpt2", "llama"]},
        "--steps": {"type": int, "default": 5000},
        "--pairs": {"nargs": "+", "help": "'ACTIVATIONS + GRADIENTS'; with 'none + none' (default: a list)"},
        "--links": {"type": float, "nargs": "+", "default": [20, 50, 100, 300], "help": "Mbit/s"},
        "--step-s": {"type": float, "default": 0.3, "help": "seconds of computation per step (default 0.3)"},
        "--stages": {
            "type": int,
            "choices": [2, STAGES],
            "default": STAGES,
            "help": "of the pipeline whose time it is",
        },
        "--plan": {"action": "store_true", "help": "only list the runs"},
        "--rate": {"type": float, "default": 250_000, "help": "tokens/s that --plan assumes (default 250,000)"},
    }
    main(__doc__, tables, {**ARGUMENTS, **changes})
