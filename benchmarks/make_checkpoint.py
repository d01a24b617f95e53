"""Make the checkpoint that ablations and fine-tuning begin with: a Llama of 22 million parameters.

    python benchmarks/make_checkpoint.py --tokenizer GPT2 --tokens train-0.bin train-1.bin --held-out held-out.bin \\
        --output FOLDER
    python benchmarks/make_checkpoint.py --model tiny-llama --steps 60 --output FOLDER     # on a CPU: no figures

It is small so that it can be passed on: embedding and head are one matrix, and the folder's bf16 weights take 43 MiB;
100 million parameters would be trained again on every machine. The folder is one that `model:` of cluster.yaml takes; a
run trains embedding and head apart from then on. The held-out loss of the rounded weights is written to `recipe.json`
and compared with the recorded one, `checkpoint_recipe.json` beside this script: the same recipe must end within 0.01.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from codec_schedule import Wire
from cut_training import BATCH, MODELS, SEQ_LEN, CutTraining
from harness import commit, describe, say
from training_runs import ARGUMENTS, data_config

from tahq.models.export import export_folder

HELD_OUT_BATCHES = 64
TOLERANCE = 0.01
"""Nats per token."""


def make(options: argparse.Namespace) -> dict[str, object]:
    """Train, round to bf16, export; returns what `recipe.json` has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    changes = {"training": {"compile": options.compile, "lr": options.lr}}
    training, begin_s = CutTraining(options.model, data_config(options), device, changes), time.time()
    deadline_s = begin_s + options.seconds
    length = {"steps": options.steps, "deadline_s": deadline_s, "state": options.state}
    losses = training.run(Wire.parse(), seed=options.seed, **length)
    if len(losses) < options.steps:
        sys.exit(f"{len(losses)} of {options.steps} steps are done; with --state the same command goes on")
    seconds = time.time() - begin_s
    weights = training.model.weights
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(weight.bfloat16() if weight.ndim >= 2 else weight)
    num_batches = options.held_out_batches
    held_out = training.held_out_loss(num_batches=num_batches)
    spec = training.slices[0].spec
    num_parameters = export_folder(
        spec, weights.__getitem__, options.output, training.tokenizer, matrices=torch.bfloat16
    )
    tokens = options.steps * BATCH * SEQ_LEN
    rate = training.steps_done * BATCH * SEQ_LEN / seconds
    say(f"{num_parameters:,} parameters, {tokens:,} tokens, {seconds:.0f} s in this call, {rate:,.0f} tokens/s")
    recipe = {"model": options.model, "steps": options.steps, "seed": options.seed, "lr": options.lr}
    recipe |= {"tokens": tokens, "held_out_batches": num_batches, "data": training.dataset.fingerprint}
    return {
        **recipe,
        "held_out": held_out,
        "last_loss": losses[-1],
        "seconds": seconds,
        "by": describe(),
        "at": commit(),
    }


def check(made: dict[str, object], recorded: Path) -> None:
    """End with status 1 if the same recipe has another held-out loss than the recorded one."""
    if not recorded.exists():
        return
    expected = json.loads(recorded.read_text())
    keys = ("model", "steps", "seed", "lr", "held_out_batches", "data")
    if any(made[key] != expected[key] for key in keys):
        say(f"another recipe than {recorded}, so the losses are not compared")
        return
    difference = float(made["held_out"]) - expected["held_out"]  # type: ignore[arg-type]
    say(f"held-out loss {made['held_out']:.4f}, {difference:+.4f} from the recorded one")
    if abs(difference) > TOLERANCE:
        sys.exit(f"held-out loss {made['held_out']:.4f}, expected {expected['held_out']:.4f} ± {TOLERANCE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder, new or empty")
    parser.add_argument("--model", choices=list(MODELS), default="llama-22m")
    parser.add_argument("--steps", type=int, default=6000, help="49 million tokens (default 6,000)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="that training may take")
    parser.add_argument("--state", type=Path, help="file for what --seconds interrupts")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out-batches", type=int, default=HELD_OUT_BATCHES)
    parser.add_argument("--recorded", type=Path, default=Path(__file__).with_name("checkpoint_recipe.json"))
    for name in ("--text", "--tokenizer", "--tokens", "--records", "--held-out", "--compile"):
        parser.add_argument(name, **ARGUMENTS[name])
    options = parser.parse_args()
    made = make(options)
    (options.output / "recipe.json").write_text(json.dumps(made, indent=1) + "\n")
    say(f"held-out loss {made['held_out']:.4f}")
    check(made, options.recorded)


if __name__ == "__main__":
    main()
