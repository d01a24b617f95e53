"""A worker's side of the run: it joins, then computes steps, each applied as the coordinator decides.

compute → PREPARE → COMMIT → apply or skip → checkpoint if one is due
"""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, overload

import torch

from tahq import __version__, fault_points
from tahq.comm.control.client import ControlClient, ControlHooks
from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Commit,
    Evaluated,
    Join,
    Message,
    Order,
    Plan,
    Prepare,
    Refuse,
    Rejoin,
    Snapshotted,
    StandBy,
    StartOver,
)
from tahq.comm.keys import Credentials
from tahq.comm.link.shaping import Shaping
from tahq.errors import (
    NonFiniteError,
    RefusedError,
    RemoteProtocolError,
    RunAbortedError,
    SnapshotError,
    StartOverError,
)
from tahq.fault_points import reached
from tahq.pipeline.checkpoint.durable_file import wait_for_room
from tahq.pipeline.checkpoint.manifest import snapshot_folder
from tahq.pipeline.checkpoint.snapshot import prune
from tahq.pipeline.checkpoint.stage_file import write_stage
from tahq.pipeline.checkpoint.writer import SnapshotWriter
from tahq.pipeline.engine import EvaluationResult, StepResult
from tahq.pipeline.stage import Stage, keep_batch
from tahq.pipeline.step_meter import StepMeter
from tahq.worker.assembly import Assembly, snapshots_folder

log = logging.getLogger(__name__)
PLANNING_S = 300.0
"""How long a worker that joins again waits for its coordinator: between a measurement and its run, that plans."""
M = TypeVar("M")
N = TypeVar("N")
O = TypeVar("O")  # noqa: E741


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """A worker's command line; everything else comes from the coordinator.

    `stage` -1 takes any that is free; `peer` is the coordinator's host:port; `advertise` may be `none` for a host that
    can only dial out. Processes with the same `worker_id` are successors; with `takeover` this one takes its stage from
    the holder. Without `credentials` there is no CURVE. A `spare` waits for the stage of a lost host; a worker that
    `stands_by` wants its stage back, and becomes a spare if another has it. A worker that `replaces_host` was started
    with --takeover, perhaps on another machine than its stage was planned for. `stage_by_key`: whenever this worker
    joins, the coordinator gives it the stage that is kept for its key.
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
    replaces_host: bool = False
    stage_by_key: bool = False


class WorkerControl:
    """The control channel of one worker, with its stage and step; for the main thread, `send` for any thread.

    Both callbacks are called in the control thread: `interrupt` ends what the main thread waits for on a link with this
    error, `obey` carries out an order.
    """

    def __init__(
        self, options: WorkerOptions, interrupt: Callable[[Exception], None], obey: Callable[[Order], None]
    ) -> None:
        self._options = options
        self._run_id = 0
        self.stage = options.stage
        self.step = -1
        """The step that is being computed, from 0; -1 before the first."""
        self.num_decided: int | None = None
        """Steps whose decisions this worker has; None before it trains."""

        def on_order(order: Order | StartOver) -> None:
            if isinstance(order, StartOver):
                interrupt(StartOverError(order.reason))
            else:
                obey(order)

        self._client = ControlClient(
            options.peer,
            f"stage {options.stage}" if options.stage >= 0 else "worker",
            shaping=Shaping(),
            peer_timeout_s=10.0,
            heartbeat_s=2.0,
            connect_timeout_s=PLANNING_S if options.stands_by else 60.0,
            credentials=options.credentials,
            hooks=ControlHooks(
                on_abort=lambda abort: interrupt(_aborted(abort)),
                on_lost=interrupt,
                on_return=self._on_return,
                on_order=on_order,
            ),
        )
        self.send = self._client.send
        self.close = self._client.close
        if options.stands_by:
            self.set_timing(Shaping(), 10.0, PLANNING_S)

    @property
    def is_aborted(self) -> bool:
        """Whether the coordinator has ended the run."""
        return self._client.aborted is not None

    def check_aborted(self) -> None:
        """Raise RunAbortedError if the coordinator has ended the run."""
        if self._client.aborted is not None:
            raise _aborted(self._client.aborted)

    def working(self, activity: str) -> None:
        """Set the activity that heartbeats report."""
        self._client.set_activity(self.stage, self.step, activity)

    def join(self) -> Assign | Bye:
        """Ask for a stage and wait for it; Bye: a spare is not needed. Errors as of `receive`."""
        self.working("joining")
        options = self._options
        process = (__version__, socket.gethostname(), os.getpid(), options.worker_id)
        self.send(Join(options.stage, *process, options.takeover, options.spare or options.stands_by))
        while isinstance(reply := self.receive(Assign, StandBy, Bye), StandBy):
            self.working("standing by")
            log.info("standing by, as a spare")
            self.set_timing(Shaping(), reply.peer_timeout_s, reply.give_up_s)
        if isinstance(reply, Assign):
            self.stage, self._run_id = reply.stage, reply.run_id
            log.info("joined %s, as stage %d", options.peer, reply.stage)
        return reply

    def set_timing(self, shaping: Shaping, peer_timeout_s: float, give_up_s: float) -> None:
        """Use the run's shaping and time limits on the control channel."""
        self._client.set_timing(
            shaping=shaping, peer_timeout_s=peer_timeout_s, heartbeat_s=peer_timeout_s / 5, give_up_s=give_up_s
        )

    @overload
    def receive(self, first: type[M], /) -> M: ...

    @overload
    def receive(self, first: type[M], second: type[N], third: type[O] = ..., /) -> M | N | O: ...

    def receive(self, *expected: type) -> object:
        """The next message, which must be of an expected kind.

        Raises:
            RefusedError, RunAbortedError, StartOverError: the coordinator refuses, aborts or restarts this worker.
            PeerLostError: the coordinator is lost.
            RemoteProtocolError: any other message.
        """
        message = self._client.recv()
        if isinstance(message, expected):
            return message
        if isinstance(message, Refuse):
            rows = "; ".join(f"{field}: here {mine}, expected {theirs}" for field, mine, theirs in message.differences)
            raise RefusedError(f"{message.reason}: {rows}" if rows else message.reason)
        if isinstance(message, Abort):
            raise _aborted(message)
        if isinstance(message, StartOver):
            raise StartOverError(message.reason)
        raise RemoteProtocolError(
            f"the coordinator at {self._options.peer} sent {type(message).__name__}, expected "
            f"{' or '.join(kind.__name__ for kind in expected)}; are both the same version of tahq?"
        )

    def _on_return(self) -> Message:
        """The coordinator was restarted: a worker that trains continues, any other starts over."""
        if self.num_decided is None:
            raise StartOverError("the coordinator was started again")
        return Rejoin(self.stage, self._run_id, self.num_decided)


