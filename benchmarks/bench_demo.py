"""The demo, run and summed up: seconds, loss, bits an element, bytes against fp32.

Run:  python benchmarks/bench_demo.py [--output benchmarks/results/demo_<hardware>_<yyyymm>.md]
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import describe

DEMO = Path(__file__).parents[1] / "launch/examples/demo.yaml"


def run_demo(folder: str) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from the command to its end, and the metrics."""
    begin = time.perf_counter()
    subprocess.run(
        [str(Path(sys.executable).with_name("tahq-launch")), str(DEMO)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=True,
    )
    seconds = time.perf_counter() - begin
    lines = (Path(folder) / "runs/demo/metrics.jsonl").read_text().splitlines()
    return seconds, [json.loads(line) for line in lines]


def report(seconds: float, metrics: list[dict[str, Any]]) -> str:
    """The result file."""
    links = [link for row in metrics for link in row["links"]]
    bits = {
        way: 8 * sum(link["payload_bytes"] for link in links if link["direction"] == way)
        / sum(link["elements"] for link in links if link["direction"] == way)
        for way in ("activations", "gradients")
    }  # fmt: skip
    sent, plain = sum(link["wire_bytes"] for link in links), 4 * sum(link["elements"] for link in links)
    last = [row["loss"] for row in metrics[-10:]]
    return "\n".join(
        [
            "# The demo",
            "",
            f"{describe()}. `python benchmarks/bench_demo.py`, which runs launch/examples/demo.yaml.",
            "",
            "| what | figure |",
            "|---|---|",
            f"| from the command to its end | {seconds:.0f} s |",
            f"| steps | {len(metrics)}, {statistics.median(row['step_time_s'] for row in metrics):.2f} s in median |",
            f"| loss, first step | {metrics[0]['loss']:.2f} nats a byte |",
            f"| loss, mean of the last ten steps | {sum(last) / len(last):.2f} nats a byte |",
            f"| activations on the wire | {bits['activations']:.3f} bits an element |",
            f"| gradients on the wire | {bits['gradients']:.3f} bits an element |",
            f"| sent on all links | {sent / 1e6:.0f} MB; {plain / sent:.1f} times that in fp32 |",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = report(*run_demo(folder))
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
