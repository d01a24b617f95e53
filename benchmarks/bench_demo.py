"""The demo, run and summed up.

python benchmarks/bench_demo.py [--output benchmarks/results/demo_<hardware>_<yyyymm>.md]
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

from harness import Table, launch, main

DEMO = Path(__file__).parents[1] / "launch/examples/demo.yaml"


def rows(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    run = launch(DEMO)
    links = [link for step in run.steps for link in step["links"]]
    losses = [step["loss"] for step in run.steps]
    yield "from the command to its end", f"{run.seconds:.0f} s"
    yield "steps", f"{len(run.steps)}, {statistics.median(run.step_times_s()):.2f} s in median"
    yield (
        "loss, first step; mean of the last ten",
        f"{losses[0]:.2f}; {statistics.fmean(losses[-10:]):.2f} nats per byte",
    )
    for direction in ("activations", "gradients"):
        mine = [link for link in links if link["direction"] == direction]
        bits = 8 * sum(link["payload_bytes"] for link in mine) / sum(link["elements"] for link in mine)
        yield f"{direction} on the wire", f"{bits:.3f} bits per element"
    sent, plain = sum(link["wire_bytes"] for link in links), 4 * sum(link["elements"] for link in links)
    yield "sent on all links", f"{sent / 1e6:.0f} MB; fp32 would be {plain / sent:.1f} times as much"


def tables(options: argparse.Namespace) -> Iterator[Table]:
    yield Table(("what", "figure"), rows(options), "launch/examples/demo.yaml by `tahq-launch`.")


if __name__ == "__main__":
    main(__doc__, tables)
