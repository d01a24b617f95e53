"""Runs rows, one try after another."""

import shutil
import time
import traceback
from collections.abc import Iterable
from pathlib import Path

from chaos.results import Results, Try
from chaos.row import Attempt, Calm, Row
from tahq_netem.backends.probe import probe


def obstacle(row: Row) -> str | None:
    """Why a row cannot be run here; None: it can."""
    missing = [need for need in row.needs if not _HAS[need]()]
    return f"this machine has no {', '.join(missing)}" if missing else None


def _has_namespaces() -> bool:
    found = probe()
    return found.namespaces_obstacle is None and (found.parts["tun"] or found.has_netem)


def _has_tcp_reset() -> bool:
    return bool(probe().parts["tcp-reset"])


def _has_time_namespaces() -> bool:
    return Path("/proc/self/ns/time").exists() and _has_namespaces() and shutil.which("unshare") is not None


_HAS = {"namespaces": _has_namespaces, "tcp-reset": _has_tcp_reset, "time-namespaces": _has_time_namespaces}


def run_row(row: Row, numbers: Iterable[int], results: Results, folder: Path) -> None:
    """Make these tries at a row; those that the results have already are not repeated, unless they failed."""
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
        print(
            f"{row.name} {number}: {'passed' if done.passed else 'FAILED'} in {done.took_s:.1f} s {done.figures}",
            flush=True,
        )
        if not done.passed:
            print(done.error, flush=True)
        shutil.rmtree(attempt.folder, ignore_errors=True)
    shutil.rmtree(calm.folder, ignore_errors=True)


def _try(row: Row, attempt: Attempt) -> Try:
    began_s = time.monotonic()
    try:
        figures = row.attempt(attempt)
    except Exception:
        return Try(row.name, attempt.number, False, time.monotonic() - began_s, {}, traceback.format_exc())
    return Try(row.name, attempt.number, True, time.monotonic() - began_s, figures)
