"""One row per stage: the worker that holds it, its progress, and the facts kept for its next worker.

Pure: identities and times are arguments, nothing is sent. ::

           JOIN            HELLO           PLAN            READY
    EMPTY ──────▶ ASSIGNED ─────▶ GREETED ─────▶ PLANNED ──────▶ READY
      ▲ │                                                         ▲ │
      │ └──────── REJOIN: it trained under the coordinator before ┘ │
      └───────────────── LEAVE, from every phase ───────────────────┘

Invariants: a stage has at most one holder, and a worker holds at most one stage; phases change along the table only;
a worker past ASSIGNED has said HELLO; an empty seat has the time at which its stage was lost.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any

from tahq.comm.control.messages import Hello, Join, Prepare, Snapshotted, Start
from tahq.coordinator.schedule_choice import ScheduleChoice
from tahq.errors import LocalProtocolError, RemoteProtocolError


class SeatPhase(Enum):
    """How far the worker of a stage has come; the value is what users read."""

    EMPTY = "without a worker"
    ASSIGNED = "building its model"
    GREETED = "waiting for the others"
    PLANNED = "connecting"
    READY = "ready"


class SeatEvent(Enum):
    """An event that moves a seat; the value is the message's name."""

    JOIN = "Join"
    HELLO = "Hello"
    PLAN = "Plan"
    READY = "Ready"
    REJOIN = "Rejoin"
    LEAVE = "leave"


TRANSITIONS: Mapping[tuple[SeatPhase, SeatEvent], SeatPhase] = {
    (SeatPhase.EMPTY, SeatEvent.JOIN): SeatPhase.ASSIGNED,
    (SeatPhase.ASSIGNED, SeatEvent.HELLO): SeatPhase.GREETED,
    (SeatPhase.GREETED, SeatEvent.PLAN): SeatPhase.PLANNED,
    (SeatPhase.PLANNED, SeatEvent.READY): SeatPhase.READY,
    (SeatPhase.EMPTY, SeatEvent.REJOIN): SeatPhase.READY,
    **{(phase, SeatEvent.LEAVE): SeatPhase.EMPTY for phase in SeatPhase},
}
FROM_WORKERS = (SeatEvent.HELLO, SeatEvent.READY)
"""Events caused by a worker's message: an impossible one is the worker's mistake, not ours."""


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """A checkpoint at which a lost stage can begin again, or the beginning of the run (`snapshot` is "").

    `snapshot` is its folder relative to the run's, `files` its hashes by name; `codecs` are START's rows for this step,
    `schedule` is what is in force in it, `saved_codecs` the state of both in the checkpoint.
    """

    step: int
    snapshot: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    codecs: Sequence[Sequence[int]] = ()
    schedule: ScheduleChoice | None = None
    saved_codecs: Mapping[str, Any] = field(default_factory=dict)
    computing: Sequence[int] = ()
    """The replicas that share the batch of this step; empty: all."""
    loss_scale: float = 0.0
    """Of this step; 0: there is none."""

    @property
    def start(self) -> Start:
        """What a stage that begins here is told."""
        codecs, (name, depths) = [list(row) for row in self.codecs], self.schedule or ("", ())
        return Start(self.step, codecs, name, list(depths), list(self.computing), self.loss_scale)

    def file_of(self, stage: int) -> str:
        """The name of a stage's file; empty if there is none."""
        return next((name for name in self.files if name.startswith(f"stage-{stage:03d}-")), "")


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of a stage's process: exit status, time, and the end of its log."""

    status: int
    when_s: float
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Which worker was told to copy a stage's file from which."""

    holder: bytes
    source: bytes


@dataclass(slots=True, eq=False)
class Try:
    """A try of a worker to dial a neighbour at this address, ordered at `since_s`."""

    address: str
    since_s: float
    failure: str | None = None
    """Why it failed; empty: it has succeeded; None: it is not reported yet."""


