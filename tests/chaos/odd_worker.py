"""`python -m chaos.odd_worker ODDITY VALUE -- …`: a `tahq-worker` in its own process with one oddity.

It prints READY when everything is imported, and is then the usual worker except for:

- ``version 9.9``: another version of tahq;
- ``config training.lr=0.5``: it reads the configuration with one field changed;
- ``nan 17``: its 17th forward of a micro-batch, from 0, gives NaN;
- ``clock 3600``: its wall clock is so many seconds ahead (the monotonic one is `unshare`'s to shift);
- ``nothing -``: it is only started differently.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from itertools import count
from typing import Any

READY = "ready"


def main() -> int:
    oddity, value, _, *arguments = sys.argv[1:]
    ODDITIES[oddity](value)
    from transformers import modeling_utils  # noqa: F401  (what takes long is imported before the clock runs)

    from tahq_launch.cli import worker_main

    print(READY, flush=True)
    sys.argv = ["tahq-worker", *arguments]
    return worker_main()


def _other_version(value: str) -> None:
    import tahq

    tahq.__version__ = value


def _other_config(change: str) -> None:
    from tahq.config import file as config_file
    from tahq.config.cluster import ClusterConfig

    path, _, value = change.partition("=")
    read = config_file.config_from_json

    def read_differently(text: str) -> ClusterConfig:
        values = json.loads(text)
        _set(values, path.split("."), json.loads(value))
        return read(json.dumps(values))

    config_file.config_from_json = read_differently


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        values = values[key]
    assert path[-1] in values, f"no {path[-1]} in {sorted(values)}"
    assert values[path[-1]] != value, f"{path[-1]} is {value} anyway"
    values[path[-1]] = value


def _nan(value: str) -> None:
    from tahq.pipeline.engine import Chunk

    compute, numbers, chosen = Chunk.compute, count(), int(value)

    def compute_oddly(self: Chunk, *arguments: Any, **options: Any) -> Any:
        result = compute(self, *arguments, **options)
        return result * math.nan if next(numbers) == chosen else result

    Chunk.compute = compute_oddly


def _skewed_clock(value: str) -> None:
    true_time, true_time_ns, ahead_s = time.time, time.time_ns, int(value)
    time.time = lambda: true_time() + ahead_s
    time.time_ns = lambda: true_time_ns() + ahead_s * 10**9


ODDITIES: dict[str, Callable[[str], None]] = {
    "version": _other_version,
    "config": _other_config,
    "nan": _nan,
    "clock": _skewed_clock,
    "nothing": lambda value: None,
}


if __name__ == "__main__":
    sys.exit(main())
