"""The run as a whole: its phase, its decisions, its checkpoints, and how it ends.

Pure: times are arguments. ::

    JOINING ──all greeted──▶ CONNECTING ──all ready──▶ TRAINING ──last commit──▶ FINISHING ──nothing owed──▶ OVER
       │                         │                        ▲ │                      │ │
       │                         │                        └─┼──── turned back ─────┘ │
       └─────────────────────────┴─ an error, a lost worker, a second signal ────────┴─────────────────────▶ OVER

Under `tahq measure` there are no steps: JOINING ──all there──▶ MEASURING ──all measured, or an error──▶ OVER.

A stage that is lost begins again at the newest complete checkpoint, or, on a host that does not have its part of that,
at the base: the newest checkpoint of which copies lie on other hosts. It computes the steps since then once more, from
what its neighbours sent then; the coordinator answers each of its PREPAREs as it answered the first one. So decisions
are kept since the base.
"""

import hashlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from tahq.comm.control.measuring import ComputeMeasured, PathsMeasured
from tahq.comm.control.messages import (
    Commit,
    Copied,
    Evaluated,
    Hello,
    Message,
    Prepare,
    Ready,
    Snapshotted,
    Traced,
)
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.seats import RestorePoint
from tahq.errors import LocalProtocolError, RemoteProtocolError


class RunPhase(Enum):
    """Where a run stands; the value is what users read."""

    JOINING = "joining"
    CONNECTING = "connecting"
    TRAINING = "training"
    FINISHING = "finishing"
    MEASURING = "measuring"
    OVER = "over"


class RunEvent(Enum):
    """What moves a run on."""

    ALL_GREETED = "all stages have said HELLO"
    ALL_READY = "all stages are connected"
    LAST_COMMIT = "the last step is committed"
    TURNED_BACK = "all stages go back to an older checkpoint"
    NOTHING_OWED = "all reports are in"
    ALL_THERE = "all workers that measure are there"
    ALL_MEASURED = "everything is measured"
    ENDED = "the run cannot or need not go on"


TRANSITIONS: Mapping[tuple[RunPhase, RunEvent], RunPhase] = {
    (RunPhase.JOINING, RunEvent.ALL_GREETED): RunPhase.CONNECTING,
    (RunPhase.CONNECTING, RunEvent.ALL_READY): RunPhase.TRAINING,
    (RunPhase.TRAINING, RunEvent.LAST_COMMIT): RunPhase.FINISHING,
    (RunPhase.TRAINING, RunEvent.TURNED_BACK): RunPhase.TRAINING,
    (RunPhase.FINISHING, RunEvent.TURNED_BACK): RunPhase.TRAINING,
    (RunPhase.FINISHING, RunEvent.NOTHING_OWED): RunPhase.OVER,
    (RunPhase.JOINING, RunEvent.ALL_THERE): RunPhase.MEASURING,
    (RunPhase.MEASURING, RunEvent.ALL_MEASURED): RunPhase.OVER,
    **{(phase, RunEvent.ENDED): RunPhase.OVER for phase in RunPhase if phase is not RunPhase.OVER},
}

WITH_STEPS = frozenset({RunPhase.TRAINING, RunPhase.FINISHING})
UNDER_WAY = WITH_STEPS | {RunPhase.CONNECTING}
"""When workers may join and be greeted that come in the place of others."""

WHEN: Mapping[type[Message], frozenset[RunPhase]] = {
    Hello: UNDER_WAY | {RunPhase.JOINING},
    Ready: UNDER_WAY,
    Prepare: WITH_STEPS,
    Evaluated: WITH_STEPS,
    Snapshotted: WITH_STEPS,
    Copied: WITH_STEPS,
    ComputeMeasured: frozenset({RunPhase.MEASURING}),
    PathsMeasured: frozenset({RunPhase.MEASURING}),
    Traced: WITH_STEPS,
}
"""In which phases a message may come; what is not listed may always come."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends: its exit status, and the message for people (empty: it reached its last step)."""

    exit_status: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """A step's decision, and by stage the fingerprint of what was computed."""

    commit: Commit
    fingerprints: tuple[str, ...]


