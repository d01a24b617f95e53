"""The run as a whole: its phase, its decisions, its checkpoints, and how it ends.

Pure: times are arguments. ::

    JOINING ──all greeted──▶ CONNECTING ──all ready──▶ TRAINING ──last commit──▶ FINISHING ──nothing owed──▶ OVER
       │                         │                        ▲ │                      │ │
       │                         │                        └─┼──── turned back ─────┘ │
       └─────────────────────────┴─ an error, a lost worker, a second signal ────────┴─────────────────────▶ OVER

Under `tahq measure` there are no steps: JOINING ──all there──▶ MEASURING ──all measured, or an error──▶ OVER.

A lost stage begins again at the newest complete checkpoint or, on a host without its part of that, at the base: the
newest checkpoint that has copies on other hosts. It recomputes the steps since then from the frames that its neighbours
sent then, and the coordinator answers each PREPARE as it answered the first. So decisions are kept since the base.
"""

import hashlib
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from tahq.comm.control.messages import (
    Commit,
    ComputeMeasured,
    Copied,
    Evaluated,
    Hello,
    Message,
    PathsMeasured,
    Prepare,
    Ready,
    Snapshotted,
    Traced,
)
from tahq.coordinator.joining.seats import RestorePoint
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
    """An event that moves a run."""

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
    (RunPhase.FINISHING, RunEvent.NOTHING_OWED): RunPhase.OVER,
    (RunPhase.JOINING, RunEvent.TURNED_BACK): RunPhase.JOINING,
    (RunPhase.CONNECTING, RunEvent.TURNED_BACK): RunPhase.CONNECTING,
    (RunPhase.TRAINING, RunEvent.TURNED_BACK): RunPhase.TRAINING,
    (RunPhase.FINISHING, RunEvent.TURNED_BACK): RunPhase.TRAINING,
    (RunPhase.JOINING, RunEvent.ALL_THERE): RunPhase.MEASURING,
    (RunPhase.MEASURING, RunEvent.ALL_MEASURED): RunPhase.OVER,
    **{(phase, RunEvent.ENDED): RunPhase.OVER for phase in RunPhase if phase is not RunPhase.OVER},
}

WITH_STEPS = frozenset({RunPhase.TRAINING, RunPhase.FINISHING})
UNDER_WAY = WITH_STEPS | {RunPhase.CONNECTING}
"""When workers may join and be greeted that replace others."""

WHEN: Mapping[type[Message], frozenset[RunPhase]] = {
    Hello: UNDER_WAY | {RunPhase.JOINING},
    Ready: UNDER_WAY,
    Prepare: WITH_STEPS,
    Evaluated: WITH_STEPS,
    Snapshotted: WITH_STEPS,
    Copied: WITH_STEPS,
    Traced: WITH_STEPS,
    ComputeMeasured: frozenset({RunPhase.MEASURING}),
    PathsMeasured: frozenset({RunPhase.MEASURING}),
}
"""In which phases a message may come; those not listed may always come."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ends: its exit status, and the message for people (empty: it reached its last step)."""

    exit_status: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """A step's decision, and the fingerprints of the results that it rests on, by stage."""

    commit: Commit
    fingerprints: Mapping[int, str]


