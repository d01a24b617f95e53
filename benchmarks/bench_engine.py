"""The measure of the engine: what share of the bound a step comes to, and whether the simulator knew.

    python benchmarks/bench_engine.py                                # all; again and again with --limit 500
    python benchmarks/bench_engine.py --only 100 --micro-batches 8 --runtimes tahq --out /tmp/try
    python benchmarks/bench_engine.py --report                       # the tables, of what there is

Four stages, 8 and 32 micro-batches, unshaped, at 300, 100 and 20 Mbit/s and at 100 Mbit/s with round trips of 50 ms,
with TAH and 6 bits and with fp32; eight stages with round trips of 150 ms; beside torch GPipe, torch 1F1B, the same in
torch's runtime for schedules, and a bare asynchronous loop. `engine_points` says what is measured, `engine_rows` what
becomes of it. Needs root, and a quiet machine: points for which the cores did not suffice are refused, and rows say how
busy other programs were.

A point is a line of NAME.jsonl and is not measured again. NAME.md has the tables and the targets, met or missed;
NAME.json the same for programs. The exit status is 0 if all was measured, whatever came out.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine_points import PLACES, RUNTIMES, WIRES, Choices, Place, sweeps
from engine_rows import as_json, engine_rows, report

from tahq_netem.measure.machine import one_line
from tahq_netem.sweep.command import run_sweep
from tahq_netem.sweep.results import DONE, read_results
from tahq_netem.sweep.spec import SCHEDULES

RESULTS = Path(__file__).parent / "results"


def measure(places: Sequence[Place], choices: Choices, results: Path, limit_s: float) -> int:
    """Measure what is missing until time is up; returns how many points are left or have failed."""
    deadline_s = time.monotonic() + limit_s
    missing = 0
    for config in sweeps(places, choices):
        outcome = run_sweep(config, results, max(0.0, deadline_s - time.monotonic()))
        missing += outcome.num_left + outcome.num_failed
    return missing


def write_report(results: Path) -> str:
    """Write the tables beside the results; returns them."""
    found = list(read_results(results).values())
    machines = dict.fromkeys(f"{one_line(row['machine'])}, {row['when'][:10]}" for row in found)
    rows, machine = engine_rows(found), "; ".join(machines)
    text = report(rows, machine, [row for row in found if row["status"] != DONE])
    results.with_suffix(".md").write_text(text)
    results.with_suffix(".json").write_text(as_json(rows, machine))
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [place.name for place in PLACES]
    parser.add_argument("--only", nargs="+", default=names, choices=names, help="networks")
    parser.add_argument("--micro-batches", type=int, nargs="+", help="of a step, of those that a network has")
    parser.add_argument("--runtimes", nargs="+", default=["tahq", *RUNTIMES], choices=["tahq", *RUNTIMES])
    parser.add_argument(
        "--schedules", nargs="+", default=["1f1b", "zero-bubble"], choices=SCHEDULES["tahq"], help="tahq's"
    )
    parser.add_argument("--wires", nargs="+", default=list(WIRES), choices=list(WIRES), help="tahq's")
    parser.add_argument("--depth", type=int, help="micro-batches under way in tahq; else the simulator chooses")
    parser.add_argument("--steps", type=int, default=5, help="of a point, at least")
    parser.add_argument("--settle", type=int, help="steps that go by before; else until TCP has settled")
    parser.add_argument("--backend", default="auto", help="of the networks; see tahq-netem probe")
    parser.add_argument("--no-calibration", action="store_true", help="do not measure the networks first")
    parser.add_argument("--max-busy-cores", type=float, help="above, a point is refused")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no point shall end")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the tables")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--name", default="engine")
    options = parser.parse_args()
    choices = Choices(
        runtimes=tuple(options.runtimes),
        schedules=tuple(options.schedules),
        micro_batches=None if options.micro_batches is None else tuple(options.micro_batches),
        wires=tuple(options.wires),
        depth=options.depth,
        settle=options.settle,
        steps=options.steps,
        backend=options.backend,
        calibrate=not options.no_calibration,
        max_busy_cores=options.max_busy_cores,
    )
    results = options.out / f"{options.name}.jsonl"
    places = [place for place in PLACES if place.name in options.only]
    missing = 0 if options.report else measure(places, choices, results, options.limit)
    print(write_report(results))
    if missing:
        print(f"{missing} points are left or failed; run it again")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
