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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

from tahq import __version__, fault_points
from tahq.assembly import Assembly, compute_device
from tahq.comm.addresses import format_address, local_address_towards
from tahq.comm.control import (
    Abort,
    Assign,
    Bye,
    Commit,
    Evaluated,
    Failed,
    Hello,
    Join,
    LinkState,
    Message,
    NotKept,
    Order,
    Plan,
    Prepare,
    Ready,
    Refuse,
    Rejoin,
    Snapshotted,
    StandBy,
    Start,
    StartOver,
    StopRequest,
)
from tahq.comm.control_channel import ControlClient
from tahq.comm.control_measuring import MeasureCompute, MeasurePaths
from tahq.comm.descriptor_limit import raise_descriptor_limit
from tahq.comm.endpoint_loop import Trouble
from tahq.comm.frame_log import FrameLog
from tahq.comm.group_rendezvous import GroupSpec, open_group
from tahq.comm.group_transport import GroupTransport
from tahq.comm.host_shaping import host_shaping
from tahq.comm.keys import Credentials, KeyPair
from tahq.comm.receive_memory import memory_for
from tahq.comm.session import PeerIdentity
from tahq.comm.shaping import Shaping
from tahq.comm.transport import Transport
from tahq.comm.worker_links import LinkOrder, WorkerLinks
from tahq.comm.zmq_endpoint import ZmqEndpoint
from tahq.comm.zmq_transport import ZmqTransport
from tahq.config import ClusterConfig
from tahq.config_file import config_from_json, config_hash
from tahq.errors import (
    InterruptedRunError,
    NonFiniteError,
    PeerLostError,
    RefusedError,
    RemoteProtocolError,
    RunAbortedError,
    StartOverError,
    TahqError,
)
from tahq.fault_points import reached
from tahq.measure.member import MeasuringMember
from tahq.memory.exhaustion import is_out_of_memory
from tahq.off_host import FileOrder, OffHost
from tahq.out_of_memory import out_of_memory
from tahq.pipeline.engine import StepResult
from tahq.pipeline.schedule import Action, ActionKind
from tahq.pipeline.snapshot_writer import SnapshotWriter
from tahq.pipeline.stage import Stage
from tahq.pipeline.step_meter import StepMeter

