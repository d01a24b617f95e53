"""From Start to the last commit and what is still owed after it.

A COMMIT leaves as soon as the last PREPARE is in, before anything is shown or written.
"""

from tahq.comm.control import Evaluated, Prepare, Snapshotted
from tahq.coordinator.commit import CommitLedger, CommitRules
from tahq.coordinator.context import RunContext
from tahq.coordinator.observer import SnapshotRecord
from tahq.coordinator.publisher import Publish
from tahq.coordinator.reports import Reports, SnapshotParts
from tahq.coordinator.run_state import Event
from tahq.errors import TahqError


class Training:
    """Answers Prepare, Evaluated and Snapshotted.

    Args:
        context: the run; all members are ready.
        num_steps: length of the run.
        publish: makes a complete snapshot the newest one.
    """

    def __init__(self, context: RunContext, num_steps: int, publish: Publish) -> None:
        self._context = context
        self._publish = publish
        self._reports = Reports(context.options.num_stages)
        self._num_steps = num_steps
        names = [member.name for member in context.membership.members]
        self._ledger = CommitLedger(commit_rules(context, num_steps), names, context.clock())

    @property
    def steps_done(self) -> int:
        """Steps committed so far."""
        return self._ledger.step

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
        stop_requested = context.state.stop_signal is not None
        decision = self._ledger.take(prepare, context.clock(), stop_requested=stop_requested)
        if decision is None:
            return
        commit, record = decision
        context.broadcast(commit)
        self._reports.owe(commit)
        context.observer.step_committed(record)
        if commit.stop:
            context.advance(Event.LAST_COMMIT, self.owed)

    def evaluated(self, identity: bytes, evaluated: Evaluated) -> None:
        """Take the validation loss; raises RemoteProtocolError if it was not asked for."""
        context = self._context
        member = context.membership.claim(identity, context.options.num_stages - 1)
        record = self._reports.evaluated(evaluated, member.name)
        self._ledger.restart_clock(context.clock())
        context.observer.validated(record)

    def snapshotted(self, identity: bytes, part: Snapshotted) -> None:
        """Take a part of a snapshot; raises RemoteProtocolError if it was not asked for."""
        member = self._context.membership.claim(identity, part.stage)
        parts = self._reports.snapshotted(part, member.name)
        if parts is not None:
            self._complete(parts)

    def _complete(self, parts: SnapshotParts) -> None:
        error = parts.error or self._publishing_error(parts)
        if not error:
            self._context.state.last_snapshot = parts.step
        self._context.observer.snapshot_written(SnapshotRecord(parts.step, parts.nbytes, error))

    def _publishing_error(self, parts: SnapshotParts) -> str:
        try:
            self._publish(parts)
        except (OSError, TahqError) as error:
            return f"coordinator: {error}"
        return ""


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
    )
