"""The I/O thread of a worker: it owns every data socket, and moves bytes between them, shaping and sessions.

One turn: run what the compute thread has asked for; take what the sockets have; give the sessions
what the downlink releases; fire timers; let the uplink take the sessions' next messages, urgent ones
first and then pieces in the order that the user wants, and put on the sockets what has left it; wait. No call
blocks but that wait, whoever is slow on the other side.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import zmq

from tahq.comm.link.frame import FrameKind, peek_kind
from tahq.comm.link.outbound import Outgoing
from tahq.comm.link.sending_order import next_to_send
from tahq.comm.link.shaping import Downlink, Shaping, Uplink
from tahq.comm.link.spec import LinkSpec
from tahq.comm.link.transitions import End
from tahq.comm.zmq.dialled import Dialled
from tahq.comm.zmq.reception import Arrival, Reception, Wire, take_messages
from tahq.comm.zmq.socket_wait import WaitSet, Waker
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import PeerLostError, RemoteProtocolError, TahqError, UserError

_log = logging.getLogger(__name__)

_MESSAGES_A_TURN = 64
_HANDLING_S = 0.0006
"""What a message spends in threads and sockets at both ends, which is part of the delay that a user sets. Measured
as what a set delay was exceeded by, 0.8 to 1.2 ms on two slow cores, less some for faster ones (bench_links.py)."""
_SOCKET_LINGER_MS = 250
"""For what the kernel has not taken when a socket is closed; by then the peer has acknowledged the data."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A link that is degraded, and why; or that is as before, if `reason` is empty."""

    spec: LinkSpec
    reason: str
    lasted_s: float = 0.0
    num_sent_again: int = 0

    def __str__(self) -> str:
        if self.reason:
            return f"{self.spec}: degraded: {self.reason}"
        again = f"{self.num_sent_again} messages were sent again from here so far"
        return f"{self.spec}: connected again after {self.lasted_s:.1f} s; {again}"


OnTrouble = Callable[[Trouble], None]
"""Told in the I/O thread."""


