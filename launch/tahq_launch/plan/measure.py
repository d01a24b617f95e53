"""`tahq measure`: the hosts of a cluster.yaml measure themselves and each other, and a file is written.

The workers are started and join as for a run, but no run folder is touched: their logs go to a temporary folder,
which stays only if something went wrong.
"""

import contextlib
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from tahq.comm.control.server import ControlServer
from tahq.comm.zmq.addresses import format_address
from tahq.config.cluster import ClusterConfig
from tahq.config.file import dump_yaml, placed_errors
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.observer import RunEnd, RunHeader
from tahq.coordinator.service import Coordinator
from tahq.errors import UserError
from tahq.observe.run_history import RunHistory
from tahq.observe.run_view import Observers, PlainLines
from tahq.plan.cluster_numbers import ClusterNumbers, HostNumbers, LayerTimes, PathNumbers, host_labels
from tahq.plan.measure.measurement import RELAY, Imitated, Measured, MeasureRequest
from tahq.plan.measure.meter import MeterServer
from tahq.plan.measure.meter_wire import LONGEST_S
from tahq.quant import CodecSpec
from tahq.units import format_rate, format_size
from tahq_launch.command_line import announce, check_writable, print_table
from tahq_launch.start.launcher import ORDERLY, relay_place, run_stages
from tahq_launch.start.preflight import reachable_start, refuse
from tahq_launch.start.prepared_run import PreparedRun, StartRequest

_MOST_CONNECTIONS = 32


def measure_hosts(start: StartRequest, request: MeasureRequest, output: Path) -> int:
    """Measure, write the figures, and print them; () in the request: as the configuration says.

    Returns 0; 3 if a worker was lost or a host could not reach another; 130 or 143 after a signal. The figures found so
    far are then written nevertheless, beside an older file rather than over it.
    """
    check_writable(output)
    if not 0 < request.seconds <= LONGEST_S / 2:
        raise UserError(f"--seconds must be above 0 and at most {LONGEST_S / 2:g}; got {request.seconds:g}")
    for spec in request.codecs:
        CodecSpec.parse(spec)
    wrong = [count for count in request.connections if not 1 < count <= _MOST_CONNECTIONS]
    if wrong:
        raise UserError(f"--connections must be 2 to {_MOST_CONNECTIONS}; got {wrong[0]}")
    folder = Path(tempfile.mkdtemp(prefix="tahq-measure-"))
    try:
        with placed_errors(start.config_path, start.overrides):
            start, faults = reachable_start(start)
            refuse([fault for fault in faults if fault.check != "data"])  # which measurements do not read
            status, numbers, _ = measured(start, request, folder)
    except UserError:
        shutil.rmtree(folder)
        raise
    if numbers is not None:
        path = write_numbers(numbers, output, is_complete=status == 0)
        print_table(_HOST_TITLES, [row for host in numbers.hosts for row in _host_rows(host)], left=(0,))
        if numbers.paths:
            print()
            print_table(_PATH_TITLES, [_path_row(path) for path in numbers.paths], left=(0, 1))
        announce(f"written to {path}" if status == 0 else f"the figures found so far are in {path}")
    if status in ORDERLY:
        shutil.rmtree(folder)
    else:
        announce(f"the workers' logs are in {folder}")
    return status


def measured(
    start: StartRequest, request: MeasureRequest, folder: Path, join_again: frozenset[int] | None = None
) -> tuple[int, ClusterNumbers | None, str]:
    """Have the workers of a configuration measure; logs are left in the folder.

    Returns:
        The exit status; the figures, None: there are none; and the address of the coordinator, where spares and the
        workers of the stages of `join_again` are about to join a run (None: no run follows).
    """
    addresses: list[str] = []
    made: list[tuple[Measured, Imitated]] = []
    opened = contextlib.ExitStack()

    def make_coordinator(prepared: PreparedRun, server: ControlServer) -> Coordinator:
        config = prepared.config
        labels = host_labels(config.hosts, config.pipeline.num_workers)
        computers = ["this machine"] * len(labels)
        if isinstance(config.hosts, list):
            computers = [host.address for host in config.hosts]
        local = config.local_stages if isinstance(config.hosts, list) else ()
        measured = Measured(labels, computers, labels[local[0]] if local else None)
        in_namespaces = config.hosts == "namespaces"
        # Elsewhere workers shape in user space, which a measurement's plain sockets bypass.
        made.append((measured, Imitated() if in_namespaces else Imitated(config.emulate.rate, config.emulate.delay)))
        wanted = _completed(request, config) if request.known is None else request
        place, run = relay_place(config, server), prepared.options.run_id
        open_relay = None if place is None else lambda: _open_relay(opened, run, *place)
        needs_codecs = None
        if (needs := request.needs_codecs) is not None:
            needs_codecs = lambda: needs(measured.numbers(made[0][1], ""))  # noqa: E731
        machines = labels if in_namespaces else computers
        wanted = replace(wanted, each=config.emulate.sleep is not None)
        measuring = Measuring(wanted, measured, machines, open_relay, needs_codecs)
        addresses.append(server.address)
        options = replace(prepared.options, is_measuring=True, hosts=measured.names, join_again=join_again)
        history = RunHistory()
        lines = Observers([history, _Lines(sys.stdout, history, start.program)])
        return Coordinator(options, server, lines, measuring=measuring)

    # Dividing by measured cost would time the layers here; the workers are about to do that.
    own = (f"run.dir={folder}", "run.name=measure", "pipeline.balance=counted")
    start = replace(start, overrides=(*start.overrides, *own))
    with opened:
        status = run_stages(start, make_coordinator, restarts_workers=False)
    ((measured, imitated),) = made
    for note in measured.notes:
        announce(f"note: {note}")
    if request.known is not None:
        hosts = measured.brought_up_to_date(request.known.hosts)
        return status, request.known.model_copy(update={"hosts": hosts}), addresses[0]
    source = f"tahq measure on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC"
    return status, measured.numbers(imitated, source) if measured.has_hosts else None, addresses[0]


