"""From Start to the last commit and what is still owed after it.

A COMMIT leaves as soon as the last PREPARE is in, before anything is shown or written.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tahq import fault_points
from tahq.comm.control.messages import Admit, Commit, Copied, Copy, Evaluated, Prepare, Published, Snapshotted, Traced
from tahq.coordinator.commit import CommitLedger, CommitRules
from tahq.coordinator.context import RunContext
from tahq.coordinator.journal import Journal
from tahq.coordinator.link_codecs import LinkCodecs
from tahq.coordinator.observer import CodecChange, SnapshotRecord, StepRecord
from tahq.coordinator.publishing import Publishing
from tahq.coordinator.recovery import for_one_again
from tahq.coordinator.reports import Reports, SnapshotParts
from tahq.coordinator.run_state import Event, Phase
from tahq.coordinator.step_report import step_record
from tahq.coordinator.tracing import TraceCollector
from tahq.errors import RemoteProtocolError
from tahq.fault_points import reached
from tahq.pipeline.checkpoint.manifest import snapshot_name


class Training:
    """Answers Prepare, Evaluated, Snapshotted and Traced.

    Args:
        context: the run; all members are ready.
        num_steps: length of the run.
        publishing: makes complete snapshots the newest one.
        journal: remembers what is decided, and what was by a coordinator before this one.

    Raises:
        SnapshotError: what the snapshot keeps of the links' codecs makes no sense.
    """

    def __init__(
        self, context: RunContext, num_steps: int, publishing: Publishing, journal: Journal | None = None
    ) -> None:
        self._context = context
        self._publishing = publishing
        self._journal = journal
        self._reports = Reports(context.options.num_stages)
        self._num_steps = num_steps
        options = context.options
        self._codecs = LinkCodecs(options.codecs, options.num_stages * options.chunks_per_stage - 1, options.start_step)
        self._inexact: set[int] = set()
        """Stages that have computed a step again otherwise than before."""
        self._codecs_kept: dict[int, dict[str, Any]] = {}
        names = [context.membership.name(stage) for stage in range(options.num_stages)]
        self._ledger = CommitLedger(commit_rules(context, num_steps), names, context.clock())
        self._traces = TraceCollector(names)
        self._is_continued = False
        """Whether workers may say again what a coordinator before this one has heard."""
        context.recovery.begin_with(self._codecs.start_rows())
        if journal is not None:
            self._go_on_from(journal)

    def _go_on_from(self, journal: Journal) -> None:
        """Take over what was decided since the restore point."""
        evaluations = journal.evaluations()
        for step in journal.steps():
            self._is_continued = True
            norm = self._ledger.adopt(step.commit, step.prepares, self._context.clock())
            chunks = self._context.options.chunks_per_stage
            record = step_record(step.commit, step.prepares, norm, step.step_time_s, chunks)
            changes, _ = self._decide_codecs(record)
            self._note_decided(step.commit, replace(self._codecs.described(record), codec_changes=changes))
            if step.commit.step in evaluations:
                self._take_evaluation(evaluations[step.commit.step])
        newest = journal.facts.newest
        if newest and newest["step"] > self._context.recovery.base.step:
            self._note_published(newest["step"], newest["snapshot"], newest["files"])
            self._reports.have_snapshot(newest["step"])

    def _decide_codecs(self, record: StepRecord) -> tuple[tuple[CodecChange, ...], list[list[int]]]:
        return self._codecs.decide(self._codecs.described(record))

    @property
    def steps_done(self) -> int:
        """Steps committed so far: decided, and written down."""
        return self._context.recovery.step

    @property
    def num_steps(self) -> int:
        """Length of the run."""
        return self._num_steps

    @property
    def is_decided(self) -> bool:
        """Whether the last step is decided, by a coordinator before this one."""
        return any(commit.stop for commit in self._context.recovery.commits)

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last step."""
        return self.steps_done >= self._num_steps

    @property
    def owed(self) -> str:
        """What the stages still owe, in words; empty: nothing."""
        return " and ".join((*self._reports.outstanding, *self._publishing.outstanding))

    def prepare(self, identity: bytes, prepare: Prepare) -> None:
        """Count a stage's part of a step; the last one decides it.

        Raises:
            RemoteProtocolError, DataError, NonFiniteError: see `CommitLedger.take`.
        """
        context = self._context
        context.membership.claim(identity, prepare.stage)
        context.recovery.prepared(prepare)
        stop_requested = context.state.stop_signal is not None
        now_s = context.clock()
        decision = self._ledger.take(prepare, now_s, stop_requested=stop_requested)
        if decision is None:
            return
        commit, record = decision
        record = self._codecs.described(record)
        changes, rows = self._codecs.decide(record)
        commit = replace(commit, codecs=rows, complete_snapshot=_complete_snapshot(context))
        reached(fault_points.COMMIT_DECIDED, step=commit.step)
        if self._journal is not None:
            self._journal.decided(commit, self._ledger.decided, record.step_time_s)
        reached(fault_points.COMMIT_JOURNALLED, step=commit.step)
        for member in context.membership.members:
            context.server.send(member.identity, commit)
            reached(fault_points.COMMIT_SENT, step=commit.step)
        self._traces.committed(commit.step, now_s - record.step_time_s, now_s)
        self._note_decided(commit, replace(record, codec_changes=changes))
        if commit.stop:
            context.advance(Event.LAST_COMMIT, self.owed)

    def _note_decided(self, commit: Commit, record: StepRecord) -> None:
        self._context.recovery.decided(commit, self._ledger.decided, self._codecs.start_rows())
        self._reports.owe(commit)
        self._context.state.evaluating = self._reports.evaluating
        if commit.snapshot:
            self._codecs_kept[commit.step + 1] = self._codecs.saved()
        self._context.observer.step_committed(record)

    def is_again(self, prepare: Prepare) -> bool:
        """Whether a stage that was lost has computed a step again that is decided."""
        return prepare.step < self._ledger.step and prepare.step == self._context.recovery.position(prepare.stage)

    def prepare_again(self, identity: bytes, prepare: Prepare) -> None:
        """Answer as the first time, apart from what is owed no more.

        Raises:
            RemoteProtocolError: the stage does not hold what it speaks for.
        """
        context = self._context
        member = context.membership.claim(identity, prepare.stage)
        answer = context.recovery.answer(prepare)
        if answer is None:
            raise RemoteProtocolError(f"{member.name} computed step {prepare.step} again, which nobody can answer")
        commit, is_alike = answer
        if not is_alike and member.stage not in self._inexact:
            self._inexact.add(member.stage)
            context.observer.warned(
                f"{member.name} computed step {prepare.step + 1} again, and not to the bit as before: the run goes on, "
                "and is no longer exact"
            )
        context.recovery.prepared(prepare)
        self.settle_copies()
        evaluate = commit.step == self._reports.evaluating
        snapshot = self._reports.lacks(commit.step + 1, member.stage)
        context.server.send(identity, for_one_again(commit, evaluate=evaluate, snapshot=snapshot))

    def lose(self, stage: int) -> None:
        """A stage's process is gone: forget what will be said again.

        First a snapshot that is complete becomes the one to come back to, rather than while the stage comes back.
        """
        self.settle_published(wait=True)
        self._ledger.forget(stage)
        self._reports.forget(stage)

    def evaluated(self, identity: bytes, evaluated: Evaluated) -> None:
        """Take the validation loss; raises RemoteProtocolError if it was not asked for."""
        context = self._context
        context.membership.claim(identity, context.options.num_stages - 1)
        if self._is_continued and evaluated.step != self._reports.evaluating:
            return  # heard by the coordinator before
        if self._journal is not None and evaluated.step == self._reports.evaluating:
            self._journal.evaluated(evaluated)
        self._take_evaluation(evaluated)

    def _take_evaluation(self, evaluated: Evaluated) -> None:
        context = self._context
        record = self._reports.evaluated(evaluated, context.membership.name(context.options.num_stages - 1))
        context.state.evaluating = None
        self._ledger.restart_clock(context.clock())
        context.observer.validated(record)

    def snapshotted(self, identity: bytes, part: Snapshotted) -> None:
        """Take a part of a snapshot; raises RemoteProtocolError if it was not asked for."""
        member = self._context.membership.claim(identity, part.stage)
        if self._is_continued and not self._reports.lacks(part.step, part.stage):
            return  # heard by the coordinator before
        parts = self._reports.snapshotted(part, member.name)
        if parts is not None:
            base = self._context.recovery.base.step if self._is_copied_first() else None
            self._publishing.begin(replace(parts, codecs=self._codecs_kept[parts.step], base=base))
            self.settle_published(wait=self._context.state.phase is Phase.FINISHING)

    def traced(self, identity: bytes, part: Traced) -> None:
        """Take a part of a traced step; raises RemoteProtocolError if it makes no sense."""
        context = self._context
        context.membership.claim(identity, part.stage)
        members = map(context.membership.at, range(context.options.num_stages))
        offsets = [context.server.clock_offset(member.identity) if member else None for member in members]
        trace = self._traces.take(part, offsets)
        if trace is not None:
            context.observer.step_traced(trace)

    def settle_published(self, *, wait: bool = False) -> bool:
        """Go by the snapshots that have been published since; with `wait`, by all that are complete.

        Returns:
            Whether there was one, or one that failed.
        """
        taken = self._publishing.take(wait=wait)
        for parts, error in taken:
            if not error:
                self._published(parts)
            self._codecs_kept.pop(parts.step, None)
            self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, error))
        return bool(taken)

    def abandon(self) -> None:
        """Nobody is led any more: wait for what is being published, so that the user is told of the newest snapshot."""
        for parts, error in self._publishing.take(wait=True):
            if not error:
                self._context.state.last_snapshot = parts.step
            self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, error))

    def _published(self, parts: SnapshotParts) -> None:
        context = self._context
        folder = f"snapshots/{snapshot_name(parts.step)}"
        files = {part.file: part.sha256 for part in parts.parts}
        self._note_published(parts.step, folder, files)
        if self._journal is not None and self._is_copied_first():
            self._journal.note(newest={"step": parts.step, "snapshot": folder, "files": files})
        if not self.settle_copies():
            context.broadcast(Published(parts.step, context.recovery.base.step))

    def _note_published(self, step: int, folder: str, files: Mapping[str, str]) -> None:
        context = self._context
        context.state.last_snapshot = step
        context.recovery.published(step, folder, files, self._codecs_kept.pop(step, {}))
        context.copies.published(context.recovery.point)

    def _is_copied_first(self) -> bool:
        """Whether a snapshot is the base only when copies of it are on other hosts."""
        return self._context.copies.is_needed(self._context.membership.members)

    def copied(self, identity: bytes, copied: Copied) -> None:
        """Take what became of a copy; raises RemoteProtocolError if its sender is not who it says."""
        context = self._context
        holder = context.membership.claim(identity, copied.holder)
        context.copies.copied(holder, copied)
        if copied.error:
            context.observer.warned(f"{holder.name} has no copy of stage {copied.stage}'s snapshot: {copied.error}")
        self.settle_copies()

    def settle_copies(self) -> bool:
        """Free what nobody can want, now that a snapshot is copied; then order what is to be copied. Whether it was."""
        context, recovery, copies = self._context, self._context.recovery, self._context.copies
        members, target = context.membership.members, copies.target
        is_settled = target is not None and copies.is_complete(members) and recovery.rebase(target)
        if is_settled and target is not None:
            copies.based(target)
            if self._journal is not None:
                self._journal.published(target.step, target.snapshot, target.files, target.saved_codecs)
            context.broadcast(Published(recovery.point.step, target.step))
        for identity, order in copies.orders(members):
            context.server.send(identity, self._admitted(identity, order))
        return is_settled

    def _admitted(self, holder: bytes, order: Copy) -> Copy:
        """The order with the key of who has the file, which has been told whose key will ask for it."""
        server, source = self._context.server, self._context.membership.at(order.stage)
        key = server.public_key(holder)
        if not key or not order.address or source is None:
            return order
        server.send(source.identity, Admit([key]))
        return replace(order, public_key=server.public_key(source.identity))


def _complete_snapshot(context: RunContext) -> int:
    """Steps behind the base, where that is a snapshot: hosts may remove what is older."""
    base = context.recovery.base
    return base.step if base.snapshot else 0


def commit_rules(context: RunContext, num_steps: int) -> CommitRules:
    """The part of the options that decides about steps."""
    options = context.options
    return CommitRules(
        first_step=options.start_step,
        total_steps=num_steps,
        clip_norm=options.clip_norm,
        non_finite=options.non_finite,
        max_skipped_in_a_row=options.max_skipped_in_a_row,
        eval_every=options.eval_every,
        snapshot_every=options.snapshot_every,
        chunks_per_stage=options.chunks_per_stage,
    )
