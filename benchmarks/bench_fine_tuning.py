"""Fine-tuning over slow links: held-out loss, exact answers and time to the same loss, with codecs and without

    python benchmarks/bench_fine_tuning.py --model FOLDER --train train.jsonl --test test.jsonl --output FILE.md
    python launch/examples/recipes/small.py /tmp/small; cd /tmp/small     # then, on a CPU, that it works:
    python …/bench_fine_tuning.py --model dense --train pairs.jsonl --test pairs.jsonl --device cpu --steps 4 --seeds 2

TAH-Quant's own use. Each row and seed is a run of `tahq-launch` in four stages, each on a host of its own with links of
`--rate`, made of namespaces, so root is needed. The seed sets the order of the records and what codecs draw. What is
not an option here has its default; of `default` the codecs, too.

Losses are those of the test records, without codecs, in nats per token of the answers. An answer is exact if greedy
decoding of the exported model, whole on one device, writes it and then the end. The target is the lowest loss that all
runs of a seed reach; time to it is the sum of the steps before, evaluations left out. ± is half of the 95 % interval by
Student's t over seeds; `minus none` is of pairs of the same seed. Finished runs are JSON lines beside FILE.md: call the
script again to continue. With `--seconds` no run begins that would not end by then, if it takes as long as the longest.
`--parallel` runs of one row are made at once, and share the GPU and the cores, but no link; times are those of the
other runs. A first run of two steps, which counts for nothing, measures the machine and compiles kernels.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from corpus_questions import exact_matches
from harness import Table, append_row, launch, main, need_gpu, read_rows, rows_path, say
from training_runs import Difference

from tahq.data.config import DataConfig
from tahq.data.tokenizer import load_tokenizer
from tahq_launch.loaded_model import load_model, model_folder
from tahq_netem.sweep.spec import split_wire

WIRES = ("raw:dtype=fp16", "tah / fixed:bits=8", "default")
STAGES = 4
Row = Mapping[str, Any]


def config(options: argparse.Namespace, wire: str, seed: int) -> dict[str, Any]:
    """The cluster.yaml of a run."""
    codecs = {} if wire == "default" else dict(zip(("activations", "gradients"), split_wire(wire), strict=True))
    names = ("steps", "eval_every", "eval_batches", "global_batch", "micro_batch", "lr")
    training = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    records = {"records": str(options.train.resolve()), "validation": str(options.test.resolve())}
    return {
        "run": {"name": "tuning", "seed": seed, "device": options.device, "keep_best": False},
        "model": {"path": str(options.model.resolve())},
        "data": {**records, "seq_len": options.seq_len},
        "training": training,
        "pipeline": {"stages": STAGES},
        "wire": codecs,
        "emulate": {"rate": options.rate},
        "hosts": "namespaces",
    }


# -- answers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Greedy:
    """The likeliest next tokens of a Hugging Face model, as `exact_matches` asks for them."""

    model: Any

    def next_tokens(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens.to(self.model.device)).logits
        return logits[torch.arange(len(tokens)), lengths - 1].argmax(1)


def exact_share(options: argparse.Namespace, source: Path) -> float:
    """The share of the test records that a model, of a folder or a run, answers exactly."""
    tokenizer = load_tokenizer(DataConfig(text="-", tokenizer=str(options.model)))
    records = [json.loads(line) for line in options.test.read_text().splitlines()]
    with model_folder(source) as folder:
        model, _ = load_model(folder, "cuda" if options.device != "cpu" else "cpu")
        return exact_matches(Greedy(model), tokenizer, records[: options.answers])


# -- runs --------------------------------------------------------------------------------------------


def tune(options: argparse.Namespace, wire: str, seed: int) -> dict[str, Any]:
    """A run's row."""
    say(f"{wire}, seed {seed}")
    found = dict[str, Any]()
    begin_s = time.monotonic()
    run = launch(config(options, wire, seed), with_run=lambda folder: found.update(exact=exact_share(options, folder)))
    step_s = list(accumulate(step["step_time_s"] for step in run.steps))
    curve = [
        (step["step"], seconds, step["validation"]["loss_raw"])
        for step, seconds in zip(run.steps, step_s, strict=True)
        if step.get("validation")
    ]
    codecs = sorted({f"{link['direction']}: {link['codec']}" for link in run.steps[-1]["links"]})
    sent = sum(link["payload_bytes"] for link in run.steps[-1]["links"])
    say(f"  {run.first_step_s:.0f} s to the first step, {step_s[-1]:.0f} s in all steps, loss {curve[-1][2]:.4f}")
    took_s = time.monotonic() - begin_s
    return {"wire": wire, "seed": seed, "curve": curve, "codecs": codecs, "sent": sent, "took_s": took_s, **found}


