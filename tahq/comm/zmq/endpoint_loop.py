"""The I/O thread of a process: it owns the sockets, and moves bytes between them, shaping and sessions.

One turn: run what other threads have asked for; take what the sockets have; give the sessions what the downlink
releases; fire timers; let the uplink take the sessions' next messages, urgent ones first and then pieces by rank, and
put on the sockets what has left it; wait. No call blocks but that wait, however slow a peer is. Idle sockets and links
cost a turn only a look: each names its next time (`timer_s`, `late_s`, `redial_s`).
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import zmq

from tahq.comm.link.frame import FrameKind, Outgoing, peek_kind
from tahq.comm.link.shaping import Downlink, Shaping, Uplink
from tahq.comm.link.spec import LinkSpec
from tahq.comm.link.transitions import End
from tahq.comm.zmq.dialled import Dialled
from tahq.comm.zmq.reception import Reception
from tahq.comm.zmq.socket_wait import Socket, WaitSet, Waker, take_messages
from tahq.comm.zmq.sockets import peer_key
from tahq.comm.zmq.transport import Arrival, LinkEnd, LinkSockets
from tahq.errors import RemoteProtocolError, TahqError, UserError

_log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 64
_HANDLING_S = 0.0006
"""Time that a message spends in threads and sockets at both ends, part of the delay that a user sets. On two slow
cores a set delay was exceeded by 0.8 to 1.2 ms; faster ones need less (bench_links.py)."""
_SOCKET_LINGER_MS = 250
"""For what the kernel has not taken when a socket is closed; by then the peer has acknowledged the data."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A link that is degraded, and why; or that works again, if `reason` is empty."""

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
"""Called in the I/O thread."""


