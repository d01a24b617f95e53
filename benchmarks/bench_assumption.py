"""Assumption 4.4 of TAH-Quant: the relative error of gradients that passed through codecs.

    python benchmarks/bench_assumption.py [--text wikitext2-valid.txt …] [--output FILE]
    python benchmarks/bench_assumption.py --model gpt2 --device cuda --text … --tokenizer GPT2-FOLDER
        --ages 50 200 800 --steps 4 --batches 8 --output benchmarks/results/assumption_4_4_<hardware>_<yyyymm>.md

The paper finds ‖ĝ−g‖²/‖g‖² below 0.4 at every step, and below 0.1 of the expectation, with tiles of 64 and 32 (§4.1,
Figure 1). This measures the same with the core of `tahq probe`, at several ages of a model in training.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from harness import Table, main

from tahq.pipeline.gradient_probe import GradientProbe, WireResult, collect
from tahq_launch.analysis.probe import bits_per_element
from tahq_launch.analysis.probe_setup import ProbeRequest, ProbeSetup, open_setup

EXAMPLES = Path(__file__).parents[1] / "launch/examples"
MODELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "demo": ("demo.yaml", ("training.global_batch=8", "training.lr_schedule=constant")),
    "gpt2-tiny": (
        "gpt2.yaml",
        ("model.num_layers=4", "model.hidden_size=128", "model.num_heads=4", "data.seq_len=128",
         "training.global_batch=8"),
    ),
    "gpt2": (
        "gpt2.yaml",
        ("model.num_layers=12", "model.hidden_size=768", "model.num_heads=12", "data.seq_len=512",
         "training.global_batch=16", "training.micro_batch=8", "training.lr=6e-4", "training.warmup_steps=40"),
    ),
}  # fmt: skip
WIRES = (
    *(f"{spec} / raw" for spec in ("tah:group=64", "tah:group=32", "tah:tau=0", "fixed:bits=6", "fixed:bits=8")),
    *(f"raw / {spec}" for spec in ("tah", "fixed:bits=6", "fixed:bits=8")),
    *("tah:group=64 / fixed:bits=8", "tah:group=32 / fixed:bits=8", "wf / raw", "raw / eden", "wf / eden"),
)


def open_model(name: str, options: argparse.Namespace) -> ProbeSetup:
    """One of MODELS, on the data that was asked for."""
    example, overrides = MODELS[name]
    changes = [*overrides, f"training.steps={2 * (max(options.ages) + options.steps)}"]
    if options.text and name != "demo":
        changes.append(f"data.tokenizer={options.tokenizer}")
        changes.append(f"data.text={json.dumps([str(path) for path in options.text])}")
    return open_setup(ProbeRequest(EXAMPLES / example, tuple(changes), WIRES, device=options.device))


def measure(setup: ProbeSetup, options: argparse.Namespace) -> Iterator[tuple[int, float, dict[str, WireResult]]]:
    """Train, and probe at every age: the age, the loss without codecs, and the results by wire."""
    probe = GradientProbe(setup.model, setup.batches, setup.wires, setup.update)
    step = 0
    for age in sorted(options.ages):
        while step < age:
            probe.train(step)
            step += 1
        probed = [probe.probe(step + index, options.batches) for index in range(options.steps)]
        step += options.steps
        results = dict(zip(WIRES, collect(setup.wires, probed), strict=True))
        yield age, statistics.fmean(each.loss for each in probed), results


def cells(setup: ProbeSetup, wire: str, result: WireResult) -> list[str]:
    bits = [bits_per_element(spec, setup.boundary) for spec in (result.wire.activations, result.wire.gradients)]
    return [
        f"`{wire}`",
        " + ".join(f"{count:.2f}" for count in bits),
        _figure(statistics.median(result.step_errors)),
        _figure(max(result.step_errors)),
        _figure(max(result.expectation_errors)),
        _figure(result.noiseless_expectation_error()),
        f"{min(result.cosines):.4f}",
        *(_figure(sums.relative) for sums in result.by_group().values()),
    ]


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _shape(setup: ProbeSetup) -> str:
    samples, length, channels = setup.boundary
    count = sum(parameter.numel() for parameter in setup.model.parameters.values())
    model, data, training = setup.config.model, setup.config.data, setup.config.training
    files = data.text if isinstance(data.text, list) else [str(data.text)]
    return (
        f"{model.family}, {model.num_layers} layers, {count:,} parameters, {setup.model.num_cuts} cuts of [{samples}, "
        f"{length}, {channels}], {training.global_batch} samples per batch, learning rate {training.lr:g}, "
        f"seed {setup.config.run.seed}; text: {', '.join(Path(file).name for file in files)}."
    )


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    yield (
        "ĝ is the gradient with the codecs at all cuts, g without, from the same weights, samples and dropout masks; "
        "g moves the weights. *A batch*: ‖ĝ−g‖²/‖g‖² of single batches (Eq. 9; the paper: below 0.4). *Mean*: the same "
        f"of the means over {options.batches} batches (Eq. 10; the paper: below 0.1), the largest of the probed steps "
        f"({options.steps} at each age). *M → ∞*: its estimate without the noise between batches. The last columns are "
        "parts of the model, over all batches. The paper fine-tuned Gemma2-2B; these models start from random weights."
    )
    for name in options.model:
        setup = open_model(name, options)
        yield f"## {name}\n\n{_shape(setup)}"
        for age, loss, results in measure(setup, options):
            groups = results[WIRES[0]].by_group()
            columns = ("forward / backward", "bits", "a batch: median", "largest", "mean", "M → ∞", "cosine", *groups)
            rows = (cells(setup, wire, result) for wire, result in results.items())
            yield Table(columns, rows, f"After {age} steps, loss {loss:.3f}:")


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--model": {"nargs": "+", "choices": list(MODELS), "default": ["demo", "gpt2-tiny"]},
            "--text": {"nargs": "+", "type": Path, "default": [], "help": "files for gpt2 models; default: the demo's"},
            "--tokenizer": {"default": "bytes", "help": "with --text: bytes, or a folder"},
            "--device": {"default": "cpu"},
            "--ages": {"nargs": "+", "type": int, "default": [10, 60], "help": "steps of training before probing"},
            "--steps": {"type": int, "default": 1, "help": "probed steps at each age"},
            "--batches": {"type": int, "default": 4, "help": "batches at each probed step, 2 or more"},
        },
    )
