"""Runs rows: one try after another, or in lanes, each with its own cores and a process for a few tries."""

import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from chaos.joining_rows import JOINING_ROWS
from chaos.link_rows import LINK_ROWS
from chaos.message_rows import MESSAGE_ROWS
from chaos.recovery_rows import RECOVERY_ROWS
from chaos.results import Results, Try
from chaos.row import Attempt, Calm, Row
from chaos.snapshot_rows import SNAPSHOT_ROWS
from chaos.stranger_rows import STRANGER_ROWS
from chaos.worker_rows import WORKER_ROWS
from tahq_netem.backends.choice import probe

TRIES_PER_PROCESS = 5
ROWS: tuple[Row, ...] = (
    *RECOVERY_ROWS,
    *SNAPSHOT_ROWS,
    *LINK_ROWS,
    *WORKER_ROWS,
    *JOINING_ROWS,
    *STRANGER_ROWS,
    *MESSAGE_ROWS,
)


def obstacle(row: Row) -> str | None:
    """Why a row cannot be run here; None: it can."""
    missing = [need for need in row.needs if not _HAS[need]()]
    return f"this machine has no {', '.join(missing)}" if missing else None


def _has_namespaces() -> bool:
    found = probe()
    return found.namespaces_obstacle is None and (found.parts["tun"] or found.parts["netem"])


def _has_tcp_reset() -> bool:
    return bool(probe().parts["tcp-reset"])


def _has_time_namespaces() -> bool:
    return Path("/proc/self/ns/time").exists() and _has_namespaces() and shutil.which("unshare") is not None


_HAS = {"namespaces": _has_namespaces, "tcp-reset": _has_tcp_reset, "time-namespaces": _has_time_namespaces}


def run_row(row: Row, numbers: Iterable[int], results: Results, folder: Path) -> None:
    """Make these tries at a row, except those that have passed before."""
    if (reason := obstacle(row)) is not None:
        print(f"{row.name}: left out: {reason}", flush=True)
        return
    calm = Calm(folder / f"{row.name}-calm")
    for number in numbers:
        if results.has_passed(row.name, number):
            continue
        attempt = Attempt(row.name, number, folder / f"{row.name}-{number}", calm)
        attempt.folder.mkdir()
        done = _try(row, attempt)
        results.add(row, done)
        outcome = "passed" if done.passed else "FAILED"
        print(
            f"{row.name} {number}: {outcome} in {done.took_s:.1f} s {done.figures}\n{done.error}".rstrip(), flush=True
        )
        shutil.rmtree(attempt.folder, ignore_errors=True)
    shutil.rmtree(calm.folder, ignore_errors=True)


def _try(row: Row, attempt: Attempt) -> Try:
    began_s = time.monotonic()
    try:
        figures = row.attempt(attempt)
    except Exception:
        return Try(row.name, attempt.number, False, time.monotonic() - began_s, {}, traceback.format_exc())
    return Try(row.name, attempt.number, True, time.monotonic() - began_s, figures)


def run_in_lanes(rows: Sequence[Row], times: int | None, results: Results, lanes: int, folder: Path) -> None:
    """As `run_row` for each row, in lanes with equal shares of the cores; `times` None: as often as each row says."""
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
        size = 1 if row.takes_s > 60 else TRIES_PER_PROCESS
        for begin in range(0, len(missing), size):
            yield row, missing[begin : begin + size]
