"""A worker's end of the control channel: its own thread owns the DEALER.

The thread sends heartbeats by itself while the main thread computes, imitates the delay of the link in
both directions, and notices at once what cannot wait until the main thread looks: an Abort, and the
coordinator's silence.
"""

import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import zmq

from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, decode_message, encode_message
from tahq.comm.control.messages import Abort, Bye, Heartbeat, Message, Order, Refuse, StartOver
from tahq.comm.control.numbering import Numbering, coordinator_of
from tahq.comm.control.unheard import Unheard
from tahq.comm.inbox import Inbox
from tahq.comm.keys import Credentials
from tahq.comm.link.shaping import Downlink, Shaping, Uplink
from tahq.comm.zmq.addresses import dial_endpoint
from tahq.comm.zmq.dialled import Dialled, Listener, Outcome, who_listens
from tahq.comm.zmq.socket_wait import Socket, WaitSet, Waker, has_input
from tahq.comm.zmq.sockets import dial_curve, limit_handshakes, replace_silent_connections
from tahq.errors import LocalProtocolError, PeerLostError, RefusedError, RemoteProtocolError, StartOverError, TahqError

_log = logging.getLogger(__name__)
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1000
_SUSPICIOUS_HANG_UPS = 3
_CONVINCING_HANG_UPS = 5
_NEEDS_CURVE = "it uses CURVE; start this worker without --no-curve, and with --coordinator-key"
_HAS_NO_CURVE = (
    "it does not use CURVE; if security.curve is off there and is meant to be, start this worker with --no-curve"
)


@dataclass(frozen=True, slots=True)
class _Timing:
    shaping: Shaping
    peer_timeout_s: float
    heartbeat_s: float
    give_up_s: float