@dataclass(slots=True, eq=False)
class Holder:
    """The part of a seat that belongs to its worker, and is reset when the worker leaves."""

    identity: bytes = b""
    public_key: str = ""
    host: str = ""
    pid: int = 0
    worker_id: str = ""
    """Shared by the successive processes of one worker; empty: unknown."""
    hello: Hello | None = None
    last_seen_s: float = 0.0
    step: int = -1
    """The step that the worker says it is at."""
    activity: str = ""
    is_silent: bool = False
    """Whether the user was warned about its silence."""
    degraded: dict[int, str] = field(default_factory=dict)
    """Links whose peer the worker calls silent, in words."""
    prepared: Prepare | None = None
    """Its PREPARE of the step that the run is at."""
    parts: dict[int, Snapshotted] = field(default_factory=dict)
    """Its parts of checkpoints that other stages have not completed, by step."""
    tries: dict[int, Try] = field(default_factory=dict)
    """Of dialling its neighbours, by stage."""
    relinking_since_s: float | None = None
    """When it was asked to make its links ready for a neighbour that returns; None: it has answered."""


@dataclass(slots=True, eq=False, kw_only=True)
class Seat(Holder):
    """One stage, with its worker's part; the fields below outlive the worker."""

    stage: int
    phase: SeatPhase = SeatPhase.EMPTY
    since_s: float = 0.0
    """When it entered this phase."""
    position: int = 0
    """The step that the stage prepares next."""
    origin: RestorePoint = RestorePoint(0)
    """Where its worker began."""
    lost_since_s: float | None = None
    """When the stage fell behind the run; None: it is at the run's step."""
    spare_from_s: float | None = None
    """When an empty seat may be given to a spare."""
    given_to: str | None = None
    """The public key of the spare that was given the stage; its own host's process no longer matters then."""
    exit: ProcessExit | None = None
    """How the process that was started for it ended."""
    refusal: str = ""
    """Why the latest worker that asked for it was refused."""
    is_inexact: bool = False
    """Whether it has recomputed a step with another result."""
    ordered: dict[int, CopyOrder] = field(default_factory=dict)
    """Orders to copy its part of a checkpoint, by step; `copied` and `failed` have the outcome."""
    copied: dict[int, CopyOrder] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    copy_holder: int | None = None
    """The stage whose worker was last told to hold its copies."""
    gone: set[int] = field(default_factory=set)
    """Checkpoints whose part its host no longer has."""

    @property
    def is_held(self) -> bool:
        """Whether it has a worker."""
        return self.phase is not SeatPhase.EMPTY

    @property
    def name(self) -> str:
        """``stage 2 (host, pid 41)``, as messages call it; ``stage 2`` without a worker."""
        return f"stage {self.stage} ({self.host}, pid {self.pid})" if self.is_held else f"stage {self.stage}"

    def forget_copies(self, is_obsolete: Callable[[int], bool]) -> None:
        """Forget the copies of checkpoints whose step is obsolete."""
        for orders in (self.ordered, self.copied):
            for step in [step for step in orders if is_obsolete(step)]:
                del orders[step]


@dataclass(slots=True)
class Spare:
    """A worker that waits for the stage of a host that is lost."""

    identity: bytes
    join: Join
    last_seen_s: float

    @property
    def name(self) -> str:
        """``host, pid 41``, as messages call it."""
        return f"{self.join.host}, pid {self.join.pid}"


class Former(Enum):
    """Why a worker that still sends messages holds no stage."""

    REFUSED = "refused"
    TAKEN_BACK = "its stage was taken back"


