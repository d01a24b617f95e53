"""What `tahq measure` prints while it measures, the file that it writes, and the tables at its end."""

import contextlib
import os
import sys
from pathlib import Path

from tahq.config.file import dump_yaml
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver, StageStatus
from tahq.errors import UserError
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers
from tahq.units import format_rate, format_size
from tahq_launch.tables import print_table

_HEADER = "# Written by `tahq measure`; docs/measuring.md says how each figure was taken.\n"


class MeasureLines(RunObserver):
    """One line for everything that begins."""

    def __init__(self) -> None:
        self._said = ("", "")
        self._devices: dict[int, str] = {}

    def opened(self, header: RunHeader) -> None:
        """Say who is waited for."""
        _say(f"measuring {header.num_stages} hosts, coordinator at {header.address}")

    def phase_changed(self, phase: str, detail: str) -> None:
        """Say what is measured now."""
        if phase == "measuring" and detail and self._said != (phase, detail):
            _say(f"measuring {detail}")
        self._said = (phase, detail)

    def stage_changed(self, status: StageStatus) -> None:
        """Say who is there, once its device is known."""
        if status.device and self._devices.get(status.stage) != status.device:
            self._devices[status.stage] = status.device
            _say(f"stage {status.stage}: {status.host}, pid {status.pid}, {status.device}")

    def warned(self, text: str) -> None:
        """Say what went wrong."""
        _say(f"warning: {text}")

    def ended(self, end: RunEnd) -> None:
        """Say why it is not complete."""
        if end.exit_status:
            print(f"tahq measure: {end.message}", file=sys.stderr, flush=True)


def _say(line: str) -> None:
    print(line, flush=True)


# -- the file ------------------------------------------------------------------------------------


def check_writable(output: Path) -> None:
    """Refuse, before anything is measured, a place where nothing can be written.

    Raises:
        UserError: it is a folder, or its folder is not there or read-only.
    """
    if output.is_dir():
        raise UserError(f"{output} is a folder; give the file to write (--output measured.yaml)")
    if not os.access(output.parent, os.W_OK):
        raise UserError(f"cannot write {output}: {output.parent} is no folder that can be written")


def write_numbers(numbers: ClusterNumbers, output: Path, *, is_complete: bool) -> Path:
    """Write the file, whole or not at all.

    Args:
        numbers: what it holds.
        output: where to. Figures that are not complete do not replace a file that is there.
        is_complete: whether they are.

    Returns:
        What was written: `output`, or ``measured.partial.yaml`` beside it.

    Raises:
        UserError: the disk does not take it.
    """
    path = output if is_complete or not output.exists() else output.with_name(f"{output.stem}.partial{output.suffix}")
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(_HEADER + dump_yaml(numbers, with_none=False), encoding="utf-8")
        return temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


# -- tables --------------------------------------------------------------------------------------

_HOST_TITLES = ("host", "memory", "micro-batch", "block fw", "block bw", "ends fw", "ends bw", "up", "down")
_PATH_TITLES = ("from", "to", "rate", "round trip", "connections")


def print_numbers(numbers: ClusterNumbers) -> None:
    """Two tables: hosts, and the ways between them."""
    print_table(_HOST_TITLES, [row for host in numbers.hosts for row in _host_rows(host)], left=(0,))
    if numbers.paths:
        print()
        print_table(_PATH_TITLES, [_path_row(path) for path in numbers.paths], left=(0, 1))


def _host_rows(host: HostNumbers) -> list[tuple[str, ...]]:
    """A row for each size of micro-batch; what does not depend on it in the first."""
    rows = []
    for index, times in enumerate(host.compute):
        first = index == 0
        memory = format_size(host.memory) if host.memory and first else ""
        up, down = (format_rate(rate) if rate and first else "" for rate in (host.up, host.down))
        rows.append((host.name if first else "", memory, *_time_cells(times), up, down))
    return rows


def _time_cells(times: LayerTimes) -> tuple[str, ...]:
    ends = (times.first_forward + times.last_forward, times.first_backward + times.last_backward)
    seconds = (times.block_forward, times.block_backward, *ends)
    return str(times.micro_batch), *(_milliseconds(value) for value in seconds)


def _path_row(path: PathNumbers) -> tuple[str, ...]:
    rate = format_rate(path.rate) if path.rate else ("failed" if path.failure else "")
    trip = _milliseconds(path.round_trip) if path.round_trip is not None else ""
    return path.source, path.target, rate, trip, str(path.connections or 1)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
