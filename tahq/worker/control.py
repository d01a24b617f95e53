"""A worker's end of the control channel: joining, messages, and what the coordinator knows of this worker."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from types import FrameType
from typing import TypeVar, overload

from tahq import __version__
from tahq.comm.control.client import ControlClient, ControlHooks
from tahq.comm.control.messages import (
    Abort,
    Assign,
    Bye,
    Join,
    Message,
    Order,
    Refuse,
    Rejoin,
    StandBy,
    StartOver,
    StopRequest,
)
from tahq.comm.link.shaping import Shaping
from tahq.errors import InterruptedRunError, RefusedError, RemoteProtocolError, RunAbortedError, StartOverError
from tahq.worker.place import WorkerOptions

log = logging.getLogger(__name__)
M = TypeVar("M")
N = TypeVar("N")
O = TypeVar("O")  # noqa: E741


class WorkerControl:
    """The control channel of one worker, with its stage and step; the main thread uses it, `send` any thread.

    Args:
        options: from the command line.
        interrupt: ends what the main thread waits for on a link with this error; called in the control thread.
        obey: carries out an order; called in the control thread.
    """

    def __init__(
        self, options: WorkerOptions, interrupt: Callable[[Exception], None], obey: Callable[[Order], None]
    ) -> None:
        self._options = options
        self._interrupt = interrupt
        self._obey = obey
        self._run_id = 0
        self.stage = options.stage
        self.step = -1
        """The step that is being computed, from 0; -1 before the first."""
        self.num_decided: int | None = None
        """Steps whose decisions this worker has; None before it trains."""
        self._client = ControlClient(
            options.peer,
            f"stage {options.stage}" if options.stage >= 0 else "worker",
            shaping=Shaping(),
            peer_timeout_s=10.0,
            heartbeat_s=2.0,
            credentials=options.credentials,
            hooks=ControlHooks(
                on_abort=lambda abort: interrupt(_aborted(abort)),
                on_lost=interrupt,
                on_return=self._on_return,
                on_order=self._on_order,
            ),
        )
        self.send = self._client.send
        self.close = self._client.close

    @property
    def is_aborted(self) -> bool:
        """Whether the coordinator has ended the run."""
        return self._client.aborted is not None

    def check_aborted(self) -> None:
        """Raise RunAbortedError if the coordinator has ended the run."""
        if self._client.aborted is not None:
            raise _aborted(self._client.aborted)

    def working(self, activity: str) -> None:
        """What heartbeats report from now on."""
        self._client.set_activity(self.stage, self.step, activity)

    def join(self) -> Assign | Bye:
        """Ask for a stage and wait for it; Bye: a spare is not needed.

        Raises:
            RefusedError, RunAbortedError, StartOverError, PeerLostError: see `receive`.
        """
        self.working("joining")
        options = self._options
        who = (options.stage, __version__, socket.gethostname(), os.getpid(), options.worker_id, options.takeover)
        self.send(Join(*who, options.spare or options.stands_by))
        while isinstance(reply := self.receive(Assign, StandBy, Bye), StandBy):
            self.working("standing by")
            log.info("standing by, as a spare")
            self.set_timing(Shaping(), reply.peer_timeout_s, reply.give_up_s)
        if isinstance(reply, Assign):
            self.stage, self._run_id = reply.stage, reply.run_id
            log.info("joined %s, as stage %d", options.peer, reply.stage)
        return reply

    def set_timing(self, shaping: Shaping, peer_timeout_s: float, give_up_s: float) -> None:
        """Use the run's shaping and time limits on the control channel."""
        self._client.set_timing(
            shaping=shaping, peer_timeout_s=peer_timeout_s, heartbeat_s=peer_timeout_s / 5, give_up_s=give_up_s
        )

    @overload
    def receive(self, first: type[M], /) -> M: ...

    @overload
    def receive(self, first: type[M], second: type[N], third: type[O] = ..., /) -> M | N | O: ...

    def receive(self, *expected: type) -> object:
        """The next message, which must be of an expected kind.

        Raises:
            RefusedError, RunAbortedError, StartOverError: the coordinator says so.
            PeerLostError: the coordinator is lost.
            RemoteProtocolError: any other message.
        """
        message = self._client.recv()
        if isinstance(message, expected):
            return message
        if isinstance(message, Refuse):
            rows = "; ".join(f"{field}: here {mine}, expected {theirs}" for field, mine, theirs in message.differences)
            raise RefusedError(f"{message.reason}: {rows}" if rows else message.reason)
        if isinstance(message, Abort):
            raise _aborted(message)
        if isinstance(message, StartOver):
            raise StartOverError(message.reason)
        raise RemoteProtocolError(
            f"the coordinator at {self._options.peer} sent {type(message).__name__}, expected "
            f"{' or '.join(kind.__name__ for kind in expected)}; are both the same version of tahq?"
        )

    def _on_order(self, order: Order | StartOver) -> None:
        if isinstance(order, StartOver):
            self._interrupt(StartOverError(order.reason))
        else:
            self._obey(order)

    def _on_return(self) -> Message:
        """The coordinator was restarted: a worker that trains continues, any other starts over."""
        if self.num_decided is None:
            raise StartOverError("the coordinator was started again")
        return Rejoin(self.stage, self._run_id, self.num_decided)


def _aborted(abort: Abort) -> RunAbortedError:
    return RunAbortedError(abort.message, abort.exit_status)


class WorkerSignals:
    """SIGINT and SIGTERM: the first asks for an orderly stop within `grace_s`, the second ends the process at once."""

    def __init__(self, control: WorkerControl) -> None:
        self._control = control
        self._numbers: list[int] = []
        self._is_reported = False
        self.grace_s: float | None = None
        """How long the step and its checkpoint may take after SIGTERM; None: not known yet."""

    def install(self) -> None:
        """Handle the signals here; called by the main thread."""
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGALRM, self._end_grace)

    def report(self) -> None:
        """Ask the coordinator to stop the run, once, if a signal has come."""
        if self._numbers and not self._is_reported:
            self._is_reported = True
            self._control.send(StopRequest(self._control.stage, self._numbers[0]))

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._numbers.append(number)
        if len(self._numbers) > 1 or self._control.step < 0 or self.grace_s is None:
            raise InterruptedRunError(f"stage {self._control.stage} stopped by {signal.Signals(number).name}", number)
        if number == signal.SIGTERM:
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)

    def _end_grace(self, number: int, frame: FrameType | None) -> None:
        """Leave, whatever the main thread is doing or waiting for."""
        raise InterruptedRunError(
            f"stage {self._control.stage} stopped by SIGTERM: step {self._control.step + 1} and its checkpoint took "
            f"longer than run.grace ({self.grace_s:g} s), so they are given up",
            signal.SIGTERM,
        )
