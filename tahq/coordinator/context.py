"""The run and the I/O around it, shared by the parts of the service."""

from collections.abc import Callable
from dataclasses import dataclass

from tahq.comm.control.messages import Message
from tahq.comm.control.server import ControlServer
from tahq.coordinator.gathering import missing_in_words
from tahq.coordinator.journal import Journal
from tahq.coordinator.observer import RunObserver, StageStatus
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.run_state import RunEvent, RunState
from tahq.coordinator.seats import Seat, Seats


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run: what is known of it, and the way out to workers, user and disk."""

    options: CoordinatorOptions
    run: RunState
    seats: Seats
    server: ControlServer
    observer: RunObserver
    journal: Journal
    clock: Callable[[], float]

    def send(self, seat: Seat, message: Message) -> None:
        """Send a message to a stage's worker, if it has one."""
        if seat.is_held:
            self.server.send(seat.identity, message)

    def broadcast(self, message: Message) -> None:
        """Send a message to the workers of all stages."""
        for seat in self.seats:
            self.send(seat, message)

    def advance(self, event: RunEvent, missing: str = "") -> None:
        """Go to the run's next phase, and tell the observer what it waits for."""
        self.run.advance(event, self.clock())
        self.tell_phase(missing)

    def tell_phase(self, missing: str | None = None) -> None:
        """Tell the observer the run's phase and what it waits for (None: for the stages that are missing)."""
        if missing is None:
            missing = missing_in_words(self.run, self.seats, self.server.address)
        self.observer.phase_changed(self.run.phase.value, missing)

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
