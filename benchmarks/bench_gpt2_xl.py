"""The engine with GPT2-XL on GPUs: the share of the bound, how much over FP32 and torch, what runtime and codec take.

    python benchmarks/bench_gpt2_xl.py                               # all; again and again with --limit 500
    python benchmarks/bench_gpt2_xl.py --parts fp32 --lane fp32      # a lane, beside other calls
    python benchmarks/bench_gpt2_xl.py --report                      # the tables, of what there is
    python benchmarks/bench_gpt2_xl.py --model tiny --device cpu --out /tmp/try     # shows that it works

1.5 billion random weights in four stages, or as many as there are GPUs, each in a network namespace of its own; 32
micro-batches a step, of one sample of 1,024 tokens or of more; 50 to 1000 Mbit/s up and down, without delay. Needs
root.

*Share of the bound*: `tahq.plan.simulate.bound`, with the bytes that crossed and the seconds that forward and backward
took, by marks in the GPUs' queues, in the same steps. Where stages share a GPU their times hold waiting for each other,
so the bound takes the least that each stage took in other results (`--least-of`), where it had a GPU of its own.

*Overhead* (part `trace`): a run of its own over open links, some steps of which are recorded, with and without the
codecs. `trace_overhead` says what counts. A share of the step, on the worst stage.

How deep pipelines are is one choice a wire, since its rates share one start of the workers, which takes longer than
most of them (`--depth-by-rate`: one a rate, as a user has it): that for which the simulator's worst loss against the
best depth of each rate is least, whatever the length of queues. It is told what compute is expected to take, and what
memory holds.
"""

import argparse
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine_points import QUEUES_S, depths
from engine_rows import predicted_again, quartiles, size_text, step_work, wire_text
from harness import need_gpu
from trace_overhead import MICRO_BATCHES, TracedRun, overhead_lines, read_runs, trace_run

from tahq_netem.measure.machine import one_line
from tahq_netem.sweep.command import run_sweep
from tahq_netem.sweep.points import NetworkChoice, sweep_points
from tahq_netem.sweep.prediction import CodecSeconds, predicted_step_s, schedule_with_depth, step_bound_s
from tahq_netem.sweep.results import DONE, Row, done, read_results
from tahq_netem.sweep.spec import SweepConfig, split_wire
from tahq_netem.sweep.stage_times import StageTimes
from tahq_netem.sweep.workload import planned_work

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
RESULTS = Path(__file__).parent / "results"
RATES = (1000, 500, 300, 100, 50)
FP32, BF16 = "raw:dtype=fp32", "raw:dtype=bf16"
TAH = "tah / fixed:bits=6"
WIRES: Mapping[str, str] = {
    "tah": TAH,
    "tah-8": "tah / fixed:bits=8",
    "aqsgd": "aqsgd:bits=4 / fixed:bits=8",
    "wf": "wf / eden",
    "fp32": FP32,
    "bf16": BF16,
}
"""tahq's, by part."""
TORCH: Mapping[str, tuple[str, str]] = {
    "torch-gpipe-fp32": ("gpipe", FP32),
    "torch-gpipe-bf16": ("gpipe", BF16),
    "torch-1f1b-fp32": ("1f1b", FP32),
    "torch-1f1b-bf16": ("1f1b", BF16),
}
"""Schedule and wire of torch's own pipelining, by part."""
TRACE = "trace"
TRACED_WIRES = (TAH, FP32)
PIECE = 1024 * 1024
"""The largest: each message costs Python, and of that stages that compute small kernels have little to spare."""
EXPECTED_S = (0.008, 0.016)
"""A micro-batch's forward and backward on one of four stages, when depths are chosen: at least this, by kernels,"""
EXPECTED_OF_SAMPLE_S = (0.004, 0.0085)
"""and at least this a sample."""
EXPECTED_CODEC = CodecSeconds(0.002, 0.002, 0.002, 0.002)
ERROR_LENGTH = 160
"""Of a message in the tables; the results' file has all of it."""
MIN_SHARE = 0.92
MAX_OVERHEAD = 0.02


