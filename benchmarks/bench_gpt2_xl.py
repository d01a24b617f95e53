"""The engine with GPT2-XL on GPUs: % of the theoretical maximum, speed beside torch, and the runtime's overhead.

    python benchmarks/bench_gpt2_xl.py [--output benchmarks/results/gpt2_xl_<hardware>_<yyyymm>.md]
    python benchmarks/bench_gpt2_xl.py --model tiny --device cpu --parts tah fp32 --rates 100    # shows that it works

1.5 billion random weights in four stages, each on a GPU and in a network namespace of its own; 32 micro-batches per
step; 50 to 1000 Mbit/s up and down, without delay. Needs root. Measured points are kept in a .jsonl beside the result
file and not measured again.

*Share*: of `tahq.plan.simulate.bound`, with the bytes that crossed and the seconds that forward and backward took, by
marks in the GPUs' queues, in the same steps; stages that share a GPU wait for each other in that time. *Overhead* (part
`trace`): `trace_overhead` says what counts.

Part `default`: `tahq-launch` with default settings but for the codecs of `--wires`, at these rates (0: unshaped), at
low rates beside depths set by hand (`default_rows`).

Depth of the pipeline of the other parts: one choice per wire, since all rates share one start of the workers: the one
that loses least against the best depth of each rate by the simulator, whatever the length of queues.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from default_rows import STEPS, Case, Codecs, Values, default_table
from engine_points import QUEUES_S, depths
from engine_rows import EngineRow, engine_rows, failures, machines, measure
from harness import Table, main, need_gpu, read_rows, rows_path
from trace_overhead import MICRO_BATCHES, overhead_rows, trace_run

from tahq_netem.sweep.points import sweep_points
from tahq_netem.sweep.spec import SweepConfig, split_wire
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import CodecSeconds, planned_work, predicted_step_s, schedule_with_depth

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
PARTS: Mapping[str, tuple[str, str, str]] = {
    "tah": ("tahq", "1f1b", TAH),
    "aqsgd": ("tahq", "1f1b", "aqsgd:bits=4 / fixed:bits=8"),
    "wf": ("tahq", "1f1b", "wf / eden"),
    "fp32": ("tahq", "1f1b", FP32),
    "bf16": ("tahq", "1f1b", BF16),
    "torch-gpipe-fp32": ("torch", "gpipe", FP32),
    "torch-gpipe-bf16": ("torch", "gpipe", BF16),
    "torch-1f1b-fp32": ("torch", "1f1b", FP32),
    "torch-1f1b-bf16": ("torch", "1f1b", BF16),
}
"""Runtime, schedule and wire."""
TRACE, DEFAULT = "trace", "default"
WIRES = {"default": None, "tah6": TAH, "tah8": "tah / fixed:bits=8", "bf16": BF16, "fp32": FP32}
BY_HAND, BY_HAND_RATES = (10, 8, 5, 2), (50, 100)
"""Depths under zero-bubble that were the fastest of many at these rates, in Mbit/s."""
TRACED_WIRES = (TAH, FP32)
PIECE = 1024 * 1024
"""Every message costs Python time, which stages that launch small kernels need."""
SAMPLES = 32
"""That a stage may have in flight, by its memory."""
EXPECTED_S, EXPECTED_OF_SAMPLE_S = (0.008, 0.016), (0.004, 0.0085)
"""When depths are chosen: at least this for a micro-batch's forward and backward on one of four stages, by kernels, and
at least this per sample."""
EXPECTED_CODEC = CodecSeconds(0.002, 0.002, 0.002, 0.002)


def sweep(part: str, options: argparse.Namespace) -> SweepConfig:
    """The sweep of a part: all rates, which share one start of the workers."""
    name, schedule, wire = PARTS[part]
    runtime: dict[str, Any] = {"name": name, "schedules": [schedule], "wires": [wire]}
    if name == "tahq":
        runtime["in_flight"] = [chosen_depth(_sweep(runtime, options), options)]
    return _sweep(runtime, options)


def _sweep(runtime: dict[str, Any], options: argparse.Namespace) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            **MODELS[options.model],
            "name": "gpt2-xl",
            "global_batch": MICRO_BATCHES * options.micro_batch,
            "micro_batches": [options.micro_batch],
            "stages": [options.stages],
            "compute": ["real"],
            "rates": [1e6 * rate for rate in options.rates if rate],
            "runtimes": [runtime],
            "device": options.device,
            "backend": options.backend,
            "steps": {"settle": 2, "at_least": 2, "at_most": 6, "about": 10.0},
            "tcp_slow_start_after_idle": False,
            "piece": PIECE,
            "timeout": 180.0,
        }
    )


def chosen_depth(config: SweepConfig, options: argparse.Namespace) -> tuple[int, ...]:
    """The depth, by stage, that loses least against the best of each rate, by the simulator."""
    points = sweep_points(config)
    forward_s, backward_s = (
        (max(least, options.micro_batch * each) * 4 / options.stages,) * options.stages
        for least, each in zip(EXPECTED_S, EXPECTED_OF_SAMPLE_S, strict=True)
    )
    work = planned_work(config, points[0].session, StageTimes(forward_s, backward_s))
    plans = [point.network.plan(options.stages) for point in points]
    seconds = {}
    for depth in depths("1f1b", options.stages, MICRO_BATCHES):
        if max(depth) * options.micro_batch <= SAMPLES:
            schedule = schedule_with_depth("1f1b", options.stages, MICRO_BATCHES, depth)
            seconds[depth] = [
                max(predicted_step_s(schedule, work, plan, EXPECTED_CODEC, queue_s=queue_s) for queue_s in QUEUES_S)
                for plan in plans
            ]
    best = [min(of_rate) for of_rate in zip(*seconds.values(), strict=True)]
    losses = {depth: max(mine / least for mine, least in zip(own, best, strict=True)) for depth, own in seconds.items()}
    # compute times on GPUs vary by a third between steps, which deeper pipelines tolerate better
    return min(losses, key=lambda depth: (round(losses[depth], 2), -sum(depth)))


def rate_rows(rows: Sequence[EngineRow], names: Sequence[str], *, ratios: bool) -> Iterator[list[object]]:
    """Tokens per second by rate and series, or (`ratios`) how many times as fast TAH-Quant's pair is."""
    found = {(row.series, row.place[1]): row.tokens_per_s for row in rows}
    for rate in sorted({row.place[1] or 0.0 for row in rows}, reverse=True):
        rates = [found.get((name, rate), math.nan) for name in names]
        pair = found.get((f"tahq 1f1b `{TAH}`", rate), math.nan)
        texts = [f"{pair / each:.2f}×" if ratios else f"{each:,.0f}" for each in rates]
        yield [round(rate / 1e6), *("–" if "nan" in text else text for text in texts)]


