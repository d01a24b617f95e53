"""`tahq measure`: the hosts of a cluster.yaml measure themselves and each other, and a file is written.

The workers are started and join as for a run, but no run folder is touched: what they log goes to a temporary folder,
which stays only if something went wrong.
"""

import contextlib
import os
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, placed_errors
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver, StageStatus
from tahq.coordinator.service import Coordinator
from tahq.errors import UserError
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers, host_labels
from tahq.plan.measure.jobs import MeasureRequest
from tahq.plan.measure.measured import Imitated, Measured
from tahq.plan.measure.meter_wire import LONGEST_S
from tahq.quant import CodecSpec
from tahq.units import format_rate, format_size
from tahq_launch.start.fork_server import ForkServer
from tahq_launch.start.launcher import (
    ORDERLY,
    Announce,
    Fleet,
    import_meanwhile,
    lead,
    listening,
    own_network,
    signals_to,
    start_workers,
)
from tahq_launch.start.prepared_run import StartRequest, prepared_run
from tahq_launch.tables import print_table

_HERE = "this machine"
_MOST_CONNECTIONS = 32


@dataclass(frozen=True, slots=True)
class MeasureOptions:
    """What a person asked for; () leaves it to the configuration.

    `seconds` is how long each stream is looked at, at least. `access`: measure uplinks and downlinks with all
    others at once. `connections`: numbers of TCP connections to try on each path, besides one.
    """

    config_path: Path
    output: Path
    overrides: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    codecs: tuple[str, ...] = ()
    seconds: float = 1.0
    parallel: bool = False
    access: bool = True
    connections: tuple[int, ...] = ()
    debug: bool = False


def measure(options: MeasureOptions, announce: Announce) -> int:
    """Measure, write what came out, and show it.

    Args:
        options: what to measure.
        announce: told what the user should know, line by line.

    Returns:
        0; 3 if a worker was lost or a host could not reach another; 130 or 143 after a signal. What was measured is
        then written all the same, beside an older file rather than over it.

    Raises:
        UserError: it could not begin, or the file cannot be written.
    """
    _check(options)
    folder = Path(tempfile.mkdtemp(prefix="tahq-measure-"))
    try:
        with placed_errors(options.config_path, options.overrides):
            status, numbers = _measured(options, folder, announce)
    except UserError:
        shutil.rmtree(folder)
        raise
    if numbers is not None:
        path = write_numbers(numbers, options.output, is_complete=status == 0)
        print_numbers(numbers)
        announce(f"written to {path}" if status == 0 else f"what was measured is in {path}")
    if status in ORDERLY:
        shutil.rmtree(folder)
    else:
        announce(f"the workers' logs are in {folder}")
    return status


def _check(options: MeasureOptions) -> None:
    check_writable(options.output)
    if not 0 < options.seconds <= LONGEST_S / 2:
        raise UserError(f"--seconds must be above 0 and at most {LONGEST_S / 2:g}; got {options.seconds:g}")
    for spec in options.codecs:
        CodecSpec.parse(spec)
    wrong = [count for count in options.connections if not 1 < count <= _MOST_CONNECTIONS]
    if wrong:
        raise UserError(f"--connections must be 2 to {_MOST_CONNECTIONS}; got {wrong[0]}")


def _measured(options: MeasureOptions, folder: Path, announce: Announce) -> tuple[int, ClusterNumbers | None]:
    with ForkServer() as forks, prepared_run(_start(options, folder), partial(import_meanwhile, forks)) as prepared:
        config = prepared.config
        measured = Measured(host_labels(config.hosts, config.pipeline.stages), _computers(config))
        measuring = Measuring(_request(options, config), measured, _machines(config))
        told = replace(prepared.options, is_measuring=True, hosts=measured.names)
        with own_network(prepared, announce, forks) as hosts, listening(prepared, hosts) as server:
            coordinator = Coordinator(told, server, MeasureLines(), measuring=measuring)
            with signals_to(coordinator.request_stop), Fleet(coordinator.worker_exited, forks) as fleet:
                start_workers(prepared, coordinator.address, hosts, fleet, announce, debug=options.debug)
                status = lead(coordinator, fleet)
    for note in measured.notes:
        announce(f"note: {note}")
    return status, measured.numbers(_imitated(config), _source()) if measured.has_hosts else None


def _start(options: MeasureOptions, folder: Path) -> StartRequest:
    # Dividing by measured cost would time here what the workers are about to time there.
    kept_apart = (f"run.dir={folder}", "run.name=measure", "pipeline.balance=counted")
    overrides = (*options.overrides, *kept_apart)
    return StartRequest(options.config_path, overrides, debug=options.debug, program="tahq measure")


def _request(options: MeasureOptions, config: ClusterConfig) -> MeasureRequest:
    given = options.codecs or tuple(config.wire.specs().values())
    return MeasureRequest(
        micro_batches=options.micro_batches or micro_batches_of(config),
        codecs=tuple(dict.fromkeys(str(CodecSpec.parse(spec)) for spec in given)),
        seconds=options.seconds,
        parallel=options.parallel,
        access=options.access,
        connections=tuple(sorted(set(options.connections))),
    )


def micro_batches_of(config: ClusterConfig) -> tuple[int, ...]:
    """The configuration's micro-batch, half of it and twice, where the global batch can be made of them."""
    size, whole = config.training.micro_batch, config.training.global_batch
    wanted = (size // 2 if size % 2 == 0 else 0, size, 2 * size)
    return tuple(number for number in wanted if number and whole % number == 0)


def _computers(config: ClusterConfig) -> list[str]:
    """The machine of each stage, for its memory."""
    if isinstance(config.hosts, str):
        return [_HERE] * config.pipeline.stages
    return [host.address for host in config.hosts]


def _machines(config: ClusterConfig) -> list[str]:
    """The machine of each stage, for its uplink and downlink."""
    if config.hosts == "namespaces":
        return host_labels(config.hosts, config.pipeline.stages)
    return _computers(config)


def _imitated(config: ClusterConfig) -> Imitated:
    """Shaping that workers do in user space, which a measurement's plain sockets bypass."""
    if config.hosts == "namespaces":
        return Imitated()
    return Imitated(config.links.rate, config.links.delay)


def _source() -> str:
    return f"tahq measure on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"


_HEADER = "# Written by `tahq measure`; docs/measuring.md says how each figure was taken.\n"


class MeasureLines(RunObserver):
    """One line for everything that begins."""

    def __init__(self) -> None:
        self._said = ("", "")
        self._devices: dict[int, str] = {}

    def opened(self, header: RunHeader) -> None:
        """Print the header."""
        _say(f"measuring {header.num_stages} hosts, coordinator at {header.address}")

    def phase_changed(self, phase: str, detail: str) -> None:
        """Say what is measured now."""
        if phase == "measuring" and detail and self._said != (phase, detail):
            _say(f"measuring {detail}")
        self._said = (phase, detail)

    def stage_changed(self, status: StageStatus) -> None:
        """Print a worker once its device is known."""
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
    """Print two tables: hosts, and the paths between them."""
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