class RunState:
    """The run beside its stages.

    Args:
        options: where it begins.
        now_s: when it began to wait for workers.
    """

    def __init__(self, options: CoordinatorOptions, now_s: float) -> None:
        self.phase = RunPhase.JOINING
        self.since_s = now_s
        """When this phase began."""
        self.stop_signal: int | None = None
        self._ending: Ending | None = None
        self.last_snapshot = options.start_step if options.snapshot else None
        """Steps behind the newest complete checkpoint; None: there is none."""
        self.epoch = options.epoch
        """Of the links: frames of another one are not taken."""
        self.returning: int | None = None
        """The epoch in which stages come back whose neighbours make their links ready; None: no stage does."""

        self.num_steps = 0
        """Length of the run; 0 until all have joined."""
        self.num_samples = 0
        """Samples of an epoch."""
        self.next_sample = options.next_sample
        """Number of the sample that the run's first step began with; None until all have joined."""

        point = RestorePoint(options.start_step, options.snapshot, dict(options.snapshot_files))
        self.base = point
        """The oldest point at which a stage may begin: since then frames and decisions are kept."""
        self.newest = point
        """The newest complete checkpoint."""
        self.copying: RestorePoint | None = None
        """The checkpoint that is being copied to other hosts."""
        self.codecs: dict[int, list[list[int]]] = {}
        """START's rows, by the step of a checkpoint that is owed or newer than the base."""
        self.saved_codecs: dict[int, dict[str, Any]] = {}
        """What `LinkCodecs.saved` returned, by the step of a checkpoint that is not published yet."""

        self.decided: dict[int, Decided] = {}
        self.last_prepares: tuple[Prepare, ...] = ()
        """Every stage's PREPARE of the step that was decided last."""
        self.skipped_in_a_row = 0
        self.step_began_s = now_s
        """When the step began that the run is at."""
        self.evaluating: int | None = None
        """The step, from 0, whose validation loss is owed."""
        self.owed: set[int] = set()
        """Checkpoints of which parts are owed, by their step."""

    @property
    def step(self) -> int:
        """The step that the run is at; all before it are decided."""
        return self.base.step + len(self.decided)

    @property
    def is_decided(self) -> bool:
        """Whether the last step is decided."""
        return any(decided.commit.stop for decided in self.decided.values())

    @property
    def outstanding(self) -> tuple[str, ...]:
        """What the stages owe, in words."""
        evaluation = ["the validation loss"] if self.evaluating is not None else []
        return (*evaluation, *(f"the checkpoint after step {step}" for step in sorted(self.owed)))

    # -- phases ----------------------------------------------------------------------------------

    def advance(self, event: RunEvent, now_s: float) -> RunPhase:
        """Go to the next phase.

        Raises:
            LocalProtocolError: this event cannot happen in this phase.
        """
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise LocalProtocolError(f"{event.name} cannot happen while the run is {self.phase.value}")
        self.phase, self.since_s = following, now_s
        return following

    def end(self, event: RunEvent, ending: Ending, now_s: float) -> None:
        """End the run; raises LocalProtocolError if it was over already."""
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

    def resumable(self, resume_command: str) -> str:
        """How to go on after the run broke off, as the end of a sentence."""
        if self.last_snapshot is None:
            return "no checkpoint had been written, so start the run anew"
        command = f" with `{resume_command}`" if resume_command else ""
        return f"the run can be resumed{command} (checkpoint after step {self.last_snapshot})"

    def ending_in_order(self, resume_command: str) -> Ending:
        """How the run ends when nothing is owed any more."""
        hint = self.resumable(resume_command)
        if self.step < self.num_steps and self.stop_signal is not None:
            text = f"stopped by {signal_name(self.stop_signal)} after step {self.step} of {self.num_steps}"
            return Ending(128 + self.stop_signal, f"{text}; {hint}")
        if self.last_snapshot != self.step:
            return Ending(1, f"all {self.step} steps are done, but the last checkpoint could not be written; {hint}")
        return Ending(0)

    # -- steps and checkpoints -------------------------------------------------------------------

    def begin_with(self, codecs: list[list[int]]) -> None:
        """Set START's rows at the point where the run begins."""
        self.newest = self.base = replace(self.base, codecs=codecs)

    def decide(self, commit: Commit, prepares: Sequence[Prepare], codecs: list[list[int]], now_s: float) -> None:
        """The step that the run is at is decided; `codecs` are START's rows for the next one."""
        self.decided[commit.step] = Decided(commit, tuple(map(fingerprint, prepares)))
        self.last_prepares, self.step_began_s = tuple(prepares), now_s
        self.skipped_in_a_row = 0 if commit.apply else self.skipped_in_a_row + 1
        if commit.evaluate:
            self.evaluating = commit.step
        if commit.snapshot:
            self.owed.add(commit.step + 1)
            self.codecs[commit.step + 1] = codecs

    def published(self, step: int, snapshot: str, files: Mapping[str, str]) -> None:
        """A checkpoint is complete: stages whose hosts have it begin there from now on."""
        self.last_snapshot = step
        saved = self.saved_codecs.pop(step, {})
        self.newest = RestorePoint(step, snapshot, dict(files), self.codecs.get(step, ()), saved)

    def rebase(self, point: RestorePoint) -> None:
        """Forget what was kept for stages that begin before this point: none does any more."""
        self.base = point
        if self.newest.step < point.step:
            self.newest = point
        self.copying = self.newest if self.newest.step > point.step else None
        self.decided = {number: decided for number, decided in self.decided.items() if number >= point.step}
        self.codecs = {number: rows for number, rows in self.codecs.items() if number > point.step}

    def turn_back(self, point: RestorePoint, now_s: float) -> None:
        """Undo every step after a checkpoint older than the base; the codecs' rows are set by `begin_with`."""
        self.advance(RunEvent.TURNED_BACK, now_s)
        self.base = self.newest = point
        self.copying = self.evaluating = None
        self.last_snapshot = point.step
        self.last_prepares, self.skipped_in_a_row = (), 0
        for kept in (self.decided, self.codecs, self.saved_codecs, self.owed):
            kept.clear()

    def origin_at(self, step: int) -> RestorePoint | None:
        """Where a worker begins that has the state after so many steps; None: no stage can begin there any more."""
        return next((point for point in (self.newest, self.base) if point.step == step), None)

    def answer(self, prepare: Prepare) -> tuple[Commit, bool] | None:
        """The decision of a step, and whether it was computed alike; None: it is not decided."""
        decided = self.decided.get(prepare.step)
        if decided is None:
            return None
        return decided.commit, decided.fingerprints[prepare.stage] == fingerprint(prepare)


def fingerprint(prepare: Prepare) -> str:
    """A hash of what a stage computed in a step, as far as PREPARE tells: equal if it is equal to the bit."""
    told = (prepare.norm2, prepare.finite, prepare.loss_sum, prepare.tokens, prepare.batch_digest)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def signal_name(number: int) -> str:
    """``SIGINT`` for 2; ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