def share_cells(row: EngineRow) -> list[object]:
    times = zip(*row.row["compute_times"], strict=True)
    return [
        row.series,
        str(row.depth),
        round((row.place[1] or 0.0) / 1e6),
        len(row.row["steps"]),
        row.step_cell(),
        f"{row.row['bound_s']:.3f}",
        f"{row.share:.3f}",
        *row.prediction_cells(),
        *(" ".join(f"{1e3 * each:.1f}" for each in seconds) for seconds in times),
    ]


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
    codecs = spec and split_wire(spec)
    return Case(title, wire, values, codecs, by_hand if has_by_hand else None, spares_checkpoint=True)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    need_gpu(options.device)
    path = rows_path(options)
    if DEFAULT in options.parts:
        cases = (case(rate, wire, options) for wire in options.wires for rate in options.rates)
        yield default_table(cases, options, options.steps, options.at_once)
    if options.parts == [DEFAULT]:
        return
    traces = path.with_name(f"{path.stem}-trace.jsonl")
    if TRACE in options.parts:
        for wire in TRACED_WIRES:
            trace_run(MODELS[options.model], split_wire(wire), options, PIECE, traces)
    found = measure((sweep(part, options) for part in options.parts if part in PARTS), path)
    rows = sorted(engine_rows(found), key=lambda row: (row.series, -(row.place[1] or 0.0)))
    yield (
        f"{machines(found)}. {options.stages} stages in network namespaces; 32 micro-batches per step, of one sample "
        "of 1,024 tokens unless stated; rates of each host's uplink and downlink, no delay, cubic without slow start "
        "after pauses. Tokens per second by the median step. *predicted*: by the simulator, with the codecs' times of "
        "the same steps. Pieces of 1 MiB."
    )
    names = list(dict.fromkeys(row.series for row in rows))
    yield Table(("Mbit/s", *names), rate_rows(rows, names, ratios=False), heading="Tokens per second")
    others = [name for name in names if FP32 in name or BF16 in name]
    if others and f"tahq 1f1b `{TAH}`" in names:
        yield Table(("Mbit/s", *others), rate_rows(rows, others, ratios=True), f"`{TAH}` in tahq, times the others:")
    columns = ("wire", "in flight", "Mbit/s", "steps", "step, s", "bound, s", "share", "predicted, s", "off by")
    shares = [share_cells(row) for row in rows if row.row["bound_s"] is not None]
    yield Table((*columns, "forward, ms", "backward, ms"), shares, heading="Against the theoretical maximum")
    if traces.exists():
        yield overhead_rows(read_rows(traces))
    yield from failures(found)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--model": {"choices": list(MODELS), "default": "gpt2-xl"},
            "--device": {"default": "auto", "help": "auto spreads the stages over the GPUs"},
            "--parts": {"nargs": "+", "choices": [DEFAULT, *PARTS, TRACE], "default": [DEFAULT, *PARTS, TRACE]},
            "--rates": {"type": int, "nargs": "+", "default": [0, 1000, 500, 300, 100, 50], "help": "Mbit/s"},
            "--wires": {"nargs": "+", "choices": list(WIRES), "default": ["default"], "help": "of part default"},
            "--steps": {"type": int, "default": STEPS, "help": "of part default"},
            "--at-once": {"type": int, "default": 1, "help": "runs of part default"},
            "--stages": {"type": int, "default": 4},
            "--micro-batch": {"type": int, "default": 1, "help": "samples per micro-batch"},
            "--best": {"type": int, "default": 0, "help": "plans by the simulator beside default settings"},
            "--backend": {"default": "auto", "help": "network backend; see tahq-netem probe"},
        },
    )
