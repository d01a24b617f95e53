"""Labels per second of records that are packed and of the same records padded, by `tahq-launch` on this machine

    python benchmarks/bench_packing.py [--output benchmarks/results/packing_<hardware>_<yyyymm>.md]

A Llama-like model with random weights in two stages learns to spell numbers of 1 to 60 digits, in rows of 256 tokens.
Everything but `data.packing` is the same and keeps its default; micro-batches are of 4 rows. Runs alternate, so that
what else the machine does changes both. Tokens are counted by their labels, as in metrics.jsonl. Losses per sample are
equal (`tests/data/test_packing.py`, `tests/integration/test_packed_runs.py`), so labels per second compare.

Needs a quiet machine.
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import Table, launch, main, spread

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
RECORDS, SEQ_LEN, STEPS, SETTLE = 2_000, 256, 8, 2


def write_records(path: Path) -> None:
    """Short records are many and long ones few, as in most collections."""
    draw = random.Random(0)
    lines = []
    for _ in range(RECORDS):
        number = str(draw.randrange(10 ** min(60, 1 + int(draw.expovariate(0.15)))))
        response = " ".join(DIGITS[int(digit)] for digit in number)
        lines.append(json.dumps({"prompt": f"# {number} = ", "response": response}) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def config(records: Path, *, packing: bool) -> dict[str, Any]:
    return {
        "run": {"name": "packing", "checkpoint_every": "never"},
        "model": {"family": "llama", "num_layers": 4, "hidden_size": 256, "num_heads": 8},
        "data": {"records": str(records), "seq_len": SEQ_LEN, "packing": packing},
        "training": {"steps": STEPS, "global_batch": 16, "micro_batch": 4},
        "pipeline": {"stages": 2, "balance": "counted"},
    }


def labels_per_s(records: Path, *, packing: bool) -> tuple[float, float]:
    """Also labels per row."""
    steps = launch(config(records, packing=packing)).steps[SETTLE:]
    labels = sum(step["tokens"] for step in steps)
    return labels / sum(step["step_time_s"] for step in steps), labels / (16 * len(steps))


def rows(options: argparse.Namespace) -> Iterator[list[str]]:
    with tempfile.TemporaryDirectory(prefix="tahq-bench-") as name:
        records = Path(name) / "numbers.jsonl"
        write_records(records)
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.repeats):
            for packing, each in found.items():
                each.append(labels_per_s(records, packing=packing))
    padded = [rate for rate, _ in found[False]]
    for packing, each in found.items():
        ratios = [rate / of_padded for (rate, _), of_padded in zip(each, padded, strict=True)]
        labels = statistics.median(count for _, count in each)
        rates = spread([rate for rate, _ in each], digits=0)
        yield ["packed" if packing else "padded", f"{labels:.0f}", rates, spread(ratios)]


def tables(options: argparse.Namespace) -> Iterator[Table]:
    columns = ("records", f"labels per row of {SEQ_LEN}", "labels/s", "against padded")
    yield Table(columns, rows(options), f"{STEPS - SETTLE} steps of 16 rows after the first {SETTLE}, two stages.")


if __name__ == "__main__":
    main(__doc__, tables, repeats=3)