def _open_relay(opened: contextlib.ExitStack, run: int, host: str, port: int) -> int:
    """Listen where the run's relay will, for workers that measure their paths to it; returns the port."""
    try:
        server = MeterServer(run, RELAY, format_address(host, port), None)
    except UserError as error:
        raise UserError(f"the relay: {error}; set run.relay to another port") from error
    opened.callback(server.close)
    return port


def _completed(request: MeasureRequest, config: ClusterConfig) -> MeasureRequest:
    """The request with the configuration's micro-batches and codecs if it names none."""
    codecs = request.codecs or config.wire.specs().values()
    return replace(
        request,
        micro_batches=request.micro_batches or micro_batches_of(config),
        codecs=tuple(dict.fromkeys(str(CodecSpec.parse(spec)) for spec in codecs)),
        connections=tuple(sorted(set(request.connections))),
    )


def micro_batches_of(config: ClusterConfig) -> tuple[int, ...]:
    """The configuration's micro-batch, half and twice that, where they divide the global batch."""
    size, whole = config.training.micro_batch, config.training.global_batch
    sizes = [*([size // 2] if size % 2 == 0 else []), size, 2 * size]
    return tuple(number for number in sizes if whole % number == 0)


class _Lines(PlainLines):
    """The lines of a run, with what is measured; the reason for an early end begins with the program's name."""

    def __init__(self, stream: TextIO, history: RunHistory, program: str) -> None:
        super().__init__(stream, history)
        self._program = program

    def opened(self, header: RunHeader) -> None:
        self.announce(
            f"measuring {header.num_stages} host{'s' * (header.num_stages > 1)}, coordinator at {header.address}"
        )

    def _print_state(self) -> None:
        if self._state[0] == "measuring" and self._state[1] and self._state != self._printed:
            self.announce(f"measuring {self._state[1]}")
        self._printed = self._state

    def ended(self, end: RunEnd) -> None:
        if end.exit_status:
            print(f"{self._program}: {end.message}", file=sys.stderr, flush=True)


def write_numbers(numbers: ClusterNumbers, output: Path, *, is_complete: bool) -> Path:
    """Write the file, whole or not at all; incomplete figures go beside an existing one (``measured.partial.yaml``)."""
    path = output if is_complete or not output.exists() else output.with_name(f"{output.stem}.partial{output.suffix}")
    temporary = path.with_name(f"{path.name}.tmp")
    header = "# Written by `tahq measure`; docs/dev/measuring.md says how each figure was taken.\n"
    try:
        temporary.write_text(header + dump_yaml(numbers, with_none=False), encoding="utf-8")
        return temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


_HOST_TITLES = ("host", "memory", "micro-batch", "block fw", "block bw", "ends fw", "ends bw", "up", "down")
_PATH_TITLES = ("from", "to", "rate", "round trip", "connections")


def _host_rows(host: HostNumbers) -> list[tuple[str, ...]]:
    """A row for each micro-batch size; the first also has the figures that do not depend on it."""
    memory = format_size(host.memory) if host.memory else ""
    up, down = (format_rate(rate) if rate else "" for rate in (host.up, host.down))
    first, *others = map(_time_cells, host.compute)
    return [(host.name, memory, *first, up, down), *(("", "", *cells, "", "") for cells in others)]


def _time_cells(times: LayerTimes) -> tuple[str, ...]:
    ends = (times.first_forward + times.last_forward, times.first_backward + times.last_backward)
    seconds = (times.block_forward, times.block_backward, *ends)
    return str(times.micro_batch), *(_milliseconds(value) for value in seconds)


def _path_row(path: PathNumbers) -> tuple[str, ...]:
    rate = format_rate(path.rate) if path.rate else ("failed" if path.failure else "")
    trip = _milliseconds(path.round_trip) if path.round_trip is not None else ""
    return path.source, path.target, f"{rate} (relayed)" if path.relayed else rate, trip, str(path.connections or 1)


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