@dataclass(slots=True)
class RunState:
    """The run beside its stages; the first fields say where it begins."""

    base: RestorePoint
    """The oldest point at which a stage may begin: frames and decisions are kept since then."""
    since_s: float
    """When the run entered its phase."""
    epoch: int = 1
    """Of the links: frames of another epoch are rejected."""
    next_sample: int | None = None
    """Number of the sample that the run's first step began with; None until all have joined."""
    newest: RestorePoint = field(init=False)
    """The newest complete checkpoint."""
    last_snapshot: int | None = field(init=False)
    """Steps behind the newest complete checkpoint on disk; None: there is none."""

    phase: RunPhase = RunPhase.JOINING
    ending: Ending = Ending(1, "the run broke off")
    stop_signal: int | None = None
    returning: int | None = None
    """The epoch of stages that come back, while their neighbours make links ready; None: no stage comes back."""
    num_steps: int = 0
    """Length of the run; 0 until all have joined."""
    num_samples: int = 0
    """Samples of an epoch."""
    copying: RestorePoint | None = None
    """The checkpoint that is being copied to other hosts."""

    decided: dict[int, Decided] = field(default_factory=dict)
    last_prepares: Mapping[int, Prepare] = field(default_factory=dict)
    """By stage, the PREPAREs of the step that was decided last."""
    abandoned_for: frozenset[int] = frozenset()
    """The lost stages for whose sake the current step is abandoned; empty: it is not."""
    skipped_in_a_row: int = 0
    step_began_s: float = 0.0
    """When the current step began."""
    checkpoint_s: float = 0.0
    """When the run began, or the last checkpoint was decided."""
    reported_s: float = 0.0
    """When a stage last reported something that the end of the run waits for."""
    evaluating: int | None = None
    """The step, from 0, whose validation loss or samples are owed."""
    owed: dict[int, RestorePoint] = field(default_factory=dict)
    """Checkpoints whose parts are owed, by step; they have no files yet."""
    present: RestorePoint | None = None
    """The checkpoint after the step that was decided last, were there one; None: no step was decided."""
    best_snapshot: int = 0
    """Steps behind the complete checkpoint with the lowest validation loss; 0: there is none."""
    stopped_early: str = ""
    """Why the run ends before its last step; empty: it does not, or was told to."""

    def __post_init__(self) -> None:
        self.newest, self.step_began_s = self.base, self.since_s
        self.last_snapshot = self.base.step if self.base.snapshot else None

    @property
    def step(self) -> int:
        """The current step; all before it are decided."""
        return self.base.step + len(self.decided)

    @property
    def is_decided(self) -> bool:
        """Whether the last step is decided."""
        return any(decided.commit.stop for decided in self.decided.values())

    @property
    def outstanding(self) -> tuple[str, ...]:
        """The reports that stages owe, in words."""
        evaluation = ["the validation loss"] if self.evaluating is not None else []
        return (*evaluation, *(f"the checkpoint after step {step}" for step in sorted(self.owed)))

    # -- phases ----------------------------------------------------------------------------------

    def advance(self, event: RunEvent, now_s: float) -> RunPhase:
        """Go to the next phase; LocalProtocolError if this event cannot happen now."""
        following = TRANSITIONS.get((self.phase, event))
        if following is None:
            raise LocalProtocolError(f"{event.name} cannot happen while the run is {self.phase.value}")
        self.phase, self.since_s = following, now_s
        return following

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
        if self.stopped_early:
            return Ending(0, f"stopped after step {self.step} of {self.num_steps}: {self.stopped_early}")
        return Ending(0)

    # -- steps and checkpoints -------------------------------------------------------------------

    def decide(self, commit: Commit, prepares: Sequence[Prepare], after: RestorePoint, now_s: float) -> None:
        """The current step is decided; `after` is the checkpoint after it, if there is to be one."""
        by_stage = {prepare.stage: prepare for prepare in prepares}
        prints = {stage: fingerprint(each) for stage, each in by_stage.items()}
        self.decided[commit.step] = Decided(commit, {} if commit.abandoned else prints)
        self.last_prepares, self.step_began_s, self.abandoned_for = by_stage, now_s, frozenset()
        if not commit.abandoned:
            self.skipped_in_a_row = 0 if commit.apply else self.skipped_in_a_row + 1
        if commit.snapshot_before and self.present is not None:
            self.owed[self.present.step], self.checkpoint_s = self.present, now_s
        self.present = after
        if commit.evaluate or commit.sample:
            self.evaluating = commit.step
        if commit.snapshot:
            self.owed[after.step], self.checkpoint_s = after, now_s

    def evaluated(self, saved: Mapping[str, Any]) -> None:
        """What was owed is known; `saved` belongs into the checkpoint after its step."""
        self.evaluating = None
        if self.present is not None:
            self.present = replace(self.present, saved_codecs={**self.present.saved_codecs, **saved})
            if self.present.step in self.owed:
                self.owed[self.present.step] = self.present

    def published(self, point: RestorePoint) -> None:
        """A checkpoint is complete: stages whose hosts have it begin there from now on."""
        self.newest, self.last_snapshot = point, point.step

    def rebase(self, point: RestorePoint) -> None:
        """Make a checkpoint the base, and forget the decisions before it: no stage can begin earlier any more."""
        self.base = point
        if self.newest.step < point.step:
            self.newest = point
        self.copying = self.newest if self.newest.step > point.step else None
        self.decided = {number: decided for number, decided in self.decided.items() if number >= point.step}

    def turn_back(self, point: RestorePoint, now_s: float) -> None:
        """Undo every step after this checkpoint, which is older than the base."""
        self.advance(RunEvent.TURNED_BACK, now_s)
        self.base = self.newest = point
        self.copying = self.evaluating = self.present = None
        self.last_snapshot = point.step
        self.last_prepares, self.skipped_in_a_row, self.abandoned_for = {}, 0, frozenset()
        self.decided.clear()
        self.owed.clear()

    def origin_at(self, step: int) -> RestorePoint | None:
        """Where a worker with the state after this many steps begins; None: no stage can begin there any more."""
        return next((point for point in (self.newest, self.base) if point.step == step), None)


def fingerprint(prepare: Prepare) -> str:
    """A hash of the results of a stage's step that PREPARE reports: equal if they are bit-identical."""
    told = (prepare.norm2, prepare.finite, prepare.loss_sum, prepare.tokens, prepare.batch_digest)
    return hashlib.blake2b(repr(told).encode(), digest_size=16).hexdigest()


def signal_name(number: int) -> str:
    """``SIGINT`` for 2; ``signal 99`` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
