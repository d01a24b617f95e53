"""Carries out the run's steps and checkpoints, from START to the last commit and the reports that are owed after it.

A COMMIT leaves as soon as the last PREPARE is in and the decision is durable, before anything is shown. Complete
checkpoints are published in a thread: that forces files to the disk and removes older checkpoints, gigabytes perhaps,
and a COMMIT must not wait for either.
"""

import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tahq import fault_points
from tahq.comm.control.messages import (
    Abandon,
    Admit,
    Commit,
    Copied,
    Evaluated,
    Prepare,
    Published,
    Snapshotted,
    Traced,
)
from tahq.coordinator import copies, recovery
from tahq.coordinator.best_loss import BEST_LOSS, BestLoss
from tahq.coordinator.context import CoordinatorOptions, RunContext
from tahq.coordinator.joining.seats import RestorePoint, Seat, stage_list
from tahq.coordinator.journal import gone
from tahq.coordinator.link_codecs import LinkCodecs
from tahq.coordinator.loss_scale import LOSS_SCALE, LossScale
from tahq.coordinator.observer import SamplesRecord, SnapshotRecord, StepRecord, ValidationRecord
from tahq.coordinator.run_state import WITH_STEPS, RunEvent, RunPhase, fingerprint
from tahq.coordinator.schedule_choice import SAVED, ScheduleChanges, ScheduleChoice, memory_by_stage, share_gpu
from tahq.coordinator.steps import TraceCollector, check_prepare, decide, is_repeated, step_record
from tahq.errors import RemoteProtocolError, SnapshotError, UserError
from tahq.fault_points import reached
from tahq.pipeline.checkpoint import snapshot as folders
from tahq.pipeline.checkpoint.manifest import StageFile, snapshot_name
from tahq.pipeline.config import TrainingConfig
from tahq.pipeline.update import learning_rate

log = logging.getLogger(__name__)

COMPUTING = "computing"
"""The key of `Seats.computing` in a checkpoint's state of codecs and schedule."""


@dataclass(frozen=True, slots=True)
class SnapshotParts:
    """Every stage's part of a checkpoint; lost stages may have to begin at that of step `base`, None: at this one."""

    point: RestorePoint
    parts: tuple[Snapshotted, ...]
    base: int | None = None
    is_best: bool = False
    """Whether its validation loss is the lowest so far."""

    @property
    def step(self) -> int:
        """Steps behind it."""
        return self.point.step

    @property
    def error(self) -> str:
        """What went wrong, by stage; empty if every part is durable."""
        return "; ".join(f"stage {part.stage}: {part.error}" for part in self.parts if part.error)


Publish = Callable[[SnapshotParts], None]
"""Raises OSError or SnapshotError if it cannot publish, or if a part is missing (`error`)."""


