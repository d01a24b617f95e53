"""The composition root of tahq-worker: one process, one stage, from JOIN to BYE.

    JOIN → ASSIGN → build → HELLO → PLAN → links → READY → START → (step, PREPARE, COMMIT)* → BYE
    JOIN → ASSIGN → HELLO → (order, measurement)* → BYE                             under `tahq measure`

Two threads beside the compute loop: one owns the data sockets (`ZmqEndpoint`), one the control socket
(`ControlClient`). An ABORT that arrives while the compute loop waits for a frame ends that wait.
"""

import gc
import logging
import re
import signal
import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from tahq import fault_points
from tahq.comm.control.messages import (
    Abandon,
    Admit,
    Assign,
    Bye,
    Copy,
    Failed,
    NoCheckpoint,
    Order,
    Plan,
    Published,
    Ready,
    ServeFiles,
    Start,
    StopRequest,
    TryPeers,
)
from tahq.comm.group.transport import GroupSpec, GroupTransport, open_group
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.zmq.addresses import parse_address
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.files import pieces
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.comm.zmq.transport import ZmqTransport
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.config.stage_estimate import memory_savings, schedule_of, stage_estimate
from tahq.errors import (
    FrameLogError,
    InterruptedRunError,
    OutOfMemoryError,
    PeerLostError,
    RefusedError,
    RemoteProtocolError,
    RunAbortedError,
    StartOverError,
    TahqError,
    UserError,
)
from tahq.fault_points import reached
from tahq.memory.free_memory import free_bytes, is_out_of_memory
from tahq.pipeline.checkpoint.copies import CheckpointCopies
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq.pipeline.stage import Stage
from tahq.worker.assembly import Assembly, compute_device, resolved_spec
from tahq.worker.control import WorkerControl, WorkerOptions, WorkerTraining
from tahq.worker.links import (
    LinkOrder,
    WorkerLinks,
    control_shaping,
    copy_rate_bits_per_s,
    open_endpoint,
    try_peers,
)
from tahq.worker.measuring import measure

log = logging.getLogger(__name__)
_POINTS = (fault_points.BACKWARD, fault_points.FORWARD)
_WORK = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "input gradient",
    ActionKind.W: "weight gradients",
}


def run_worker(options: WorkerOptions) -> int:
    """Serve one stage until the run ends.

    Returns:
        The exit status that the coordinator ended the run with: 0, or 130/143 after a signal.

    Raises:
        TahqError: refused, aborted, a peer lost, out of memory…; the coordinator has been told.
    """
    raise_descriptor_limit()
    while True:
        worker = Worker(options)
        try:
            return worker.run()
        except StartOverError as error:
            worker.abandon()
            log.warning("joining again: %s", error)
            stage = options.stage if options.stage_by_key else worker.control.stage
            options = replace(options, stage=stage, takeover=False, stands_by=True)
        except TahqError as error:
            worker.report(error)
            raise
        except Exception as error:
            stage = worker.control.stage
            if is_out_of_memory(error):
                lost = out_of_memory(error, stage, worker.config, worker.device)
                worker.report(lost)
                raise lost from error
            worker.report(TahqError(f"stage {stage}: internal error: {type(error).__name__}: {error}"))
            raise
        finally:
            worker.close()
        del worker
        gc.collect()  # its stage is full of cycles, and the next one needs the memory


