"""What the parts of the service share: the run, the line to the workers, and whom to tell."""

from collections.abc import Callable
from dataclasses import dataclass

from tahq.comm.control.channel import ControlServer
from tahq.comm.control.messages import Message
from tahq.coordinator.copies import Copies
from tahq.coordinator.membership import Member, Membership
from tahq.coordinator.observer import RunObserver, StageStatus
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.recovery import Recovery
from tahq.coordinator.run_state import Event, RunState
from tahq.coordinator.spares import Spares


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run, as the coordinator holds it."""

    options: CoordinatorOptions
    server: ControlServer
    observer: RunObserver
    clock: Callable[[], float]
    membership: Membership
    state: RunState
    recovery: Recovery
    copies: Copies
    spares: Spares

    def broadcast(self, message: Message) -> None:
        """Send a message to every member."""
        for member in self.membership.members:
            self.server.send(member.identity, message)

    def advance(self, event: Event, missing: str = "") -> None:
        """Go to the next phase, and say what it waits for."""
        self.state.advance(event, self.clock())
        self.tell_phase(missing)

    def tell_phase(self, missing: str) -> None:
        """Say where the run stands and what it waits for."""
        self.observer.phase_changed(self.state.phase.value, missing)

    def tell_stage(self, member: Member) -> None:
        """Say how a worker stands."""
        self.observer.stage_changed(
            StageStatus(
                stage=member.stage,
                host=member.host,
                pid=member.pid,
                device=member.hello.device if member.hello else "",
                num_parameters=member.hello.num_parameters if member.hello else 0,
                activity=member.activity or member.standing.value,
                step=member.step,
            )
        )
