"""The composition root of tahq-worker: one process, one stage, from JOIN to BYE.

    JOIN → ASSIGN → build → HELLO → PLAN → links → READY → START → (step, PREPARE, COMMIT)* → BYE
    JOIN → ASSIGN → HELLO → (order, what was measured)* → BYE                       under `tahq measure`

Two threads beside the compute loop: one owns the data sockets (`ZmqEndpoint`), one the control socket
(`ControlClient`). An ABORT that arrives while the compute loop waits for a frame ends that wait.
"""

import logging
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from tahq import __version__, fault_points
from tahq.comm.control.client import ControlClient
from tahq.comm.control.measuring import MeasureCompute, MeasurePaths
from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Commit,
    Evaluated,
    Failed,
    Join,
    Message,
    NoCheckpoint,
    Order,
    Plan,
    Ready,
    Refuse,
    Rejoin,
    Snapshotted,
    StandBy,
    Start,
    StartOver,
    StopRequest,
)
from tahq.comm.group.rendezvous import GroupSpec, open_group
from tahq.comm.group.transport import GroupTransport
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import Transport
from tahq.comm.zmq.endpoint import ZmqEndpoint
from tahq.comm.zmq.sockets import raise_descriptor_limit
from tahq.comm.zmq.transport import ZmqTransport
from tahq.config.cluster import ClusterConfig
from tahq.config.file import config_from_json
from tahq.errors import (
    FrameLogError,
    NonFiniteError,
    PeerLostError,
    RefusedError,
    RemoteProtocolError,
    RunAbortedError,
    StartOverError,
    TahqError,
)
from tahq.fault_points import reached
from tahq.memory.free_memory import is_out_of_memory
from tahq.pipeline.checkpoint.writer import SnapshotWriter
from tahq.pipeline.schedule.schedule import Action, ActionKind
from tahq.pipeline.stage import Stage
from tahq.pipeline.step_meter import StepMeter
from tahq.worker.assembly import Assembly, compute_device
from tahq.worker.links import LinkOrder, WorkerLinks
from tahq.worker.measuring import MeasuringMember
from tahq.worker.messages import greeting, greeting_without_model, peers_of, prepare_of, refusal_text
from tahq.worker.off_host import FileOrder, OffHost
from tahq.worker.out_of_memory import out_of_memory
from tahq.worker.place import WorkerOptions, control_shaping, listening_addresses, open_endpoint
from tahq.worker.signals import WorkerSignals

log = logging.getLogger(__name__)
_POINTS = (fault_points.BACKWARD, fault_points.FORWARD)
M = TypeVar("M", bound=Message)


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
            return _serve(worker)
        except StartOverError as error:
            log.warning("joining again: %s", error)
            options = replace(options, stage=worker.stage, takeover=False, stands_by=True)


def _is_traced(config: ClusterConfig, live_step: int, step: int) -> bool:
    """Whether a step is traced; the coordinator has no times of steps that are computed again."""
    return step >= live_step and config.run.is_traced(step)


def _serve(worker: "Worker") -> int:
    try:
        return worker.run()
    except StartOverError:
        worker.abandon()
        raise
    except TahqError as error:
        worker.report(error)
        raise
    except Exception as error:
        if is_out_of_memory(error):
            lost = out_of_memory(error, worker.stage, worker.config, worker.device)
            worker.report(lost)
            raise lost from error
        worker.report(TahqError(f"stage {worker.stage}: internal error: {type(error).__name__}: {error}"))
        raise
    finally:
        worker.close()


