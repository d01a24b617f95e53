"""Where a run stands, what may be said then, and how it ends.

Pure: times are arguments. The whole life of a run is the two tables below. ::

    JOINING ──all greeted──▶ CONNECTING ──all ready──▶ TRAINING ──last commit──▶ FINISHING ──nothing owed──▶ OVER
       └────────────────────────┴───────── an error, a lost worker, a second signal ──┴───────────────────────▶ OVER

Under `tahq measure` there are no steps: JOINING ──all there──▶ MEASURING ──all measured, or an error──▶ OVER.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tahq.comm.control.measuring import ComputeMeasured, PathsMeasured
from tahq.comm.control.messages import Copied, Evaluated, Hello, Message, Prepare, Ready, Snapshotted, Traced
from tahq.errors import LocalProtocolError, RemoteProtocolError


class Phase(Enum):
    """Where a run stands; the value is what users read."""

    JOINING = "joining"
    CONNECTING = "connecting"
    TRAINING = "training"
    FINISHING = "finishing"
    MEASURING = "measuring"
    OVER = "over"


class Event(Enum):
    """What moves a run on."""

    ALL_GREETED = "all stages have said what they are"
    ALL_READY = "all stages are connected"
    LAST_COMMIT = "the last step is committed"
    NOTHING_OWED = "all reports are in"
    ALL_THERE = "all who measure are there"
    ALL_MEASURED = "all is measured"
    ENDED = "the run cannot or need not go on"


TRANSITIONS: Mapping[tuple[Phase, Event], Phase] = {
    (Phase.JOINING, Event.ALL_GREETED): Phase.CONNECTING,
    (Phase.JOINING, Event.ENDED): Phase.OVER,
    (Phase.CONNECTING, Event.ALL_READY): Phase.TRAINING,
    (Phase.CONNECTING, Event.ENDED): Phase.OVER,
    (Phase.TRAINING, Event.LAST_COMMIT): Phase.FINISHING,
    (Phase.TRAINING, Event.ENDED): Phase.OVER,
    (Phase.FINISHING, Event.NOTHING_OWED): Phase.OVER,
    (Phase.FINISHING, Event.ENDED): Phase.OVER,
    (Phase.JOINING, Event.ALL_THERE): Phase.MEASURING,
    (Phase.MEASURING, Event.ALL_MEASURED): Phase.OVER,
    (Phase.MEASURING, Event.ENDED): Phase.OVER,
}

_UNDER_WAY = (Phase.CONNECTING, Phase.TRAINING, Phase.FINISHING)
"""When workers may join, and be greeted, that come in the place of others."""

WHEN: Mapping[type[Message], frozenset[Phase]] = {
    Hello: frozenset({Phase.JOINING, *_UNDER_WAY}),
    Ready: frozenset(_UNDER_WAY),
    Prepare: frozenset({Phase.TRAINING, Phase.FINISHING}),
    Evaluated: frozenset({Phase.TRAINING, Phase.FINISHING}),
    Snapshotted: frozenset({Phase.TRAINING, Phase.FINISHING}),
    Copied: frozenset({Phase.TRAINING, Phase.FINISHING}),
    ComputeMeasured: frozenset({Phase.MEASURING}),
    PathsMeasured: frozenset({Phase.MEASURING}),
    Traced: frozenset({Phase.TRAINING, Phase.FINISHING}),
}
"""In which phases a message may come; what is not listed may always come."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends: its exit status, and the message for people (empty: it reached its last step)."""

    exit_status: int
    message: str = ""


class RunState:
    """Phase, stop request and newest snapshot of a run.

    Args:
        now_s: when it began to wait for workers.
        last_snapshot: steps behind the snapshot that it continues from; None: a new run.
    """

    def __init__(self, now_s: float, last_snapshot: int | None = None) -> None:
        self.phase = Phase.JOINING
        self.phase_since_s = now_s
        self.last_snapshot = last_snapshot
        self.stop_signal: int | None = None
        self.evaluating: int | None = None
        """The step, from 0, whose evaluation is under way."""
        self._ending: Ending | None = None
        self._exits: dict[int, tuple[int, float]] = {}
        self._last_words: dict[int, str] = {}

    def advance(self, event: Event, now_s: float) -> Phase:
        """Go to the next phase.

        Raises:
            LocalProtocolError: this event cannot happen in this phase.
        """
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise LocalProtocolError(f"{event.name} cannot happen while the run is {self.phase.value}")
        self.phase, self.phase_since_s = following, now_s
        return following

    def end(self, event: Event, ending: Ending, now_s: float) -> None:
        """The run is over, in this way; raises LocalProtocolError if it was over already."""
        self.advance(event, now_s)
        self._ending = ending

    @property
    def ending(self) -> Ending:
        """How the run ended; raises LocalProtocolError while it has not."""
        if self._ending is None:
            raise LocalProtocolError(f"the run has not ended: it is {self.phase.value}")
        return self._ending

    def check(self, message: Message, name: str) -> None:
        """Raise RemoteProtocolError if a message of this type may not come now."""
        phases = WHEN.get(type(message))
        if phases is not None and self.phase not in phases:
            raise RemoteProtocolError(f"{name} sent {type(message).__name__} while the run was {self.phase.value}")

    def request_stop(self, signal_number: int) -> bool:
        """Note that somebody wants the run to stop; the first request counts. Whether it can stop in order.

        In order means: finish the step, write a snapshot. Before the first step there is nothing to finish.
        """
        if self.stop_signal is None:
            self.stop_signal = signal_number
        return self.phase in (Phase.TRAINING, Phase.FINISHING)

    def note_exit(self, stage: int, status: int, now_s: float, last_words: str = "") -> None:
        """A stage's process has ended, and this is what it wrote last; the first report counts."""
        if stage not in self._exits:
            self._exits[stage] = (status, now_s)
            self._last_words[stage] = last_words

    def forget_exit(self, stage: int) -> None:
        """A new process serves this stage, or will."""
        self._exits.pop(stage, None)
        self._last_words.pop(stage, None)

    def last_words(self, stage: int) -> str:
        """What the ended process of a stage wrote last; empty if nothing is known."""
        return self._last_words.get(stage, "")

    def exits(self, until_s: float) -> dict[int, int]:
        """Exit status of the stages whose processes ended before this time."""
        return {stage: status for stage, (status, when_s) in self._exits.items() if when_s <= until_s}

    def resumable(self, resume_command: str) -> str:
        """What can be done after the run broke off, as the end of a sentence."""
        if self.last_snapshot is None:
            return "no snapshot had been written, so start the run anew"
        command = f" with `{resume_command}`" if resume_command else ""
        return f"the run can be resumed{command} (snapshot after step {self.last_snapshot})"
