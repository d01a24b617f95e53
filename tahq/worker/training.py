"""The steps of one worker: compute, PREPARE, wait for COMMIT, apply it, and write checkpoints that are due."""

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from tahq import fault_points
from tahq.comm.control.messages import Commit, Evaluated, Plan, Prepare, Snapshotted
from tahq.errors import NonFiniteError, RemoteProtocolError, RunAbortedError, SnapshotError
from tahq.fault_points import reached
from tahq.pipeline.checkpoint.durable_file import wait_for_room
from tahq.pipeline.checkpoint.manifest import snapshot_folder
from tahq.pipeline.checkpoint.snapshot import prune
from tahq.pipeline.checkpoint.stage_file import write_stage
from tahq.pipeline.checkpoint.writer import SnapshotWriter
from tahq.pipeline.engine import StepResult
from tahq.pipeline.stage import Stage, keep_batch
from tahq.pipeline.step_meter import StepMeter
from tahq.worker.assembly import Assembly, snapshots_folder
from tahq.worker.control import WorkerControl

log = logging.getLogger(__name__)


class WorkerTraining:
    """One stage's steps, each as the coordinator decides it.

    Args:
        control: the channel to the coordinator.
        stage: computes the steps.
        assembly: the parts that the stage was made of.
        plan: the coordinator's.
        offer: called with hash and place of every file of a checkpoint that is written, in any thread.
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
        self._writer = SnapshotWriter(self._write_snapshot, config.run.snapshot_buffers, stage.stopwatch)
        self._last_checkpoint: int | None = None
        """Steps behind the run's last checkpoint, which waits for room on a full disk; None: it is not due yet."""
        self._complete_snapshot = assembly.assign.start_step
        """Steps behind the newest checkpoint that all stages have written, as the coordinator has said."""
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
            result = stage.engine.run_step(step)
            reached(fault_points.BEFORE_PREPARE, stage=control.stage, step=step)
            control.send(self._prepare(step, result))
            reached(fault_points.PREPARED, stage=control.stage, step=step)
            control.working("commit")
            with stage.stopwatch.measure("commit"):
                commit = self._await_commit(step)
            control.num_decided = step + 1
            reached(fault_points.COMMITTING, stage=control.stage, step=step)
            self._send_trace(step)
            meter.begin(step + 1)
            self._writer.hold_back_changes()
            self._carry_out(commit)
            if commit.stop:
                self._send_trace(None)  # before the report of the last checkpoint, which BYE follows
            self._snapshot(commit)
            if commit.stop:
                return

    def _prepare(self, step: int, result: StepResult) -> Prepare:
        """This stage's part of a computed step; takes what was measured of it."""
        stage, meter = self._stage, self._meter
        meter.note(stage.take_link_stats())
        with stage.stopwatch.measure("norms"):
            norm2 = stage.update.squared_norms()
        timing = dict(result.timing)
        for activity, seconds in stage.stopwatch.take().items():
            timing[activity] = timing.get(activity, 0.0) + seconds
        return Prepare(
            step=step,
            stage=self._control.stage,
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

    def _await_commit(self, step: int) -> Commit:
        try:
            commit = self._control.receive(Commit)
        except RunAbortedError as error:
            if error.exit_status == NonFiniteError.exit_status:
                self._keep_batch(step)
            raise
        if commit.step != step:
            raise RemoteProtocolError(f"the coordinator committed step {commit.step} while step {step} is computed")
        return commit

    def _send_trace(self, step: int | None) -> None:
        """Send the spans of traced steps that are complete when `step` is committed; None: of all that are left."""
        if step is None or self._stage.stopwatch.is_recording:
            self._meter.note(self._stage.take_link_stats())
        for part in self._meter.trace(step):
            self._control.send(part)

    def _carry_out(self, commit: Commit) -> None:
        stage = self._stage
        with stage.stopwatch.measure("optimizer"):
            if commit.apply:
                stage.update.apply(commit.step, commit.clip_factor)
            else:
                stage.update.discard()
                self._keep_batch(commit.step)
        stage.use_codecs(commit.step + 1, commit.codecs)
        if commit.evaluate:
            self._control.working("evaluate")
            sums = stage.engine.evaluate(commit.step, stage.plan.training.eval_batches)
            if sums is not None:
                self._control.send(Evaluated(commit.step, sums.tokens, sums.loss_sum, sums.raw_loss_sum))
            self._meter.begin(commit.step + 1)

    def _keep_batch(self, step: int) -> None:
        """Keep the samples of a step that had NaN or infinity; the first stage does so for all."""
        batch = self._stage.engine.batch
        if self._control.stage != 0 or batch is None:
            return
        folder = Path(self._config.run.dir) / self._config.run.name / "non_finite"
        try:
            path = keep_batch(folder, step + 1, batch)
        except SnapshotError as error:
            log.warning("the batch of step %d, which had NaN or infinity, is not kept: %s", step + 1, error)
        else:
            log.warning("step %d had NaN or infinity; its batch is in %s", step + 1, path)

    # -- checkpoints -----------------------------------------------------------------------------

    def _snapshot(self, commit: Commit) -> None:
        """Have a due checkpoint written; after the last step, return when all are written and reported."""
        self._complete_snapshot = commit.complete_snapshot
        if commit.snapshot:
            self._control.working("snapshot")
            # nothing changes after the last step, and state that memory has no room for cannot be copied
            copy = not (commit.stop or self._stage.keeps_state_on_disk)
            self._last_checkpoint = commit.step + 1 if commit.stop else None
            self._writer.take(commit.step + 1, self._stage.tensors(), copy=copy)
        if commit.stop:
            self._writer.finish()

    def _write_snapshot(self, step: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this stage's part of the checkpoint after `step` steps and report it, a failure too; in any thread.

        If the disk is full, the next checkpoint replaces this one; the last one waits for room.
        """
        number, snapshots = self._control.stage, snapshots_folder(self._config)
        folder = snapshot_folder(snapshots, step)
        write = partial(write_stage, folder, number, tensors, self._assembly.meta(step))
        try:
            is_last = step == self._last_checkpoint
            written = wait_for_room(write, self._config.run.give_up, self._wait_for_room) if is_last else write()
        except SnapshotError as error:
            self._control.send(Snapshotted(step, number, "", "", 0, error=str(error)))
            return
        if isinstance(self._config.hosts, list):
            try:
                prune(snapshots, self._config.run.keep_snapshots, self._complete_snapshot, self._complete_snapshot)
            except SnapshotError as error:  # the new checkpoint is complete regardless
                log.warning("%s", error)
        self._offer(written.sha256, folder / written.file)
        self._control.send(Snapshotted(step, number, written.file, written.sha256, written.nbytes))

    def _wait_for_room(self, seconds: float) -> None:
        """Sleep while the disk has no room for the last checkpoint; leaves if the run is aborted."""
        self._control.working("waiting for room on the disk")
        time.sleep(seconds)
        self._control.check_aborted()
