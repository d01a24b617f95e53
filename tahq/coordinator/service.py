"""The coordinator at work: polls its socket, has each message answered, watches the clock, ends the run.

Everything that decides is in the pure cores (`membership`, `plan`, `commit`, `reports`, `run_state`,
`watch`). One thread; `request_stop` alone may be called from elsewhere (a signal handler).
"""

import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tahq.comm.control import (
    Abort,
    Bye,
    Evaluated,
    Failed,
    Heartbeat,
    Hello,
    Join,
    LinkState,
    Message,
    Prepare,
    Ready,
    Snapshotted,
    Start,
    StopRequest,
    Traced,
)
from tahq.comm.control_channel import ControlServer
from tahq.comm.control_measuring import ComputeMeasured, PathsMeasured
from tahq.coordinator.context import RunContext
from tahq.coordinator.gathering import Gathering
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.membership import Membership
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.publisher import Publish, SnapshotPublisher
from tahq.coordinator.run_state import Ending, Event, Phase, RunState
from tahq.coordinator.training import Training
from tahq.coordinator.watch import check_exits, check_silence, check_waiting
from tahq.errors import (
    InterruptedRunError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    TahqError,
    UserError,
)

POLL_S = 0.1
"""Longest wait for a message, and so the longest that a signal or a dead child goes unnoticed."""


