"""Carries out the run's steps and checkpoints, from START to the last commit and what is owed after it.

A COMMIT leaves as soon as the last PREPARE is in and the decision is durable, before anything is shown.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tahq import fault_points
from tahq.comm.control.messages import Admit, Commit, Copied, Copy, Evaluated, Prepare, Published, Snapshotted, Traced
from tahq.coordinator import copies, recovery
from tahq.coordinator.commit import CommitRules, check_prepare, decide, is_repeated, norm_of
from tahq.coordinator.context import RunContext
from tahq.coordinator.link_codecs import LinkCodecs
from tahq.coordinator.observer import SnapshotRecord, StepRecord, ValidationRecord
from tahq.coordinator.publishing import Publishing, SnapshotParts
from tahq.coordinator.run_state import RunEvent, RunPhase
from tahq.coordinator.seats import RestorePoint, Seat
from tahq.coordinator.step_report import TraceCollector, step_record
from tahq.errors import RemoteProtocolError, SnapshotError, UserError
from tahq.fault_points import reached
from tahq.pipeline.checkpoint.manifest import snapshot_name
from tahq.pipeline.checkpoint.snapshot import choose_snapshot, turn_back
from tahq.pipeline.update.learning_rate import learning_rate


class Training:
    """Answers PREPARE, EVALUATED, SNAPSHOTTED, COPIED and TRACED.

    Args:
        context: the run; its length is known. If its journal is of this run, it goes on from there.
        publishing: makes complete checkpoints the newest one.

    Raises:
        SnapshotError: what the checkpoint says of the links' codecs makes no sense.
    """

    def __init__(self, context: RunContext, publishing: Publishing) -> None:
        self._context = context
        self._run, self._seats, self._options = context.run, context.seats, context.options
        self._publishing = publishing
        self._rules = CommitRules(context.options.training, context.run.num_steps, context.options.snapshot_every)
        self._begin_at(context.options.start_step, context.options.codecs.saved)
        self._is_continued = False
        """Whether workers may repeat what a coordinator before this one has heard."""
        self._go_on()

    def _begin_at(self, step: int, saved: Mapping[str, Any]) -> None:
        """Begin at the run's base, with what the checkpoint keeps of the links' codecs."""
        num_links = self._options.num_stages * self._options.chunks_per_stage - 1
        self._codecs = LinkCodecs(replace(self._options.codecs, saved=saved), num_links, step)
        self._traces = TraceCollector([seat.name for seat in self._seats])
        self._run.begin_with(self._codecs.start_rows())
        for seat in self._seats:
            seat.origin = self._run.base
        self._run.step_began_s = self._context.clock()

    def _go_on(self) -> None:
        """Take over what the journal has of this run since its base."""
        journal, run = self._context.journal, self._run
        evaluations = journal.evaluations()
        for step in journal.steps():
            self._is_continued = True
            record = self._record(step.commit, step.prepares, step.step_time_s)
            changes, _ = self._codecs.decide(record)
            run.decide(step.commit, step.prepares, self._codecs.start_rows(), self._context.clock())
            self._keep_codecs(step.commit)
            self._context.observer.step_committed(replace(record, codec_changes=changes))
            if step.commit.step in evaluations:
                self._take_evaluation(evaluations[step.commit.step])
        newest = journal.facts.newest
        if newest and newest["step"] > run.base.step:
            self._note_published(newest["step"], newest["snapshot"], newest["files"])
            run.owed = {step for step in run.owed if step > newest["step"]}

    @property
    def owed(self) -> str:
        """What is still to come after the last commit, in words; empty: nothing."""
        return " and ".join((*self._run.outstanding, *self._publishing.outstanding))

    # -- steps -----------------------------------------------------------------------------------

    def prepare(self, seat: Seat, prepare: Prepare) -> None:
        """Count a stage's part of the step that the run is at; the last one decides it.

        Raises:
            RemoteProtocolError, DataError, NonFiniteError: as `check_prepare` and `decide`.
        """
        run = self._run
        last = run.last_prepares[seat.stage] if run.last_prepares else None
        if is_repeated(prepare, seat.prepared) or (seat.prepared is None and is_repeated(prepare, last)):
            return
        is_last = seat.stage == len(self._seats) - 1
        check_prepare(prepare, run.step, seat.prepared, seat.name, is_last=is_last)
        seat.prepared, seat.position = prepare, max(seat.position, prepare.step + 1)
        prepares = [each.prepared for each in self._seats if each.prepared is not None]
        if len(prepares) == len(self._seats):
            self._commit(prepares)

    def _commit(self, prepares: list[Prepare]) -> None:
        context, run = self._context, self._run
        now_s = context.clock()
        began_s = run.step_began_s
        names = [seat.name for seat in self._seats]
        commit = decide(self._rules, prepares, names, run.skipped_in_a_row, stop=run.stop_signal is not None)
        record = self._record(commit, prepares, now_s - began_s)
        changes, rows = self._codecs.decide(record)
        commit = replace(commit, codecs=rows, complete_snapshot=run.base.step if run.base.snapshot else 0)
        reached(fault_points.COMMIT_DECIDED, step=commit.step)
        context.journal.decided(commit, prepares, record.step_time_s)
        reached(fault_points.COMMIT_JOURNALLED, step=commit.step)
        for seat in self._seats:
            context.send(seat, commit)
            seat.prepared = None
            reached(fault_points.COMMIT_SENT, step=commit.step)
        self._traces.committed(commit.step, began_s, now_s)
        run.decide(commit, prepares, self._codecs.start_rows(), now_s)
        self._keep_codecs(commit)
        context.observer.step_committed(replace(record, codec_changes=changes))
        if commit.stop:
            context.advance(RunEvent.LAST_COMMIT, self.owed)

    def _record(self, commit: Commit, prepares: list[Prepare] | tuple[Prepare, ...], step_time_s: float) -> StepRecord:
        record = step_record(commit, prepares, norm_of(prepares), step_time_s, self._options.chunks_per_stage)
        rate = learning_rate(self._options.training, commit.step, self._run.num_steps)
        return self._codecs.described(replace(record, lr=rate))

    def _keep_codecs(self, commit: Commit) -> None:
        if commit.snapshot:
            self._run.saved_codecs[commit.step + 1] = self._codecs.saved()

    def is_again(self, prepare: Prepare) -> bool:
        """Whether a stage that was lost has recomputed a step that is decided."""
        return prepare.step < self._run.step and prepare.step == self._seats[prepare.stage].position

    def prepare_again(self, seat: Seat, prepare: Prepare) -> None:
        """Answer as the first time, apart from reports that are not owed any more.

        Raises:
            RemoteProtocolError: the step's decision is not kept any more.
        """
        answer = self._run.answer(prepare)
        if answer is None:
            raise RemoteProtocolError(f"{seat.name} computed step {prepare.step} again, whose decision is not kept")
        commit, is_alike = answer
        if not is_alike and not seat.is_inexact:
            seat.is_inexact = True
            self._context.observer.warned(
                f"{seat.name} computed step {prepare.step + 1} again, and not to the bit as before: the run goes on, "
                "and is no longer exact"
            )
        seat.position = prepare.step + 1
        self.settle_copies()
        self._context.send(seat, recovery.answer_again(self._run, seat, commit))

    def evaluated(self, seat: Seat, evaluated: Evaluated) -> None:
        """Take the validation loss; raises RemoteProtocolError if it was not asked for."""
        if evaluated.step != self._run.evaluating:
            if self._is_continued:
                return  # heard by the coordinator before
            asked = self._run.evaluating
            raise RemoteProtocolError(f"{seat.name} evaluated step {evaluated.step}; expected {asked}")
        if evaluated.tokens < 1:
            raise RemoteProtocolError(f"{seat.name} evaluated step {evaluated.step} on {evaluated.tokens} tokens")
        self._context.journal.evaluated(evaluated)
        self._take_evaluation(evaluated)

    def _take_evaluation(self, evaluated: Evaluated) -> None:
        self._run.evaluating = None
        self._run.step_began_s = self._context.clock()  # an evaluation is not part of a step
        self._context.observer.validated(
            ValidationRecord(
                step=evaluated.step + 1,
                tokens=evaluated.tokens,
                loss=evaluated.loss_sum / evaluated.tokens,
                loss_raw=evaluated.raw_loss_sum / evaluated.tokens,
            )
        )

    def traced(self, seat: Seat, part: Traced) -> None:
        """Take a part of a traced step; raises RemoteProtocolError if it makes no sense."""
        server = self._context.server
        offsets = [server.clock_offset(each.identity) if each.is_held else None for each in self._seats]
        trace = self._traces.take(part, offsets)
        if trace is not None:
            self._context.observer.step_traced(trace)

    # -- checkpoints -----------------------------------------------------------------------------

    def snapshotted(self, seat: Seat, part: Snapshotted) -> None:
        """Take a stage's part of a checkpoint; the last one begins its publication.

        Raises:
            RemoteProtocolError: it was not asked for.
        """
        run = self._run
        if not recovery.owes_part(run, seat, part.step):
            if self._is_continued:
                return  # heard by the coordinator before
            raise RemoteProtocolError(
                f"{seat.name} reported a checkpoint after step {part.step} that it was not asked for"
            )
        seat.parts[part.step] = part
        if any(recovery.owes_part(run, each, part.step) for each in self._seats):
            return
        run.owed.discard(part.step)
        parts = tuple(each.parts.pop(part.step) for each in self._seats)
        base = run.base.step if copies.is_needed(self._options, self._seats) else None
        self._publishing.begin(SnapshotParts(part.step, parts, run.saved_codecs[part.step], base))
        self.settle_published(wait=run.phase is RunPhase.FINISHING)

    def settle_published(self, *, wait: bool = False) -> bool:
        """Take note of the checkpoints that were published since; with `wait`, of all that are complete.

        Returns:
            Whether there was one, or one that failed.
        """
        taken = self._publishing.take(wait=wait)
        for parts, error in taken:
            if not error:
                self._published(parts)
            self._run.saved_codecs.pop(parts.step, None)
            self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, error))
        return bool(taken)

    def abandon(self) -> None:
        """Wait for what is being published, so that the user hears about the newest checkpoint."""
        try:
            taken = self._publishing.take(wait=True)
        except UserError as error:  # the run's folder is gone
            self._context.observer.warned(str(error))
            return
        for parts, reason in taken:
            if not reason:
                self._run.last_snapshot = parts.step
            self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, reason))

    def _published(self, parts: SnapshotParts) -> None:
        context = self._context
        folder = f"snapshots/{snapshot_name(parts.step)}"
        files = {part.file: part.sha256 for part in parts.parts}
        self._note_published(parts.step, folder, files)
        if copies.is_needed(self._options, self._seats):
            context.journal.note(newest={"step": parts.step, "snapshot": folder, "files": files})
        if not self.settle_copies():
            context.broadcast(Published(parts.step, self._run.base.step))

    def _note_published(self, step: int, folder: str, files: Mapping[str, str]) -> None:
        self._run.published(step, folder, files)
        copies.published(self._run, self._seats)

    def turn_back(self, before: int) -> None:
        """Undo every step after the newest whole checkpoint that is older than this many steps.

        Raises:
            SnapshotError: there is none, or its configuration is another.
        """
        context, run, options = self._context, self._run, self._options
        self.settle_published(wait=True)
        snapshots = options.run_folder / "snapshots"
        chosen = choose_snapshot(snapshots, all_files_here=not options.hosts, before=before)
        manifest = chosen.manifest
        if manifest.meta.get("config_hash") != options.config_hash:
            raise SnapshotError(f"{chosen.folder} is of another configuration; use --resume to continue from it")
        turn_back(snapshots, chosen.folder)
        saved = dict(manifest.meta.get("codecs") or {})
        folder = f"snapshots/{chosen.folder.name}"
        point = RestorePoint(manifest.step, folder, dict(manifest.sha256), saved_codecs=saved)
        run.turn_back(point, context.clock())
        self._seats.turn_back(point)
        self._begin_at(point.step, saved)
        facts = context.journal.facts
        facts = replace(facts, step=point.step, snapshot=folder, files=point.files, codecs=saved, newest={})
        context.journal.begin(facts)
        context.observer.turned_back(point.step)

    def copied(self, holder: Seat, copied: Copied) -> None:
        """Take the outcome of a copy."""
        if not 0 <= copied.stage < len(self._seats):
            raise RemoteProtocolError(f"{holder.name} has a copy of stage {copied.stage}, which does not exist")
        copies.copied(self._seats[copied.stage], holder, copied)
        if copied.error:
            words = f"{holder.name} has no copy of stage {copied.stage}'s checkpoint: {copied.error}"
            self._context.observer.warned(words)
        self.settle_copies()

    def settle_copies(self) -> bool:
        """Make the checkpoint the base that is copied now, if one is, and order the next copies; whether one was."""
        context, run, seats, target = self._context, self._run, self._seats, self._run.copying
        is_settled = (
            target is not None
            and copies.is_complete(self._options, run, seats)
            and recovery.can_rebase(run, seats, target)
        )
        if is_settled and target is not None:
            run.rebase(target)
            copies.rebased(run, seats)
            context.journal.published(target.step, target.snapshot, target.files, target.saved_codecs)
            context.broadcast(Published(run.newest.step, target.step))
        for identity, order in copies.due(self._options, run, seats):
            context.server.send(identity, self._admitted(identity, order))
        return is_settled

    def _admitted(self, holder: bytes, order: Copy) -> Copy:
        """The order with the key of the worker that has the file, which is told to admit the holder."""
        key, source = self._context.server.public_key(holder), self._seats[order.stage]
        if not key or not order.address:
            return order
        self._context.send(source, Admit([key]))
        return replace(order, public_key=source.public_key)