class Worker:
    """One stage's process, from joining to leaving."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.config: ClusterConfig | None = None
        """The coordinator's; None before it has arrived."""
        self.device: torch.device | None = None
        """Where this stage computes; None before that is known."""
        self._has_chunks = False
        self._endpoint: ZmqEndpoint | None = None
        self._links: WorkerLinks | None = None
        self._groups: list[GroupTransport] = []
        self._turns = defaultdict[tuple[int, int], threading.Lock](threading.Lock)
        """By the plan's epoch and the other stage; see `GroupSpec.turn`."""
        self._copies: CheckpointCopies | None = None
        self._stage: Stage | None = None
        self.control = WorkerControl(options, self._interrupt_links, self._obey)
        self._signals = WorkerSignals(self.control)

    def run(self) -> int:
        """The whole life of the worker; returns its exit status."""
        self._signals.install()
        control, options = self.control, self._options
        assign = control.join()
        if isinstance(assign, Bye):
            return assign.exit_status
        config = self.config = config_from_json(assign.config_json)
        self._configure(config)
        spare_device = config.run.device if options.spare else None
        self.device = device = compute_device(config, assign.stage, options.device or spare_device)
        if assign.is_measuring:
            return measure(control, options, assign, config, device)
        self._endpoint = endpoint = open_endpoint(options, assign, config, device, control.send)
        self._copies = copies = self._open_copies(assign, config, endpoint)
        try:
            assign = copies.restored(control.working)
        except PeerLostError as error:
            log.error("%s", error)
            control.send(NoCheckpoint(control.stage, assign.start_step, str(error)))
            return control.receive(Bye).exit_status  # or StartOverError, at an older checkpoint
        assembly = Assembly.build(assign, config, device, control.working)
        self._links = links = WorkerLinks(endpoint, assign.stage, control.send, self._relay_host)
        control.send(assembly.greeting(endpoint.address))
        control.working("waiting for the others")
        plan = control.receive(Plan, Bye)
        if not isinstance(plan, Plan):
            return 0  # all steps are done
        control.working("connecting")
        reached(fault_points.HANDSHAKE, stage=assign.stage, step=plan.start_step)
        transports = links.open(plan, config.run.join_timeout, partial(self._open_group, assembly, plan))
        stage = self._stage = assembly.connect(plan, transports, self._before_action)
        stage.update.on_search = lambda done, due: control.working(f"searching subspaces, {done}/{due}")
        stage.prepare(control.working)
        training = WorkerTraining(control, stage, assembly, plan, copies.offer)
        control.send(Ready(control.stage))
        start = control.receive(Start)
        stage.use_codecs(start.step, start.codecs)
        stage.use_schedule(start.schedule, start.depths)
        stage.use_replicas(start.computing)
        stage.use_loss_scale(start.loss_scale)
        try:
            training.run(start.step)
        except FrameLogError as error:
            log.error("%s; all stages go back to a checkpoint", error)
            links.report_lacking(error.link)
        return control.receive(Bye).exit_status

    def report(self, error: TahqError) -> None:
        """Report the error to the coordinator, unless it came from there."""
        log.error("%s", error)
        if isinstance(error, RefusedError | RunAbortedError) or self.control.is_aborted:
            return
        with suppress(PeerLostError):
            self.control.send(Failed(self.control.stage, str(error), error.exit_status))

    def abandon(self) -> None:
        """Drop the links as if this process had died; the neighbours continue with its successor."""
        for group in self._groups:
            group.abandon()
        if self._endpoint is not None:
            self._endpoint.abandon()

    def close(self) -> None:
        """Close all sockets; the links send a goodbye."""
        signal.setitimer(signal.ITIMER_REAL, 0)  # this worker is leaving
        for part in (self._copies, *self._groups, self._endpoint, self.control):
            if part is not None:
                part.close()

    def _configure(self, config: ClusterConfig) -> None:
        """Apply the keys of `run:` that concern this process."""
        self._has_chunks = config.pipeline.chunks > 1
        run, tahq_log = config.run, logging.getLogger("tahq")
        self._signals.grace_s = run.grace
        if tahq_log.getEffectiveLevel() > logging.DEBUG:  # else the command line asked for more
            tahq_log.setLevel(run.log_level.upper())
        self.control.set_timing(control_shaping(config), run.peer_timeout, run.give_up)
        if run.threads is not None:
            torch.set_num_threads(run.threads)

    def _open_copies(self, assign: Assign, config: ClusterConfig, endpoint: ZmqEndpoint) -> CheckpointCopies:
        offer = partial(endpoint.files.offer, assign.run_id)
        folder, rate = Path(config.run.dir) / config.run.name, copy_rate_bits_per_s(config, assign.stage)
        fetch, report = partial(pieces, endpoint.fetching), self.control.send
        return CheckpointCopies(assign, folder, config.pipeline.num_workers, rate, fetch, offer, report)

    def _open_group(
        self, assembly: Assembly, plan: Plan, link: ZmqTransport, dial: str, transport: str
    ) -> GroupTransport:
        if transport not in ("gloo", "nccl"):
            raise RemoteProtocolError(f"the plan has a link over {transport!r}; expected zmq, gloo or nccl")
        assign = assembly.assign
        spec = GroupSpec(
            backend="nccl" if transport == "nccl" else "gloo",
            identity=PeerIdentity(assign.run_id, plan.epoch, assign.stage, assign.config_hash),
            dial=dial,
            device=assembly.device,
            timeout_s=assembly.config.run.peer_timeout,
            turn=self._turns[plan.epoch, link.end.spec.peer_stage],
        )
        self._groups.append(open_group(link, spec))
        return self._groups[-1]

    def _before_action(self, step: int, action: Action) -> None:
        assert self._stage is not None, "it computes"
        chunk = f"chunk {action.chunk}, " if self._has_chunks else ""
        place = f"micro-batch {action.micro_batch + 1}/{self._stage.engine.num_micro_batches}"
        self.control.working(f"{chunk}{place} {_WORK[action.kind]}")
        reached(_POINTS[action.kind is ActionKind.F], stage=self.control.stage, step=step)
        self.control.check_aborted()
        self._signals.report()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Admit) and self._endpoint is not None:
            self._endpoint.allow(order.public_keys)
        if isinstance(order, ServeFiles) and self._endpoint is not None:
            self._endpoint.serve_files(RelayTicket.planned(order.ticket, self._relay_host), order.public_key)
        if isinstance(order, TryPeers) and self._endpoint is not None:
            try_peers(self._endpoint, self.control.stage, order, self.control.send)
        if isinstance(order, Copy | Published) and self._copies is not None:
            self._copies.obey(order)
        if isinstance(order, Abandon) and self._stage is not None:
            self._stage.engine.abandoned_step = order.step
        if isinstance(order, LinkOrder) and self._links is not None:
            self._links.obey(order)

    @property
    def _relay_host(self) -> str:
        """Where this worker reaches the coordinator's host."""
        return parse_address(self._options.peer, "coordinator")[0]

    def _interrupt_links(self, reason: Exception) -> None:
        if self._endpoint is not None:
            self._endpoint.abort(reason)