class Coordinator:
    """Brings the workers of a run together and leads them through it.

    Args:
        options: the run.
        server: bound already; used by the thread of `run` only, closed by whoever made it.
        observer: told what happens.
        publish: makes a complete snapshot the newest one; None: as files under the run's folder.
        measuring: what is done in place of a run, once all are there; `options.is_measuring` tells the workers.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        server: ControlServer,
        observer: RunObserver,
        *,
        publish: Publish | None = None,
        measuring: Measuring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        membership = Membership(options.num_stages, options.version, options.config_hash, options.hosts)
        self._state = RunState(clock(), options.start_step if options.snapshot else None)
        self._context = RunContext(options, server, observer, clock, membership, self._state)
        self._gathering = Gathering(self._context)
        self._training: Training | None = None
        self._publish = publish or SnapshotPublisher(options)
        self._measuring = measuring
        self._num_steps = 0
        self._signals: deque[int] = deque()
        self._num_signals = 0
        self._next_tick_s = clock()

    @property
    def address(self) -> str:
        """host:port that workers dial."""
        return self._context.server.address

    def request_stop(self, signal_number: int) -> None:
        """Ask the run to stop: in order the first time, at once the second. Safe in a signal handler."""
        self._signals.append(signal_number)

    def worker_exited(self, stage: int, status: int, last_words: str = "") -> None:
        """The launcher's word that a stage's process has ended (negative: killed by that signal).

        Called from `tick`. What the worker may have said before it ended is read first; `last_words` is
        the end of its log, for the message if it said nothing.
        """
        self._state.note_exit(stage, status, self._context.clock(), last_words)

    def run(self, tick: Callable[[], None]) -> int:
        """Lead the run to its end.

        Args:
            tick: called about ten times a second, for what else this thread has to do.

        Returns:
            The exit status of the run: 0 done, 128 + signal interrupted, else as errors.py has it.
        """
        self._open()
        try:
            self._lead(tick)
            self._let_leave(tick)
        finally:
            self._close()
        return self._state.ending.exit_status

    # -- the loop --------------------------------------------------------------------------------

    def _lead(self, tick: Callable[[], None]) -> None:
        """Turn until the run is over, however that comes."""
        try:
            while self._state.phase is not Phase.OVER:
                self._turn(tick)
        except TahqError as error:
            self._abort(error.exit_status, str(error))
        except BaseException as error:
            self._abort(1, f"the coordinator failed: {error!r}")
            raise

    def _turn(self, tick: Callable[[], None]) -> None:
        # taken before the poll: if this process was held up, signs of life wait in the socket
        polled_s = self._context.clock()
        for identity, message in self._context.server.poll(POLL_S):
            self._dispatch(identity, message)
        for refused in self._context.server.take_refused():
            self._context.observer.warned(refused)
        if self._state.phase is not Phase.OVER:
            self._tick(tick)
            self._take_signals()
            self._check_timers(polled_s)

    def _tick(self, tick: Callable[[], None]) -> None:
        now_s = self._context.clock()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + POLL_S
            tick()

    def _dispatch(self, identity: bytes, message: Message) -> None:
        if self._state.phase is Phase.OVER:
            return
        member = self._context.membership.find(identity)
        if member is None and not isinstance(message, Join | Heartbeat):
            self._gathering.turn_away(identity, message)
            return
        self._context.membership.seen(identity, self._context.clock())
        try:
            self._handle(identity, message, member.name if member else "a worker without a stage")
        except RemoteProtocolError as error:
            if self._state.phase is not Phase.JOINING:
                raise
            self._gathering.dismiss(identity, str(error))

    def _handle(self, identity: bytes, message: Message, name: str) -> None:
        handler = HANDLERS.get(type(message))
        if handler is None:
            raise RemoteProtocolError(f"{name} sent {type(message).__name__}, which only a coordinator sends")
        self._state.check(message, name)
        handler(self, identity, message)

    def _take_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            self._num_signals += 1
            if self._num_signals > 1:
                raise InterruptedRunError(f"stopped at once by a second {signal_name(number)}", number)
            self._stop(number, "the coordinator")

    def _check_timers(self, polled_s: float) -> None:
        context, options = self._context, self._context.options
        step = self._training.steps_done if self._training and self._state.phase is Phase.TRAINING else None
        check_exits(self._state, context.membership, self._gathering.refusals, context.clock(), step)
        for member in check_silence(self._state, context.membership, polled_s, options.peer_timeout_s, step):
            self._gathering.lose(member)
        check_waiting(self._state, context.membership, polled_s, options.join_timeout_s, self.address)

    # -- messages --------------------------------------------------------------------------------

    def _on_join(self, identity: bytes, join: Join) -> None:
        self._gathering.join(identity, join)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        if not self._gathering.hello(identity, hello):
            return
        if self._measuring is not None:
            self._context.advance(Event.ALL_THERE)
            self._measuring.begin(self._context)
            return
        self._num_steps = self._gathering.num_steps()
        if self._context.options.start_step >= self._num_steps:
            self._say_bye(Event.ENDED, Ending(0, f"nothing to do: all {self._num_steps} steps were done before"))
        else:
            self._gathering.plan(self._num_steps)

    def _on_ready(self, identity: bytes, ready: Ready) -> None:
        if self._gathering.ready(identity, ready):
            self._training = Training(self._context, self._num_steps, self._publish)
            self._context.broadcast(Start(self._context.options.start_step, self._training.start_codecs))
            self._context.advance(Event.ALL_READY)

    def _on_prepare(self, identity: bytes, prepare: Prepare) -> None:
        self._begun().prepare(identity, prepare)

    def _on_evaluated(self, identity: bytes, evaluated: Evaluated) -> None:
        self._begun().evaluated(identity, evaluated)
        self._finish_if_nothing_is_owed()

    def _on_snapshotted(self, identity: bytes, part: Snapshotted) -> None:
        self._begun().snapshotted(identity, part)
        self._finish_if_nothing_is_owed()

    def _on_compute_measured(self, identity: bytes, figures: ComputeMeasured) -> None:
        self._measures().computed(identity, figures)
        self._finish_if_all_is_measured()

    def _on_paths_measured(self, identity: bytes, figures: PathsMeasured) -> None:
        self._measures().paths_measured(identity, figures)
        self._finish_if_all_is_measured()

    def _on_traced(self, identity: bytes, part: Traced) -> None:
        self._begun().traced(identity, part)

    def _on_link_state(self, identity: bytes, state: LinkState) -> None:
        member = self._context.membership.claim(identity, state.stage)
        link = f"link {state.link} to stage {state.peer_stage}"
        if state.reason:
            self._context.observer.warned(f"{member.name}: {link} is degraded: {state.reason}")
        else:
            again = f"; {state.num_sent_again} messages were sent again so far" if state.num_sent_again else ""
            self._context.observer.warned(f"{member.name}: {link} works again after {state.lasted_s:.1f} s{again}")

    def _on_stop_request(self, identity: bytes, request: StopRequest) -> None:
        member = self._context.membership.claim(identity, request.stage)
        self._stop(request.signal_number, member.name)

    def _on_failed(self, identity: bytes, failed: Failed) -> None:
        member = self._context.membership.claim(identity, failed.stage)
        self._context.membership.leave(member.stage)
        self._abort(failed.exit_status if 0 < failed.exit_status < 256 else 1, f"{member.name}: {failed.message}")

    def _on_heartbeat(self, identity: bytes, heartbeat: Heartbeat) -> None:
        member = self._context.membership.doing(identity, heartbeat)
        if member is not None:
            self._context.tell_stage(member)
        else:
            self._gathering.remind(identity)

    def _begun(self) -> Training:
        if self._training is None:
            raise LocalProtocolError("training has not begun")
        return self._training

    def _measures(self) -> Measuring:
        if self._measuring is None:
            raise LocalProtocolError("this is a run, not a measurement")
        return self._measuring

    # -- the end ---------------------------------------------------------------------------------

    def _stop(self, signal_number: int, who: str) -> None:
        first = self._state.stop_signal is None
        name = signal_name(signal_number)
        if not self._state.request_stop(signal_number):
            when = "while measuring" if self._state.phase is Phase.MEASURING else "before the first step"
            raise InterruptedRunError(f"{who} got {name} {when}", signal_number)
        if first and self._state.phase is Phase.TRAINING:
            step = self._begun().steps_done + 1
            self._context.observer.warned(f"{who} got {name}: finishing step {step}, then a snapshot")

    def _finish_if_nothing_is_owed(self) -> None:
        if self._state.phase is not Phase.FINISHING:
            return
        owed = self._begun().owed
        self._context.tell_phase(owed)
        if not owed:
            self._say_bye(Event.NOTHING_OWED, self._orderly_ending(self._begun()))

    def _finish_if_all_is_measured(self) -> None:
        if self._measures().is_finished:
            failures = self._measures().measured.failures
            self._say_bye(Event.ALL_MEASURED, Ending(PeerLostError.exit_status, failures[0]) if failures else Ending(0))

    def _orderly_ending(self, training: Training) -> Ending:
        done, signal_number, hint = training.steps_done, self._state.stop_signal, self._resume_hint()
        if not training.finished and signal_number is not None:
            text = f"stopped by {signal_name(signal_number)} after step {done} of {self._num_steps}"
            return Ending(128 + signal_number, f"{text}; {hint}")
        if self._state.last_snapshot != done:
            return Ending(1, f"all {done} steps are done, but the last snapshot could not be written; {hint}")
        return Ending(0)

    def _say_bye(self, event: Event, ending: Ending) -> None:
        self._state.end(event, ending, self._context.clock())
        self._context.broadcast(Bye(ending.exit_status))

    def _abort(self, exit_status: int, message: str) -> None:
        if self._training is not None and exit_status != UserError.exit_status:
            message = f"{message}; {self._resume_hint()}"
        self._state.end(Event.ENDED, Ending(exit_status, message), self._context.clock())
        self._context.broadcast(Abort(message, exit_status))

    def _resume_hint(self) -> str:
        return self._state.resumable(self._context.options.resume_command)

    def _let_leave(self, tick: Callable[[], None]) -> None:
        """Keep the socket going until the workers have left, or should have."""
        clock = self._context.clock
        until_s = clock() + self._context.options.leave_timeout_s
        stages = {member.stage for member in self._context.membership.members}
        while clock() < until_s and not stages <= self._state.exits(clock()).keys():
            self._context.server.poll(POLL_S)
            tick()

    # -- what the observer is told at either end -------------------------------------------------

    def _open(self) -> None:
        options = self._context.options
        self._context.observer.opened(
            RunHeader(options.name, options.run_folder, options.num_stages, self.address, options.start_step)
        )
        self._context.tell_phase(self._gathering.missing)

    def _close(self) -> None:
        ending = self._state.ending
        done = self._training.steps_done if self._training else self._context.options.start_step
        self._context.tell_phase("")
        self._context.observer.ended(
            RunEnd(ending.exit_status, ending.message, done, self._num_steps, self._state.last_snapshot)
        )


HANDLERS: Mapping[type[Message], Callable[[Coordinator, bytes, Any], None]] = {
    Join: Coordinator._on_join,
    Hello: Coordinator._on_hello,
    Ready: Coordinator._on_ready,
    Prepare: Coordinator._on_prepare,
    Evaluated: Coordinator._on_evaluated,
    Snapshotted: Coordinator._on_snapshotted,
    ComputeMeasured: Coordinator._on_compute_measured,
    PathsMeasured: Coordinator._on_paths_measured,
    Traced: Coordinator._on_traced,
    LinkState: Coordinator._on_link_state,
    StopRequest: Coordinator._on_stop_request,
    Failed: Coordinator._on_failed,
    Heartbeat: Coordinator._on_heartbeat,
}


def signal_name(number: int) -> str:
    """``SIGINT`` for 2; ``signal 99`` for what is none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
