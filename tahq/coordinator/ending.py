"""How a run ends: requests to stop, the last step's reports, and what the workers are told."""

import math
import signal
from collections import deque

from tahq.comm.control.messages import Abort, Bye, StopRequest
from tahq.coordinator.context import RunContext
from tahq.coordinator.run_state import WITH_STEPS, Ending, RunEvent, RunPhase, signal_name
from tahq.coordinator.seats import Seat, SeatPhase
from tahq.coordinator.training import Training
from tahq.errors import InterruptedRunError, RemoteProtocolError, UserError


class RunEnding:
    """Stops and ends a run."""

    def __init__(self, ctx: RunContext, training: Training) -> None:
        self._ctx, self._run, self._training = ctx, ctx.run, training
        self.signals: deque[int] = deque()
        """Of this process, not yet taken; a signal handler may append to it."""
        self._num_signals = 0
        self._leave_by_s = math.inf

    def stop_requested(self, seat: Seat, request: StopRequest) -> None:
        """A worker's process got a signal."""
        if request.signal_number not in signal.valid_signals():
            raise RemoteProtocolError(f"{seat.name} reported signal {request.signal_number}, which does not exist")
        self._stop(request.signal_number, seat.name)

    def take_signals(self) -> None:
        """Stop in order at this process's first signal; InterruptedRunError at the second, or after `run.grace`."""
        while self.signals:
            number = self.signals.popleft()
            self._num_signals += 1
            if self._num_signals > 1:
                raise InterruptedRunError(f"stopped at once by a second {signal_name(number)}", number)
            self._stop(number, "the coordinator")
        if self._ctx.clock() > self._leave_by_s:
            raise InterruptedRunError(
                "stopped by SIGTERM: the step and its checkpoint took longer than run.grace "
                f"({self._ctx.options.grace_s:g} s), so they are given up after step {self._run.step}",
                signal.SIGTERM,
            )

    def _stop(self, number: int, who: str) -> None:
        """Finish the step and stop after a checkpoint; InterruptedRunError if there is no step to finish."""
        run, name = self._run, signal_name(number)
        is_first, run.stop_signal = run.stop_signal is None, run.stop_signal or number
        if run.phase not in WITH_STEPS:
            when = "while measuring" if run.phase is RunPhase.MEASURING else "before the first step"
            raise InterruptedRunError(f"{who} got {name} {when}", number)
        if number == signal.SIGTERM:  # after Ctrl-C a person sees the effect, and can press it again
            self._leave_by_s = min(self._leave_by_s, self._ctx.clock() + self._ctx.options.grace_s)
        if is_first and run.phase is RunPhase.TRAINING:
            self._ctx.warn(f"{who} got {name}: finishing step {run.step + 1}, then a checkpoint")

    def finish_if_nothing_is_owed(self) -> None:
        """End the run in order if its last step is decided and every stage has done what is left to do."""
        if self._run.phase is not RunPhase.FINISHING or self._ctx.seats.before(SeatPhase.READY):
            return
        owed = self._training.owed
        self._ctx.tell_phase(owed)
        if not owed:
            self.say_bye(RunEvent.NOTHING_OWED, self._run.ending_in_order(self._ctx.options.resume_command))

    def say_bye(self, event: RunEvent, ending: Ending) -> None:
        """End the run, in order."""
        self._run.end(event, ending, self._ctx.clock())
        self._tell_all(Bye(ending.exit_status))

    def abort(self, exit_status: int, message: str) -> None:
        """End the run at once; the message says how to go on."""
        if self._run.phase in WITH_STEPS:
            self._training.abandon()
            if exit_status != UserError.exit_status:
                message = f"{message}; {self._run.resumable(self._ctx.options.resume_command)}"
        self._run.end(RunEvent.ENDED, Ending(exit_status, message), self._ctx.clock())
        self._tell_all(Abort(message, exit_status))

    def _tell_all(self, message: Bye | Abort) -> None:
        self._ctx.broadcast(message)
        for identity in self._ctx.seats.spares:
            self._ctx.server.send(identity, message)

    def note_end(self) -> None:
        """Mark the run as over, so that no coordinator goes on with it; if that fails, going on would lose nothing."""
        journal = self._ctx.journal
        if not journal.has_run:
            return
        journal.wait = None
        try:
            journal.note(is_over=True)
        except UserError as error:
            self._ctx.warn(f"{error}; the run has ended all the same")
