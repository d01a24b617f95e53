"""The coordinator: polls its socket, has each message answered, watches the clock, ends the run.

The state is in two objects, `Seats` (a row per stage) and `RunState`. Functions over them decide how to react to an
event (`gathering`, `recovery`, `copies`, `steps`); `Seating` and `Training` carry it out. One thread; `request_stop`
alone may be called from elsewhere (a signal handler).
"""

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from typing import Any

from tahq.comm.control.members import Admission
from tahq.comm.control.messages import (
    OWNER,
    Abort,
    Bye,
    ComputeMeasured,
    Copied,
    Evaluated,
    Failed,
    FindFiles,
    Heartbeat,
    Hello,
    Join,
    LinkState,
    Message,
    NoCheckpoint,
    NotKept,
    PathsMeasured,
    Prepare,
    ReadRun,
    Ready,
    Refuse,
    Rejoin,
    Relinked,
    Snapshotted,
    StartOver,
    StopRequest,
    Traced,
    Tried,
)
from tahq.comm.control.server import ControlServer
from tahq.comm.relay.process import Relay
from tahq.coordinator import copies, recovery
from tahq.coordinator.context import MAX_TEXT_LENGTH, CoordinatorOptions, RunContext
from tahq.coordinator.joining import gathering, reaching
from tahq.coordinator.joining.seating import Restart, Seating
from tahq.coordinator.joining.seats import ProcessExit, RestorePoint, Seat, SeatPhase, Seats
from tahq.coordinator.journal import Journal, NotWrittenError
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver
from tahq.coordinator.owner import file_places, run_lines
from tahq.coordinator.run_state import WITH_STEPS, Ending, RunEvent, RunPhase, RunState, signal_name
from tahq.coordinator.training import Publish, Training
from tahq.errors import (
    InterruptedRunError,
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    SnapshotError,
    TahqError,
    UserError,
    brief,
)

