"""The run's options, and one object for a run with its I/O, shared by the parts of the service."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tahq.comm.config import LinkTransport
from tahq.comm.control.messages import Abort, Bye, Message
from tahq.comm.control.server import ControlServer
from tahq.comm.relay.process import Relay
from tahq.comm.topology import Grid, Ticket
from tahq.coordinator.joining.seats import Seat, SeatPhase, Seats, stage_list
from tahq.coordinator.journal import Journal
from tahq.coordinator.link_codecs import CodecOptions
from tahq.coordinator.observer import RunObserver, StageStatus
from tahq.coordinator.run_state import Ending, RunEvent, RunPhase, RunState
from tahq.coordinator.schedule_choice import Choose, ScheduleChoice
from tahq.errors import brief
from tahq.pipeline.config import TrainingConfig

MAX_TEXT_LENGTH = 4000
"""Of a message to the user."""


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """A run as its resolved configuration describes it; epochs become steps once the workers know their samples."""

    num_stages: int
    """Of all replicas of the pipeline; replica r begins with stage r·P."""
    run_id: int
    run_folder: Path
    config_json: str
    """The resolved configuration that every worker is sent."""
    config_hash: str
    version: str
    """tahq's; a worker of another version is refused."""
    training: TrainingConfig
    validation_sets: Sequence[str] = ("",)
    """Their names."""
    tokens_per_step: int = 0
    """Tokens of a global batch, prompts and padding included; 0: unknown."""
    checkpoint_every: int | float | Literal["never"] = "never"
    """Steps (int) or seconds (float) between checkpoints; one is always written at the end and on interruption."""
    keep_checkpoints: int = 2
    best: Literal["", "after", "at once"] = ""
    """Whether the checkpoint with the lowest validation loss is kept. `after`: it is written at the next commit, once
    its loss is known. `at once`: with each evaluation, because some of its state changes before that commit."""
    copies: int = 0
    """Copies of each stage's checkpoint on other hosts."""
    copies_within_host: bool = False
    """Whether a worker on the same host may hold them."""
    peer_timeout_s: float = 10.0
    give_up_s: float = 120.0
    """How long a lost worker is waited for; a worker that is silent for half of it is lost."""
    join_timeout_s: float = 600.0
    grace_s: float = 25.0
    """How long an orderly end may take after SIGTERM."""
    start_step: int = 0
    """Steps behind the checkpoint that the run continues from."""
    snapshot: str = ""
    """Folder of the checkpoint to continue from, relative to the run's folder; empty: start anew."""
    snapshot_files: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of each of its files, by name."""
    tie_link: bool = False
    """One more link between the first and the last stage, for the gradients of tied embeddings."""
    chunks_per_stage: int = 1
    """Chunks of the model on each stage (more than 1 under interleaved schedules)."""
    replicas: int = 1
    """Pipelines side by side."""
    replicas_wait_s: float | None = None
    """How long replicas wait for one with a lost worker before they go on without it; None: until it is back."""
    shares_updates: bool = False
    """Whether each replica updates a share of the parameters, and reports the norms of their gradients only."""
    shares_weights: bool = False
    """Whether replicas lend each other weights, so that all of them take part in evaluations."""
    recorded_replicas: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """A run to repeat: by step, the replicas that computed it, where not all did; none: the step was abandoned."""
    sites: tuple[str, ...] = ()
    """The site of each stage, "" = its own; empty: each has its own."""
    inside: LinkTransport = "zmq"
    """The transport between neighbours of one site."""
    tries_links: bool = False
    """Whether neighbours first try which of them can dial the other."""
    hosts: tuple[str, ...] = ()
    """The host of each stage, for messages; empty: as the workers name them."""
    host_keys: tuple[str, ...] = ()
    """The public key that each stage's worker must have, "" = any key that may join; empty: any."""
    by_hand: frozenset[int] = frozenset()
    """Stages whose workers a person starts."""
    by_invite: bool = False
    """Whether workers joined by invites: each gets the stage that is kept for its key."""
    name: str = "run"
    epoch: int = 1
    """Number of this start of the run: frames of other epochs are rejected."""
    resume_command: str = ""
    """How to continue the run, for messages: `tahq-launch cluster.yaml --resume`."""
    codecs: CodecOptions = field(default_factory=CodecOptions)
    """The links' codecs, and the rules that change them."""
    schedule: ScheduleChoice = field(default_factory=lambda: ScheduleChoice("1f1b"))
    """What a run begins with."""
    are_depths_set: bool = False
    """Whether the depths in `schedule` stay."""
    choose_schedule: Choose | None = None
    """Finds another schedule during the run; None: it stays."""
    next_sample: int | None = None
    """Number of the sample that `start_step` begins with; None: taken from the workers' HELLO."""
    is_measuring: bool = False
    """Whether workers measure instead of training (`tahq measure`)."""
    join_again: frozenset[int] | None = None
    """Stages whose workers, as all spares, join again for a run once all have measured; None: no run follows."""
    leave_timeout_s: float = 1.0
    """How long the coordinator waits for workers to leave at the end."""

    @property
    def grid(self) -> Grid:
        """The links of the run."""
        return Grid(self.num_stages // self.replicas, self.replicas, self.chunks_per_stage, self.tie_link)

    @property
    def num_norms(self) -> int:
        """Workers that report different norms: those of one replica, or all of them."""
        return self.num_stages if self.shares_updates else self.grid.num_stages

    @property
    def longest_wait_s(self) -> float:
        """How long loading, connecting and the last reports may take."""
        return max(self.give_up_s, self.join_timeout_s)


def command_by_hand(options: CoordinatorOptions, missing: Iterable[int], address: str) -> str:
    """What a person types to start one of these stages; empty: the launcher starts them all."""
    stage = min(options.by_hand.intersection(missing), default=None)
    if stage is None:
        return ""
    return "tahq join" if options.by_invite else f"tahq-worker --stage {stage} --peer {address}"


@dataclass(slots=True)
class RunContext:
    """One run: its state, and access to workers, user and disk."""

    options: CoordinatorOptions
    run: RunState
    seats: Seats
    server: ControlServer
    observer: RunObserver
    journal: Journal
    clock: Callable[[], float]
    relay: Relay | None = None
    """For links whose ends cannot dial each other; None: such a link is an error."""
    num_relayed_files: int = 0
    """How often files were to be fetched over the relay."""

    @property
    def ticket(self) -> Ticket | None:
        """Issues tickets for links over the relay in the run's present epoch; None: there is no relay."""
        relay = self.relay
        return None if relay is None else lambda link, end: relay.ticket(link, self.run.epoch, end)

    def send(self, seat: Seat, message: Message) -> None:
        """Send a message to a stage's worker, if it has one."""
        if seat.is_held:
            self.server.send(seat.identity, message)

    def broadcast(self, message: Message) -> None:
        """Send a message to the workers of all stages."""
        for seat in self.seats:
            self.send(seat, message)

    def end(self, event: RunEvent, ending: Ending, farewell: Bye | Abort) -> None:
        """End the run, and tell all workers and spares."""
        self.run.advance(event, self.clock())
        self.run.ending = ending
        self.broadcast(farewell)
        for identity in self.seats.spares:
            self.server.send(identity, farewell)

    def warn(self, text: str) -> None:
        """Tell the user; workers' words in it may be long."""
        self.observer.warned(brief(text, MAX_TEXT_LENGTH))

    def advance(self, event: RunEvent, missing: str = "") -> None:
        """Go to the run's next phase, and tell the observer what it waits for."""
        self.run.advance(event, self.clock())
        self.tell_phase(missing)

    def tell_phase(self, missing: str | None = None) -> None:
        """Tell the observer the run's phase and what it waits for (None: for the stages that are missing)."""
        self.observer.phase_changed(self.run.phase.value, self._missing() if missing is None else missing)

    def _missing(self) -> str:
        """The stages that the run waits for, and how to start one by hand; empty: it waits for none."""
        missing = self.seats.missing
        if self.run.phase is not RunPhase.CONNECTING and missing:
            command = command_by_hand(self.options, missing, self.server.address)
            return stage_list(missing) + (f" ({command})" if command else "")
        if self.run.phase is RunPhase.CONNECTING:
            late, doing = self.seats.before(SeatPhase.READY), ""
        else:
            late, doing = self.seats.before(SeatPhase.GREETED), " to build the model"
        return f"{stage_list(late)}{doing}" if late else ""

    def tell_stage(self, seat: Seat) -> None:
        """Tell the observer about a stage's worker."""
        self.observer.stage_changed(
            StageStatus(
                stage=seat.stage,
                host=seat.host,
                pid=seat.pid,
                device=seat.hello.device if seat.hello else "",
                num_parameters=seat.hello.num_parameters if seat.hello else 0,
                activity=seat.activity or seat.phase.value,
                step=seat.step,
            )
        )
