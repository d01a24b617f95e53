"""GPT2-XL on GPUs with default settings, torch's schedules beside it, and the runtime's overhead by trace.

    python benchmarks/bench_gpt2_xl.py [--output benchmarks/results/gpt2_xl_<hardware>_<yyyymm>.md]
    python benchmarks/bench_gpt2_xl.py --stages 2 --wires default tah6 tah8 bf16 fp32     # on two GPUs
    python benchmarks/bench_gpt2_xl.py --model tiny --device cpu --rates 100              # shows that it works

1.5 billion random weights in stages, each in a network namespace of its own and the GPUs in turn; 32 samples of 1,024
tokens per step; 50 to 1000 Mbit/s up and down, without delay. Needs root. What is measured is kept in .jsonl files
beside the result file and not measured again. Parts:

- `default`: `tahq-launch` with default settings but for the codecs of `--wires`, at these rates (0: unshaped), at low
  rates beside depths set by hand (`default_rows`);
- `torch-<schedule>-<type>`: torch.distributed.pipelining over gloo, in micro-batches of one sample;
- `trace`: the shares of a step that runtime and codecs take (`trace_overhead`).
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from default_rows import STEPS, Case, Codecs, Values, default_table
from engine_rows import EngineRow, engine_rows, failures, machines, measure
from harness import Table, main, need_gpu, read_rows, rows_path
from trace_overhead import MICRO_BATCHES, overhead_rows, trace_run

from tahq_netem.sweep.spec import SweepConfig, split_wire

MODELS: Mapping[str, dict[str, Any]] = {
    "gpt2-xl": {
        "model": {"family": "gpt2", "num_layers": 48, "hidden_size": 1600, "num_heads": 25, "vocab_size": 50257},
        "seq_len": 1024,
    },
    "tiny": {
        "model": {"family": "gpt2", "num_layers": 8, "hidden_size": 64, "num_heads": 2, "vocab_size": 512},
        "seq_len": 32,
    },
}
FP32, BF16, TAH = "raw:dtype=fp32", "raw:dtype=bf16", "tah / fixed:bits=6"
WIRES = {
    "default": None,
    "tah6": TAH,
    "tah8": "tah / fixed:bits=8",
    "aqsgd": "aqsgd:bits=4 / fixed:bits=8",
    "bf16": BF16,
    "fp32": FP32,
}
TORCH = {
    f"torch-{schedule}-{name}": (schedule, wire)
    for schedule in ("gpipe", "1f1b")
    for name, wire in (("fp32", FP32), ("bf16", BF16))
}
"""Schedule and type on the wire."""
TRACE, DEFAULT = "trace", "default"
BY_HAND, BY_HAND_RATES = (10, 8, 5, 2), (50, 100)
"""Depths under zero-bubble that were the fastest of many at these rates, in Mbit/s."""
TRACED_WIRES = (TAH, FP32)
PIECE = 1024 * 1024
"""Every message costs Python time, which stages that launch small kernels need."""


def sweep(part: str, options: argparse.Namespace) -> SweepConfig:
    """The sweep of a part: all rates, which share one start of the workers."""
    schedule, wire = TORCH[part]
    return SweepConfig.model_validate(
        {
            **MODELS[options.model],
            "name": "gpt2-xl",
            "global_batch": MICRO_BATCHES,
            "micro_batches": [1],
            "stages": [options.stages],
            "compute": ["real"],
            "rates": [1e6 * rate for rate in options.rates if rate],
            "runtimes": [{"name": "torch", "schedules": [schedule], "wires": [wire]}],
            "device": options.device,
            "backend": options.backend,
            "steps": {"settle": 2, "at_least": 2, "at_most": 6, "about": 10.0},
            "tcp_slow_start_after_idle": False,
            "timeout": 180.0,
        }
    )


def rate_rows(rows: Sequence[EngineRow], names: Sequence[str]) -> Iterator[list[object]]:
    """Tokens per second by rate and series."""
    found = {(row.series, row.place[1]): row.tokens_per_s for row in rows}
    for rate in sorted({row.place[1] or 0.0 for row in rows}, reverse=True):
        rates = [found.get((name, rate), math.nan) for name in names]
        yield [round(rate / 1e6), *("–" if math.isnan(each) else f"{each:,.0f}" for each in rates)]


def case(rate: int, wire: str, options: argparse.Namespace) -> Case:
    """Default settings at a rate in Mbit/s, 0: unshaped; but for the codecs of a wire."""
    keys, spec = MODELS[options.model], WIRES[wire]
    network = {"tcp_slow_start_after_idle": False} | ({"rate": f"{rate}mbit"} if rate else {})
    values: Values = {
        "run": {"name": "default", "device": options.device, "checkpoint_every": "never"},
        "model": keys["model"],
        "data": {"text": "stdlib", "seq_len": keys["seq_len"]},
        "training": {"global_batch": MICRO_BATCHES},
        "pipeline": {"stages": options.stages},
        "emulate": network,
        "hosts": "namespaces",
    }

    def by_hand(codecs: Codecs) -> Values:
        pipeline = {"schedule": "zero-bubble", "in_flight": list(BY_HAND), "balance": "counted"}
        return {"pipeline": pipeline, "training": {"micro_batch": 1}}

    has_by_hand = wire == "default" and rate in BY_HAND_RATES and options.stages == len(BY_HAND)
    title = f"{rate} Mbit/s" if rate else "unshaped"
    return Case(title, wire, values, spec and split_wire(spec), by_hand if has_by_hand else None)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    path = rows_path(options)
    traces = path.with_name(f"{path.stem}-trace.jsonl")
    if DEFAULT in options.parts:
        cases = (case(rate, wire, options) for wire in options.wires for rate in options.rates)
        yield default_table(cases, options, options.steps, options.at_once)
    if TRACE in options.parts:
        for wire in TRACED_WIRES:
            trace_run(MODELS[options.model], split_wire(wire), options, PIECE, traces)
    if traces.exists():
        yield overhead_rows(read_rows(traces))
    if parts := [part for part in options.parts if part in TORCH]:
        found = measure((sweep(part, options) for part in parts), path)
        rows = sorted(engine_rows(found), key=lambda row: (row.series, -(row.place[1] or 0.0)))
        names = list(dict.fromkeys(row.series for row in rows))
        caption = f"{machines(found)}. Tokens per second by the median step."
        yield Table(("Mbit/s", *names), rate_rows(rows, names), caption, heading="torch")
        yield from failures(found)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--model": {"choices": list(MODELS), "default": "gpt2-xl"},
            "--device": {"default": "auto", "help": "auto spreads the stages over the GPUs"},
            "--parts": {"nargs": "+", "choices": [DEFAULT, TRACE, *TORCH], "default": [DEFAULT]},
            "--rates": {"type": int, "nargs": "+", "default": [0, 1000, 500, 300, 100, 50], "help": "Mbit/s"},
            "--wires": {"nargs": "+", "choices": list(WIRES), "default": ["default"], "help": "of part default"},
            "--steps": {"type": int, "default": STEPS, "help": "of part default"},
            "--at-once": {"type": int, "default": 1, "help": "runs of part default"},
            "--stages": {"type": int, "default": 4},
            "--best": {"type": int, "default": 0, "help": "plans by the simulator beside default settings"},
            "--backend": {"default": "auto", "help": "network backend; see tahq-netem probe"},
        },
    )