class Seats:
    """The table: a row per stage, the spares, and workers that have lost their place.

    Args:
        num_stages: stages are 0 … num_stages − 1.
        origin: where they begin.
        now_s: when the wait for them began.
        replicas: of the pipeline.
    """

    def __init__(
        self, num_stages: int, origin: RestorePoint = RestorePoint(0), now_s: float = 0.0, replicas: int = 1
    ) -> None:
        self._num_stages = num_stages // replicas
        self.computing: tuple[int, ...] = tuple(range(replicas))
        """The replicas that share the batch of the current step."""
        self._seats = [
            Seat(stage=stage, since_s=now_s, position=origin.step, origin=origin, lost_since_s=now_s)
            for stage in range(num_stages)
        ]
        self.spares: dict[bytes, Spare] = {}
        """In the order in which they came."""
        self.former: dict[bytes, Former] = {}

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats)

    def __getitem__(self, stage: int) -> Seat:
        return self._seats[stage]

    @property
    def held(self) -> tuple[Seat, ...]:
        """Seats with a worker."""
        return tuple(seat for seat in self._seats if seat.is_held)

    @property
    def missing(self) -> tuple[int, ...]:
        """Stages without a worker."""
        return self.before(SeatPhase.ASSIGNED)

    def before(self, phase: SeatPhase) -> tuple[int, ...]:
        """Stages that have not reached this phase."""
        order = list(SeatPhase)
        return tuple(seat.stage for seat in self._seats if order.index(seat.phase) < order.index(phase))

    @property
    def told_computing(self) -> tuple[int, ...]:
        """`computing` as messages and checkpoints have it: empty if all compute."""
        return self.computing if len(self.computing) * self._num_stages < len(self) else ()

    @property
    def evaluator(self) -> int:
        """The stage that reports evaluations: the last one of the first replica that computes."""
        return (self.computing[0] + 1) * self._num_stages - 1

    def replica(self, seat: Seat) -> int:
        """The replica that a stage belongs to."""
        return seat.stage // self._num_stages

    @property
    def whole(self) -> tuple[int, ...]:
        """The replicas all of whose stages are where the run is."""
        late = {self.replica(seat) for seat in self._seats if seat.lost_since_s is not None}
        return tuple(replica for replica in range(len(self) // self._num_stages) if replica not in late)

    def find(self, identity: bytes) -> Seat | None:
        """The seat of the worker with this identity."""
        return next((seat for seat in self._seats if seat.is_held and seat.identity == identity), None)

    def claim(self, identity: bytes, stage: int) -> Seat:
        """The seat of a worker whose message is about this stage; RemoteProtocolError if it has another, or none."""
        seat = self.find(identity)
        if seat is None:
            raise RemoteProtocolError(f"a worker that holds no stage sent a message for stage {stage}")
        if seat.stage != stage:
            raise RemoteProtocolError(f"{seat.name} sent a message for stage {stage}, which it does not hold")
        return seat

    # -- events ----------------------------------------------------------------------------------

    def join(self, stage: int, identity: bytes, join: Join, now_s: float, *, host: str = "", key: str = "") -> Seat:
        """Give an empty seat to a worker; `host` is what messages call its machine."""
        if self.find(identity) is not None:
            raise LocalProtocolError(f"the worker {join.host}, pid {join.pid}, already holds a stage")
        seat = self.advance(stage, SeatEvent.JOIN, now_s)
        seat.identity, seat.public_key, seat.last_seen_s = identity, key, now_s
        seat.host, seat.pid, seat.worker_id = host or join.host, join.pid, join.worker_id
        self.former.pop(identity, None)
        self.spares.pop(identity, None)
        return seat

    def advance(self, stage: int, event: SeatEvent, now_s: float) -> Seat:
        """Move a seat to its next phase; RemoteProtocolError for a worker's message that may not come in this phase."""
        seat = self._seats[stage]
        following = TRANSITIONS.get((seat.phase, event))
        if following is None and event in FROM_WORKERS:
            raise RemoteProtocolError(f"{seat.name} sent {event.value} while it was {seat.phase.value}")
        if following is None:
            raise LocalProtocolError(f"{event.name} cannot happen to {seat.name} while it is {seat.phase.value}")
        seat.phase, seat.since_s = following, now_s
        return seat

    def leave(self, stage: int, now_s: float, *, position: int, is_silent: bool = False) -> Seat:
        """Free a seat; `position` is where the next worker begins at the earliest. Returns the row before."""
        before = self._seats[stage]
        after = replace(before, **asdict(Holder()), position=position)
        after.phase, after.since_s = TRANSITIONS[before.phase, SeatEvent.LEAVE], now_s
        if after.lost_since_s is None:
            after.lost_since_s = before.last_seen_s if is_silent else now_s
        self._seats[stage] = after
        return before

    def turn_back(self, point: RestorePoint) -> None:
        """Make every stage begin at this point, and forget copies of newer checkpoints."""
        for seat in self._seats:
            seat.position, seat.origin = point.step, point
            seat.forget_copies(lambda step: step > point.step)
            seat.failed.clear()
            seat.gone.clear()

    def add_spare(self, identity: bytes, join: Join, now_s: float) -> bool:
        """Let a worker wait for a stage; whether it is new."""
        is_new = identity not in self.spares
        self.spares[identity] = Spare(identity, join, now_s)
        self.former.pop(identity, None)
        return is_new

    @property
    def num_spares(self) -> str:
        """``1 spare``, for messages."""
        return f"{len(self.spares)} spare{'s' * (len(self.spares) != 1)}"


def stage_list(stages: Iterable[int]) -> str:
    """``stage 2`` or ``stages 2, 3``."""
    numbers = list(stages)
    return f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