class Training:
    """Answers PREPARE, EVALUATED, SNAPSHOTTED, COPIED and TRACED; called by one thread.

    Args:
        ctx: the run.
        publish: makes a complete checkpoint the newest; None: as files under the run's folder.
        executor: runs `publish`, one call after the other; None: in a thread.
    """

    def __init__(self, ctx: RunContext, publish: Publish | None, executor: Executor | None) -> None:
        self._ctx, self._run, self._seats = ctx, ctx.run, ctx.seats
        self._publish = publish or partial(publish_to_folder, ctx.options)
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="tahq-publish")
        self._publishing: deque[tuple[SnapshotParts, Future[str]]] = deque()
        self._is_continued = False
        """Whether workers may repeat messages that the previous coordinator has received."""
        self._scale: LossScale | None = None
        """Of the present step; None: no stage multiplies in fp16."""

    def begin(self) -> None:
        """Begin at the run's base; if the journal is of this run, go on from there.

        Raises:
            SnapshotError: the checkpoint's state of the links' codecs is malformed.
        """
        ctx, run, journal = self._ctx, self._run, self._ctx.journal
        for seat in copies.uncopied(ctx.options, self._seats):
            ctx.warn(
                f"{seat.name} only dials out, so no other host can copy its checkpoints: if its host is lost with its "
                "disk, so is the run"
            )
        self._begin_at(run.base)
        run.checkpoint_s = ctx.clock()
        evaluations = journal.evaluations()
        for step in journal.steps():
            self._is_continued = True
            record = self._record(step.commit, step.prepares, step.step_time_s)
            change = ""
            if step.commit.schedule:
                self._schedule.present = ScheduleChoice(step.commit.schedule, tuple(step.commit.depths))
                change = str(self._schedule.present)
            self._use(step.commit)
            changes, _ = self._codecs.decide(record)
            self._note_early_stop(step.commit)
            run.decide(step.commit, step.prepares, self._point_after(step.commit), ctx.clock())
            ctx.observer.step_committed(replace(record, codec_changes=changes, schedule_change=change))
            if step.commit.step in evaluations:
                self._take_evaluation(evaluations[step.commit.step])
        newest = journal.facts.newest
        if newest and newest["step"] > run.base.step:
            step = newest["step"]
            point = run.owed.get(step, RestorePoint(step))
            self._note_published(replace(point, snapshot=newest["snapshot"], files=newest["files"]))
            run.owed = {owed: point for owed, point in run.owed.items() if owed > step}
        ctx.advance(RunEvent.ALL_READY)
        if run.is_decided:
            ctx.advance(RunEvent.LAST_COMMIT, self.owed)
        for seat in self._seats:
            seat.lost_since_s = seat.spare_from_s = None

    def _begin_at(self, point: RestorePoint) -> None:
        """Begin with the state of the links' codecs that the checkpoint keeps."""
        options, run = self._ctx.options, self._run
        num_links = options.grid.first_sum_link - options.tie_link * options.replicas
        others = (SAVED, COMPUTING, BEST_LOSS, LOSS_SCALE)
        saved = {key: value for key, value in point.saved_codecs.items() if key not in others}
        if options.codecs.rules is None:
            saved = {}
        self._codecs = LinkCodecs(replace(options.codecs, saved=saved), num_links, point.step)
        self._best = BestLoss.restored(point.saved_codecs)
        in_fp16 = (seat.hello is not None and seat.hello.products == "fp16" for seat in self._seats)
        if self._scale is not None or any(in_fp16):
            self._scale = LossScale.at_start(options.training.loss_scale, point.saved_codecs)
        run.best_snapshot = folders.best_step(options.run_folder / "snapshots")
        hellos = [(seat.host, seat.hello) for seat in self._seats]
        self._memory = memory_by_stage(hellos)
        choose = None if share_gpu(hellos) else options.choose_schedule
        self._schedule = ScheduleChanges(
            *(choose, options.schedule, point.saved_codecs, self._executor, self._memory),
            are_depths_set=options.are_depths_set,
        )
        self._traces = TraceCollector([seat.name for seat in self._seats])
        told = point.saved_codecs.get(COMPUTING, ()) if options.replicas_wait_s is not None else ()
        computing = [each for each in told if each in range(options.replicas)]
        self._seats.computing = tuple(computing or range(options.replicas))
        run.newest = run.base = replace(
            *(point,),
            codecs=self._codecs.start_rows(),
            schedule=self._schedule.told,
            computing=self._seats.told_computing,
            loss_scale=self._loss_scale,
        )
        for seat in self._seats:
            seat.origin = run.base
        run.step_began_s = self._ctx.clock()

    @property
    def owed(self) -> str:
        """The work that is left after the last commit, in words; empty: none."""
        publishing = (f"the checkpoint after step {parts.step}" for parts, _ in self._publishing)
        return " and ".join((*self._run.outstanding, *publishing))

    # -- steps -----------------------------------------------------------------------------------

    def prepare(self, seat: Seat, prepare: Prepare) -> bool:
        """Count a stage's part of the current step; the last one decides it.

        Returns:
            Whether a stage that was lost has recomputed a step that is decided; it is answered as the first time.

        Raises:
            RemoteProtocolError, DataError, NonFiniteError: as `check_prepare` and `decide`.
        """
        run = self._run
        if prepare.step < run.step and prepare.step == seat.position:
            self._prepare_again(seat, prepare)
            return True
        last = run.last_prepares.get(seat.stage)
        if is_repeated(prepare, seat.prepared) or (seat.prepared is None and is_repeated(prepare, last)):
            return False
        seats, is_last = self._seats, self._ctx.options.grid.is_last(seat.stage)
        has_loss = is_last and seats.replica(seat) in seats.computing
        may_abandon = self._ctx.options.replicas_wait_s is not None
        check_prepare(prepare, run.step, seat.prepared, seat.name, has_loss=has_loss, may_abandon=may_abandon)
        seat.prepared, seat.position = prepare, max(seat.position, prepare.step + 1)
        self._commit_if_prepared()
        return False

    def go_on_without_lost(self) -> None:
        """Abandon the current step if a worker was lost long ago, and there is a replica that can go on."""
        ctx, run, seats = self._ctx, self._run, self._seats
        lost = recovery.left_out(ctx.options, run, seats, ctx.clock())
        if not lost:
            return
        if not run.abandoned_for:
            missed = stage_list(stage for stage in sorted(lost) if seats.replica(seats[stage]) in seats.computing)
            whose = f"{missed} lost for {ctx.options.replicas_wait_s:g} s"
            ctx.warn(f"{whose}: step {run.step + 1} is skipped, and replicas without lost workers go on")
        run.abandoned_for = lost
        for seat in seats:
            links = [ends.link for ends, other in recovery.links_of(ctx.options, seat.stage) if other in lost]
            ctx.send(seat, Abandon(run.step, links))
        self._commit_if_prepared()

    def _commit_if_prepared(self) -> None:
        """Decide the step if all that it waits for have prepared it."""
        awaited = recovery.awaited(self._run, self._seats)
        if awaited and all(seat.prepared is not None for seat in awaited):
            self._commit([seat.prepared for seat in self._seats if seat.prepared is not None])

    def _commit(self, prepares: list[Prepare]) -> None:
        ctx, run, options = self._ctx, self._run, self._ctx.options
        now_s, began_s = ctx.clock(), run.step_began_s
        names = [seat.name for seat in self._seats]
        commit = decide(
            options.training,
            prepares,
            names,
            num_steps=run.num_steps,
            num_stages=options.grid.num_stages,
            num_norms=options.num_norms,
            abandoned=bool(run.abandoned_for) or options.recorded_replicas.get(run.step) == (),
            is_checkpoint_due=self._is_checkpoint_due(now_s),
            skipped_in_a_row=run.skipped_in_a_row,
            loss_scale=self._loss_scale,
            stop=run.stop_signal is not None or bool(self._best.why_over(options.training.early_stopping)),
        )
        record = self._with_relayed(self._record(commit, prepares, now_s - began_s))
        changes, rows = self._codecs.decide(record)
        commit = replace(commit, codecs=rows, complete_snapshot=run.base.step if run.base.snapshot else 0)
        commit = replace(commit, best_snapshot=run.best_snapshot, snapshot_before=self._is_best_due())
        if commit.evaluate and options.best == "at once":
            commit = replace(commit, snapshot=True)
        schedule_change = self._schedule.decide(record)
        if schedule_change:
            name, depths = self._schedule.present
            commit = replace(commit, schedule=name, depths=list(depths))
        commit = replace(commit, computing=self._next_replicas())
        if self._scale is not None:
            commit = replace(commit, loss_scale=self._scale.after(commit).scale)
        reached(fault_points.COMMIT_DECIDED, step=commit.step)
        ctx.journal.decided(commit, prepares, record.step_time_s)
        reached(fault_points.COMMIT_JOURNALLED, step=commit.step)
        for seat in self._seats:
            if seat.prepared is not None:  # a stage that is behind asks later
                ctx.send(seat, commit)
            seat.prepared = None
            reached(fault_points.COMMIT_SENT, step=commit.step)
        ctx.server.flush()
        self._traces.committed(commit.step, began_s, now_s)
        self._use(commit)
        self._note_early_stop(commit)
        run.decide(commit, prepares, self._point_after(commit), now_s)
        self.settle_copies()  # with shared updates a base may have waited for this step
        ctx.observer.step_committed(replace(record, codec_changes=changes, schedule_change=schedule_change))
        if commit.stop:
            ctx.advance(RunEvent.LAST_COMMIT, self.owed)

    def _with_relayed(self, record: StepRecord) -> StepRecord:
        """With the bytes that each sender has sent over the relay since the step before."""
        if self._ctx.relay is None:
            return record
        counts, all_ends = self._ctx.relay.take_counts(), self._ctx.options.grid.links()
        links = (
            replace(link, relayed_bytes=counts.get((link.link, int(link.sender != all_ends[link.link].lower)), 0))
            for link in record.links
        )
        return replace(record, links=tuple(links))

    def _is_checkpoint_due(self, now_s: float) -> bool:
        every, run = self._ctx.options.checkpoint_every, self._run
        if isinstance(every, int):
            return (run.step + 1) % every == 0
        return every != "never" and now_s - run.checkpoint_s >= every

    def _is_best_due(self) -> bool:
        """Whether the step before this one has the lowest validation loss, and no checkpoint."""
        before = self._run.decided.get(self._run.step - 1)
        is_kept = before is None or before.commit.snapshot
        return self._ctx.options.best == "after" and self._best.step == self._run.step and not is_kept

    def _note_early_stop(self, commit: Commit) -> None:
        """Note why this commit ends the run before its last step, if it does so for the validation loss."""
        run = self._run
        if commit.stop and commit.step + 1 < run.num_steps and run.stop_signal is None:
            run.stopped_early = self._best.why_over(self._ctx.options.training.early_stopping)

    def _next_replicas(self) -> list[int]:
        """The replicas that compute the next step, if that changes; else none."""
        options, seats = self._ctx.options, self._seats
        following = tuple(options.recorded_replicas.get(self._run.step + 1) or range(options.replicas))
        if options.replicas_wait_s is not None and not options.recorded_replicas:
            following = seats.whole or seats.computing
        return list(following) if following != seats.computing else []

    @property
    def _loss_scale(self) -> float:
        """Of the present step; 0: there is none."""
        return 0.0 if self._scale is None else self._scale.scale

    def _use(self, commit: Commit) -> None:
        """What a commit says of the steps behind it."""
        self._scale = None if self._scale is None else self._scale.after(commit)
        if commit.computing:
            self._seats.computing = tuple(commit.computing)

    def _point_after(self, commit: Commit) -> RestorePoint:
        computing = self._seats.told_computing
        saved = self._codecs.saved() | self._schedule.saved() | ({COMPUTING: list(computing)} if computing else {})
        saved |= self._best.saved() | ({} if self._scale is None else self._scale.saved())
        return RestorePoint(
            commit.step + 1,
            codecs=self._codecs.start_rows(),
            schedule=self._schedule.told,
            saved_codecs=saved,
            computing=computing,
            loss_scale=commit.loss_scale,
        )

    def _record(self, commit: Commit, prepares: Sequence[Prepare], step_time_s: float) -> StepRecord:
        options = self._ctx.options
        lr = learning_rate(options.training, commit.step, self._run.num_steps)
        record = step_record(
            *(commit, prepares, step_time_s, options.grid, lr, self._seats.computing), num_norms=options.num_norms
        )
        pairs = zip(record.stages, self._memory, strict=True)
        stages = tuple(replace(stage, memory_bytes=nbytes) for stage, nbytes in pairs)
        schedule, depths = self._schedule.present
        record = replace(record, stages=stages, schedule=schedule, in_flight=depths, loss_scale=self._loss_scale)
        return self._codecs.described(
            replace(record, computed_tokens=0 if commit.abandoned else options.tokens_per_step)
        )

    def _prepare_again(self, seat: Seat, prepare: Prepare) -> None:
        """Answer as the first time, apart from reports that are no longer owed."""
        run, decided = self._run, self._run.decided.get(prepare.step)
        if decided is None:
            raise RemoteProtocolError(f"{seat.name} computed step {prepare.step} again, whose decision is not kept")
        if decided.fingerprints.get(seat.stage, mine := fingerprint(prepare)) != mine and not seat.is_inexact:
            seat.is_inexact = True
            self._ctx.warn(
                f"{seat.name} recomputed step {prepare.step + 1} with a different result: the run goes on, and "
                "is no longer bit-exact"
            )
        seat.position = prepare.step + 1
        run.reported_s = self._ctx.clock()
        self.settle_copies()
        self._ctx.send(seat, recovery.answer_again(self._ctx.options, run, seat, decided.commit))

    def evaluated(self, seat: Seat, evaluated: Evaluated) -> None:
        """Take the validation loss; raises RemoteProtocolError if it was not asked for."""
        if evaluated.step != self._run.evaluating:
            if self._is_continued or evaluated.step == recovery.open_evaluation(self._ctx.options, self._run):
                return  # the previous coordinator received it, or a stage evaluated again for other replicas
            asked = self._run.evaluating
            raise RemoteProtocolError(f"{seat.name} evaluated step {evaluated.step}; expected {asked}")
        self._check_evaluation(seat, evaluated)
        self._ctx.journal.evaluated(evaluated)
        self._take_evaluation(evaluated)

    def _check_evaluation(self, seat: Seat, evaluated: Evaluated) -> None:
        options = self._ctx.options
        numbers = evaluated.tokens, evaluated.loss_sum, evaluated.raw_loss_sum
        num_sets, num_prompts = len(options.validation_sets), len(prompts_of(options.training))
        are_losses = {len(each) for each in numbers} in ({num_sets}, {0}) and min(evaluated.tokens, default=1) >= 1
        are_losses &= len(evaluated.num_right) in (0, len(evaluated.tokens))
        if not are_losses or len(evaluated.samples) not in (num_prompts, 0):
            raise RemoteProtocolError(
                f"{seat.name} evaluated step {evaluated.step} on {evaluated.tokens} tokens, with "
                f"{len(evaluated.samples)} samples; expected {num_sets} validation sets and {num_prompts} prompts"
            )

    def _take_evaluation(self, evaluated: Evaluated) -> None:
        # an evaluation is not part of a step
        self._run.step_began_s = self._run.reported_s = self._ctx.clock()
        if evaluated.tokens:
            self._take_losses(evaluated)
        self._run.evaluated(self._best.saved())
        if evaluated.samples:
            texts = zip(prompts_of(self._ctx.options.training), evaluated.samples, strict=True)
            self._ctx.observer.sampled(SamplesRecord(evaluated.step + 1, tuple(texts)))

    def _take_losses(self, evaluated: Evaluated) -> None:
        num_right: list[float] | list[None] = evaluated.num_right or [None] * len(evaluated.tokens)
        rows = zip(evaluated.tokens, evaluated.loss_sum, evaluated.raw_loss_sum, num_right, strict=True)
        first, *others = (
            ValidationRecord(
                *(evaluated.step + 1, count, loss / count, raw_loss / count, name),
                accuracy=None if right is None else right / count,
            )
            for name, (count, loss, raw_loss, right) in zip(self._ctx.options.validation_sets, rows, strict=True)
        )
        training = self._ctx.options.training
        watched = next((each for each in (first, *others) if each.name == training.best_set), first)
        self._best = self._best.after(watched.step, watched.loss_raw, training.early_stopping)
        self._ctx.observer.validated(replace(first, others=tuple(others)))

    def traced(self, _: Seat, part: Traced) -> None:
        """Take a part of a traced step; raises RemoteProtocolError if it is malformed."""
        server = self._ctx.server
        offsets = [server.clock_offset(each.identity) if each.is_held else None for each in self._seats]
        trace = self._traces.take(part, offsets)
        if trace is not None:
            self._ctx.observer.step_traced(trace)

    # -- checkpoints -----------------------------------------------------------------------------

    def snapshotted(self, seat: Seat, part: Snapshotted) -> None:
        """Take a stage's part of a checkpoint, which was asked for; the last one begins its publication."""
        run, seats = self._run, self._seats
        if not recovery.owes_part(run, seat, part.step):
            if self._is_continued:
                return  # the previous coordinator received it
            raise RemoteProtocolError(
                f"{seat.name} reported a checkpoint after step {part.step} that it was not asked for"
            )
        seat.parts[part.step], run.reported_s = part, self._ctx.clock()
        if any(recovery.owes_part(run, each, part.step) for each in seats):
            return
        base = run.base.step if copies.is_needed(self._ctx.options, seats) else None
        is_best = bool(self._ctx.options.best) and self._best.step == part.step
        given = tuple(each.parts.pop(part.step) for each in seats)
        parts = SnapshotParts(run.owed.pop(part.step), given, base, is_best)
        self._publishing.append((parts, self._executor.submit(self._error_of, parts)))
        self.settle_published(wait=run.phase is RunPhase.FINISHING)

    def _error_of(self, parts: SnapshotParts) -> str:
        """Publish a checkpoint; returns why that failed, "" if it has not."""
        try:
            self._publish(parts)
        except (OSError, SnapshotError) as error:
            return parts.error or f"coordinator: {error}"
        return parts.error

    def settle_published(self, *, wait: bool = False) -> bool:
        """Take note of checkpoints that were published or failed; with `wait`, of all that are complete.

        Returns whether there was one. Raises UserError if the run's folder is gone.
        """
        is_any = False
        while self._publishing and (wait or self._publishing[0][1].done()):
            parts, future = self._publishing.popleft()
            error, is_any = future.result(), True
            if not error:
                self._published(parts)
            self._tell_written(parts, error)
        return is_any

    def abandon(self) -> None:
        """Wait for checkpoints that are being published, so that the user hears about the newest."""
        for parts, future in self._publishing:
            try:
                error = future.result()
            except UserError as failure:  # the run's folder is gone
                self._ctx.warn(str(failure))
                return
            if not error:
                self._run.last_snapshot = parts.step
            self._tell_written(parts, error)

    def close(self) -> None:
        """Return when everything is published."""
        self._executor.shutdown(wait=True)

    def _tell_written(self, parts: SnapshotParts, error: str) -> None:
        nbytes = sum(part.nbytes for part in parts.parts)
        self._ctx.observer.snapshot_written(SnapshotRecord(parts.step, nbytes, error, parts.is_best))

    def _published(self, parts: SnapshotParts) -> None:
        folder = f"snapshots/{snapshot_name(parts.step)}"
        files = {part.file: part.sha256 for part in parts.parts}
        self._note_published(replace(parts.point, snapshot=folder, files=files))
        if parts.is_best:
            self._run.best_snapshot = parts.step
        if copies.is_needed(self._ctx.options, self._seats):
            self._ctx.journal.note(newest={"step": parts.step, "snapshot": folder, "files": files})
        if not self.settle_copies():
            self._ctx.broadcast(Published(parts.step, self._run.base.step))

    def _note_published(self, point: RestorePoint) -> None:
        self._run.published(point)
        copies.published(self._run, self._seats)

    def turn_back(self) -> None:
        """Undo every step after the newest whole checkpoint that is older than the base, or begin there.

        Raises:
            SnapshotError: there is none, or its configuration is another.
        """
        ctx, run, options = self._ctx, self._run, self._ctx.options
        self.settle_published(wait=True)
        snapshots = options.run_folder / "snapshots"
        chosen = folders.choose_snapshot(snapshots, all_files_here=not options.hosts, before=run.base.step)
        manifest = chosen.manifest
        if manifest.meta.get("config_hash") != options.config_hash:
            raise SnapshotError(f"{chosen.folder} is of another configuration; use --resume to continue from it")
        folders.turn_back(snapshots, chosen.folder)
        saved, files = dict(manifest.meta.get("codecs") or {}), dict(manifest.sha256)
        point = RestorePoint(manifest.step, f"snapshots/{chosen.folder.name}", files, saved_codecs=saved)
        was_training = run.phase in WITH_STEPS
        run.turn_back(point, ctx.clock())
        self._seats.turn_back(point)
        if was_training:
            self._begin_at(point)
        else:
            if run.next_sample is not None:
                run.next_sample -= (options.start_step - point.step) * options.training.global_batch
            ctx.options = replace(options, start_step=point.step)
        if ctx.journal.is_of(options.run_id, options.config_hash):
            begins = replace(ctx.journal.facts, step=point.step, snapshot=point.snapshot, files=files, codecs=saved)
            ctx.journal.begin(replace(begins, newest={}))
        ctx.observer.turned_back(point.step)

    def copied(self, holder: Seat, copied: Copied) -> None:
        """Take the outcome of a copy."""
        if not 0 <= copied.stage < len(self._seats):
            raise RemoteProtocolError(f"{holder.name} has a copy of stage {copied.stage}, which does not exist")
        copies.copied(self._seats[copied.stage], holder, copied)
        if copied.error:
            self._ctx.warn(f"{holder.name} has no copy of stage {copied.stage}'s checkpoint: {copied.error}")
        self.settle_copies()

    def settle_copies(self) -> bool:
        """Make the checkpoint that is copied now the base, if complete, and order copies; whether the base moved."""
        ctx, run, seats, target = self._ctx, self._run, self._seats, self._run.copying
        if run.phase not in WITH_STEPS:
            return False
        can_rebase = recovery.can_rebase(run, seats, target, shares_updates=ctx.options.shares_updates)
        is_settled = copies.is_complete(ctx.options, run, seats) and can_rebase
        if is_settled and target is not None:
            run.rebase(target)
            copies.rebased(run, seats)
            ctx.journal.published(target.step, target.snapshot, target.files, target.saved_codecs)
            ctx.broadcast(Published(run.newest.step, target.step))
        for identity, order in copies.due(ctx.options, run, seats):
            key, source = ctx.server.public_key(identity), seats[order.stage]
            if key and order.address:  # under CURVE each of the two is told the other's key
                ctx.send(source, Admit([key]))
                order = replace(order, public_key=source.public_key)
            ctx.server.send(identity, order)
        return is_settled


