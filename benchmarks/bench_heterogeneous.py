"""A cluster of unlike hosts: default settings against the hosts as listed with layers split evenly.

    python benchmarks/bench_heterogeneous.py [--output benchmarks/results/heterogeneous_<hardware>_<yyyymm>.md]

Compute is 1 : 2 : 4, links are 50 to 1000 Mbit/s and not the same up and down. Four hosts in network namespaces, twelve
layers asleep as long as each host would take, micro-batches of 4 samples. `tahq-launch` with default settings, then
what someone would set by hand without planning, 1F1B with three layers each, and the best plans by the simulator
(`default_rows`). Needs root and a quiet machine.
"""

import argparse
from collections.abc import Iterator

from default_rows import Case, Codecs, Values, default_table
from engine_points import CONGESTION_CONTROL
from harness import Table, main

NUM_LAYERS, HIDDEN_SIZE, SEQ_LEN = 12, 512, 256
MICRO_BATCH, GLOBAL_BATCH = 4, 64
LAYER_MS = 30, 60
"""Forward and backward of a micro-batch on a host of speed 1."""
HOSTS = (
    ("desk", 1, 50, 200),
    ("tower", 4, 300, 1000),
    ("laptop", 2, 100, 500),
    ("server", 1, 1000, 1000),
)
"""Name, speed, and Mbit/s up and down of each host, in the order in which a user might list them."""
WIRES: dict[str, Codecs | None] = {"default": None, "tah6": ("tah", "fixed:bits=6")}


def case(wire: str) -> Case:
    """What each host sleeps is for the layers of an even division."""
    count = len(HOSTS)
    sleep = {
        name: [f"{NUM_LAYERS // count * milliseconds / speed:g}ms" for _, speed, _, _ in HOSTS]
        for name, milliseconds in zip(("forward", "backward"), LAYER_MS, strict=True)
    }
    hosts = {f"host{n}": {"up": f"{up}mbit", "down": f"{down}mbit"} for n, (_, _, up, down) in enumerate(HOSTS)}
    model = {"family": "gpt2", "num_layers": NUM_LAYERS, "hidden_size": HIDDEN_SIZE, "num_heads": 8}
    values: Values = {
        "run": {"name": "default"},
        "model": model,
        "data": {"text": "stdlib", "seq_len": SEQ_LEN},
        "training": {"global_batch": GLOBAL_BATCH, "micro_batch": MICRO_BATCH},
        "pipeline": {"stages": count},
        "emulate": {
            "sleep": sleep,
            "hosts": hosts,
            "congestion_control": CONGESTION_CONTROL,
            "tcp_slow_start_after_idle": False,
        },
        "hosts": "namespaces",
    }
    naive: Values = {"pipeline": {"schedule": "1f1b", "layers": [NUM_LAYERS // count] * count}}
    return Case("as listed", wire, values, WIRES[wire], lambda codecs: naive, in_order=False)


def tables(options: argparse.Namespace) -> Iterator[Table | str]:
    yield Table(("host", "speed", "up, Mbit/s", "down, Mbit/s"), HOSTS)
    yield default_table(map(case, WIRES), options)


if __name__ == "__main__":
    main(__doc__, tables, {"--best": {"type": int, "default": 3, "help": "plans by the simulator beside the default"}})