def measure(options: argparse.Namespace) -> list[Row]:
    """All runs, those that FILE.jsonl does not have for as long as `--seconds` allows; the model itself first."""
    need_gpu(options.device)
    begin_s, path = time.monotonic(), rows_path(options)
    rows = read_rows(path)
    made = {(row["wire"], row["seed"]) for row in rows}
    todo: dict[tuple[str, int], Callable[[], dict[str, Any]]] = {
        ("before", 0): lambda: {"wire": "before", "seed": 0, "exact": exact_share(options, options.model), "took_s": 0}
    }
    todo |= {
        (wire, seed): partial(tune, options, wire, seed) for seed in range(options.seeds) for wire in options.wires
    }
    if len(made) < len(todo):
        launch(config(options, "default", 0) | {"training": {"steps": 2, "global_batch": options.global_batch}})
    for wire in ("before", *options.wires):
        left = [key for key in todo if key[0] == wire and key not in made]
        for keys in (left[place : place + options.parallel] for place in range(0, len(left), options.parallel)):
            longest_s = max((row["took_s"] for row in rows), default=0.0)
            if time.monotonic() - begin_s + longest_s > options.seconds:
                say(f"{wire}, seeds {[seed for _, seed in keys]}: no time left; call the script again")
                continue
            with ThreadPoolExecutor(len(keys)) as threads:
                for row in threads.map(lambda key: todo[key](), keys):
                    rows.append({**row, "at_once": len(keys)})
                    append_row(path, rows[-1])
    return rows


# -- tables ------------------------------------------------------------------------------------------


def interval(values: Sequence[float], digits: int) -> str:
    """Mean ± half of its 95 % interval."""
    if not values:
        return ""
    found = Difference.of(values)
    spread = f" ± {found.half_width:,.{digits}f}" if found.count > 1 else ""
    return f"{found.mean:,.{digits}f}{spread}"


def reached(row: Row, target: float) -> tuple[int, float]:
    """The step, and seconds until it, at which a run's loss is not above the target."""
    return next((step, seconds) for step, seconds, loss in row["curve"] if loss <= target)


def final_rows(by_wire: Mapping[str, dict[int, Row]], before: Sequence[Row]) -> Iterator[list[object]]:
    """Each wire's last loss, exact answers, and time to the loss that all runs of a seed reach."""
    for row in before:
        yield ["before", "", "", "", f"{100 * row['exact']:.1f} %", *[""] * 4]
    none = next(iter(by_wire.values()), {})
    common = [seed for seed in none if all(seed in each for each in by_wire.values())]
    targets = {seed: max(min(loss for *_, loss in each[seed]["curve"]) for each in by_wire.values()) for seed in common}
    for wire, each in by_wire.items():
        to_target = {seed: reached(each[seed], target) for seed, target in targets.items()}
        alone = [seed for seed in common if each[seed]["at_once"] == none[seed]["at_once"] == 1]
        some = next(iter(each.values()))
        yield [
            *(f"`{wire}`", len(each), interval([row["curve"][-1][2] for row in each.values()], 4)),
            interval([each[seed]["curve"][-1][2] - none[seed]["curve"][-1][2] for seed in common], 4),
            interval([100 * row["exact"] for row in each.values()], 1) + " %",
            interval([step for step, _ in to_target.values()], 0),
            interval([to_target[seed][1] for seed in alone], 0),
            interval([reached(none[seed], targets[seed])[1] / to_target[seed][1] for seed in alone], 2),
            f"{some['sent'] / 1e6:,.2f} MB; {', '.join(some['codecs'])}",
        ]


def curve_rows(by_wire: Mapping[str, dict[int, Row]]) -> Iterator[list[object]]:
    """The mean loss of each wire, by step."""
    every = [row for each in by_wire.values() for row in each.values()]
    for place, (step, *_) in enumerate(every[0]["curve"] if every else ()):
        means = (interval([row["curve"][place][2] for row in each.values()], 4) for each in by_wire.values())
        yield [step, *means]


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    rows = measure(options)
    by_wire = {wire: {row["seed"]: row for row in rows if row["wire"] == wire} for wire in options.wires}
    by_wire = {wire: each for wire, each in by_wire.items() if each}
    shown = {key: getattr(options, key) for key in ("steps", "global_batch", "micro_batch", "seq_len", "lr", "rate")}
    settings = ", ".join(f"{key} {'default' if value is None else value}" for key, value in shown.items())
    yield f"{options.model.name}, records of {options.train.name} and {options.test.name}; {settings}."
    columns = ("wire", "seeds", "last loss", "minus none", "exact answers", "steps to target", "s to target")
    yield Table((*columns, "times as fast as none", "bytes per step, last"), final_rows(by_wire, rows[:1]))
    yield Table(("step", *(f"`{wire}`" for wire in by_wire)), curve_rows(by_wire), heading="Held-out loss by step")


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--model": {"type": Path, "required": True, "help": "a folder as of the Hugging Face Hub"},
            "--train": {"type": Path, "required": True, "help": "JSON lines with prompt and response"},
            "--test": {"type": Path, "required": True, "help": "held-out records"},
            "--wires": {"nargs": "+", "default": list(WIRES), "help": "'activations / gradients'; the first is none"},
            "--seeds": {"type": int, "default": 3},
            "--parallel": {"type": int, "default": 1, "help": "runs of a row, with different seeds, at once"},
            "--steps": {"type": int, "default": 200},
            "--eval-every": {"type": int, "default": 20},
            "--eval-batches": {"type": int, "default": 4},
            "--answers": {"type": int, "default": 500, "help": "test records that are answered, the first ones"},
            "--global-batch": {"type": int, "default": 32},
            "--micro-batch": {"type": int, "help": "default: tahq's"},
            "--seq-len": {"type": int, "default": 128},
            "--lr": {"type": float, "help": "default: tahq's"},
            "--rate": {"default": "100mbit"},
            "--device": {"default": "cuda", "help": "cuda: all stages on one GPU"},
            "--seconds": {"type": float, "default": float("inf"), "help": "that the script may take"},
        },
    )
