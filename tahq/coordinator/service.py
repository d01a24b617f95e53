"""The coordinator at work: polls its socket, has each message answered, watches the clock, ends the run.

Everything that decides is in the pure cores (`membership`, `plan`, `commit`, `reports`, `run_state`,
`watch`). One thread; `request_stop` alone may be called from elsewhere (a signal handler).
"""

import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from tahq.comm.control.channel import ControlServer
from tahq.comm.control.measuring import ComputeMeasured, PathsMeasured
from tahq.comm.control.messages import (
    Copied,
    Evaluated,
    Failed,
    Heartbeat,
    Hello,
    Join,
    LinkState,
    Message,
    NotKept,
    Prepare,
    Ready,
    Rejoin,
    Relinked,
    Snapshotted,
    Start,
    StopRequest,
    Traced,
)
from tahq.comm.topology import link_ends
from tahq.coordinator.context import RunContext
from tahq.coordinator.copies import Copies
from tahq.coordinator.disk_room import WaitForRoom
from tahq.coordinator.ending import RunEnding
from tahq.coordinator.gathering import Gathering
from tahq.coordinator.journal import Journal
from tahq.coordinator.measuring import Measuring
from tahq.coordinator.membership import Membership, Standing
from tahq.coordinator.observer import RunEnd, RunHeader, RunObserver
from tahq.coordinator.options import CoordinatorOptions
from tahq.coordinator.publisher import Publish, SnapshotPublisher
from tahq.coordinator.publishing import Publishing
from tahq.coordinator.recovery import Recovery, RestorePoint
from tahq.coordinator.returning import Restart, Returning
from tahq.coordinator.run_journal import RunJournal
from tahq.coordinator.run_state import Ending, Event, Phase, RunState
from tahq.coordinator.spares import Spares
from tahq.coordinator.training import Training
from tahq.coordinator.watch import check_exits, check_waiting, silence
from tahq.errors import (
    LocalProtocolError,
    PeerLostError,
    RemoteProtocolError,
    TahqError,
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
        executor: runs `publish`, one call after the other; None: in a thread.
        measuring: what is done in place of a run, once all are there; `options.is_measuring` tells the workers.
        journal: remembers what this coordinator decides, for the one that may have to come after it; and what the one
            before has decided, if the options are of that run.
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        membership = Membership(options.num_stages, options.version, options.config_hash, options.hosts)
        self._state = RunState(clock(), options.start_step if options.snapshot else None)
        recovery = recovery_of(options)
        copies = Copies(
            is_on=options.copies > 0,
            within_host=options.copies_within_host,
            num_stages=options.num_stages,
            base=recovery.base,
        )
        self._context = RunContext(
            options, server, observer, clock, membership, self._state, recovery, copies, Spares()
        )
        self._gathering = Gathering(self._context)
        self.restart: Restart | None = None
        """Starts a stage's worker again; None: nobody here can."""
        self._do_beside: Callable[[], None] = lambda: None
        self._room = WaitForRoom(self._context, self._attend, self._dispatch)
        self._journal = journal
        self._kept = RunJournal(journal, self._context, self._room)
        self._holders = self._kept.holders()
        self._returning = Returning(self._context, self._gathering, self._restart, self._kept.note_epoch, self._forget)
        self._ending = RunEnding(self._context)
        self._silent: set[int] = set()
        """Stages that have given no sign of life for a while."""
        self._training: Training | None = None
        self._publishing = Publishing(publish or SnapshotPublisher(options), executor)
        self._measuring = measuring
        self._num_steps = 0
        self._next_tick_s = clock()

    @property
    def address(self) -> str:
        """host:port that workers dial."""
        return self._context.server.address

    def request_stop(self, signal_number: int) -> None:
        """Ask the run to stop: in order the first time, at once the second. Safe in a signal handler."""
        self._ending.request(signal_number)

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
        self._do_beside = tick
        self._open()
        try:
            self._lead(tick)
            self._let_leave(tick)
            self._kept.note_end()
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
            self._ending.abort(error.exit_status, str(error))
        except BaseException as error:
            self._ending.abort(1, f"the coordinator failed: {error!r}")
            raise

    def _turn(self, tick: Callable[[], None]) -> None:
        # taken before the poll: if this process was held up, signs of life wait in the socket
        polled_s = self._context.clock()
        for identity, message in self._room.take() or self._context.server.poll(POLL_S):
            self._dispatch(identity, message)
        for refused in self._context.server.take_refused():
            self._context.observer.warned(refused)
        if self._state.phase is not Phase.OVER:
            self._tick(tick)
            self._ending.take_requests()
            self._check_timers(polled_s)
        if self._training is not None and self._training.settle_published():
            self._ending.finish_if_nothing_is_owed()

    def _attend(self) -> None:
        """What goes on while the journal waits for room."""
        self._tick(self._do_beside)
        self._ending.take_requests()
        self._ending.check_grace()

    def _tick(self, tick: Callable[[], None]) -> None:
        now_s = self._context.clock()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + POLL_S
            tick()

    def _dispatch(self, identity: bytes, message: Message) -> None:
        if self._state.phase is Phase.OVER:
            return
        member = self._context.membership.find(identity)
        if member is None and not isinstance(message, Join | Rejoin | Heartbeat):
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

    def _check_timers(self, polled_s: float) -> None:
        context, options = self._context, self._context.options
        step = self._training.steps_done if self._training and self._state.phase is Phase.TRAINING else None
        for stage in self._returning.given:
            self._state.forget_exit(stage)
        killed = check_exits(self._state, context.membership, self._gathering.refusals, context.clock(), step)
        for stage, why in killed.items():
            self._state.forget_exit(stage)
            self._lose(stage, why)
        self._check_silence(polled_s, step)
        self._gathering.lose_silent_spares(polled_s - max(options.peer_timeout_s, options.give_up_s / 2))
        self._returning.give_to_spares()
        self._returning.check_waiting(options.give_up_s)
        check_waiting(self._state, context.membership, polled_s, options.join_timeout_s, self.address)
        self._ending.check_grace()

    def _check_silence(self, polled_s: float, step: int | None) -> None:
        options, membership = self._context.options, self._context.membership
        silent = {member.stage: member for member in membership.silent(polled_s - options.peer_timeout_s)}
        if self._state.phase is Phase.JOINING:
            for member in silent.values():
                self._gathering.lose(member)
            return
        for stage in silent.keys() - self._silent:
            self._context.observer.warned(silence(silent[stage], options.peer_timeout_s, step))
        for member in filter(None, map(membership.at, self._silent - silent.keys())):
            self._context.observer.warned(f"{member.name} gives signs of life again")
        self._silent = set(silent)
        lost_s = max(options.peer_timeout_s, options.give_up_s / 2)
        for member in membership.silent(polled_s - lost_s):
            self._lose(member.stage, silence(member, lost_s, step), is_silent=True)

    def _restart(self, stage: int) -> bool:
        return self.restart is not None and self.restart(stage)

    def _forget(self, stage: int) -> None:
        if self._training is not None:
            self._training.lose(stage)

    def _lose(self, stage: int, why: str, *, is_replaced: bool = False, is_silent: bool = False) -> None:
        if self._measuring is not None:
            raise PeerLostError(why)
        self._forget(stage)
        self._silent.discard(stage)
        self._kept.note_lost(stage)
        self._returning.lose(stage, why, is_replaced=is_replaced, is_silent=is_silent)

    # -- messages --------------------------------------------------------------------------------

    def _on_join(self, identity: bytes, join: Join) -> None:
        is_wanted = 0 <= join.stage < self._context.options.num_stages and (
            self._context.membership.at(join.stage) is None
        )
        if join.spare and self._measuring is None and not is_wanted:
            self._gathering.admit_spare(identity, join)
            return
        if join.spare and join.stage not in self._returning.given:
            join = replace(join, spare=False)  # it is on its own host
        replaced = self._context.membership.replaced_by(identity, join)
        if replaced is not None:
            reason = "a person takes its stage over" if join.takeover else "it was started again"
            self._lose(replaced.stage, f"{replaced.name}: {reason}", is_replaced=True)
        self._gathering.join(identity, join)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        is_complete = self._gathering.hello(identity, hello)
        if self._state.phase is not Phase.JOINING:
            self._returning.greeted()
            if self._training is not None:
                self._training.settle_copies()
            return
        if not is_complete:
            return
        if self._measuring is not None:
            self._context.advance(Event.ALL_THERE)
            self._measuring.begin(self._context)
            return
        self._num_steps = self._gathering.num_steps()
        if self._context.options.start_step >= self._num_steps:
            self._ending.say_bye(Event.ENDED, Ending(0, f"nothing to do: all {self._num_steps} steps were done before"))
        else:
            self._returning.num_steps = self._num_steps
            self._kept.begin(self._num_steps, *self._gathering.data_position(self._context.options.start_step))
            self._gathering.plan(self._num_steps)

    def _on_ready(self, identity: bytes, ready: Ready) -> None:
        is_complete = self._gathering.ready(identity, ready)
        self._kept.note_holder(ready.stage)
        if self._training is not None:
            self._context.copies.began(ready.stage, self._context.recovery.position(ready.stage))
            self._returning.ready(ready.stage)
            self._training.settle_copies()
        elif is_complete:
            self._begin_training()
            codecs = [list(row) for row in self._context.recovery.base.codecs]
            self._context.broadcast(Start(self._context.options.start_step, codecs))
            self._begun().settle_copies()

    def _begin_training(self) -> None:
        self._training = Training(self._context, self._num_steps, self._publishing, self._journal)
        self._ending.training = self._training
        for member in self._context.copies.uncopied(self._context.membership.members):
            self._context.observer.warned(
                f"{member.name} only dials out, so nobody can have a copy of its snapshots: if its host is lost with "
                "its disk, so is the run"
            )
        self._returning.begin()
        self._context.advance(Event.ALL_READY)
        if self._training.is_decided:
            self._context.advance(Event.LAST_COMMIT, self._training.owed)

    def _on_rejoin(self, identity: bytes, rejoin: Rejoin) -> None:
        holder = self._holders.get(rejoin.stage) if rejoin.run_id == self._context.options.run_id else None
        if not self._gathering.answer_rejoin(identity, holder):
            return
        if self._training is None:
            self._go_on()
        self._context.recovery.rejoined(rejoin.stage, rejoin.step)
        self._context.observer.warned(f"{self._context.membership.name(rejoin.stage)} goes on where it was")
        self._returning.rejoined(rejoin.stage)
        self._begun().settle_copies()
        self._ending.finish_if_nothing_is_owed()

    def _go_on(self) -> None:
        """A worker of the coordinator before this one lives: the run goes on where it is, whoever else comes."""
        options = self._context.options
        self._num_steps = self._returning.num_steps = self._kept.num_steps
        self._context.observer.planned(options.start_step, self._num_steps)
        self._context.advance(Event.ALL_GREETED)
        self._begin_training()
        for stage in range(options.num_stages):
            self._returning.wait_for(stage)

    def _on_relinked(self, identity: bytes, relinked: Relinked) -> None:
        self._returning.relinked(identity, relinked)

    def _on_prepare(self, identity: bytes, prepare: Prepare) -> None:
        training = self._begun()
        if training.is_again(prepare):
            training.prepare_again(identity, prepare)
            self._returning.prepared_again(prepare.stage)
        else:
            training.prepare(identity, prepare)

    def _on_evaluated(self, identity: bytes, evaluated: Evaluated) -> None:
        self._begun().evaluated(identity, evaluated)
        self._ending.finish_if_nothing_is_owed()

    def _on_snapshotted(self, identity: bytes, part: Snapshotted) -> None:
        self._begun().snapshotted(identity, part)
        self._ending.finish_if_nothing_is_owed()

    def _on_copied(self, identity: bytes, copied: Copied) -> None:
        self._begun().copied(identity, copied)

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
        self._returning.link_state(member.name, state)
        link = f"link {state.link} to stage {state.peer_stage}"
        if state.reason:
            self._context.observer.warned(f"{member.name}: {link} is degraded: {state.reason}")
        else:
            again = f"; {state.num_sent_again} messages were sent again so far" if state.num_sent_again else ""
            self._context.observer.warned(f"{member.name}: {link} works again after {state.lasted_s:.1f} s{again}")

    def _on_not_kept(self, identity: bytes, unkept: NotKept) -> None:
        member = self._context.membership.claim(identity, unkept.stage)
        self._context.observer.warned(
            f"{member.name}: what it sends on link {unkept.link} is not kept until the next snapshot is complete: "
            f"{unkept.reason}; training goes on, and if a worker dies before that, all stages go back to the last one"
        )

    def _on_stop_request(self, identity: bytes, request: StopRequest) -> None:
        member = self._context.membership.claim(identity, request.stage)
        if request.signal_number not in signal.valid_signals():
            raise RemoteProtocolError(f"{member.name} got signal {request.signal_number}, it says, which is none")
        self._ending.stop(request.signal_number, member.name)

    def _on_failed(self, identity: bytes, failed: Failed) -> None:
        member = self._context.membership.claim(identity, failed.stage)
        if (
            self._training is not None
            and member.stage in self._returning.given
            and member.standing is not Standing.READY
        ):
            self._lose(member.stage, f"{member.name}: {failed.message}", is_silent=True)  # another spare may be able to
            return
        self._context.membership.leave(member.stage)
        self._ending.abort(
            failed.exit_status if 0 < failed.exit_status < 256 else 1, f"{member.name}: {failed.message}"
        )

    def _on_heartbeat(self, identity: bytes, heartbeat: Heartbeat) -> None:
        member = self._context.membership.doing(identity, heartbeat)
        if member is not None:
            self._context.tell_stage(member)
        else:
            self._context.spares.seen(identity, self._context.clock())
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

    def _finish_if_all_is_measured(self) -> None:
        if self._measures().is_finished:
            failures = self._measures().measured.failures
            ending = Ending(PeerLostError.exit_status, failures[0]) if failures else Ending(0)
            self._ending.say_bye(Event.ALL_MEASURED, ending)

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
        self._publishing.close()
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
    Rejoin: Coordinator._on_rejoin,
    Relinked: Coordinator._on_relinked,
    Prepare: Coordinator._on_prepare,
    Evaluated: Coordinator._on_evaluated,
    Snapshotted: Coordinator._on_snapshotted,
    Copied: Coordinator._on_copied,
    ComputeMeasured: Coordinator._on_compute_measured,
    PathsMeasured: Coordinator._on_paths_measured,
    Traced: Coordinator._on_traced,
    LinkState: Coordinator._on_link_state,
    NotKept: Coordinator._on_not_kept,
    StopRequest: Coordinator._on_stop_request,
    Failed: Coordinator._on_failed,
    Heartbeat: Coordinator._on_heartbeat,
}


def recovery_of(options: CoordinatorOptions) -> Recovery:
    """What lost stages come back with when nothing has been computed yet."""
    point = RestorePoint(options.start_step, options.snapshot, dict(options.snapshot_files))
    links = link_ends(options.num_stages, options.tie_link, options.chunks_per_stage)
    return Recovery(point, links, options.num_stages, options.epoch)