def sweeps(part: str, options: argparse.Namespace) -> list[SweepConfig]:
    """What a part measures: its rates together where one depth does for all."""
    if part in TORCH:
        schedule, wire = TORCH[part]
        return [_sweep({"name": "torch", "schedules": [schedule], "wires": [wire]}, options.rates, options)]
    runtime = {"name": "tahq", "wires": [WIRES[part]]}
    return [
        _sweep({**runtime, "in_flight": [chosen_depth(_sweep(runtime, rates, options), options)]}, rates, options)
        for rates in ([[rate] for rate in options.rates] if options.depth_by_rate else [options.rates])
    ]


def _sweep(runtime: dict[str, Any], rates: Sequence[int], options: argparse.Namespace) -> SweepConfig:
    return SweepConfig.model_validate(
        {
            **MODELS[options.model],
            "name": f"gpt2-xl-{options.at_a_time}-at-a-time",
            "global_batch": MICRO_BATCHES * options.micro_batch,
            "micro_batches": [options.micro_batch],
            "stages": [options.stages],
            "compute": ["real"],
            "rates": [1e6 * rate for rate in rates],
            "runtimes": [runtime],
            "device": options.device,
            "backend": options.backend,
            "calibrate": not options.no_calibration,
            "steps": {"settle": options.settle, "at_least": options.steps, "at_most": 6, "about": 10.0},
            "tcp_slow_start_after_idle": False,
            "piece": options.piece,
            "timeout": options.timeout,
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
    held = {
        depth: schedule_with_depth("1f1b", options.stages, MICRO_BATCHES, depth)
        for depth in depths("1f1b", options.stages, MICRO_BATCHES)
        if max(depth) * options.micro_batch <= options.samples
    }
    seconds = {
        depth: [
            max(predicted_step_s(schedule, work, plan, EXPECTED_CODEC, queue_s=queue_s) for queue_s in QUEUES_S)
            for plan in plans
        ]
        for depth, schedule in held.items()
    }
    best = [min(of_rate) for of_rate in zip(*seconds.values(), strict=True)]
    losses = {depth: max(mine / least for mine, least in zip(own, best, strict=True)) for depth, own in seconds.items()}
    # what GPUs compute takes a third longer in one step than in another, which deeper pipelines mind less
    return min(losses, key=lambda depth: (round(losses[depth], 2), -sum(depth)))


def measure(options: argparse.Namespace, results: Path) -> int:
    """Measure what is missing until time is up; returns how many points are left or have failed."""
    deadline_s = time.monotonic() + options.limit
    missing = 0
    for part in options.parts:
        if part == TRACE:
            traces = results.with_name(f"{results.stem}-trace.jsonl")
            for wire in TRACED_WIRES:
                trace_run(MODELS[options.model], split_wire(wire), options, traces)
        else:
            for config in sweeps(part, options):
                outcome = run_sweep(config, results, max(0.0, deadline_s - time.monotonic()))
                missing += outcome.num_left + outcome.num_failed
    return missing


# -- the report ----------------------------------------------------------------------------------


def report(rows: Sequence[Row], runs: Sequence[TracedRun], least_of: Sequence[Path]) -> Iterator[str]:
    """Markdown; `least_of`: results with the least times of stages, for those that share GPUs."""
    least = least_times(row for path in least_of for row in read_results(path).values()) if least_of else None
    rows = [row if least is None else with_least_times(row, least) for row in rows]
    measured = sorted(done(rows), key=_place)
    machines = dict.fromkeys(f"{one_line(row['machine'])}, {row['when'][:10]}" for row in rows)
    yield "# The engine with GPT2-XL on GPUs\n"
    yield f"{'; '.join(machines)}. `python benchmarks/bench_gpt2_xl.py`\n"
    stages = ", ".join(map(str, sorted({row["point"]["stages"] for row in rows})))
    yield (
        f"Stages: {stages}, in network namespaces; 32 micro-batches a step, of one sample of 1,024 tokens or as\n"
        "said; rates of each host's uplink and downlink, no delay, cubic without slow start after pauses. Tokens a\n"
        "second by the median step. *share*: of the bound that compute, bytes and rates set,\n"
        "with the seconds that forward and backward took on the GPUs in the same steps. *predicted*: by the\n"
        "simulator, with the codecs' times of the same steps. Pieces of 1 MiB.\n"
    )
    if least is not None:
        yield (
            "Stages share GPUs, so the bound takes the least that each stage took where it had one of its own:\n"
            f"{_ms(least.forward_s)} ms forward, {_ms(least.backward_s)} ms backward\n"
            f"({', '.join(path.name for path in least_of)}).\n"
        )
    for name in dict.fromkeys(row["sweep"] for row in measured):
        parts = dict.fromkeys(_series(row) for row in measured if row["sweep"] == name)
        count = name.removeprefix("gpt2-xl-").removesuffix("-at-a-time")
        yield f"Measured {count} at a time: {'; '.join(parts)}."
    yield ""
    yield from _tokens_table(measured)
    yield from _shares_table(measured)
    yield from overhead_lines(runs)
    yield "## Targets\n"
    yield from _targets(measured, runs)
    failed = [row for row in rows if row["status"] != DONE]
    if failed:
        yield "\n## Not measured\n"
        yield from (f"- {_series(row)}, {_network(row)}: {row['error'][:ERROR_LENGTH]} …" for row in failed)


def _tokens_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Tokens a second\n"
    series = list(dict.fromkeys(map(_series, rows)))
    found = {(_series(row), _mbits(row)): tokens_per_s(row) for row in rows}
    yield f"| Mbit/s | {' | '.join(series)} |\n|{'---|' * (len(series) + 1)}"
    for mbits in sorted({_mbits(row) for row in rows}, reverse=True):
        cells = [f"{found[name, mbits]:,.0f}" if (name, mbits) in found else "–" for name in series]
        yield f"| {mbits} | {' | '.join(cells)} |"
    yield ""
    tah = f"tahq 1f1b `{TAH}`"
    if tah not in series:
        return
    yield f"`{TAH}` in tahq, times the others:\n"
    others = [name for name in series if not name.startswith("tahq") or FP32 in name or BF16 in name]
    yield f"| Mbit/s | {' | '.join(others)} |\n|{'---|' * (len(others) + 1)}"
    for mbits in sorted({_mbits(row) for row in rows}, reverse=True):
        mine = found.get((tah, mbits), math.nan)
        times = [mine / found.get((name, mbits), math.nan) for name in others]
        cells = ["–" if math.isnan(value) else f"{value:.2f}×" for value in times]
        yield f"| {mbits} | {' | '.join(cells)} |"
    yield ""


def _shares_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Against the bound\n"
    titles = ("wire", "in flight", "Mbit/s", "steps", "step, s", "bound, s", "share", "predicted, s", "off by")
    titles += ("forward, ms", "backward, ms")
    yield f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    for row in rows:
        if row["bound_s"] is None:
            continue
        low_s, step_s, high_s = quartiles([step["seconds"] for step in row["steps"]])
        predicted_s = predicted_again(row)
        times = row["compute_times"]
        cells = [
            f"`{_wire(row)}`{_of(row)}",
            str(tuple(row["point"]["in_flight"])),
            str(_mbits(row)),
            str(len(row["steps"])),
            f"{step_s:.3f} ({low_s:.3f}–{high_s:.3f})",
            f"{row['bound_s']:.3f}",
            f"{row['bound_s'] / step_s:.3f}",
            "" if predicted_s is None else f"{predicted_s:.3f}",
            "" if predicted_s is None else f"{predicted_s / step_s - 1:+.1%}",
            *(_ms([pair[way] for pair in times]) for way in (0, 1)),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _targets(rows: Sequence[Row], runs: Sequence[TracedRun]) -> Iterator[str]:
    for row in rows:
        if row["bound_s"] is not None:
            share = row["bound_s"] / quartiles([step["seconds"] for step in row["steps"]])[1]
            verdict = "met" if share >= MIN_SHARE else "MISSED"
            name = f"{_wire(row)}{_of(row)}, {_network(row)}"
            yield f"- {name}: at least {MIN_SHARE} of the bound: {share:.3f}, {verdict}"
    for run in runs:
        verdict = "met" if run.overhead < MAX_OVERHEAD else "MISSED"
        name = f"{run.wire}{size_text(run.micro_batch)}, by trace"
        yield f"- {name}: overhead below {MAX_OVERHEAD:.0%} of the step: {run.overhead:.1%}, {verdict}"


def least_times(rows: Iterable[Row]) -> StageTimes:
    """The least that each stage took for a forward and for a backward, of one sample, in any of these rows."""
    alone = [row for row in done(rows) if row.get("compute_times") and row["point"]["micro_batch"] == 1]
    forwards, backwards = zip(*(zip(*row["compute_times"], strict=True) for row in alone), strict=True)
    return StageTimes(tuple(map(min, zip(*forwards, strict=True))), tuple(map(min, zip(*backwards, strict=True))))


def with_least_times(row: Row, least: StageTimes) -> Row:
    """The row with the bound of these times of compute in place of its own."""
    if row.get("bound_s") is None:
        return row
    point = row["point"]
    plan = NetworkChoice(point["rate_bits_per_s"], point["round_trip_s"]).plan(point["stages"])
    return {**row, "bound_s": step_bound_s(step_work(row, least), plan)}


def _ms(seconds: Iterable[float]) -> str:
    return " ".join(f"{1e3 * each:.1f}" for each in seconds)


def tokens_per_s(row: Row) -> float:
    """By the median step."""
    tokens: int = row["point"]["global_batch"] * row["point"]["seq_len"]
    return tokens / quartiles([step["seconds"] for step in row["steps"]])[1]


def _place(row: Row) -> tuple[bool, str, int, str, float]:
    """tahq's first, a wire's rows together, the fastest network first."""
    point = row["point"]
    place = (point["micro_batch"], _wire(row), -point["rate_bits_per_s"])
    return point["runtime"] != "tahq", point["schedule"], *place


def _series(row: Row) -> str:
    return f"{row['point']['runtime']} {row['point']['schedule']} `{_wire(row)}`{_of(row)}"


def _of(row: Row) -> str:
    return size_text(row["point"]["micro_batch"])


def _wire(row: Row) -> str:
    return wire_text(row["point"]["activations"], row["point"]["gradients"])


def _network(row: Row) -> str:
    return NetworkChoice(row["point"]["rate_bits_per_s"], row["point"]["round_trip_s"]).label


def _mbits(row: Row) -> int:
    return round(row["point"]["rate_bits_per_s"] / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*WIRES, *TORCH, TRACE]
    parser.add_argument("--model", choices=list(MODELS), default="gpt2-xl")
    parser.add_argument("--device", default="auto", help="auto spreads the stages over the GPUs there are")
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES), help="Mbit/s")
    parser.add_argument("--stages", type=int, default=4, help="one a GPU, for shares of the bound that hold")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples of a micro-batch")
    parser.add_argument("--samples", type=int, default=32, help="that a stage may have in flight, by its memory")
    parser.add_argument("--depth-by-rate", action="store_true", help="start anew for each rate, as deep as suits it")
    parser.add_argument("--settle", type=int, default=2, help="steps that go by before any counts")
    parser.add_argument("--steps", type=int, default=2, help="of a point, at least")
    parser.add_argument("--piece", type=int, default=PIECE, help="links.piece, in bytes")
    parser.add_argument("--backend", default="auto", help="of the networks; see tahq-netem probe")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds that a start may take")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the networks first")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no point shall end")
    parser.add_argument("--lane", help="measure into a results' file of this name, beside other calls")
    parser.add_argument("--at-a-time", type=int, default=1, help="how many calls measure beside each other, with this")
    parser.add_argument("--pictures", type=Path, help="keep the traces of part trace in this folder")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables of all lanes")
    parser.add_argument(
        "--least-of", type=Path, nargs="+", default=[], help="results where such stages had GPUs of their own"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="gpt2_xl_h200_202611")
    options = parser.parse_args()
    if not options.report:
        need_gpu(options.device)
        lane = f"-{options.lane}" if options.lane else ""
        missing = measure(options, options.out / f"{options.name}{lane}.jsonl")
        print(f"{missing} points are left or failed; run it again" if missing else "nothing is left")
    if options.lane is None:
        traces = set(options.out.glob(f"{options.name}*-trace.jsonl"))
        paths = sorted(set(options.out.glob(f"{options.name}*.jsonl")) - traces)
        rows = [row for path in paths for row in read_results(path).values()]
        text = "\n".join(report(rows, read_runs(sorted(traces)), options.least_of)) + "\n"
        (options.out / f"{options.name}.md").write_text(text)
        print(text)


if __name__ == "__main__":
    main()
