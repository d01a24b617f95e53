"""The composition root of tahq-worker: one process, one stage, from JOIN to BYE.

    JOIN → ASSIGN → build → HELLO → PLAN → links → READY → START → (step, PREPARE, COMMIT)* → BYE
    JOIN → ASSIGN → HELLO → (order, measurement)* → BYE                             under `tahq measure`

Two threads beside the compute loop: one owns the data sockets (`ZmqEndpoint`), one the control socket
(`ControlClient`). An ABORT that arrives while the compute loop waits for a frame ends that wait.
"""

import logging
import signal
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tahq import fault_points
from tahq.comm.control.messages import (
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
    Start,
)
from tahq.comm.group.transport import GroupSpec, GroupTransport, open_group
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.files import pieces
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.comm.zmq.transport import ZmqTransport
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.errors import (
    FrameLogError,
    PeerLostError,
    RefusedError,
    RemoteProtocolError,
    RunAbortedError,
    StartOverError,
    TahqError,
)
from tahq.fault_points import reached
from tahq.memory.free_memory import is_out_of_memory
from tahq.pipeline.checkpoint.copies import CheckpointCopies
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq.worker.assembly import Assembly, compute_device
from tahq.worker.control import WorkerControl, WorkerSignals
from tahq.worker.links import LinkOrder, WorkerLinks
from tahq.worker.measuring import measure
from tahq.worker.out_of_memory import out_of_memory
from tahq.worker.place import (
    WorkerOptions,
    control_shaping,
    copy_rate_bits_per_s,
    listening_addresses,
    open_endpoint,
)
from tahq.worker.training import WorkerTraining

log = logging.getLogger(__name__)
_POINTS = (fault_points.BACKWARD, fault_points.FORWARD)


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
            options = replace(options, stage=worker.control.stage, takeover=False, stands_by=True)
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


class Worker:
    """One stage's process, from joining to leaving."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self.config: ClusterConfig | None = None
        """The coordinator's; None before it has arrived."""
        self.device: torch.device | None = None
        """Where this stage computes; None before that is known."""
        self._endpoint: ZmqEndpoint | None = None
        self._links: WorkerLinks | None = None
        self._groups: list[GroupTransport] = []
        self._copies: CheckpointCopies | None = None
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
            return measure(control, assign, config, device, listening_addresses(options, config, assign.stage))
        self._endpoint = endpoint = open_endpoint(options, assign, config, device, control.send)
        self._copies = copies = self._open_copies(assign, config, endpoint)
        try:
            assign = copies.restored(control.working)
        except PeerLostError as error:
            log.error("%s", error)
            control.send(NoCheckpoint(control.stage, assign.start_step, str(error)))
            return control.receive(Bye).exit_status  # or StartOverError, at an older checkpoint
        assembly = Assembly.build(assign, config, device, control.working)
        self._links = links = WorkerLinks(endpoint, assign.stage, control.send)
        control.working("waiting for the others")
        control.send(assembly.greeting(endpoint.address, endpoint.address if config.run.copies else ""))
        plan = control.receive(Plan, Bye)
        if not isinstance(plan, Plan):
            return 0  # all steps are done
        stage = assembly.connect(plan, self._connect(plan, assembly, links), self._before_action)
        control.working("preparing the codecs")
        stage.prepare()
        training = WorkerTraining(control, stage, assembly, plan, copies.offer)
        control.send(Ready(control.stage))
        start = control.receive(Start)
        stage.use_codecs(start.step, start.codecs)
        try:
            training.run(start.step)
        except FrameLogError as error:
            log.error("%s; all stages go back to a checkpoint", error)
            links.say_lacking(error.link)
        return control.receive(Bye).exit_status

    def report(self, error: TahqError) -> None:
        """Tell the coordinator why this worker leaves, unless the coordinator said so itself."""
        log.error("%s", error)
        if isinstance(error, RefusedError | RunAbortedError) or self.control.is_aborted:
            return
        with suppress(PeerLostError):
            self.control.send(Failed(self.control.stage, str(error), error.exit_status))

    def abandon(self) -> None:
        """Leave the links as if this process had died: the neighbours go on with the next one."""
        for group in self._groups:
            group.abandon()
        if self._endpoint is not None:
            self._endpoint.abandon()

    def close(self) -> None:
        """Release the sockets; the links say goodbye."""
        signal.setitimer(signal.ITIMER_REAL, 0)  # this worker is leaving
        if self._copies is not None:
            self._copies.close()
        for group in self._groups:
            group.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self.control.close()

    def _configure(self, config: ClusterConfig) -> None:
        """Apply what `run:` says about this process."""
        run, tahq_log = config.run, logging.getLogger("tahq")
        self._signals.grace_s = run.grace
        if tahq_log.getEffectiveLevel() > logging.DEBUG:  # else the command line asked for more
            tahq_log.setLevel(run.log_level.upper())
        self.control.set_timing(control_shaping(config), run.peer_timeout, run.give_up)
        if run.threads is not None:
            torch.set_num_threads(run.threads)

    def _open_copies(self, assign: Assign, config: ClusterConfig, endpoint: ZmqEndpoint) -> CheckpointCopies:
        def offer(sha256: str, path: Path) -> None:
            if config.run.copies:
                endpoint.files.offer(assign.run_id, sha256, path)

        folder, rate = Path(config.run.dir) / config.run.name, copy_rate_bits_per_s(config, assign.stage)
        fetch, report = partial(pieces, endpoint.fetching), self.control.send
        return CheckpointCopies(assign, folder, config.pipeline.stages, rate, fetch, offer, report)

    def _connect(self, plan: Plan, assembly: Assembly, links: WorkerLinks) -> dict[int, Transport]:
        assign, config = assembly.assign, assembly.config

        def group(link: ZmqTransport, dial: str, transport: str) -> Transport:
            if transport not in ("gloo", "nccl"):
                raise RemoteProtocolError(f"the plan has a link over {transport!r}; expected zmq, gloo or nccl")
            spec = GroupSpec(
                backend="nccl" if transport == "nccl" else "gloo",
                identity=PeerIdentity(assign.run_id, plan.epoch, assign.stage, assign.config_hash),
                dial=dial,
                device=assembly.device,
                timeout_s=config.run.peer_timeout,
            )
            self._groups.append(open_group(link, spec))
            return self._groups[-1]

        self.control.working("connecting")
        reached(fault_points.HANDSHAKE, stage=assign.stage, step=plan.start_step)
        return links.open(plan, config.run.join_timeout, group)

    def _before_action(self, step: int, action: Action) -> None:
        self.control.working(str(action))
        reached(_POINTS[action.kind is ActionKind.F], stage=self.control.stage, step=step)
        self.control.check_aborted()
        self._signals.report()

    def _obey(self, order: Order) -> None:
        if isinstance(order, Admit) and self._endpoint is not None:
            self._endpoint.allow(order.public_keys)
        if isinstance(order, Copy | Published) and self._copies is not None:
            self._copies.obey(order)
        if isinstance(order, LinkOrder) and self._links is not None:
            self._links.obey(order)

    def _interrupt_links(self, reason: Exception) -> None:
        if self._endpoint is not None:
            self._endpoint.abort(reason)