class Worker:
    """One stage's process, step by step through the protocol."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._signals = WorkerSignals(lambda: f"stage {self.stage}", lambda: self._step)
        self._endpoint: ZmqEndpoint | None = None
        self._links: WorkerLinks | None = None
        self._groups: list[GroupTransport] = []
        self._off_host: OffHost | None = None
        self.stage = options.stage
        self.config: ClusterConfig | None = None
        """As the coordinator has sent it; None before."""
        self.device: torch.device | None = None
        """Where this stage computes; None before that is known."""
        self._step = -1
        self._num_decided: int | None = None
        """Steps whose decisions it has; None before it trains."""
        self._run_id = 0
        self._client = ControlClient(
            options.peer,
            f"stage {options.stage}" if options.stage >= 0 else "worker",
            shaping=Shaping(),
            peer_timeout_s=10.0,
            heartbeat_s=2.0,
            credentials=options.credentials,
            on_abort=self._on_abort,
            on_lost=self._on_lost,
            on_return=self._on_return,
            on_order=self._on_order,
        )

    def run(self) -> int:
        """The whole life of the worker; returns the status it leaves with."""
        self._signals.install()
        assign = self._join()
        if isinstance(assign, Bye):
            return assign.exit_status
        config = self.config = config_from_json(assign.config_json)
        self._signals.grace_s = config.run.grace
        self._log_as_configured(config)
        self._client.set_timing(
            shaping=control_shaping(config),
            peer_timeout_s=config.run.peer_timeout,
            heartbeat_s=config.run.peer_timeout / 5,
            give_up_s=config.run.give_up,
        )
        if assign.is_measuring:
            return self._measure(assign, config)
        device = self._options.device or (config.run.device if self._options.spare else None)
        self.device = compute_device(config, assign.stage, device)
        self._endpoint = open_endpoint(self._options, assign, config, self.device, self._client.send)
        self._off_host = OffHost(assign, config, self._endpoint, self._client.send)
        try:
            assign = self._off_host.restored(self._working)
        except PeerLostError as error:
            log.error("%s", error)
            self._client.send(NoCheckpoint(self.stage, assign.start_step, str(error)))
            return self._await(Bye).exit_status  # or StartOverError, at an older checkpoint
        assembly = Assembly.build(assign, config, device, self._working)
        self._links = WorkerLinks(self._endpoint, assign.stage, self._client.send)
        plan = self._hello(assign, assembly, self._endpoint.address, self._off_host.address)
        if plan is None:
            return 0
        transports = self._connect(assign, plan, assembly, self._links)
        stage = assembly.connect(plan, transports, self._before_action)
        self._working("preparing the codecs")
        stage.prepare()
        meter = StepMeter(stage.stopwatch, self.stage, peers_of(plan), partial(_is_traced, config, plan.live_step))
        self._client.send(Ready(self.stage))
        start = self._await(Start)
        stage.use_codecs(start.step, start.codecs)
        try:
            self._train(stage, assembly, meter, start.step)
        except FrameLogError as error:
            log.error("%s; all stages go back to a checkpoint", error)
            self._links.say_lacking(error.link)
        return self._await(Bye).exit_status

    def report(self, error: TahqError) -> None:
        """Tell the coordinator why this worker leaves, unless the coordinator said so itself."""
        log.error("%s", error)
        if isinstance(error, RefusedError | RunAbortedError) or self._client.aborted is not None:
            return
        with suppress(PeerLostError):
            self._client.send(Failed(self.stage, str(error), error.exit_status))

    def abandon(self) -> None:
        """Leave the links as if this process had died: the neighbours go on with the next one."""
        for group in self._groups:
            group.abandon()
        if self._endpoint is not None:
            self._endpoint.abandon()

    def close(self) -> None:
        """Release the sockets; the links say goodbye."""
        signal.setitimer(signal.ITIMER_REAL, 0)  # this worker is leaving
        if self._off_host is not None:
            self._off_host.close()
        for group in self._groups:
            group.close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._client.close()

    # -- joining ---------------------------------------------------------------------------------

    def _join(self) -> Assign | Bye:
        """Ask for a stage, and wait for it; a spare may be told that it is not needed."""
        self._working("joining")
        options = self._options
        who = (options.stage, __version__, socket.gethostname(), os.getpid(), options.worker_id, options.takeover)
        self._client.send(Join(*who, options.spare or options.stands_by))
        assign = self._receive(Assign, StandBy, Bye)
        while isinstance(assign, StandBy):
            self._stand_by(assign)
            assign = self._receive(Assign, StandBy, Bye)
        if isinstance(assign, Assign):
            self.stage, self._run_id = assign.stage, assign.run_id
            log.info("joined %s, as stage %d", options.peer, assign.stage)
            return assign
        return Bye(assign.exit_status) if isinstance(assign, Bye) else Bye()

    def _stand_by(self, order: StandBy) -> None:
        self._working("standing by")
        log.info("standing by, as a spare")
        heartbeat_s = order.peer_timeout_s / 5
        self._client.set_timing(
            shaping=Shaping(),
            peer_timeout_s=order.peer_timeout_s,
            heartbeat_s=heartbeat_s,
            give_up_s=order.give_up_s,
        )

    @staticmethod
    def _log_as_configured(config: ClusterConfig) -> None:
        """Take `run.log_level`, unless the command line asked for more."""
        tahq_log = logging.getLogger("tahq")
        if tahq_log.getEffectiveLevel() > logging.DEBUG:
            tahq_log.setLevel(config.run.log_level.upper())

    def _hello(self, assign: Assign, assembly: Assembly, address: str, files_address: str) -> Plan | None:
        """Say what was made of the configuration; None: no step is left to take."""
        self._working("waiting for the others")
        self._client.send(greeting(assign, assembly, address, files_address))
        plan = self._receive(Plan, Bye)
        return plan if isinstance(plan, Plan) else None

    def _connect(self, assign: Assign, plan: Plan, assembly: Assembly, links: WorkerLinks) -> dict[int, Transport]:
        def group(link: ZmqTransport, dial: str, transport: str) -> Transport:
            self._groups.append(open_group(link, self._group_spec(assign, plan, assembly, dial, transport)))
            return self._groups[-1]

        self._working("connecting")
        reached(fault_points.HANDSHAKE, stage=self.stage, step=plan.start_step)
        return links.open(plan, assembly.config.run.join_timeout, group)

    @staticmethod
    def _group_spec(assign: Assign, plan: Plan, assembly: Assembly, dial: str, transport: str) -> GroupSpec:
        if transport not in ("gloo", "nccl"):
            raise RemoteProtocolError(f"the plan has a link over {transport!r}; expected zmq, gloo or nccl")
        return GroupSpec(
            backend="nccl" if transport == "nccl" else "gloo",
            identity=PeerIdentity(assign.run_id, plan.epoch, assign.stage, assign.config_hash),
            dial=dial,
            device=assembly.device,
            timeout_s=assembly.config.run.peer_timeout,
        )

    # -- measuring -------------------------------------------------------------------------------

    def _measure(self, assign: Assign, config: ClusterConfig) -> int:
        """Carry out orders to measure until there are no more; returns the status to leave with."""
        device = compute_device(config, assign.stage, self._options.device)
        if config.run.threads is not None:
            torch.set_num_threads(config.run.threads)
        listening = listening_addresses(self._options, config, assign.stage)
        with MeasuringMember(assign, config, device, listening, self._working) as member:
            self._working("waiting for the others")
            self._client.send(greeting_without_model(assign, config, member.address, device))
            while True:
                order = self._receive(MeasureCompute, MeasurePaths, Bye)
                if isinstance(order, Bye):
                    return order.exit_status
                if isinstance(order, MeasureCompute | MeasurePaths):
                    self._client.send(member.carry_out(order))

    # -- training --------------------------------------------------------------------------------

    def _train(self, stage: Stage, assembly: Assembly, meter: StepMeter, first_step: int) -> None:
        snapshots = assembly.snapshot_writer(stage, self._tell_snapshot, self._wait_for_room)
        meter.begin(first_step)
        self._num_decided = first_step
        for step in range(first_step, stage.plan.total_steps):
            self._step = step
            result = stage.engine.run_step(step)
            reached(fault_points.BEFORE_PREPARE, stage=self.stage, step=step)
            self._client.send(prepare_of(step, stage, result, meter))
            reached(fault_points.PREPARED, stage=self.stage, step=step)
            self._working("commit")
            with stage.stopwatch.measure("commit"):
                commit = self._await_commit(step, stage, assembly)
            if commit.step != step:
                raise RemoteProtocolError(f"the coordinator committed step {commit.step} while step {step} is computed")
            self._num_decided = step + 1
            reached(fault_points.COMMITTING, stage=self.stage, step=step)
            self._tell_trace(step, stage, meter)
            meter.begin(step + 1)
            snapshots.hold_back_changes()
            self._carry_out(commit, stage, assembly, meter)
            if commit.stop:
                self._tell_rest_of_trace(stage, meter)
            self._snapshot(commit, stage, assembly, snapshots)
            if commit.stop:
                return

    def _tell_snapshot(self, part: Snapshotted) -> None:
        """A part of a snapshot is written, or is not; called in any thread."""
        if self._off_host is not None:
            self._off_host.snapshotted(part)
        self._client.send(part)

    def _wait_for_room(self, seconds: float) -> None:
        """Sleep while the disk has no room for the last checkpoint; leaves if the run is aborted."""
        self._working("waiting for room on the disk")
        time.sleep(seconds)
        if self._client.aborted is not None:
            raise RunAbortedError(self._client.aborted.message, self._client.aborted.exit_status)

    def _await_commit(self, step: int, stage: Stage, assembly: Assembly) -> Commit:
        try:
            return self._await(Commit)
        except RunAbortedError as error:
            if error.exit_status == NonFiniteError.exit_status:
                assembly.keep_batch(step + 1, stage)
            raise

    def _tell_trace(self, step: int, stage: Stage, meter: StepMeter) -> None:
        """The step is committed: send what was kept of traced steps whose frames have come, or had another step to."""
        if stage.stopwatch.is_recording:
            meter.note(stage.take_link_stats())
        for part in meter.trace(step):
            self._client.send(part)

    def _tell_rest_of_trace(self, stage: Stage, meter: StepMeter) -> None:
        """Send the last step's trace; BYE comes only after its checkpoint is reported."""
        meter.note(stage.take_link_stats())
        for part in meter.trace_rest():
            self._client.send(part)

    def _carry_out(self, commit: Commit, stage: Stage, assembly: Assembly, meter: StepMeter) -> None:
        with stage.stopwatch.measure("optimizer"):
            if commit.apply:
                stage.update.apply(commit.step, commit.clip_factor)
            else:
                stage.update.discard()
                assembly.keep_batch(commit.step + 1, stage)
        stage.use_codecs(commit.step + 1, commit.codecs)
        if commit.evaluate:
            self._evaluate(commit.step, stage)
            meter.begin(commit.step + 1)

    def _snapshot(self, commit: Commit, stage: Stage, assembly: Assembly, snapshots: SnapshotWriter) -> None:
        """Have a snapshot written that is due; after the last step, return when all are written and reported."""
        assembly.complete_snapshot = commit.complete_snapshot
        if commit.snapshot:
            self._working("snapshot")
            # nothing changes after the last step, and state that memory has no room for cannot be copied
            copy = not (commit.stop or stage.keeps_state_on_disk)
            assembly.last_checkpoint = commit.step + 1 if commit.stop else None
            snapshots.take(commit.step + 1, stage.tensors(), copy=copy)
        if commit.stop:
            snapshots.finish()

    def _evaluate(self, step: int, stage: Stage) -> None:
        self._working("evaluate")
        sums = stage.engine.evaluate(step, stage.plan.training.eval_batches)
        if sums is not None:
            self._client.send(Evaluated(step, sums.tokens, sums.loss_sum, sums.raw_loss_sum))

    def _before_action(self, step: int, action: Action) -> None:
        self._working(str(action))
        reached(_POINTS[action.kind is ActionKind.F], stage=self.stage, step=step)
        if self._client.aborted is not None:
            raise RunAbortedError(self._client.aborted.message, self._client.aborted.exit_status)
        signal_number = self._signals.take_request()
        if signal_number is not None:
            self._client.send(StopRequest(self.stage, signal_number))

    # -- messages --------------------------------------------------------------------------------

    def _await(self, expected: type[M]) -> M:
        message = self._receive(expected)
        if not isinstance(message, expected):
            raise AssertionError(f"_receive({expected.__name__}) returned {type(message).__name__}")
        return message

    def _receive(self, *expected: type) -> Message:
        """The next message, which must be of an expected kind; a refusal or an abort is raised."""
        message = self._client.recv()
        if isinstance(message, expected):
            return message
        if isinstance(message, Refuse):
            raise RefusedError(refusal_text(message))
        if isinstance(message, Abort):
            raise RunAbortedError(message.message, message.exit_status)
        if isinstance(message, StartOver):
            raise StartOverError(message.reason)
        raise RemoteProtocolError(
            f"the coordinator at {self._options.peer} sent {type(message).__name__}, expected "
            f"{' or '.join(kind.__name__ for kind in expected)}; are both the same version of tahq?"
        )

    def _working(self, activity: str) -> None:
        self._client.set_activity(self.stage, self._step, activity)

    def _on_abort(self, abort: Abort) -> None:
        self._interrupt_links(RunAbortedError(abort.message, abort.exit_status))

    def _on_order(self, order: Order | StartOver) -> None:
        if isinstance(order, StartOver):
            self._interrupt_links(StartOverError(order.reason))
            return
        if isinstance(order, FileOrder) and self._off_host is not None:
            self._off_host.obey(order)
        if isinstance(order, LinkOrder) and self._links is not None:
            self._links.obey(order)

    def _on_return(self) -> Message:
        """The coordinator was restarted: a worker that trains continues, any other starts over."""
        if self._num_decided is not None:
            return Rejoin(self.stage, self._run_id, self._num_decided)
        raise StartOverError("the coordinator was started again")

    def _on_lost(self, lost: TahqError) -> None:
        self._interrupt_links(lost)

    def _interrupt_links(self, reason: Exception) -> None:
        if self._endpoint is not None:
            self._endpoint.abort(reason)