class WorkerSignals:
    """SIGINT and SIGTERM: the first asks for an orderly stop within `grace_s`, the second ends the process at once."""

    def __init__(self, control: WorkerControl) -> None:
        self._control = control
        self._numbers: list[int] = []
        self._is_reported = False
        self.grace_s: float | None = None
        """Seconds that the step and its checkpoint may take after SIGTERM; None: not known yet."""

    def install(self) -> None:
        """Handle the signals here; called by the main thread."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGALRM, self._end_grace)

    def report(self) -> None:
        """Ask the coordinator to stop the run, once, if a signal has come."""
        if self._numbers and not self._is_reported:
            self._is_reported = True
            self._control.send(StopRequest(self._control.stage, self._numbers[0]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if len(self._numbers) > 1 or self._control.step < 0 or self.grace_s is None:
            name = f"stage {self._control.stage}" if self._control.stage >= 0 else "worker without a stage"
            raise InterruptedRunError(f"{name} stopped by {signal.Signals(number).name}", number)
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _end_grace(self, number: int, frame: FrameType | None) -> None:
        """End the process, whatever the main thread is doing or waiting for."""
        raise InterruptedRunError(
            f"stage {self._control.stage} stopped by SIGTERM: step {self._control.step + 1} and its checkpoint took "
            f"longer than run.grace ({self.grace_s:g} s), so they were abandoned",
            signal.SIGTERM,
        )


# -- the error of a device that is out of memory -----------------------------------------------------

_ALLOCATION = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_GENERAL = (
    "use a smaller training.micro_batch, memory.recompute: block, more stages, or fewer layers on "
    "this stage (pipeline.layers)"
)


def out_of_memory(
    error: BaseException, stage: int, config: ClusterConfig | None = None, device: torch.device | None = None
) -> OutOfMemoryError:
    """One line with the failed allocation, the stage's needs (`stage_estimate`, a lower bound) and helpful changes.

    `config` is resolved; it and `device` are None if they were not known yet.
    """
    advice = _estimate(config, stage, device) if config is not None and device is not None else _GENERAL
    return OutOfMemoryError(
        f"stage {stage} is out of memory: {_allocation(error, device)}; {advice}; `tahq-launch --dry-run` shows the "
        "estimate of every stage"
    )


def _estimate(config: ClusterConfig, stage: int, device: torch.device) -> str:
    """The stage's needs and advice; if they cannot be estimated, advice without numbers."""
    try:
        spec = resolved_spec(config, None)
        memory = stage_estimate(config, spec, stage, device=device.type)
        helpful = memory_savings(config, spec, stage, device=device.type)
        depth = schedule_of(config, spec).max_in_flight(stage % config.pipeline.stages)
    except (UserError, ValueError, MemoryError, RuntimeError):
        return _GENERAL
    kinds = memory.kinds()
    activations = kinds.pop("activations")
    rest = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items() if nbytes)
    each = size(activations / max(1, depth))
    held = f"activations {size(activations)} ({depth} micro-batches in flight, {each} each)"
    advice = ", ".join(f"{change} ({size(saved)} less)" for change, saved in helpful)
    helps = f"by the same estimate, these would help: {advice}" if advice else _GENERAL
    return f"it needs {size(memory.total)} or more: {held}, {rest}; {helps}"


def _allocation(error: BaseException, device: torch.device | None) -> str:
    match = _ALLOCATION.search(str(error))
    if match is not None:
        text = f"tried to allocate {size(float(match[1]) * _UNITS[match[2]])}"
    else:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if device is None:
        return text
    try:
        free = free_bytes(device)
    except RuntimeError:  # a CUDA context that cannot be used any more
        free = 0
    return f"{text}, {size(free)} free on {device}" if free else f"{text} on {device}"


def size(nbytes: float) -> str:
    """``1.25 GiB``; below a hundredth of that in MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 0.01 * 2**30 else f"{nbytes / 2**20:.2f} MiB"
