"""The engine against the theoretical maximum, and against the simulator's prediction.

    python benchmarks/bench_engine.py [--output benchmarks/results/engine_<hardware>_<yyyymm>.md]
    python benchmarks/bench_engine.py --only 100 --runtimes tahq        # a part
    python benchmarks/bench_engine.py --runtimes default                # the command with default settings alone

First `tahq-launch` with default settings and with fixed codecs, beside the best plans by the simulator. Then the rest:
Four stages, 8 and 32 micro-batches, unshaped, at 300, 100 and 20 Mbit/s and at 100 Mbit/s with round trips of 50 ms,
with TAH and 6 bits and with fp32; eight stages with round trips of 150 ms; beside torch GPipe, torch 1F1B, the same in
torch's runtime for schedules, and a bare asynchronous loop. Needs root and a quiet machine: points for which the cores
did not suffice are refused. Measured points are kept in a .jsonl beside the result file and not measured again.
"""

import argparse
import itertools
from collections.abc import Iterator

from default_rows import Case, Codecs, Values, default_table
from engine_points import (
    BACKWARD_S,
    CONGESTION_CONTROL,
    FORWARD_S,
    FP32,
    HIDDEN_SIZE,
    MICRO_BATCH,
    PLACES,
    RUNTIMES,
    SEQ_LEN,
    Place,
    chosen_depth,
    sweeps,
)
from engine_rows import EngineRow, engine_rows, failures, machines, measure
from harness import Table, main, rows_path

from tahq.units import write_duration

OWN = ("default", "tahq")
WIRES: dict[str, Codecs | None] = {
    "default": None,
    "fp32": (FP32, FP32),
    "tah6": ("tah", "fixed:bits=6"),
    "tah8": ("tah", "fixed:bits=8"),
}
"""Of default settings."""
COLUMNS = ("runtime", "in flight", "wire", "step, s", "tokens/s", "bound, s", "share", "and commit", "predicted, s")
CAPTION = (
    f"Stages that sleep 73 and 152 ms per micro-batch of {MICRO_BATCH} × {SEQ_LEN} tokens, activations of 2.1 MB in "
    "fp32; network namespaces, rates of each host's uplink and downlink. A step is the median of the counted steps, in "
    "brackets the quartiles. *bound*: the shortest time that compute, bytes, rates and delays allow; *share*: bound "
    "over step; *and commit*: with one round trip to the coordinator added, for tahq. *predicted*: by the "
    "simulator, with the codecs' times of the same steps. *busy cores*: by the measurement, in brackets by anything "
    "else. No slow start after pauses."
)


def cells(row: EngineRow) -> list[str]:
    return [
        f"{row.point['runtime']} {row.point['schedule']}",
        "the schedule's" if row.depth is None else str(row.depth),
        f"`{row.wire}`",
        row.step_cell(),
        f"{row.tokens_per_s:,.0f}",
        f"{row.row['bound_s']:.3f}",
        f"{row.share:.3f}",
        f"{row.share_with_commit:.3f}",
        *row.prediction_cells(),
        f"{row.row['busy_cores']:.2f} ({row.row['busy_cores_of_others']:.2f})",
    ]


def case(place: Place, wire: str) -> Case:
    """Default settings on a network like that of the other rows, with the fewest micro-batches."""
    count = min(place.micro_batches)
    sleep = {"forward": f"{1e3 * FORWARD_S:g}ms", "backward": f"{1e3 * BACKWARD_S:g}ms"}
    rate = {} if place.rate_bits_per_s is None else {"rate": f"{place.rate_bits_per_s / 1e6:g}mbit"}
    tcp = {"congestion_control": CONGESTION_CONTROL, "tcp_slow_start_after_idle": False}
    model = {"family": "gpt2", "num_layers": place.stages, "hidden_size": HIDDEN_SIZE, "num_heads": 8}
    values: Values = {
        "run": {"name": "default"},
        "model": model,
        "data": {"text": "stdlib", "seq_len": SEQ_LEN},
        "training": {"global_batch": count * MICRO_BATCH, "micro_batch": MICRO_BATCH},
        "pipeline": {"stages": place.stages},
        "emulate": {**rate, "delay": write_duration(place.round_trip_s / 2), **tcp, "sleep": sleep},
        "hosts": "namespaces",
    }

    def by_hand(codecs: Codecs) -> Values:
        depths = chosen_depth(place, count, "zero-bubble", " / ".join(codecs))
        return {"pipeline": {"schedule": "zero-bubble", "layers": [1] * place.stages, "in_flight": list(depths)}}

    return Case(f"{place.title}, {count} micro-batches", wire, values, WIRES[wire], by_hand)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    places = [place for place in PLACES if place.name in options.only]
    if "default" in options.runtimes:
        cases = itertools.product(places, options.wires)
        yield default_table((case(*each) for each in cases), options)
    if options.runtimes == ["default"]:
        return
    found = measure(sweeps(places, options.runtimes, backend=options.backend), rows_path(options))
    rows = sorted(
        engine_rows(found), key=lambda row: (row.point["runtime"] != "tahq", row.point["runtime"], row.wire, row.series)
    )
    yield f"{machines(found)}. {CAPTION}"
    for place in PLACES:
        for count in place.micro_batches:
            here = [cells(row) for row in rows if row.place == place.key and row.micro_batches == count]
            if here:
                yield Table((*COLUMNS, "off by", "busy cores"), here, heading=f"{place.title}, {count} micro-batches")
    yield from failures(found)


if __name__ == "__main__":
    main(
        __doc__,
        tables,
        {
            "--only": {"nargs": "+", "default": [each.name for each in PLACES], "help": "networks"},
            "--runtimes": {"nargs": "+", "default": [*OWN, *RUNTIMES], "choices": [*OWN, *RUNTIMES]},
            "--wires": {"nargs": "+", "default": list(WIRES), "choices": list(WIRES), "help": "of default settings"},
            "--best": {"type": int, "default": 5, "help": "plans that are run beside default settings"},
            "--backend": {"default": "auto", "help": "network backend; see tahq-netem probe"},
        },
    )
