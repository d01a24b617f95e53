"""What a coordinator writes down of the run as a whole: that it began, who holds which stage, epochs, the end.

What it decides about steps, `Training` writes. Without a journal nothing is written, and nobody goes on.
"""

from collections.abc import Mapping

from tahq.coordinator.context import RunContext
from tahq.coordinator.disk_room import WaitForRoom
from tahq.coordinator.journal import Journal, JournalFacts, JournalledHolder
from tahq.errors import SnapshotError


class RunJournal:
    """One run's journal, or none.

    Args:
        journal: None: there is none.
        context: the run.
        wait_for_room: what is done when the disk is full.
    """

    def __init__(self, journal: Journal | None, context: RunContext, wait_for_room: WaitForRoom) -> None:
        self._journal = journal
        self._context = context
        if journal is not None:
            journal.wait_for_room = wait_for_room

    @property
    def is_continued(self) -> bool:
        """Whether it is of this run, and goes on."""
        if self._journal is None or not self._journal.has_run:
            return False
        facts, options = self._journal.facts, self._context.options
        return (facts.run_id, facts.config_hash) == (options.run_id, options.config_hash)

    @property
    def num_steps(self) -> int:
        """Length of the run that goes on."""
        if self._journal is None:
            raise AssertionError("without a journal no run goes on")
        return self._journal.facts.num_steps

    def holders(self) -> Mapping[int, JournalledHolder]:
        """Who holds which stage of the run that goes on."""
        return self._journal.holders() if self._journal is not None and self.is_continued else {}

    def begin(self, num_steps: int, num_samples: int, next_sample: int) -> None:
        """Remember where this run begins, unless it goes on.

        Args:
            num_steps: its length.
            num_samples: of an epoch.
            next_sample: the first that it trains on.
        """
        if self._journal is None or self.is_continued:
            return
        options = self._context.options
        self._journal.begin(
            JournalFacts(
                options.run_id,
                options.config_hash,
                self._context.recovery.epoch,
                options.start_step,
                next_sample,
                num_samples,
                num_steps,
                options.global_batch,
                options.start_step,
                options.snapshot,
                dict(options.snapshot_files),
                dict(options.codecs.saved),
            )
        )

    def note_epoch(self, epoch: int) -> None:
        """A stage comes back in this epoch."""
        if self._journal is not None:
            self._journal.note(epoch=epoch)

    def note_holder(self, stage: int) -> None:
        """The stage's worker is linked with its neighbours."""
        member = self._context.membership.at(stage)
        if self._journal is not None and member is not None and member.hello is not None:
            who = (member.host, member.pid, member.worker_id)
            self._journal.held(JournalledHolder(stage, member.identity, member.hello, *who))

    def note_lost(self, stage: int) -> None:
        """The stage has no worker."""
        if self._journal is not None:
            self._journal.lost(stage)

    def note_end(self) -> None:
        """Have nobody go on with this run; where that cannot be written, going on with it loses nothing either."""
        if self._journal is None or not self._journal.has_run:
            return
        self._journal.wait_for_room = None
        try:
            self._journal.note(is_over=True)
        except SnapshotError as error:
            self._context.observer.warned(f"{error}; the run has ended all the same")