def _aborted(abort: Abort) -> RunAbortedError:
    return RunAbortedError(abort.message, abort.exit_status)


class WorkerTraining:
    """One stage's steps, each as the coordinator decides it.

    `offer` is called with hash and path of every checkpoint file that is written, in any thread.
    """

    def __init__(
        self,
        control: WorkerControl,
        stage: Stage,
        assembly: Assembly,
        plan: Plan,
        offer: Callable[[str, Path], None],
    ) -> None:
        self._control = control
        self._stage = stage
        self._assembly = assembly
        self._offer = offer
        self._config = config = assembly.config
        self._sampler = assembly.sampler(stage.engine)
        self._run_folder = Path(config.run.dir) / config.run.name
        num_stages = config.pipeline.num_workers if isinstance(config.hosts, str) else 1
        self._writer = SnapshotWriter(self._write_snapshot, config.run.checkpoint_buffers, stage.stopwatch, num_stages)
        self._is_saving = False
        """Whether the steps wait for a checkpoint."""
        self._last_checkpoint: int | None = None
        """Steps behind the run's last checkpoint, which waits for room on a full disk; None: it is not due yet."""
        self._complete_snapshot = assembly.assign.start_step
        """Steps behind the newest checkpoint that all stages have written, as the coordinator has said."""
        self._best_snapshot = 0
        """The same of the one with the lowest validation loss; 0: there is none."""
        peers = {int(link): int(peer_stage) for link, peer_stage, *_ in plan.links}
        # the coordinator has no times of steps that are computed again
        self._meter = StepMeter(
            stage.stopwatch, control.stage, peers, lambda step: step >= plan.live_step and config.run.is_traced(step)
        )

    def run(self, first_step: int) -> None:
        """Compute from a step on until the coordinator commits the last one."""
        control, stage, meter = self._control, self._stage, self._meter
        meter.begin(first_step)
        control.num_decided = first_step
        for step in range(first_step, stage.plan.total_steps):
            control.step = step
            if self._config.training.is_fused:  # the backward changes what a checkpoint is copied from
                self._writer.hold_back_changes()
            result = stage.engine.run_step(step)
            reached(fault_points.BEFORE_PREPARE, stage=control.stage, step=step)
            control.send(self._prepare(step, result))
            reached(fault_points.PREPARED, stage=control.stage, step=step)
            if step + 1 < stage.plan.total_steps:
                stage.engine.read_ahead(step + 1)
            control.working("waiting for the commit")
            commit = self._await_commit(step)
            control.num_decided = step + 1
            reached(fault_points.COMMITTING, stage=control.stage, step=step)
            self._send_trace(step)
            meter.begin(step + 1)
            self._writer.hold_back_changes()
            self._complete_snapshot, self._best_snapshot = commit.complete_snapshot, commit.best_snapshot
            if commit.snapshot_before:
                self._save(step, copy=True)
                self._writer.hold_back_changes()
            self._carry_out(commit)
            if commit.stop:
                self._send_trace(None)  # before the report of the last checkpoint, which BYE follows
            self._snapshot(commit)
            if commit.stop:
                return

    def _prepare(self, step: int, result: StepResult) -> Prepare:
        """This stage's part of a computed step; takes its measurements."""
        stage, meter = self._stage, self._meter
        meter.note(stage.take_link_stats())
        with stage.stopwatch.measure("norms"):
            norm2 = stage.update.squared_norms(meanwhile=stage.stopwatch.read_marks)
        return Prepare(
            step=step,
            stage=self._control.stage,
            norm2=norm2,
            finite=result.finite,
            loss_sum=result.loss_sum,
            router_loss=result.router_loss,
            rewards=result.rewards,
            tokens=result.tokens,
            batch_digest=result.batch_digest,
            timing=stage.stopwatch.take(),
            links=meter.take_rows(),
            codec_state_bytes=stage.codec_state_nbytes,
            active_s=meter.active_s,
            codec_errors=[[float(e.link), float(e.direction), e.relative_error] for e in stage.take_codec_errors()],
            weights_digest=stage.weights_digest(step),
            abandoned=result.is_abandoned,
            peak_bytes=stage.peak_nbytes,
        )

    def _await_commit(self, step: int) -> Commit:
        try:
            with self._stage.stopwatch.measure("commit"):
                commit = self._control.receive(Commit)
        except RunAbortedError as error:
            if error.exit_status == NonFiniteError.exit_status:
                self._keep_batch(step)
            raise
        if commit.step != step:
            raise RemoteProtocolError(f"the coordinator committed step {commit.step} while step {step} is computed")
        return commit

    def _send_trace(self, step: int | None) -> None:
        """Send the traces that are complete when `step` is committed; None: all that are left."""
        if step is None or self._stage.stopwatch.is_recording:
            self._meter.note(self._stage.take_link_stats())
        for part in self._meter.trace(step):
            self._control.send(part)

    def _carry_out(self, commit: Commit) -> None:
        stage = self._stage
        self._control.working("updating weights")
        with stage.stopwatch.measure("optimizer"):
            if commit.apply:
                stage.update.apply(commit.step, commit.clip_factor)
            else:
                stage.update.discard()
            if not (commit.apply or commit.abandoned or commit.loss_scale):  # else the scale was too high
                self._keep_batch(commit.step)
        stage.gather_weights(commit.step)
        stage.use_codecs(commit.step + 1, commit.codecs)
        stage.use_schedule(commit.schedule, commit.depths)
        stage.use_replicas(commit.computing)
        stage.use_loss_scale(commit.loss_scale)
        if (commit.evaluate or commit.sample) and stage.evaluates:
            self._evaluate(commit)
            self._meter.begin(commit.step + 1)

    def _evaluate(self, commit: Commit) -> None:
        """Validation losses and samples, as far as the commit asks for them; the last stage reports them."""
        engine, step, working = self._stage.engine, commit.step, self._control.working
        sums, samples = list[EvaluationResult](), list[str]()
        if commit.evaluate:
            num_batches, num_sets = self._config.training.eval_batches, len(self._config.data.validation_sets)
            sums = engine.evaluate(step, num_batches, num_sets, working)
        if commit.sample and self._sampler is not None:
            samples = self._sampler.texts(step, partial(self._before_token, step))
        if (sums or samples) and self._stage.is_of_first_replica:
            losses = [each.loss_sum for each in sums], [each.raw_loss_sum for each in sums]
            num_right = [each.num_right for each in sums if self._config.training.dpo is not None]
            self._control.send(Evaluated(step, [each.tokens for each in sums], *losses, samples, num_right))

    def _before_token(self, step: int, number: int) -> None:
        self._control.working(f"writing samples, token {number + 1}")
        if number == 1:
            reached(fault_points.SAMPLING, stage=self._control.stage, step=step)

    def _keep_batch(self, step: int) -> None:
        """Keep the samples of a step that had NaN or infinity; the first stage does so for all."""
        batch = self._stage.engine.batch
        if self._control.stage != 0 or batch is None:
            return
        try:
            path = keep_batch(self._run_folder / "non_finite", step + 1, batch)
        except SnapshotError as error:
            log.warning("the batch of step %d, which had NaN or infinity, is not kept: %s", step + 1, error)
        else:
            log.warning("step %d had NaN or infinity; its batch is in %s", step + 1, path)

    # -- checkpoints -----------------------------------------------------------------------------

    def _snapshot(self, commit: Commit) -> None:
        """Have a due checkpoint written; after the last step, return when all are written and reported."""
        if commit.snapshot:
            self._last_checkpoint = commit.step + 1 if commit.stop else None
            self._save(commit.step + 1, copy=not commit.stop)  # nothing changes after the last step
        if commit.stop:
            self._is_saving = True
            self._writer.finish()
            self._is_saving = False

    def _save(self, step: int, *, copy: bool) -> None:
        """Have the checkpoint after `step` steps written."""
        self._is_saving = True
        self._control.working("checkpoint")
        # state that memory has no room for cannot be copied
        self._writer.take(step, self._stage.tensors(), copy=copy and not self._stage.keeps_state_on_disk)
        self._is_saving = False

    def _report_saving(self, activity: str) -> None:
        """Called in any thread."""
        if self._is_saving:
            self._control.working(activity)

    def _write_snapshot(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this stage's part of the checkpoint after `step` steps and report it, a failure too; in any thread.

        If the disk is full, the next checkpoint replaces this one; the last one waits for room.
        """
        number, snapshots = self._control.stage, snapshots_folder(self._config)
        folder = snapshot_folder(snapshots, step)
        write = partial(write_stage, folder, number, tensors, self._assembly.meta(step), self._report_saving)
        try:
            is_last = step == self._last_checkpoint
            written = wait_for_room(write, self._config.run.give_up, self._wait_for_room) if is_last else write()
        except SnapshotError as error:
            self._control.send(Snapshotted(step, number, "", "", 0, error=str(error)))
            return
        if isinstance(self._config.hosts, list):
            try:
                complete = self._complete_snapshot
                prune(snapshots, self._config.run.keep_checkpoints, complete, complete, self._best_snapshot)
            except SnapshotError as error:  # the new checkpoint is complete regardless
                log.warning("%s", error)
        self._offer(written.sha256, folder / written.file)
        self._control.send(Snapshotted(step, number, written.file, written.sha256, written.nbytes))

    def _wait_for_room(self, seconds: float) -> None:
        """Sleep while the disk has no room for the last checkpoint; RunAbortedError ends the wait."""
        self._control.working("waiting for room on the disk")
        time.sleep(seconds)
        self._control.check_aborted()
