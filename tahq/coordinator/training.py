"""From Start to the last commit and what is still owed after it.

A COMMIT leaves as soon as the last PREPARE is in, before anything is shown or written.
"""

from dataclasses import replace
from typing import Any

from tahq.comm.control import Evaluated, Prepare, Published, Snapshotted, Traced
from tahq.coordinator.commit import CommitLedger, CommitRules
from tahq.coordinator.context import RunContext
from tahq.coordinator.link_codecs import LinkCodecs
from tahq.coordinator.observer import SnapshotRecord
from tahq.coordinator.publisher import Publish
from tahq.coordinator.recovery import for_one_again
from tahq.coordinator.reports import Reports, SnapshotParts
from tahq.coordinator.run_state import Event
from tahq.coordinator.tracing import TraceCollector
from tahq.errors import RemoteProtocolError, TahqError
from tahq.pipeline.manifest import snapshot_name


class Training:
    """Answers Prepare, Evaluated, Snapshotted and Traced.

    Args:
        context: the run; all members are ready.
        num_steps: length of the run.
        publish: makes a complete snapshot the newest one.

    Raises:
        SnapshotError: what the snapshot keeps of the links' codecs makes no sense.
    """

    def __init__(self, context: RunContext, num_steps: int, publish: Publish) -> None:
        self._context = context
        self._publish = publish
        self._reports = Reports(context.options.num_stages)
        self._num_steps = num_steps
        options = context.options
        self._codecs = LinkCodecs(options.codecs, options.num_stages * options.chunks_per_stage - 1, options.start_step)
        self._inexact: set[int] = set()
        """Stages that have computed a step again otherwise than before."""
        self._codecs_kept: dict[int, dict[str, Any]] = {}
        names = [member.name for member in context.membership.members]
        self._ledger = CommitLedger(commit_rules(context, num_steps), names, context.clock())
        self._traces = TraceCollector(names)

    @property
    def steps_done(self) -> int:
        """Steps committed so far."""
        return self._ledger.step

    @property
    def start_codecs(self) -> list[list[int]]:
        """For START: the codecs that are not as configured."""
        return self._codecs.start_rows()

    @property
    def finished(self) -> bool:
        """Whether the run has reached its last step."""
        return self.steps_done >= self._num_steps

    @property
    def owed(self) -> str:
        """What the stages still owe, in words; empty: nothing."""
        return " and ".join(self._reports.outstanding)

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
        commit = replace(commit, codecs=rows, complete_snapshot=context.state.last_snapshot or 0)
        context.recovery.decided(commit, self._ledger.decided, self._codecs.start_rows())
        context.broadcast(commit)
        self._traces.committed(commit.step, now_s - record.step_time_s, now_s)
        self._reports.owe(commit)
        context.state.evaluating = self._reports.evaluating
        if commit.snapshot:
            self._codecs_kept[commit.step + 1] = self._codecs.saved()
        context.observer.step_committed(replace(record, codec_changes=changes))
        if commit.stop:
            context.advance(Event.LAST_COMMIT, self.owed)

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
        evaluate = commit.step == self._reports.evaluating
        snapshot = self._reports.lacks(commit.step + 1, member.stage)
        context.server.send(identity, for_one_again(commit, evaluate=evaluate, snapshot=snapshot))

    def lose(self, stage: int) -> None:
        """A stage's process is gone: forget what will be said again."""
        self._ledger.forget(stage)
        self._reports.forget(stage)

    def evaluated(self, identity: bytes, evaluated: Evaluated) -> None:
        """Take the validation loss; raises RemoteProtocolError if it was not asked for."""
        context = self._context
        member = context.membership.claim(identity, context.options.num_stages - 1)
        record = self._reports.evaluated(evaluated, member.name)
        context.state.evaluating = None
        self._ledger.restart_clock(context.clock())
        context.observer.validated(record)

    def snapshotted(self, identity: bytes, part: Snapshotted) -> None:
        """Take a part of a snapshot; raises RemoteProtocolError if it was not asked for."""
        member = self._context.membership.claim(identity, part.stage)
        parts = self._reports.snapshotted(part, member.name)
        if parts is not None:
            self._complete(replace(parts, codecs=self._codecs_kept.pop(parts.step)))

    def traced(self, identity: bytes, part: Traced) -> None:
        """Take a part of a traced step; raises RemoteProtocolError if it makes no sense."""
        context = self._context
        context.membership.claim(identity, part.stage)
        members = map(context.membership.at, range(context.options.num_stages))
        offsets = [context.server.clock_offset(member.identity) if member else None for member in members]
        trace = self._traces.take(part, offsets)
        if trace is not None:
            context.observer.step_traced(trace)

    def _complete(self, parts: SnapshotParts) -> None:
        error = self._publishing_error(parts)
        if not error:
            self._published(parts)
        self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, error))

    def _published(self, parts: SnapshotParts) -> None:
        context = self._context
        context.state.last_snapshot = parts.step
        folder = f"snapshots/{snapshot_name(parts.step)}"
        context.recovery.published(parts.step, folder, {part.file: part.sha256 for part in parts.parts})
        context.broadcast(Published(parts.step))

    def _publishing_error(self, parts: SnapshotParts) -> str:
        try:
            self._publish(parts)
        except (OSError, TahqError) as error:
            return parts.error or f"coordinator: {error}"
        return parts.error


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
