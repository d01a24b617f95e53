"""Loss with AGoQ's stored activations, 8-bit states and 8-bit gradients, against bf16 and other ways to save memory.

    python benchmarks/bench_agoq_loss.py --tokenizer GPT2_FOLDER --text wikitext2-valid.txt wikitext2-test.txt stdlib
    python benchmarks/bench_agoq_loss.py --model tiny --steps 30 --seeds 1      # on a CPU: that it works, no figures

A Llama of 12 blocks of 768 in four stages (AGoQ §6.3, Figure 8). `A`: activations in 4 bits; `A, bits by stage`: 4, 5,
8, 8 as under 1F1B; `4 bits everywhere`: attention's too; `O`: block-wise 8-bit moments; `G`: gradients of four replicas
in E4M3 blocks, summed in fp32; `FP8 all-reduce`: summed in E4M3 with one scale per tensor. Replicas are parts of the
batch in one process. Runs are kept beside the result file; call the script again to continue.
"""

import argparse
from collections.abc import Iterator

from codec_schedule import NONE
from harness import Table, main
from option_training import OPTIONS
from stored_training import METHODS
from training_runs import ARGUMENTS, METHOD, Difference, Losses, Run, picture, run_all


def plan(options: argparse.Namespace) -> Iterator[Run]:
    for seed in range(options.seeds):
        for name in options.methods:
            yield Run(f"{options.model[0]}/{name}", NONE, NONE, seed, options.steps)


def tables(options: argparse.Namespace, method: str = METHOD) -> Iterator[Table | str]:
    results = run_all(plan(options), options)
    losses, model = Losses(results), options.model[0]
    held_out = {(each.run.model, each.run.seed): each.held_out for each in results}
    settings = {name: (f"{model}/{name}", NONE, NONE) for name in options.methods}
    base = settings[options.methods[0]]

    def rows() -> Iterator[list[object]]:
        for name, setting in settings.items():
            gap = losses.difference(setting, base)
            kept = [held_out[setting[0], seed] for seed in range(options.seeds)]
            last = Difference.of([value - held_out[base[0], seed] for seed, value in enumerate(kept)])
            yield [
                name, f"{sum(losses.losses(setting)) / options.seeds:.4f}", f"{gap.mean:+.4f}", f"{gap.half_width:.4f}",
                f"{sum(kept) / options.seeds:.4f}", f"{last.mean:+.4f}", f"{last.half_width:.4f}", gap.count,
            ]  # fmt: skip

    columns = ("method", "loss", "gap", "±", "held out", "gap", "±", "seeds")
    yield Table(columns, rows(), f"{options.steps} steps, {method}")

    def draw(panels: list[object]) -> None:
        losses.draw_gaps(panels[0], settings, f"{model}, against {options.methods[0]}", base)

    yield from picture(options.output, 1, 1, draw)


STEPS = {
    "--methods": {"nargs": "+", "choices": list(OPTIONS), "default": list(METHODS)},
    "--steps": {"type": int, "default": 3000},
    "--model": {"nargs": 1, "default": ["llama"]},
}

if __name__ == "__main__":
    main(__doc__, tables, {**ARGUMENTS, **STEPS})