class EndpointLoop:
    """The body of the I/O thread; only `submit`, `open` and `stop` are called from elsewhere."""

    def __init__(self, reception: Reception | None, shaping: Shaping, on_trouble: OnTrouble | None = None) -> None:
        self._on_trouble = on_trouble
        self._reception = reception
        held_s = max(0.0, shaping.delay_s - _HANDLING_S)
        self._uplink: Uplink[tuple[Wire, Outgoing]] = Uplink(replace(shaping, delay_s=held_s))
        self._downlink: Downlink[Arrival] = Downlink(shaping)
        self._waker = Waker()
        self._commands: deque[tuple[LinkEnd | None, Callable[[], None]]] = deque()
        self._wires: list[Wire] = []
        self._dialled: list[Dialled] = []
        self._wait_set = WaitSet(self._waker)
        if reception is not None:
            for socket in (reception.router, *reception.gate.sockets):
                self._wait_set.add(socket)
        self._resume_s: float | None = None
        self._is_stopped = False

    # Called from other threads

    def submit(self, end: LinkEnd | None, action: Callable[[], None], urgent: bool = True) -> None:
        """Have the I/O thread do this; an error of tahq's that it raises fails the link.

        What is not urgent is done when the thread next wakes, before it looks at what has come.
        """
        self._commands.append((end, action))
        if urgent:
            self._waker.wake()

    def open(self, end: LinkEnd, dealers: list[Dialled]) -> None:
        """Take over a link, with its connections if it is dialled from here, else none."""
        if not dealers and self._reception is None:
            raise UserError(f"{end.spec}: nothing listens here for the peer to dial; set the host's `bind`")
        self.submit(end, partial(self._open, end, dealers))

    def relink(self, end: LinkEnd, dealers: list[Dialled], switch: Callable[[], None]) -> None:
        """Have another process at the other end of a link, which is dialled with these, or else dials.

        `switch` is called between the two, in the I/O thread.
        """
        self.submit(end, partial(self._relink, end, dealers, switch))

    def stop(self) -> None:
        """End the thread's body, and release the sockets."""
        self.submit(None, self._stop)

    # The thread

    def run(self) -> None:
        """Turn until stopped; whatever goes wrong reaches everyone who waits."""
        try:
            while not self._is_stopped:
                self._turn()
        except Exception as error:
            _log.exception("the I/O thread has failed")
            for wire in self._wires:
                self._give_up(wire.end, TahqError(f"{wire.end.spec}: the I/O thread has failed: {error!r}"))
        finally:
            self._release()

    def _turn(self) -> None:
        self._waker.clear()
        self._run_commands()
        self._shake_hands()
        self._receive()
        self._hand_over()
        self._handle_timers()
        self._note_trouble()
        self._transmit()
        self._note_flushed()
        if not self._commands and not self._is_stopped:
            self._wait_set.wait(self._timeout_s())

    def _run_commands(self) -> None:
        while self._commands:
            self._guard(*self._commands.popleft())

    def _guard(self, end: LinkEnd | None, action: Callable[[], None]) -> None:
        try:
            action()
        except TahqError as error:
            if end is None:
                raise
            self._fail(end, error)
        if end is not None:
            self._publish(end)

    def _timeout_s(self) -> float | None:
        times = [wire.end.session.next_timer_s() for wire in self._wires]
        times += [self._uplink.next_s(), self._downlink.next_s(), self._resume_s]
        times += [dialled.redial_s for dialled in self._dialled]
        times += [self._reception.gate.next_s] if self._reception is not None else []
        known = [time_s for time_s in times if time_s is not None]
        return min(known) - time.monotonic() if known else None

    def _stop(self) -> None:
        self._is_stopped = True

    def _release(self) -> None:
        self._wait_set.close(_SOCKET_LINGER_MS)
        self._waker.close()
        for wire in self._wires:
            wire.end.flushed.set()

    # Links

    def _shake_hands(self) -> None:
        """Let in who may come in, and see who has let us in."""
        if self._reception is not None:
            self._reception.gate.serve()
        for dialled in self._dialled:
            dialled.look()

    def _open(self, end: LinkEnd, dealers: list[Dialled]) -> None:
        if dealers:
            for dealer in dealers:
                self._wait_set.add(dealer.socket)
                self._wait_set.add(dealer.events)
            self._dialled += dealers
            self._wires.append(Wire(end, [dealer.socket for dealer in dealers], is_dialled=True, routes=[]))
        elif self._reception is not None:
            count = end.session.num_connections
            wire = Wire(end, [self._reception.router] * count, is_dialled=False, routes=[None] * count)
            self._wires.append(wire)
            for arrival in self._reception.open(wire):
                self._arrive(arrival)

    def _relink(self, end: LinkEnd, dealers: list[Dialled], switch: Callable[[], None]) -> None:
        self._close(next(wire for wire in self._wires if wire.end is end))
        switch()
        self._open(end, dealers)

    def _close(self, wire: Wire) -> None:
        self._wires.remove(wire)
        if wire.is_dialled:
            for dialled in [dialled for dialled in self._dialled if dialled.socket in wire.sockets]:
                self._dialled.remove(dialled)
                self._wait_set.remove(dialled.socket)
                self._wait_set.remove(dialled.events)
                dialled.close()
        elif self._reception is not None:
            self._reception.close(wire)

    def _publish(self, end: LinkEnd) -> None:
        for frame in end.session.take_delivered():
            end.inbox.put(frame)
        if end.session.remote is not End.CONNECTING and not end.met.is_set():
            end.met.set()
        if end.session.remote is End.CLOSED and end.inbox.error is None:
            end.inbox.fail(PeerLostError(f"{end.spec}: the peer has closed it; nothing more will come"))

    def _fail(self, end: LinkEnd, error: TahqError) -> None:
        if end.inbox.error is None:
            _log.warning("%s", error)
        for frame in end.session.take_delivered():
            end.inbox.put(frame)
        self._give_up(end, error)
        end.session.close(time.monotonic(), reason=str(error))

    def _give_up(self, end: LinkEnd, error: TahqError) -> None:
        end.inbox.fail(error)
        end.met.set()

    def _note_flushed(self) -> None:
        for wire in self._wires:
            if wire.in_transit == 0 and wire.end.session.is_settled:
                wire.end.flushed.set()

    def _handle_timers(self) -> None:
        now_s = time.monotonic()
        for wire in self._wires:
            due_s = wire.end.session.next_timer_s()
            if due_s is not None and due_s <= now_s:
                self._guard(wire.end, partial(wire.end.session.handle_timer, now_s))

    def _note_trouble(self) -> None:
        """Tell once when a link becomes degraded, and when it is as before."""
        now_s = time.monotonic()
        for wire in self._wires:
            reason = wire.end.session.trouble(now_s)
            if reason and wire.degraded_s is None:
                wire.degraded_s = now_s
                self._tell(Trouble(wire.end.spec, reason))
            elif not reason and wire.degraded_s is not None:
                lasted_s, wire.degraded_s = now_s - wire.degraded_s, None
                if wire.end.session.remote is End.OPEN:
                    self._tell(Trouble(wire.end.spec, "", lasted_s, wire.end.session.outbound.num_again))

    def _tell(self, trouble: Trouble) -> None:
        _log.warning("%s", trouble)
        if self._on_trouble is not None:
            self._on_trouble(trouble)

    # In

    def _receive(self) -> None:
        for wire in self._wires:
            for connection, dealer in enumerate(wire.sockets if wire.is_dialled else ()):
                for parts in take_messages(dealer, _MESSAGES_A_TURN):
                    self._arrive_from(wire, connection, parts)
        if self._reception is not None:
            for route, *parts in take_messages(self._reception.router, _MESSAGES_A_TURN):
                self._reception.gate.know(route)
                self._receive_routed(self._reception, route.bytes, parts)

    def _receive_routed(self, reception: Reception, route: bytes, parts: list[zmq.Frame]) -> None:
        known = reception.wire_of(route)
        if known is not None:
            self._arrive_from(*known, parts)
        elif (arrival := reception.sort(route, parts)) is not None:
            self._arrive(arrival)

    def _arrive_from(self, wire: Wire, connection: int, parts: list[zmq.Frame]) -> None:
        if len(parts) == 2:
            self._arrive(Arrival(wire, connection, *parts))
        else:
            self._fail(wire.end, RemoteProtocolError(f"{wire.end.spec}: sent {len(parts)} message parts; expected 2"))

    def _arrive(self, arrival: Arrival) -> None:
        now_s = time.monotonic()
        arrival.wire.end.session.heard(now_s, arrival.connection)
        # An acknowledgement says nothing about what it overtakes; all else keeps its place.
        if peek_kind(arrival.header.buffer) == FrameKind.ACK:
            self._take_in(arrival)
        else:
            self._downlink.receive(arrival, arrival.nbytes, now_s)

    def _hand_over(self) -> None:
        for arrival in self._downlink.take_due(time.monotonic()):
            self._take_in(arrival)

    def _take_in(self, arrival: Arrival) -> None:
        end, header, payload = arrival.wire.end, arrival.header.buffer, arrival.payload.buffer
        receive = partial(end.session.receive, header, payload, time.monotonic(), arrival.connection)
        self._guard(end, receive)

    # Out

    def _transmit(self) -> None:
        now_s = time.monotonic()
        self._resume_s = now_s
        for _ in range(_MESSAGES_A_TURN):
            if not self._uplink.is_free(now_s):
                self._resume_s = self._uplink.free_s
                break
            if not self._enter_next(now_s):
                self._resume_s = None
                break
        for wire, outgoing in self._uplink.take_due(now_s):
            self._put(wire, outgoing)

    def _enter_next(self, now_s: float) -> bool:
        for wire in self._wires:
            if (urgent := wire.end.session.next_urgent(now_s)) is not None:
                return self._enter(wire, urgent, now_s)
        first = next_to_send((wire.end.session.next_rank, wire) for wire in self._wires)
        piece = None if first is None else first.end.session.next_piece(now_s)
        return first is not None and piece is not None and self._enter(first, piece, now_s)

    def _enter(self, wire: Wire, outgoing: Outgoing, now_s: float) -> bool:
        wire.in_transit += 1
        self._uplink.send((wire, outgoing), outgoing.nbytes, outgoing.ready_s, now_s)
        return True

    def _put(self, wire: Wire, outgoing: Outgoing) -> None:
        wire.in_transit -= 1
        try:
            wire.put(outgoing)
        except zmq.ZMQError as error:
            # Its connection is down at the moment, or replaced; the session will notice what is missing.
            _log.debug("%s: nothing can be put on the socket: %s", wire.end.spec, error)