log = logging.getLogger(__name__)
_POINTS = (fault_points.BACKWARD, fault_points.FORWARD)
M = TypeVar("M", bound=Message)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker is told on its command line; all else comes from the coordinator.

    `stage` -1 takes any that is free; `peer` is the coordinator's host:port; `advertise` may be
    `none` for a host that can only dial out. Processes with the same `worker_id` follow each other; with `takeover`
    this one takes its stage from whoever holds it. Without `credentials` there is no CURVE. A `spare` waits for the
    stage of a host that is lost; one that `stands_by` wants its stage back, and becomes a spare if another has it.
    """

    stage: int
    peer: str
    bind: str | None = None
    advertise: str | None = None
    device: str | None = None
    worker_id: str = ""
    takeover: bool = False
    credentials: Credentials | None = None
    spare: bool = False
    stands_by: bool = False


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
        self._signals: list[int] = []
        self._stop_requested = False
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

    @property
    def _own_keys(self) -> KeyPair | None:
        return self._options.credentials.own if self._options.credentials is not None else None

    def run(self) -> int:
        """The whole life of the worker; returns the status it leaves with."""
        self._install_signal_handlers()
        assign = self._join()
        if isinstance(assign, Bye):
            return assign.exit_status
        config = self.config = config_from_json(assign.config_json)
        self._log_as_configured(config)
        self._client.set_timing(
            shaping=_control_shaping(config),
            peer_timeout_s=config.run.peer_timeout,
            heartbeat_s=config.run.peer_timeout / 5,
            give_up_s=config.run.give_up,
        )
        if assign.is_measuring:
            return self._measure(assign, config)
        listening = listening_addresses(self._options, config, assign.stage)
        self._off_host = OffHost(assign, config, listening, self._own_keys, self._client.send)
        assign = self._off_host.restored(self._working)
        device = self._options.device or (config.run.device if self._options.spare else None)
        self.device = compute_device(config, assign.stage, device)
        assembly = Assembly.build(assign, config, device, self._working)
        self._endpoint = self._open_endpoint(assign, config, assembly.device)
        self._links = WorkerLinks(self._endpoint, assign.stage, self._client.send)
        plan = self._hello(assign, assembly, self._endpoint.address, self._off_host.address)
        if plan is None:
            return 0
        transports = self._connect(assign, plan, assembly, self._links)
        stage = assembly.connect(plan, transports, self._before_action)
        self._working("preparing the codecs")
        stage.prepare()
        meter = StepMeter(stage.stopwatch, self.stage, _peers(plan), config.run.is_traced)
        self._client.send(Ready(self.stage))
        start = self._await(Start)
        stage.use_codecs(start.step, start.codecs)
        self._train(stage, assembly, meter, start.step, plan.live_step)
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

    def _open_endpoint(self, assign: Assign, config: ClusterConfig, device: torch.device) -> ZmqEndpoint:
        bind, advertise = listening_addresses(self._options, config, assign.stage)
        return ZmqEndpoint(
            identity=PeerIdentity(assign.run_id, 0, assign.stage, assign.config_hash),
            bind=bind,
            advertise=advertise,
            shaping=host_shaping(config.links, config.hosts, assign.stage, config.pipeline.stages),
            peer_timeout_s=config.run.peer_timeout,
            heartbeat_s=config.run.peer_timeout / 5,
            give_up_s=config.run.give_up,
            first=config.links.first,
            connections=config.links.connections,
            allocate=memory_for(device),
            keys=self._own_keys,
            on_trouble=self._report_trouble,
            frame_log=_frame_logs(config, assign.stage, self._report_unkept),
        )

    def _report_trouble(self, trouble: Trouble) -> None:
        """Called by the thread that moves frames; a coordinator that is lost ends the run anyway."""
        spec = trouble.spec
        with suppress(TahqError):
            self._client.send(
                LinkState(
                    *(self.stage, spec.link, spec.peer_stage, trouble.reason),
                    lasted_s=trouble.lasted_s,
                    num_sent_again=trouble.num_sent_again,
                )
            )

    def _report_unkept(self, link: int, reason: str) -> None:
        with suppress(TahqError):
            self._client.send(NotKept(self.stage, link, reason))

    def _hello(self, assign: Assign, assembly: Assembly, address: str, files_address: str) -> Plan | None:
        """Say what was made of the configuration; None: no step is left to take."""
        self._working("waiting for the others")
        self._client.send(
            Hello(
                stage=assign.stage,
                version=__version__,
                config_hash=config_hash(assembly.config),
                tokenizer_hash=assembly.tokenizer_hash,
                data_hash=assembly.data_hash,
                address=address,
                device=str(assembly.device),
                torch_version=str(torch.__version__),
                num_parameters=assembly.num_parameters,
                num_train_samples=assembly.num_train_samples,
                next_sample=assembly.next_sample,
                arithmetic_changes=assembly.arithmetic_changes,
                start_step=assign.start_step,
                files_address=files_address,
            )
        )
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
            self._client.send(_greeting_without_model(assign, config, member.address, device))
            while True:
                order = self._receive(MeasureCompute, MeasurePaths, Bye)
                if isinstance(order, Bye):
                    return order.exit_status
                if isinstance(order, MeasureCompute | MeasurePaths):
                    self._client.send(member.carry_out(order))

    # -- training --------------------------------------------------------------------------------

    def _train(self, stage: Stage, assembly: Assembly, meter: StepMeter, first_step: int, live_step: int) -> None:
        snapshots = assembly.snapshot_writer(stage, self._tell_snapshot)
        meter.begin(first_step)
        self._num_decided = first_step
        for step in range(first_step, stage.plan.total_steps):
            self._step = step
            result = stage.engine.run_step(step)
            reached(fault_points.BEFORE_PREPARE, stage=self.stage, step=step)
            self._client.send(_prepare(step, stage, result, meter))
            reached(fault_points.PREPARED, stage=self.stage, step=step)
            self._working("commit")
            with stage.stopwatch.measure("commit"):
                commit = self._await_commit(step, stage, assembly)
            if commit.step != step:
                raise RemoteProtocolError(f"the coordinator committed step {commit.step} while step {step} is computed")
            self._num_decided = step + 1
            reached(fault_points.COMMITTING, stage=self.stage, step=step)
            if step >= live_step:
                self._tell_trace(step, stage, meter)
            meter.begin(step + 1)
            snapshots.hold_back_changes()
            self._carry_out(commit, stage, assembly, meter)
            self._snapshot(commit, stage, assembly, snapshots)
            if commit.stop:
                return

    def _tell_snapshot(self, part: Snapshotted) -> None:
        """A part of a snapshot is written, or is not; called in any thread."""
        if self._off_host is not None:
            self._off_host.snapshotted(part)
        self._client.send(part)

    def _await_commit(self, step: int, stage: Stage, assembly: Assembly) -> Commit:
        try:
            return self._await(Commit)
        except RunAbortedError as error:
            if error.exit_status == NonFiniteError.exit_status:
                assembly.keep_batch(step + 1, stage)
            raise

    def _tell_trace(self, step: int, stage: Stage, meter: StepMeter) -> None:
        """The step is committed: send what was kept of it, if it is traced."""
        if stage.stopwatch.is_recording:
            meter.note(stage.take_link_stats())
        for part in meter.trace(step):
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
            snapshots.take(commit.step + 1, stage.tensors(), copy=copy)
        if commit.stop:
            snapshots.finish()

    def _evaluate(self, step: int, stage: Stage) -> None:
        self._working("evaluate")
        sums = stage.engine.evaluate(step, stage.plan.training.eval_batches)
        stage.take_link_stats()  # a step's figures are about training traffic alone
        if sums is not None:
            self._client.send(Evaluated(step, sums.tokens, sums.loss_sum, sums.raw_loss_sum))

    def _before_action(self, step: int, action: Action) -> None:
        self._working(str(action))
        reached(_POINTS[action.kind is ActionKind.F], stage=self.stage, step=step)
        if self._client.aborted is not None:
            raise RunAbortedError(self._client.aborted.message, self._client.aborted.exit_status)
        if self._signals and not self._stop_requested:
            self._stop_requested = True
            self._client.send(StopRequest(self.stage, self._signals[0]))

    # -- messages, signals, the end --------------------------------------------------------------

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
            raise RefusedError(_refusal(message))
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
        """The coordinator was started again: who trains goes on, who had not begun begins anew."""
        if self._num_decided is not None:
            return Rejoin(self.stage, self._run_id, self._num_decided)
        raise StartOverError("the coordinator was started again")

    def _on_lost(self, lost: TahqError) -> None:
        self._interrupt_links(lost)

    def _interrupt_links(self, reason: Exception) -> None:
        if self._endpoint is not None:
            self._endpoint.abort(reason)

    def _install_signal_handlers(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGALRM, self._on_grace_over)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """First: ask for an orderly stop at the next action. Second, or before training: leave now."""
        self._signals.append(number)
        if len(self._signals) > 1 or self._step < 0 or self.config is None:
            raise InterruptedRunError(f"stage {self.stage} stopped by {signal.Signals(number).name}", number)
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self.config.run.grace)

    def _on_grace_over(self, number: int, frame: FrameType | None) -> None:
        """The step and its snapshot have taken too long: leave, whatever this thread is doing or waiting for."""
        grace_s = self.config.run.grace if self.config is not None else 0.0
        raise InterruptedRunError(
            f"stage {self.stage} stopped by SIGTERM: step {self._step + 1} and its snapshot took longer than run.grace "
            f"({grace_s:g} s), so they are given up",
            signal.SIGTERM,
        )


def _frame_logs(
    config: ClusterConfig, stage: int, report: Callable[[int, str], None]
) -> Callable[[int], FrameLog] | None:
    """Logs for each link of a stage that can be brought to life again; gloo and NCCL links cannot."""
    if config.run.frame_log == 0 or (config.links.inside != "zmq" and any(config.sites)):
        return None
    frames = Path(config.run.dir) / config.run.name / "frames"
    limit_nbytes = config.run.frame_log // (2 * config.pipeline.chunks)

    def log(link: int) -> FrameLog:
        folder = frames / f"stage-{stage:03d}" / f"link-{link:03d}"
        return FrameLog(folder, link, limit_nbytes, on_given_up=partial(report, link), inside=frames)

    return log


def listening_addresses(options: WorkerOptions, config: ClusterConfig, stage: int) -> tuple[str, str | None]:
    """Where this worker listens, and what others dial: the command line, then `hosts:`, then a guess.

    The guess is the address that this machine reaches the coordinator from, on any free port. In an
    advertised address port 0 stands for the port that is bound. A spare is on another host than its stage was.
    """
    if isinstance(config.hosts, list) and not options.spare:
        host = config.hosts[stage]
        bind, advertise = host.bind, host.advertise or format_address(host.address, 0)
    else:
        bind, advertise = format_address(local_address_towards(options.peer), 0), None
    return options.bind or bind, options.advertise or advertise


def _greeting_without_model(assign: Assign, config: ClusterConfig, address: str, device: torch.device) -> Hello:
    return Hello(
        stage=assign.stage,
        version=__version__,
        config_hash=config_hash(config),
        tokenizer_hash="",
        data_hash="",
        address=address,
        device=str(device),
        torch_version=str(torch.__version__),
        num_parameters=0,
        num_train_samples=0,
    )


def _control_shaping(config: ClusterConfig) -> Shaping:
    """What is imitated of the way to the coordinator; control messages are small, and not counted in any cap."""
    if config.hosts == "namespaces":
        return Shaping()
    return Shaping(config.links.rate, config.links.delay)


def _peers(plan: Plan) -> dict[int, int]:
    """The stage at the other end of each link."""
    return {int(link): int(peer_stage) for link, peer_stage, *_ in plan.links}


def _prepare(step: int, stage: Stage, result: StepResult, meter: StepMeter) -> Prepare:
    meter.note(stage.take_link_stats())
    with stage.stopwatch.measure("norms"):
        norm2 = stage.update.squared_norms()
    timing = dict(result.timing)
    for activity, seconds in stage.stopwatch.take().items():
        timing[activity] = timing.get(activity, 0.0) + seconds
    return Prepare(
        step=step,
        stage=stage.plan.stage,
        norm2=norm2,
        finite=result.finite,
        loss_sum=result.loss_sum,
        tokens=result.tokens,
        batch_digest=result.batch_digest,
        timing=timing,
        links=meter.take_rows(),
        codec_state_bytes=stage.codec_state_nbytes,
        active_s=meter.active_s,
        codec_errors=[[float(e.link), float(e.direction), e.relative_error] for e in stage.take_codec_errors()],
    )


def _refusal(refuse: Refuse) -> str:
    rows = "; ".join(f"{field}: here {mine}, expected {theirs}" for field, mine, theirs in refuse.differences)
    return f"{refuse.reason}: {rows}" if rows else refuse.reason