FAILURES = frozenset({1, 2, 3, 4, 5, 130, 143})
"""Exit statuses of a run that fails."""
POLL_S = 0.1
"""Longest wait for a message, and so the longest that a signal or a dead child goes unnoticed."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 5.0
"""Between attempts to write to a journal that has no room or is locked."""


Collect = Callable[[Callable[[], bool]], Iterator[str]]
"""(whether it is still wanted) -> the progress in words, until all is fetched or has failed."""


class Coordinator:
    """Gathers the workers of a run and leads them through it.

    Args:
        options: the run.
        server: bound already; used by the thread of `run` only, closed by its creator.
        observer: told what happens.
        publish: makes a complete checkpoint the newest; None: as files under the run's folder.
        executor: runs `publish`, one call after the other; None: in a thread.
        measuring: what to do instead of a run once all workers are there; `options.is_measuring` tells the workers.
        journal: keeps this coordinator's decisions for its successor; one of the same run is continued.
        relay: for links whose ends cannot dial each other, which `close` ends; None: there is none.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        options: CoordinatorOptions,
        server: ControlServer,
        observer: RunObserver,
        *,
        publish: Publish | None = None,
        executor: Executor | None = None,
        measuring: Measuring | None = None,
        journal: Journal | None = None,
        relay: Relay | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.restart: Restart | None = None
        """Starts a stage's worker again; None: workers are not started from here."""
        self.admission: Admission | None = None
        """Admits more keys while the run goes on; None: those of its start are all."""
        self.collect: Collect | None = None
        """Fetches checkpoint files before the workers leave in order; None: the files stay where they are."""
        self._collecting: Iterator[str] | None = None
        self._is_collecting_wanted = True
        files, saved = dict(options.snapshot_files), options.codecs.saved
        origin = RestorePoint(options.start_step, options.snapshot, files, saved_codecs=saved)
        self._run = RunState(origin, clock(), options.epoch, options.next_sample)
        self._seats = Seats(options.num_stages, origin, clock(), options.replicas)
        self._ctx = RunContext(options, self._run, self._seats, server, observer, journal or Journal(), clock, relay)
        self._ctx.journal.wait = self._wait_for_journal
        self._training = Training(self._ctx, publish, executor)
        self._seating = Seating(
            self._ctx,
            lambda stage: self.restart is not None and self.restart(stage),
            lambda: self._training.settle_published(wait=True),
        )
        self._measuring = measuring
        self._tick_beside: Callable[[], None] = lambda: None
        self._next_tick_s = clock()
        self._heard: list[tuple[bytes, Message]] = []
        """Messages that came while the journal could not be written."""
        self._signals: deque[int] = deque()
        """Received by this process, not handled yet."""
        self._num_signals = 0
        self._leave_by_s = math.inf
        self._handlers: Mapping[type[Message], Callable[[Seat, Any], None]] = {
            Hello: self._on_hello,
            Tried: self._on_tried,
            Ready: self._on_ready,
            Relinked: self._seating.relinked,
            Prepare: self._on_prepare,
            Evaluated: self._training.evaluated,
            Snapshotted: self._training.snapshotted,
            Copied: self._training.copied,
            Traced: self._training.traced,
            LinkState: self._on_link_state,
            NotKept: self._on_not_kept,
            NoCheckpoint: self._on_no_checkpoint,
            ComputeMeasured: self._on_measured,
            PathsMeasured: self._on_measured,
            StopRequest: self._on_stop_request,
            Failed: self._on_failed,
        }
        """By the type of message, for the workers that hold a stage."""

    @property
    def address(self) -> str:
        """host:port that workers dial."""
        return self._ctx.server.address

    def warn(self, text: str) -> None:
        """Tell the user; the run's events keep it."""
        self._ctx.warn(text)

    def request_stop(self, signal_number: int) -> None:
        """Ask the run to stop: in order the first time, at once the second. Safe in a signal handler."""
        self._signals.append(signal_number)

    def worker_exited(self, stage: int, status: int, last_words: str = "") -> None:
        """Note that a stage's process has ended (negative status: killed by that signal); called from `tick`.

        The worker's own last messages are read first; `last_words` is the end of its log, in case there are none.
        """
        if self._seats[stage].exit is None:
            self._seats[stage].exit = ProcessExit(status, self._ctx.clock(), last_words)

    def run(self, tick: Callable[[], None]) -> int:
        """Lead the run to its end; returns its exit status: 0 done, 128 + signal interrupted, else as in errors.py.

        `tick` is called about ten times a second, for the other work of this thread.
        """
        self._tick_beside = tick
        ctx, run, options = self._ctx, self._run, self._ctx.options
        ctx.observer.opened(
            RunHeader(options.name, options.run_folder, options.num_stages, self.address, options.start_step)
        )
        ctx.tell_phase()
        try:
            self._lead()
            self._let_leave()
            self._note_end()
        finally:
            self._is_collecting_wanted = False
            self._training.close()
            ctx.tell_phase("")
            end = run.ending
            ctx.observer.ended(RunEnd(end.exit_status, end.message, run.step, run.num_steps, run.last_snapshot))
        return run.ending.exit_status

    def close(self) -> None:
        """End the relay, once the workers have left; safe to call twice."""
        if self._ctx.relay is not None:
            self._ctx.relay.close()

    # -- the loop --------------------------------------------------------------------------------

    def _lead(self) -> None:
        try:
            while self._run.phase is not RunPhase.OVER:
                self._turn()
        except TahqError as error:
            self._abort(error.exit_status, str(error))
        except BaseException as error:
            self._abort(1, f"the coordinator failed: {error!r}")
            raise

    def _turn(self) -> None:
        # taken before the poll: if this process was held up, heartbeats wait in the socket
        polled_s = self._ctx.clock()
        heard, self._heard = self._heard, []
        for identity, message in heard or self._ctx.server.poll(POLL_S):
            self._dispatch(identity, message)
        for refused in self._ctx.server.take_refused():
            can_be = f"; `tahq allow KEY --run {self._ctx.options.run_folder}` admits it"
            self._ctx.warn(refused if self.admission is None else refused + can_be)
        if self.admission is not None:
            self.admission.look()
        if self._run.phase is not RunPhase.OVER:
            self._tick()
            self._take_signals()
            if self._collecting is None:  # else a lost worker matters no more
                self._check_timers(polled_s)
        if self._training.settle_published() or self._collecting is not None:
            self._finish_if_nothing_is_owed()

    def _tick(self) -> None:
        now_s = self._ctx.clock()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + POLL_S
            self._tick_beside()
            if self._ctx.relay is not None and (death := self._ctx.relay.check()):
                self._ctx.warn(death)

    def _dispatch(self, identity: bytes, message: Message) -> None:
        if self._run.phase is RunPhase.OVER or (self.admission and self.admission.takes(identity, message)):
            return
        if isinstance(message, ReadRun | FindFiles) or (isinstance(message, StopRequest) and message.stage == OWNER):
            self._on_owner(identity, message)
            return
        seat = self._seats.find(identity)
        if seat is None and not isinstance(message, Join | Rejoin | Heartbeat):
            self._seating.turn_away(identity, message)
            return
        if seat is not None:
            seat.last_seen_s = self._ctx.clock()
        if self._collecting is not None and isinstance(message, Failed | NoCheckpoint):
            return  # all steps and reports are done without it
        try:
            self._handle(identity, message, seat.name if seat is not None else "a worker without a stage")
        except RemoteProtocolError as error:
            if self._run.phase is not RunPhase.JOINING or seat is None:
                raise
            self._seating.dismiss(seat, Refuse(str(error)))

    def _handle(self, identity: bytes, message: Message, name: str) -> None:
        self._run.check(message, name)
        handler = self._handlers.get(type(message))
        match message:
            case Join():
                self._seating.join(identity, message)
            case Rejoin():
                self._on_rejoin(identity, message)
            case Heartbeat():
                self._on_heartbeat(identity, message)
            case _ if handler is not None:
                handler(self._seats.claim(identity, self._stage_of(message)), message)
            case _:
                raise RemoteProtocolError(f"{name} sent {type(message).__name__}, which only a coordinator sends")
        if isinstance(message, Evaluated | Snapshotted | Rejoin):
            self._finish_if_nothing_is_owed()

    def _stage_of(self, message: Any) -> int:
        if isinstance(message, Evaluated):
            return self._seats.evaluator
        stage: int = message.holder if isinstance(message, Copied) else message.stage
        return stage

    def _check_timers(self, polled_s: float) -> None:
        ctx, run, seats = self._ctx, self._run, self._seats
        for seat in seats:
            if seat.given_to is not None:
                seat.exit = None
        for stage, why in recovery.killed(run, seats, ctx.clock()).items():
            seats[stage].exit = None
            self._seating.lose(stage, why)
        self._check_silence(polled_s)
        self._seating.check_spares(polled_s)
        if self._seating.is_trying:
            self._connect_if_greeted()
        self._training.go_on_without_lost()
        recovery.check_deadlines(ctx.options, run, seats, polled_s, self.address)

    def _check_silence(self, polled_s: float) -> None:
        run, timeout_s = self._run, self._ctx.options.peer_timeout_s
        silent = recovery.silent(self._seats, polled_s - timeout_s)
        if run.phase is RunPhase.JOINING:
            for seat in silent:
                self._seating.free_silent(seat)
            return
        for seat in self._seats.held:
            if seat in silent and not seat.is_silent:
                self._ctx.warn(recovery.silence(run, seat, timeout_s))
            elif seat.is_silent and seat not in silent:
                self._ctx.warn(f"{seat.name} is responding again")
            seat.is_silent = seat in silent
        lost_s = recovery.lost_after_s(self._ctx.options)
        for seat in recovery.silent(self._seats, polled_s - lost_s):
            self._seating.lose(seat.stage, recovery.silence(run, seat, lost_s), is_silent=True)

    def _wait_for_journal(self, write: Callable[[], None], failure: NotWrittenError) -> None:
        """Repeat a write that failed for want of room or a lock; the step that it belongs to is held back.

        Meanwhile signals and processes are handled, heartbeats are noted, and other messages are kept for later.

        Raises:
            SnapshotError: it still fails after `run.give_up`.
        """
        ctx, give_up_s, began_s, pause_s = self._ctx, self._ctx.options.give_up_s, self._ctx.clock(), FIRST_PAUSE_S
        ctx.warn(f"{failure}; training waits for {failure.wanted}, for {give_up_s:.0f} s (run.give_up)")
        is_written = False
        while not is_written:
            left_s = began_s + give_up_s - ctx.clock()
            if left_s <= 0:
                waited = f"waited {give_up_s:.0f} s for {failure.wanted} (run.give_up)"
                raise SnapshotError(f"{failure}; {waited}; resume once it is there")
            until_s = ctx.clock() + min(pause_s, left_s)
            while ctx.clock() < until_s:
                for identity, message in ctx.server.poll(POLL_S):
                    if isinstance(message, Heartbeat):
                        self._dispatch(identity, message)
                    else:
                        self._heard.append((identity, message))
                self._tick()
                self._take_signals()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            try:
                write()
                is_written = True
            except NotWrittenError as error:
                failure = error
        ctx.warn(f"the journal is written after {ctx.clock() - began_s:.1f} s: training goes on")

    # -- joining and coming back -----------------------------------------------------------------

    def _on_hello(self, seat: Seat, hello: Hello) -> None:
        self._seating.hello(seat, hello)
        self._connect_if_greeted()

    def _on_tried(self, seat: Seat, tried: Tried) -> None:
        reaching.note_report(seat, tried)
        self._connect_if_greeted()

    def _connect_if_greeted(self) -> None:
        """Have workers connect once all of them are there."""
        if self._run.phase is not RunPhase.JOINING:
            self._seating.bring_back()
            self._training.settle_copies()
        elif not self._seats.before(SeatPhase.GREETED):
            self._all_greeted()

    def _all_greeted(self) -> None:
        """All workers are there for the first time: measure, or plan the run."""
        ctx, options, run = self._ctx, self._ctx.options, self._run
        if self._measuring is not None:
            ctx.advance(RunEvent.ALL_THERE)
            self._measuring.begin(ctx)
            return
        gathering.note_data(options, run, self._seats)
        if options.start_step >= run.num_steps:
            self._say_bye(RunEvent.ENDED, Ending(0, f"nothing to do: all {run.num_steps} steps are done"))
            return
        if not self._seating.try_links():
            return
        if not ctx.journal.is_of(options.run_id, options.config_hash):
            ctx.journal.begin(gathering.facts(options, run))
        ctx.advance(RunEvent.ALL_GREETED)
        ctx.observer.planned(options.start_step, run.num_steps)
        self._seating.plan()

    def _on_ready(self, seat: Seat, _: Ready) -> None:
        self._seating.ready(seat)
        if self._run.phase in WITH_STEPS:
            copies.began(self._run, seat)
            self._seating.start(seat)
        elif not self._seats.before(SeatPhase.READY):
            self._training.begin()
            self._ctx.broadcast(self._run.base.start)
        self._training.settle_copies()

    def _on_rejoin(self, identity: bytes, rejoin: Rejoin) -> None:
        seat = self._seating.rejoin(identity, rejoin)
        if seat is None:
            return
        if self._run.phase not in WITH_STEPS:
            self._go_on()
        seat.position = rejoin.step
        seat.lost_since_s = seat.spare_from_s = None
        self._ctx.warn(f"{seat.name} continues where it was")
        self._seating.bring_back()
        self._training.settle_copies()

    def _go_on(self) -> None:
        """Continue the previous coordinator's run: one of its workers is alive."""
        run, options = self._run, self._ctx.options
        gathering.note_facts(options, run, self._ctx.journal.facts)
        if self._ctx.relay is not None and self._ctx.journal.facts.has_relay:
            self._ctx.relay.open()
        self._ctx.observer.planned(options.start_step, run.num_steps)
        self._ctx.advance(RunEvent.ALL_GREETED)
        self._training.begin()
        for seat in self._seats:
            self._seating.wait_for(seat)

    # -- a stage's messages ----------------------------------------------------------------------

    def _on_prepare(self, seat: Seat, prepare: Prepare) -> None:
        if self._training.prepare(seat, prepare):
            self._seating.recomputed(seat)

    def _on_link_state(self, seat: Seat, state: LinkState) -> None:
        link = f"link {state.link} to stage {state.peer_stage}"
        self._ctx.observer.link_changed(seat.stage, state.link, state.reason)
        if state.reason:
            seat.degraded[state.link] = f"{seat.name}: {link} is silent"
            self._ctx.warn(f"{seat.name}: {link} is degraded: {state.reason}")
        else:
            seat.degraded.pop(state.link, None)
            again = f"; {state.num_sent_again} messages were sent again so far" if state.num_sent_again else ""
            self._ctx.warn(f"{seat.name}: {link} works again after {state.lasted_s:.1f} s{again}")

    def _on_not_kept(self, seat: Seat, unkept: NotKept) -> None:
        self._ctx.warn(
            f"{seat.name}: frames that it sends on link {unkept.link} are not kept until the next checkpoint is "
            f"complete: {unkept.reason}; training goes on, and if a worker dies before that, all stages go back to the "
            "last checkpoint"
        )

    def _on_no_checkpoint(self, seat: Seat, lacking: NoCheckpoint) -> None:
        why = f"{seat.name}: {lacking.reason}"
        if seat.given_to is not None:
            self._seating.dismiss(seat, Refuse(lacking.reason))
            self._seating.lose(seat.stage, why, is_silent=True)  # another spare may be able to
            return
        try:
            self._training.turn_back()
        except SnapshotError as error:
            raise SnapshotError(f"{why}; {error}") from error
        self._ctx.tell_phase()
        self._seating.start_all_over(why)

    def _on_failed(self, seat: Seat, failed: Failed) -> None:
        why, options = f"{seat.name}: {failed.message}", self._ctx.options
        if self._run.phase in WITH_STEPS and seat.given_to is not None and seat.phase is not SeatPhase.READY:
            self._seating.lose(seat.stage, why, is_silent=True)  # another spare may be able to
            return
        if self._run.phase is RunPhase.JOINING and options.by_invite and failed.exit_status == UserError.exit_status:
            self._seating.dismiss(seat, Refuse(f"{why}; correct that there, then `tahq join`"))
            return
        self._seats.leave(seat.stage, self._ctx.clock(), position=seat.position)
        self._abort(failed.exit_status if failed.exit_status in FAILURES else 1, why)

    def _on_heartbeat(self, identity: bytes, heartbeat: Heartbeat) -> None:
        seat = self._seats.find(identity)
        if seat is not None:
            seat.step, seat.activity = heartbeat.step, heartbeat.activity
            self._ctx.tell_stage(seat)
            return
        if identity in self._seats.spares:
            self._seats.spares[identity].last_seen_s = self._ctx.clock()
        self._seating.remind(identity)

    def _on_measured(self, seat: Seat, figures: ComputeMeasured | PathsMeasured) -> None:
        measuring = self._measuring
        if measuring is None:
            raise LocalProtocolError("this is a run, not a measurement")
        measuring.take(seat, figures)
        if measuring.is_finished:
            failures, ending = measuring.measured.failures, Ending(0)
            if self._ctx.options.join_again is not None:  # the plan avoids paths that failed
                self._let_join_again(self._ctx.options.join_again)
            elif failures:
                ending = Ending(PeerLostError.exit_status, failures[0])
            self._say_bye(RunEvent.ALL_MEASURED, ending)

    def _let_join_again(self, stages: Iterable[int]) -> None:
        """After a measurement: tell those who are needed again, before the others get their BYE."""
        again = StartOver("all hosts have measured")
        for stage in stages:
            self._ctx.send(self._seats[stage], again)
        for identity in self._seats.spares:
            self._ctx.server.send(identity, again)

    def _on_owner(self, identity: bytes, message: ReadRun | FindFiles | StopRequest) -> None:
        server = self._ctx.server
        if not server.is_owner(identity):
            server.send(identity, Refuse("only a process with the coordinator's own key may read or stop the run"))
        elif isinstance(message, ReadRun):
            server.send(identity, run_lines(self._ctx.options.run_folder, message))
        elif isinstance(message, FindFiles):
            try:
                server.send(identity, file_places(self._ctx, message, server.public_key(identity)))
            except UserError as error:
                server.send(identity, Refuse(str(error)))
        else:
            is_now = message.signal_number == signal.SIGTERM
            self.request_stop(signal.SIGTERM if is_now else signal.SIGINT)

    # -- the end ---------------------------------------------------------------------------------

    def _on_stop_request(self, seat: Seat, request: StopRequest) -> None:
        if request.signal_number not in (signal.SIGINT, signal.SIGTERM):
            raise RemoteProtocolError(
                f"{seat.name} reported signal {request.signal_number}; expected SIGINT or SIGTERM"
            )
        self._stop(request.signal_number, seat.name)

    def _take_signals(self) -> None:
        """Stop in order at this process's first signal; InterruptedRunError at the second, or after `run.grace`.

        While files are collected, only that ends.
        """
        if self._collecting is not None:
            self._is_collecting_wanted &= not self._signals and self._ctx.clock() <= self._leave_by_s
            return
        while self._signals:
            number = self._signals.popleft()
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

    def _stop(self, number: int, receiver: str) -> None:
        """Finish the step and stop after a checkpoint; InterruptedRunError if there is no step to finish."""
        run, name = self._run, signal_name(number)
        is_first, run.stop_signal = run.stop_signal is None, run.stop_signal or number
        if run.phase not in WITH_STEPS:
            when = "while measuring" if run.phase is RunPhase.MEASURING else "before the first step"
            raise InterruptedRunError(f"{receiver} got {name} {when}", number)
        if number == signal.SIGTERM:  # after Ctrl-C the user sees the effect, and can press it again
            self._leave_by_s = min(self._leave_by_s, self._ctx.clock() + self._ctx.options.grace_s)
        if is_first and run.phase is RunPhase.TRAINING:
            self._ctx.warn(f"{receiver} got {name}: finishing step {run.step + 1}, then a checkpoint")

    def _finish_if_nothing_is_owed(self) -> None:
        """End the run in order if its last step is decided and every stage has done what is left to do.

        Before the workers leave, their checkpoint files are collected.
        """
        if self._run.phase is not RunPhase.FINISHING or (self._seats.before(SeatPhase.READY) and not self._collecting):
            return
        owed = self._training.owed
        if not owed and self._collecting is None and self.collect is not None and self._run.last_snapshot is not None:
            self._collecting = self.collect(lambda: self._is_collecting_wanted)
        if self._collecting is not None:
            owed = next(self._collecting, "")
        self._ctx.tell_phase(owed)
        if not owed:
            self._say_bye(RunEvent.NOTHING_OWED, self._run.ending_in_order(self._ctx.options.resume_command))

    def _say_bye(self, event: RunEvent, ending: Ending) -> None:
        self._ctx.end(event, ending, Bye(ending.exit_status))

    def _abort(self, exit_status: int, message: str) -> None:
        """End the run at once; the message says how to go on."""
        message = brief(message, MAX_TEXT_LENGTH)
        if self._run.phase in WITH_STEPS:
            self._training.abandon()
            if exit_status != UserError.exit_status:
                message = f"{message}; {self._run.resumable(self._ctx.options.resume_command)}"
        self._ctx.end(RunEvent.ENDED, Ending(exit_status, message), Abort(message, exit_status))

    def _let_leave(self) -> None:
        """Keep the socket going until the workers have left, or should have."""
        until_s = self._ctx.clock() + self._ctx.options.leave_timeout_s
        while self._ctx.clock() < until_s and any(seat.exit is None for seat in self._seats.held):
            self._ctx.server.poll(POLL_S)
            self._tick_beside()

    def _note_end(self) -> None:
        """Mark the run as over, so that no coordinator goes on with it; if that fails, going on would lose nothing."""
        journal = self._ctx.journal
        if not journal.has_run:
            return
        journal.wait = None
        try:
            journal.note(is_over=True)
        except UserError as error:
            self._ctx.warn(f"{error}; the run has ended anyway")