class ControlClient:
    """Sends to and receives from the coordinator; used by one thread beside its own, but for `send`."""

    def __init__(
        self,
        peer: str,
        name: str,
        *,
        shaping: Shaping,
        peer_timeout_s: float,
        heartbeat_s: float,
        connect_timeout_s: float = 60.0,
        credentials: Credentials | None = None,
        on_abort: Callable[[Abort], None] | None = None,
        on_lost: Callable[[TahqError], None] | None = None,
        on_return: Callable[[], Message] | None = None,
        on_order: Callable[[Order | StartOver], None] | None = None,
    ) -> None:
        """Start dialling; returns at once.

        Args:
            peer: host:port of the coordinator.
            name: what the coordinator's log calls this worker.
            shaping: delay and rate of this host's connection, imitated here for both directions.
            peer_timeout_s: a coordinator that is silent for so long is gone.
            heartbeat_s: how often to give a sign of life.
            connect_timeout_s: how long to try until the coordinator first answers.
            credentials: this worker's keys and the coordinator's; None: no CURVE.
            on_abort: called in the client's thread when an Abort comes.
            on_lost: called in the client's thread when the coordinator is lost.
            on_return: called in the client's thread when another process of the coordinator answers; what it returns is
                sent first, then again what the one before may not have heard. It may raise StartOverError, and so does
                `recv` then.
            on_order: called in the client's thread with what cannot wait until the main thread looks; of these, `recv`
                returns StartOver alone.

        Raises:
            UserError: `peer` is no address.
        """
        self.aborted: Abort | None = None
        """The Abort that has come, if one has."""
        self._peer = f"coordinator at {peer}"
        self._timing = _Timing(shaping, peer_timeout_s, heartbeat_s, peer_timeout_s)
        self._connect_timeout_s = connect_timeout_s
        self._on_abort = on_abort
        self._on_lost = on_lost
        self._on_return = on_return
        self._on_order = on_order
        self._unheard = Unheard()
        self._warned_s: float | None = None
        """Since when the coordinator has been silent, once that was said."""
        self._address = peer
        self._credentials = credentials
        self._listener: Listener | None = None
        """What answers at its address, once that has hung up so often that somebody has looked."""
        self.obstacle = ""
        self._heartbeat = Heartbeat()
        self._echo: tuple[float, float] | None = None
        """When the heartbeat heard last was sent, by the coordinator's clock, and when it was heard, by this one."""
        self._outbox: deque[tuple[bytes, float]] = deque()
        self._inbox: Inbox[Message] = Inbox(self._peer)
        self._numbering = Numbering()
        self._uplink: Uplink[bytes] = Uplink(shaping)
        self._downlink: Downlink[Message] = Downlink(shaping)
        self._is_over = False
        self._close_by_s: float | None = None
        self._dial(dial_endpoint(peer, "coordinator"), name)
        self._started_s = time.monotonic()
        self._heard_s: float | None = None
        self._heartbeat_at_s = self._started_s
        self._thread = threading.Thread(target=self._run, name="tahq-control", daemon=True)
        self._thread.start()

    def _dial(self, endpoint: str, name: str) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            self._dealer.setsockopt(option, value)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES + 1024)
        replace_silent_connections(self._dealer, self._timing.peer_timeout_s)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._dealer.setsockopt(zmq.ROUTING_ID, name.encode()[:200] + b"#" + os.urandom(12).hex().encode())
        limit_handshakes(self._dealer)
        if self._credentials is not None:
            dial_curve(self._dealer, self._credentials.own, self._credentials.coordinator)
        self._dialled = Dialled(self._dealer, endpoint.removeprefix("tcp://"), self)
        self._waker = Waker()
        self._wait_set = WaitSet(self._waker)
        self._wait_set.add(self._dealer)
        self._wait_set.add(self._dialled.events)

    # The main thread's side

    def send(self, message: Message) -> None:
        """Queue a message; returns at once. Any thread may call it; each thread's messages stay in order.

        Raises:
            LocalProtocolError: a field of it is not of its type, or the client is closed.
            PeerLostError: the coordinator is lost.
        """
        if self._inbox.error is not None:
            raise self._inbox.error.with_traceback(None)
        self._unheard.said(message)
        self._outbox.append((encode_message(message), time.monotonic()))
        self._waker.wake()

    def recv(self, timeout_s: float | None = None) -> Message:
        """The next message but heartbeats; an Abort, a Refuse or a Bye is one too.

        Raises:
            TimeoutError: none came in time.
            PeerLostError: the coordinator is silent, or was never there; the message has its address.
            RefusedError: it does not take this worker's key, or is not who has the key that was given.
        """
        return self._inbox.get(timeout_s)

    def poll(self) -> Message | None:
        """As `recv`, without waiting: None if there is none."""
        try:
            return self._inbox.get(0.0)
        except TimeoutError:
            return None

    def set_activity(self, stage: int, step: int, activity: str) -> None:
        """What the heartbeats say from now on."""
        self._heartbeat = Heartbeat(stage, step, activity)

    def set_timing(self, *, shaping: Shaping, peer_timeout_s: float, heartbeat_s: float, give_up_s: float) -> None:
        """Use these from now on; a worker learns them from the configuration in Assign.

        The coordinator's silence is warned of after `peer_timeout_s`, and borne for `give_up_s`.
        """
        self._timing = _Timing(shaping, peer_timeout_s, heartbeat_s, give_up_s)
        self._waker.wake()

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued, taking at most `linger_s`, and release the socket; safe to call twice."""
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + linger_s + self._timing.shaping.delay_s
            self._waker.wake()
            self._thread.join()
            self._inbox.fail(LocalProtocolError(f"{self._peer}: the control channel is closed on this side"))
            self._context.term()

    # The client's thread

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._turn()
        except (StartOverError, RefusedError) as error:
            self._lose(error)
        except TahqError as error:
            self._lose(PeerLostError(str(error)))
        except Exception as error:
            _log.exception("the control thread has failed")
            self._lose(PeerLostError(f"{self._peer}: the control thread has failed: {error!r}"))
        finally:
            self._wait_set.close(self._linger_ms())
            self._waker.close()

    def _linger_ms(self) -> int:
        """How long what is queued may take to leave; nobody listens any more once the run is over."""
        if self._is_over or self._inbox.error is not None or self._close_by_s is None:
            return 0
        return int(1000 * max(0.0, self._close_by_s - time.monotonic()))

    def _lose(self, error: TahqError) -> None:
        self._hand_over(math.inf)
        self._inbox.fail(error)
        if self._on_lost is not None and self._close_by_s is None:
            self._on_lost(error)

    def _is_finished(self) -> bool:
        if self._close_by_s is None:
            return False
        return (not self._outbox and not self._uplink) or time.monotonic() >= self._close_by_s

    def _turn(self) -> None:
        self._waker.clear()
        self._receive()
        self._dialled.look()
        self._hand_over(time.monotonic())
        self._check_silence()
        self._send_heartbeat()
        self._transmit()
        if not self._outbox and not self._is_finished():
            self._wait_set.wait(self._next_s() - time.monotonic())

    @property
    def spec(self) -> str:
        """Name of the channel in messages."""
        return self._peer

    def reconnected(self, connection: int) -> None:
        """A new connection has replaced one that was lost: see at once what is missing."""
        if self._heard_s is not None:
            self._numbering.ask()
            self._heartbeat_at_s = time.monotonic()

    def note_outcome(self, outcome: Outcome, dialled: Dialled) -> None:
        """Notice that the two ends will never agree; called in the client's thread.

        Raises:
            RefusedError: with what is wrong, and what to do.
        """
        if outcome in (Outcome.REFUSED, Outcome.NO_CURVE):
            raise RefusedError(f"{self._peer}: {_refusal(outcome, self._credentials)}")
        if outcome is Outcome.BROKEN:
            _log.warning("%s: %s; dialling again", self._peer, outcome.value)
        if dialled.has_succeeded or dialled.num_hang_ups < _SUSPICIOUS_HANG_UPS:
            return
        if self._listener is None:
            self._listener = who_listens(self._address)
        reason = _disagreement(self._listener, self._credentials)
        if reason and dialled.num_hang_ups >= _CONVINCING_HANG_UPS:
            raise RefusedError(f"{self._peer}: {reason}")

    def _next_s(self) -> float:
        times = (self._heartbeat_at_s, self._silent_at_s(), self._close_by_s, self._dialled.redial_s)
        lines = (self._uplink.next_s(), self._downlink.next_s())
        return min(time_s for time_s in (*times, *lines) if time_s is not None)

    def _silent_at_s(self) -> float | None:
        if self._is_over:
            return None
        if self._heard_s is None:
            return self._started_s + self._connect_timeout_s
        return self._heard_s + self._timing.give_up_s

    def _check_silence(self) -> None:
        silent_at_s = self._silent_at_s()
        self._warn_of_silence()
        if silent_at_s is None or time.monotonic() < silent_at_s:
            return
        if self._heard_s is None:
            raise PeerLostError(
                f"{self._peer}: no answer within {self._connect_timeout_s:g} s; check that it runs, and that its "
                f"address can be reached from here"
            )
        raise PeerLostError(f"{self._peer}: no sign of life for {self._timing.give_up_s:.1f} s")

    def _warn_of_silence(self) -> None:
        if self._heard_s is None or self._is_over:
            return
        if time.monotonic() - self._heard_s < self._timing.peer_timeout_s:
            if self._warned_s is not None:
                _log.warning("%s: gives signs of life again", self._peer)
            self._warned_s = None
        elif self._warned_s is None:
            self._warned_s = self._heard_s
            _log.warning("%s: no sign of life for %.1f s; waiting for it", self._peer, self._timing.peer_timeout_s)

    def _begin_anew(self, process: int) -> None:
        """The coordinator was started again: say who is here, and what the one before may not have heard."""
        _log.warning("%s: was started again", self._peer)
        self._numbering = Numbering(process)
        if self._on_return is None:
            raise PeerLostError(f"{self._peer}: was started again, and knows nothing of this end")
        for message in (self._on_return(), *self._unheard.messages()):
            self._dealer.send_multipart(self._numbering.wrap(encode_message(message)), zmq.NOBLOCK)

    def _receive(self) -> None:
        while has_input(self._dealer):
            parts = self._dealer.recv_multipart(zmq.NOBLOCK)
            self._heard_s = time.monotonic()
            if len(parts) != 2:
                raise RemoteProtocolError(f"{self._peer}: sent {len(parts)} message parts; expected 2")
            process = coordinator_of(parts[0], self._peer)
            if self._numbering.coordinator not in (0, process):
                self._begin_anew(process)
            if self._numbering.take(parts[0], self._peer):
                arrival_s = self._heard_s + self._timing.shaping.delay_s
                self._downlink.receive(decode_message(parts[1], self._peer), len(parts[1]), arrival_s)
        if self._numbering.must_ask and self._heard_s is not None:
            self._heartbeat_at_s = min(self._heartbeat_at_s, self._heard_s)
        for again in self._numbering.again():
            self._put(again)

    def _hand_over(self, until_s: float) -> None:
        for message in self._downlink.take_due(until_s):
            self._is_over |= isinstance(message, Abort | Bye | Refuse)
            self._unheard.heard(message)
            if isinstance(message, Heartbeat):
                self._note_heartbeat(message)
            elif not isinstance(message, Order):
                self._inbox.put(message)
            if isinstance(message, Order | StartOver) and self._on_order:
                self._on_order(message)
            if isinstance(message, Abort):
                self._note_abort(message)

    def _note_heartbeat(self, heartbeat: Heartbeat) -> None:
        """Answer at once: the round trip tells the coordinator how far this clock is from its own."""
        self._echo = (heartbeat.sent_s, time.monotonic())
        self._heartbeat_at_s = min(self._heartbeat_at_s, self._echo[1])

    def _note_abort(self, abort: Abort) -> None:
        self.aborted = abort
        if self._on_abort is not None:
            self._on_abort(abort)

    def _send_heartbeat(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._heartbeat_at_s and self._close_by_s is None:
            self._heartbeat_at_s = now_s + self._timing.heartbeat_s
            sent_s, heard_s = self._echo or (0.0, now_s + 1.0)
            heartbeat = replace(self._heartbeat, sent_s=now_s, echo_s=sent_s, held_s=now_s - heard_s)
            self._outbox.append((encode_message(heartbeat), now_s))

    def _transmit(self) -> None:
        self._uplink.reshape(self._timing.shaping)
        self._downlink.reshape(self._timing.shaping)
        while self._outbox:
            data, ready_s = self._outbox.popleft()
            self._uplink.send(data, len(data), ready_s)
        for data in self._uplink.take_due(time.monotonic()):
            self._put(self._numbering.wrap(data))

    def _put(self, parts: list[bytes]) -> None:
        try:
            self._dealer.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            # ZMQ has given the connection up; why, it tells in a moment.
            _log.debug("%s: nothing can be sent now", self._peer)


def _refusal(outcome: Outcome, credentials: Credentials | None) -> str:
    """What is wrong with a connection that ZMQ has given up, and what to do."""
    if credentials is None:
        return _NEEDS_CURVE
    if outcome is Outcome.NO_CURVE:
        return _HAS_NO_CURVE
    return (
        f"it does not know this worker's key {credentials.own.public}; add that to security.allow of its "
        f"cluster.yaml, or give this worker a key that is there (--key)"
    )


def _disagreement(listener: Listener, credentials: Credentials | None) -> str:
    """Why what answers at the coordinator's address hangs up; "" where it may be the network, or a tunnel to nobody."""
    if listener is Listener.CURVE and credentials is None:
        return _NEEDS_CURVE
    if listener is Listener.CURVE and credentials is not None:
        whose = "this worker's own" if credentials.coordinator == credentials.own.public else "given"
        return (
            f"its key is not {credentials.coordinator} ({whose}); give the one that it prints (--coordinator-key), and "
            f"add this worker's {credentials.own.public} to security.allow there"
        )
    if listener is Listener.OTHER_ZMQ and credentials is not None:
        return _HAS_NO_CURVE
    return "another program listens there" if listener is Listener.STRANGER else ""
