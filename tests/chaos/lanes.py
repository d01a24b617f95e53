"""Many tries at a time, on a machine with cores for them: each lane has its own, and a process for a few tries."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from chaos.results import Results
from chaos.row import Row
from chaos.session import obstacle

TRIES_A_PROCESS = 5


def run_in_lanes(rows: Sequence[Row], times: int | None, results: Results, lanes: int, folder: Path) -> None:
    """As `run_row` for each row, in so many lanes; results come in as each lane's process ends.

    Args:
        rows: which.
        times: tries of each; None: as each row has it.
        results: gone on with.
        lanes: how many; each has an equal share of the cores.
        folder: for the lanes' results.
    """
    free: SimpleQueue[list[int]] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // lanes)
    for lane in range(lanes):
        free.put(cores[lane * share : (lane + 1) * share] or cores)

    def run(row: Row, numbers: Sequence[int]) -> Path:
        mine = free.get()
        try:
            out = folder / f"{row.name}-{numbers[0]}.json"
            os.sched_setaffinity(0, mine)  # of this thread, and so of what it starts
            command = (sys.executable, "-m", "chaos", "--rows", row.name, "--numbers", ",".join(map(str, numbers)))
            with out.with_suffix(".log").open("w") as log:
                subprocess.run([*command, "--out", str(out)], stdout=log, stderr=log, check=False)
            print(out.with_suffix(".log").read_text(), end="", flush=True)
            return out
        finally:
            free.put(mine)

    jobs = sorted(_jobs(rows, times, results), key=lambda job: -job[0].takes_s * len(job[1]))
    with ThreadPoolExecutor(lanes) as pool:
        for done in as_completed([pool.submit(run, *job) for job in jobs]):
            if done.result().exists():
                results.adopt(Results(done.result()))


def _jobs(rows: Sequence[Row], times: int | None, results: Results) -> Iterator[tuple[Row, list[int]]]:
    for row in rows:
        if (reason := obstacle(row)) is not None:
            print(f"{row.name}: left out: {reason}", flush=True)
            continue
        missing = [number for number in range(times or row.times) if not results.has_passed(row.name, number)]
        size = 1 if row.takes_s > 60 else TRIES_A_PROCESS
        for begin in range(0, len(missing), size):
            yield row, missing[begin : begin + size]