def prompts_of(training: TrainingConfig) -> list[str]:
    """The prompts of samples; none: there are no samples."""
    return [] if training.samples is None else training.samples.prompts


def publish_to_folder(options: CoordinatorOptions, parts: SnapshotParts) -> None:
    """Write the manifest, move `latest`, remove all but the newest few; or remove the parts of a failed checkpoint.

    Raises:
        SnapshotError: it has failed, or cannot be published; `latest` names the one before.
        UserError: the run's folder is gone.
    """
    snapshots = options.run_folder / "snapshots"
    if not options.run_folder.is_dir():
        raise gone(options.run_folder)
    if parts.error:
        _try_to(lambda: folders.discard(snapshots, parts.step))  # the part's own error says more than this one's
        raise SnapshotError(parts.error)
    reached(fault_points.PUBLISHING, step=parts.step)
    files = [StageFile(part.file, part.sha256, part.nbytes) for part in parts.parts]
    meta: Mapping[str, Any] = {
        "run_id": options.run_id,
        "config": json.loads(options.config_json),
        "config_hash": options.config_hash,
        "version": options.version,
        "codecs": dict(parts.point.saved_codecs),
    }
    folders.publish(snapshots, parts.step, files, meta, options.give_up_s)
    if parts.is_best:
        _try_to(lambda: folders.mark_best(snapshots, parts.step))
    _try_to(lambda: folders.prune(snapshots, options.keep_checkpoints, base=parts.base))  # the new one is complete
    reached(fault_points.PUBLISHED, step=parts.step)


def _try_to(remove: Callable[[], object]) -> None:
    try:
        remove()
    except SnapshotError as error:
        log.warning("%s", error)