class EndpointLoop:
    """Moves messages between sockets, shaping and sessions; only `submit`, `open` and `stop` are for other threads.

    Without `reception` nothing listens here. `is_remote`: messages that come in are held for the delay, too, since
    their senders do not shape.
    """

    def __init__(
        self,
        reception: Reception | None,
        shaping: Shaping,
        on_trouble: OnTrouble | None = None,
        *,
        is_remote: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._on_trouble = on_trouble
        self._reception = reception
        self._is_remote = is_remote
        self._uplink: Uplink[tuple[LinkSockets, Outgoing]] = Uplink(shaping)
        self._downlink: Downlink[Arrival] = Downlink(shaping)
        self.reshape(shaping)
        self._waker = Waker()
        self._commands: deque[tuple[LinkEnd | None, Callable[[], None]]] = deque()
        self._wires: list[LinkSockets] = []
        self._dialled: dict[Dialled, LinkEnd] = {}
        self._wait_set = WaitSet(self._waker)
        if reception is not None:
            for socket in reception.gate.sockets:
                self._wait_set.add(socket, reception.gate.serve)
            self._wait_set.add(reception.router, partial(self._receive_routed, reception))
        self._resume_s = math.inf
        self._is_stopped = False

    # Called from other threads

    def submit(self, end: LinkEnd | None, action: Callable[[], None], urgent: bool = True) -> None:
        """Run this in the I/O thread; a TahqError that it raises fails the link.

        An action that is not urgent is done when the thread next wakes, before it looks at what has come.
        """
        self._commands.append((end, action))
        if urgent:
            self._waker.wake()

    def open(self, end: LinkEnd, dealers: list[Dialled]) -> None:
        """Take over a link, with its connections if it is dialled from here, else none."""
        if not end.spec.dials and self._reception is None:
            raise UserError(f"{end.spec}: nothing listens here for the peer to dial; set the host's `bind`")
        self.submit(end, partial(self._open, end, dealers))

    def stop(self) -> None:
        """End the thread's body, and release the sockets."""
        self.submit(None, self._stop)

    # The thread

    def run(self) -> None:
        """Turn until stopped; an error is raised in every thread that waits."""
        try:
            while not self._is_stopped:
                self.step()
                self.wait()
        except Exception as error:
            _log.exception("the I/O thread has failed")
            for wire in self._wires:
                wire.end.give_up(TahqError(f"{wire.end.spec}: the I/O thread has failed: {error!r}"))
        finally:
            self.release()

    def step(self) -> None:
        """Do everything that is due."""
        self._waker.clear()
        while self._commands:
            self._guard(*self._commands.popleft())
        self._wait_set.serve()
        for arrival in self._downlink.take_due(self._clock()):
            self._take_in(arrival)
        self._handle_timers(self._clock())
        self._transmit(self._clock())
        self._note_flushed()

    def wait(self, until_s: float = math.inf) -> None:
        """Wait until something is to be done, at most until `until_s`."""
        if not self._commands and not self._is_stopped:
            self._wait_set.wait(min(until_s, self._next_s()) - self._clock())

    def reshape(self, shaping: Shaping) -> None:
        """Hold messages to other rates and another delay from now on; in the I/O thread."""
        self._uplink.reshape(replace(shaping, delay_s=max(0.0, shaping.delay_s - _HANDLING_S)))
        self._downlink.reshape(shaping)
        self._delay_in_s = shaping.delay_s if self._is_remote else 0.0

    def _guard(self, end: LinkEnd | None, action: Callable[[], None]) -> None:
        try:
            action()
        except TahqError as error:
            if end is None:
                raise
            end.fail(error)
        if end is not None:
            end.publish()

    def _next_s(self) -> float:
        next_s = min(self._uplink.next_s, self._downlink.next_s, self._resume_s)
        for wire in self._wires:
            next_s = min(next_s, wire.end.session.timer_s, wire.late_s)
        for dialled in self._dialled:
            next_s = min(next_s, dialled.redial_s)
        return next_s if self._reception is None else min(next_s, self._reception.gate.next_s)

    def _stop(self) -> None:
        self._is_stopped = True

    def release(self) -> None:
        """Close the sockets; in the I/O thread."""
        self._wait_set.close(_SOCKET_LINGER_MS)
        self._waker.close()
        for wire in self._wires:
            wire.end.flushed.set()

    @property
    def is_idle(self) -> bool:
        """Whether everything that was to go to peers that are connected has gone, and was acknowledged."""
        sessions = [wire.end.session for wire in self._wires]
        return not self._uplink and all(s.outbound.is_settled for s in sessions if s.remote is End.OPEN)

    # Links

    def _open(self, end: LinkEnd, dealers: list[Dialled]) -> None:
        if dealers:
            wire = LinkSockets(end, [dealer.socket for dealer in dealers], True, [], self._clock())
            for connection, dealer in enumerate(dealers):
                self._dialled[dealer] = end
                self._wait_set.add(dealer.events, partial(self._guard, end, dealer.look))
                self._wait_set.add(dealer.socket, partial(self._receive, wire, connection, dealer.socket))
            self._wires.append(wire)
            if end.peer_key and not end.spec.dials and self._reception is not None:
                self._reception.gate.allow(end.peer_key)
        elif self._reception is not None:
            wire, arrivals = self._reception.open(end)
            self._wires.append(wire)
            for arrival in arrivals:
                self._arrive(arrival)

    def relink(self, end: LinkEnd, dealers: list[Dialled], switch: Callable[[], None]) -> None:
        """Have another process at the other end of a link; `switch` is called in between; in the I/O thread."""
        self._close(next(wire for wire in self._wires if wire.end is end))
        switch()
        self._open(end, dealers)

    def leave(self, end: LinkEnd) -> None:
        """Say BYE on a temporary link, and forget it when that has gone; in the I/O thread."""
        end.close("")
        if end.session.remote is End.CONNECTING:
            self.forget(end)

    def forget(self, end: LinkEnd) -> None:
        """Close a link without BYE; in the I/O thread."""
        for wire in [wire for wire in self._wires if wire.end is end]:
            self._close(wire)
            end.flushed.set()

    def _close(self, wire: LinkSockets) -> None:
        self._wires.remove(wire)
        if wire.is_dialled:
            for dialled in [dialled for dialled in self._dialled if dialled.socket in wire.sockets]:
                del self._dialled[dialled]
                self._wait_set.remove(dialled.socket)
                self._wait_set.remove(dialled.events)
                dialled.close(_SOCKET_LINGER_MS if wire.end.is_temporary else 0)
        elif self._reception is not None:
            self._reception.close(wire)

    def _note_flushed(self) -> None:
        for wire in tuple(self._wires):
            session = wire.end.session
            if wire.in_transit > 0:
                continue
            if session.local is End.CLOSED and session.is_settled:
                wire.end.flushed.set()
            if wire.end.is_temporary and session.is_over:
                self.forget(wire.end)

    # Time

    def _handle_timers(self, now_s: float) -> None:
        for wire in self._wires:
            session = wire.end.session
            is_due = session.timer_s <= now_s
            if is_due:
                self._guard(wire.end, partial(session.handle_timer, now_s))
            if is_due or session.is_disturbed or wire.is_degraded:
                self._note_trouble(wire, now_s)
            if wire.late_s <= now_s:
                self._note_lateness(wire, now_s)
        for dialled, end in list(self._dialled.items()):
            if dialled.redial_s <= now_s:
                self._guard(end, dialled.look)
        if self._reception is not None and self._reception.gate.next_s <= now_s:
            self._reception.gate.serve()

    def _note_trouble(self, wire: LinkSockets, now_s: float) -> None:
        """Report a link once when it becomes degraded, and when it works again."""
        session = wire.end.session
        session.is_disturbed = False
        reason = session.trouble(now_s) if wire.end.warns else ""
        if reason and not wire.is_degraded:
            wire.is_degraded, wire.degraded_s = True, now_s
            self._report(Trouble(wire.end.spec, reason))
        elif not reason and wire.is_degraded:
            wire.is_degraded = False
            if session.remote is End.OPEN:
                self._report(Trouble(wire.end.spec, "", now_s - wire.degraded_s, session.outbound.num_again))

    def _report(self, trouble: Trouble) -> None:
        _log.warning("%s", trouble)
        if self._on_trouble is not None:
            self._on_trouble(trouble)

    def _note_lateness(self, wire: LinkSockets, now_s: float) -> None:
        end, waited_s, wire.late_s = wire.end, now_s - wire.opened_s, math.inf
        if not end.warns or end.session.remote is not End.CONNECTING or end.session.local is End.CLOSED:
            return
        addresses = [dialled.address for dialled in self._dialled if dialled.socket in wire.sockets]
        if addresses:
            hint = end.obstacle or "check that the peer runs, and that its address can be reached from here"
            reason = f"cannot reach {addresses[0]} from this host; {hint}"
        else:
            own = self._reception.address if self._reception is not None else "this host"
            reason = f"the peer has not dialled this host; check that it can reach {own}"
        _log.warning("%s: not connected after %.2g s: %s", end.spec, waited_s, reason)

    # In

    def _receive(self, wire: LinkSockets, connection: int, dealer: Socket) -> None:
        for parts in take_messages(dealer, _MESSAGES_PER_TURN):
            self._arrive_from(wire, connection, parts)

    def _receive_routed(self, reception: Reception) -> None:
        for route, *parts in take_messages(reception.router, _MESSAGES_PER_TURN):
            reception.gate.know(route)
            known = reception.wire_of(route.bytes, parts)
            if known is not None:
                self._arrive_from(*known, parts)
            elif (arrival := reception.sort(route.bytes, parts)) is not None:
                self._wires += reception.opened
                reception.opened.clear()
                self._arrive(arrival)

    def _arrive_from(self, wire: LinkSockets, connection: int, parts: list[zmq.Frame]) -> None:
        if wire.is_dialled and not wire.end.spec.dials and peer_key(parts[0]) != wire.end.peer_key:
            _log.warning("%s: dropped a message of a member with another key", wire.end.spec)
        elif len(parts) == 2:
            self._arrive(Arrival(wire, connection, *parts))
        else:
            wire.end.fail(RemoteProtocolError(f"{wire.end.spec}: sent {len(parts)} message parts; expected 2"))

    def _arrive(self, arrival: Arrival) -> None:
        is_held = self._delay_in_s > 0 or self._downlink.is_limited or self._downlink
        # An acknowledgement says nothing about what it overtakes; all else keeps its place.
        if not is_held or peek_kind(arrival.header.buffer) == FrameKind.ACK:
            self._take_in(arrival)
        else:
            now_s = self._clock()
            arrival.wire.end.session.heard(now_s, arrival.connection)
            nbytes = len(arrival.header) + len(arrival.payload)
            self._downlink.receive(arrival, nbytes, now_s + self._delay_in_s)

    def _take_in(self, arrival: Arrival) -> None:
        end = arrival.wire.end
        try:
            end.session.receive(arrival.header.buffer, arrival.payload.buffer, self._clock(), arrival.connection)
        except TahqError as error:
            end.fail(error)
        end.publish()

    # Out

    def _transmit(self, now_s: float) -> None:
        self._resume_s = now_s
        for _ in range(_MESSAGES_PER_TURN):
            if self._uplink.free_s > now_s:
                self._resume_s = self._uplink.free_s
                break
            chosen = self._next_message(now_s)
            if chosen is None:
                self._resume_s = math.inf
                break
            wire, outgoing = chosen
            wire.in_transit += 1
            self._uplink.send(chosen, outgoing.nbytes, outgoing.ready_s, now_s)
        for wire, outgoing in self._uplink.take_due(now_s):
            wire.in_transit -= 1
            try:
                wire.put(outgoing)
            except zmq.ZMQError as error:
                # Its connection is down at the moment, or replaced; the session will notice what is missing.
                _log.debug("%s: nothing can be put on the socket: %s", wire.end.spec, error)

    def _next_message(self, now_s: float) -> tuple[LinkSockets, Outgoing] | None:
        """What enters the uplink next: a session's own message, or the piece with the lowest rank."""
        best, best_rank = None, None
        for wire in self._wires:
            session = wire.end.session
            if session.signals and (urgent := session.next_urgent(now_s)) is not None:
                return wire, urgent
            rank = session.next_rank
            if rank is not None and (best_rank is None or rank < best_rank):
                best, best_rank = wire, rank
        piece = None if best is None else best.end.session.next_piece(now_s)
        return None if best is None or piece is None else (best, piece)
