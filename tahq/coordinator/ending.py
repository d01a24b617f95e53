"""How a run ends: who asked it to, when it does, and what all are told."""

import math
import signal
from collections import deque

from tahq.comm.control.messages import Abort, Bye
from tahq.coordinator.context import RunContext
from tahq.coordinator.membership import Standing
from tahq.coordinator.run_state import Ending, Event, Phase
from tahq.coordinator.training import Training
from tahq.errors import InterruptedRunError, UserError


class RunEnding:
    """Requests to stop, and the end.

    Args:
        context: the run.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._state = context.state
        self._signals: deque[int] = deque()
        self._num_signals = 0
        self._leave_by_s = math.inf
        self.training: Training | None = None
        """None before the first step."""

    # -- being asked to stop ---------------------------------------------------------------------

    def request(self, signal_number: int) -> None:
        """This process has got a signal. Safe in a signal handler."""
        self._signals.append(signal_number)

    def take_requests(self) -> None:
        """Stop in order at the first signal.

        Raises:
            InterruptedRunError: it was the second, or training has not begun.
        """
        while self._signals:
            number = self._signals.popleft()
            self._num_signals += 1
            if self._num_signals > 1:
                raise InterruptedRunError(f"stopped at once by a second {signal_name(number)}", number)
            self.stop(number, "the coordinator")

    def stop(self, signal_number: int, who: str) -> None:
        """Finish the step and stop after a snapshot; InterruptedRunError if there is no step to finish."""
        context, state = self._context, self._state
        first = state.stop_signal is None
        name = signal_name(signal_number)
        if not state.request_stop(signal_number):
            when = "while measuring" if state.phase is Phase.MEASURING else "before the first step"
            raise InterruptedRunError(f"{who} got {name} {when}", signal_number)
        if signal_number == signal.SIGTERM:  # of Ctrl-C a person sees what comes of it, and can press it again
            self._leave_by_s = min(self._leave_by_s, context.clock() + context.options.grace_s)
        if first and state.phase is Phase.TRAINING and self.training is not None:
            step = self.training.steps_done + 1
            context.observer.warned(f"{who} got {name}: finishing step {step}, then a snapshot")

    def check_grace(self) -> None:
        """Raise InterruptedRunError once stopping in order has taken longer than it may."""
        if self._context.clock() > self._leave_by_s and self.training is not None:
            raise InterruptedRunError(
                "stopped by SIGTERM: the step and its snapshot took longer than run.grace "
                f"({self._context.options.grace_s:g} s), so they are given up after step {self.training.steps_done}",
                signal.SIGTERM,
            )

    # -- the end ---------------------------------------------------------------------------------

    def finish_if_nothing_is_owed(self) -> None:
        """End the run in order if its last step is decided and everybody has done what is left to do."""
        if self._state.phase is not Phase.FINISHING or self.training is None:
            return
        if self._context.membership.lacking(Standing.READY):
            return
        owed = self.training.owed
        self._context.tell_phase(owed)
        if not owed:
            self.say_bye(Event.NOTHING_OWED, self._in_order(self.training))

    def _in_order(self, training: Training) -> Ending:
        done, signal_number, hint = training.steps_done, self._state.stop_signal, self._resume_hint()
        if not training.finished and signal_number is not None:
            text = f"stopped by {signal_name(signal_number)} after step {done} of {training.num_steps}"
            return Ending(128 + signal_number, f"{text}; {hint}")
        if self._state.last_snapshot != done:
            return Ending(1, f"all {done} steps are done, but the last snapshot could not be written; {hint}")
        return Ending(0)

    def say_bye(self, event: Event, ending: Ending) -> None:
        """The run is over, in order."""
        self._state.end(event, ending, self._context.clock())
        self._tell_all(Bye(ending.exit_status))

    def abort(self, exit_status: int, message: str) -> None:
        """The run is over, at once; the message says how it is gone on with."""
        if self.training is not None:
            self.training.abandon()
        if self.training is not None and exit_status != UserError.exit_status:
            message = f"{message}; {self._resume_hint()}"
        self._state.end(Event.ENDED, Ending(exit_status, message), self._context.clock())
        self._tell_all(Abort(message, exit_status))

    def _tell_all(self, message: Bye | Abort) -> None:
        self._context.broadcast(message)
        for identity in self._context.spares.identities:
            self._context.server.send(identity, message)

    def _resume_hint(self) -> str:
        return self._state.resumable(self._context.options.resume_command)


def signal_name(number: int) -> str:
    """``SIGINT`` for 2; ``signal 99`` for what is none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
