"""A worker's end of the control channel: its own thread owns the DEALER.

The thread sends heartbeats while the main thread computes, imitates the delay of the link in both directions, and
handles at once what cannot wait until the main thread looks: an Abort, and the coordinator's silence.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import zmq

from tahq.comm.control.encoding import MAX_MESSAGE_NBYTES, decode_message, encode_message
from tahq.comm.control.messages import (
    Abort,
    Bye,
    Commit,
    Evaluated,
    Heartbeat,
    Message,
    Order,
    Prepare,
    Published,
    Refuse,
    Snapshotted,
    StartOver,
)
from tahq.comm.keys import Credentials
from tahq.comm.link.frame import Channel
from tahq.comm.link.session import PeerForgotError, Session
from tahq.comm.link.shaping import Shaping
from tahq.comm.link.spec import ANY_STAGE, CONTROL_LINK, LinkSpec, PeerIdentity, SessionLimits
from tahq.comm.link.transitions import End
from tahq.comm.zmq.addresses import format_address, parse_address
from tahq.comm.zmq.dialled import SUSPICIOUS_HANG_UPS, Dialled, Listener, Outcome, identify_listener
from tahq.comm.zmq.endpoint_loop import EndpointLoop
from tahq.comm.zmq.socket_wait import Inbox, Socket
from tahq.comm.zmq.sockets import open_dealer
from tahq.comm.zmq.transport import LinkEnd
from tahq.errors import LocalProtocolError, PeerLostError, RefusedError, StartOverError, TahqError

_log = logging.getLogger(__name__)
CONTROL_IDENTITY = PeerIdentity(0, 0, ANY_STAGE, "control")
_CONVINCING_HANG_UPS = 5
_NEEDS_CURVE = "it uses CURVE; start this worker without --no-curve, and with --coordinator-key"
_HAS_NO_CURVE = (
    "it does not use CURVE; if security.curve is off there and is meant to be, start this worker with --no-curve"
)


@dataclass(frozen=True, slots=True)
class ControlHooks:
    """What the client's thread calls at once.

    Attributes:
        on_abort: an Abort has come.
        on_lost: the coordinator is lost.
        on_order: an order has come; of these, `recv` returns StartOver alone.
        on_return: another process of the coordinator answers. The message returned is sent first, then those that the
            previous process may have missed. It may raise StartOverError, and so does `recv` then. None: the
            coordinator is lost.
    """

    on_abort: Callable[[Abort], None] = lambda abort: None
    on_lost: Callable[[TahqError], None] = lambda error: None
    on_order: Callable[[Order | StartOver], None] = lambda order: None
    on_return: Callable[[], Message] | None = None


class ControlClient:
    """Sends to and receives from the coordinator; used by one thread beside its own, except `send`.

    Args:
        peer: host:port of the coordinator.
        name: what the coordinator's log calls this worker.
        shaping: delay and rate of this host's connection, imitated here for both directions.
        peer_timeout_s: a coordinator that is silent this long is gone.
        heartbeat_s: how often to give a sign of life.
        connect_timeout_s: how long to try until the coordinator first answers.
        credentials: this worker's keys and the coordinator's; None: no CURVE.
        hooks: called in the client's thread.

    Raises:
        UserError: `peer` is not host:port.
    """

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
        hooks: ControlHooks = ControlHooks(),
    ) -> None:
        """Start dialling; returns at once."""
        self.aborted: Abort | None = None
        """The Abort that has come, if one has."""
        self._peer = f"coordinator at {peer}"
        self._hooks = hooks
        self._heartbeat_s, self._delay_s = heartbeat_s, shaping.delay_s
        self._connect_timeout_s = connect_timeout_s
        self._connect_by_s = time.monotonic() + connect_timeout_s
        self._unanswered = Unanswered()
        self._heartbeat = Heartbeat()
        self.heartbeat_at_s = time.monotonic()
        """When the next heartbeat is due."""
        self._inbox: Inbox[Message] = Inbox(self._peer)
        self._is_over = False
        self._close_by_s: float | None = None
        self._error: TahqError | None = None
        self._limits = SessionLimits(
            peer_timeout_s, heartbeat_s, piece_nbytes=shaping.message_nbytes, max_message_nbytes=MAX_MESSAGE_NBYTES + 16
        )
        address = format_address(*parse_address(peer, "coordinator"))
        self._end = _CoordinatorEnd(self, credentials)
        self._context: zmq.Context[Socket] = zmq.Context()
        own, server_key = (credentials.own, credentials.coordinator) if credentials is not None else (None, "")
        dealer = open_dealer(self._context, name.encode(), peer_timeout_s, own, server_key)
        self._loop = EndpointLoop(None, shaping, is_remote=True)
        self._loop.open(self._end, [Dialled(dealer, address, self._end)])
        self._thread = threading.Thread(target=self._run, name="tahq-control", daemon=True)
        self._thread.start()

    # The main thread's side

    def send(self, message: Message) -> None:
        """Queue a message; returns at once. Any thread may call it; each thread's messages stay in order.

        Raises:
            LocalProtocolError: a field has the wrong type, or the client is closed.
            PeerLostError: the coordinator is lost.
        """
        if self._inbox.error is not None:
            raise self._inbox.error.with_traceback(None)
        data = encode_message(message)
        self._unanswered.sent(message)
        self._loop.submit(self._end, partial(self._end.say, Channel.CONTROL, data))

    def recv(self, timeout_s: float | None = None) -> Message:
        """The next message except heartbeats and orders; an Abort, a Refuse or a Bye is returned, too.

        Raises:
            TimeoutError: none came in time.
            PeerLostError: the coordinator is silent, or was never there; the message has its address.
            RefusedError: it refuses this worker's key, or does not have the key that was given.
        """
        return self._inbox.get(timeout_s)

    def poll(self) -> Message | None:
        """As `recv`, without waiting: None if there is none."""
        try:
            return self._inbox.get(0.0)
        except TimeoutError:
            return None

    def set_activity(self, stage: int, step: int, activity: str) -> None:
        """Set the content of heartbeats from now on."""
        self._heartbeat = Heartbeat(stage, step, activity)

    def set_timing(self, *, shaping: Shaping, peer_timeout_s: float, heartbeat_s: float, give_up_s: float) -> None:
        """Use these from now on; a worker learns them from the configuration in Assign.

        The coordinator's silence is warned about after half of `peer_timeout_s`, and tolerated for `give_up_s`.
        """

        def apply() -> None:
            self._limits = replace(
                self._limits, peer_timeout_s=peer_timeout_s, heartbeat_s=heartbeat_s, give_up_s=give_up_s
            )
            self._heartbeat_s, self._delay_s = heartbeat_s, shaping.delay_s
            self._end.session.use_times(self._limits, time.monotonic())
            self.heartbeat_at_s = min(self.heartbeat_at_s, time.monotonic() + heartbeat_s)
            self._loop.reshape(shaping)

        self._loop.submit(None, apply)

    def close(self, linger_s: float = 1.0) -> None:
        """Send what is queued, taking at most `linger_s`, and release the socket; safe to call twice."""
        if self._close_by_s is None:
            self._close_by_s = time.monotonic() + linger_s + 2 * self._delay_s
            self._loop.submit(self._end, partial(self._end.close, ""))
            self._thread.join()
            self._inbox.fail(LocalProtocolError(f"{self._peer}: the control channel is closed on this side"))
            self._context.destroy(linger=0)

    # The client's thread

    def _run(self) -> None:
        try:
            while not self._is_finished():
                self._loop.step()
                self._tick(time.monotonic())
                if not self._is_finished():
                    self._loop.wait(self._next_s())
        except (RefusedError, StartOverError) as error:
            self._lose(error)
        except TahqError as error:
            self._lose(PeerLostError(str(error)))
        except Exception as error:
            _log.exception("the control thread has failed")
            self._lose(PeerLostError(f"{self._peer}: the control thread has failed: {error!r}"))
        finally:
            self._loop.release()

    def _lose(self, error: TahqError) -> None:
        self._inbox.fail(error)
        if self._close_by_s is None:
            self._hooks.on_lost(error)

    def _is_finished(self) -> bool:
        if self._close_by_s is None:
            return False
        is_gone = self._is_over or self._inbox.error is not None
        return is_gone or self._end.flushed.is_set() or time.monotonic() >= self._close_by_s

    @property
    def _is_connecting(self) -> bool:
        return self._end.session.remote is End.CONNECTING

    def _next_s(self) -> float:
        times = [self.heartbeat_at_s]
        if self._close_by_s is not None:
            times.append(self._close_by_s)
        if self._is_connecting:
            times.append(self._connect_by_s)
        return min(times)

    def _tick(self, now_s: float) -> None:
        if self._error is not None:
            raise self._error
        if self._is_connecting and now_s >= self._connect_by_s and self._close_by_s is None:
            raise PeerLostError(
                f"{self._peer}: no answer within {self._connect_timeout_s:g} s; check that it runs, and that its "
                f"address can be reached from here"
            )
        if now_s >= self.heartbeat_at_s:
            self.heartbeat_at_s = now_s + self._heartbeat_s
            if self._end.session.remote is End.OPEN:
                self._loop.submit(self._end, partial(self._end.say, Channel.CONTROL, encode_message(self._heartbeat)))

    def new_session(self, spec: LinkSpec) -> Session:
        """A session with the coordinator, from its beginning."""
        return Session(CONTROL_IDENTITY, spec, self._limits)

    def take(self, data: bytes) -> None:
        """Handle a message that has come."""
        message = decode_message(data, self._peer)
        if isinstance(message, Abort | Bye | Refuse):
            self._is_over = True
            self._end.session.hold()  # its silence no longer means that it is lost
            self._end.warns = False
        self._unanswered.received(message)
        if not isinstance(message, Order | Heartbeat):
            self._inbox.put(message)
        if isinstance(message, Order | StartOver):
            self._hooks.on_order(message)
        if isinstance(message, Abort):
            self.aborted = message
            self._hooks.on_abort(message)

    def lost(self, error: TahqError) -> None:
        """The session has ended with this error, which does no harm if another process of the coordinator answers."""
        if self._is_over or self._close_by_s is not None:
            return
        if not isinstance(error, PeerForgotError) or self._hooks.on_return is None:
            self._error = self._error or error
            return
        _log.warning("%s: was started again", self._peer)
        self._connect_timeout_s = self._limits.silence_s
        self._connect_by_s = time.monotonic() + self._connect_timeout_s
        self._end.session = self.new_session(self._end.spec)
        for message in (self._hooks.on_return(), *self._unanswered.messages()):
            self._end.say(Channel.CONTROL, encode_message(message))


class _CoordinatorEnd(LinkEnd):
    """The client's end of its link, as the loop knows it."""

    def __init__(self, client: ControlClient, credentials: Credentials | None) -> None:
        spec = LinkSpec(CONTROL_LINK, ANY_STAGE, "", dials=True, title=client._peer)
        super().__init__(spec, client.new_session(spec))
        self._client, self._credentials = client, credentials
        self._listener: Listener | None = None
        """What answers at the coordinator's address, looked up once it has hung up suspiciously often."""

    def publish(self) -> None:
        """Hand over messages, and notice that the coordinator has left."""
        for _, data in self.session.take_messages():
            self._client.take(data)
        if self.session.remote is End.OPEN and not self.met.is_set():
            self._client.heartbeat_at_s = time.monotonic()
        super().publish()
        if self.session.remote is End.CLOSED:
            self._client.lost(PeerLostError(f"{self.spec}: the coordinator has closed the channel"))

    def fail(self, error: TahqError) -> None:
        """The session has ended."""
        for _, data in self.session.take_messages():
            self._client.take(data)
        self._client.lost(error)

    def note_outcome(self, outcome: Outcome, dialled: Dialled) -> None:
        """Raise RefusedError, with what to do, once the two ends will never agree: waiting would not help."""
        if outcome in (Outcome.REFUSED, Outcome.NO_CURVE):
            raise RefusedError(f"{self.spec}: {_refusal(outcome, self._credentials)}")
        if outcome is Outcome.BROKEN:
            _log.warning("%s: %s; dialling again", self.spec, outcome.value)
        if dialled.has_succeeded or dialled.num_hang_ups < SUSPICIOUS_HANG_UPS:
            return
        if self._listener is None:
            self._listener = identify_listener(dialled.address)
        reason = _disagreement(self._listener, self._credentials)
        if reason and dialled.num_hang_ups >= _CONVINCING_HANG_UPS:
            raise RefusedError(f"{self.spec}: {reason}")


def _refusal(outcome: Outcome, credentials: Credentials | None) -> str:
    """What is wrong with a connection that ZMQ has given up, and what to do."""
    if credentials is None:
        return _NEEDS_CURVE
    if outcome is Outcome.NO_CURVE:
        return _HAS_NO_CURVE
    if credentials.is_invite:
        return "it does not know this invite, so the invite is of another coordinator or forged; ask for another"
    own = credentials.own.public
    return (
        f"it does not know this worker's key {own}; add that to security.allow of its cluster.yaml, or admit it to the "
        f"run with `tahq allow {own}` there, or give this worker a key that is there (--key)"
    )


def _disagreement(listener: Listener, credentials: Credentials | None) -> str:
    """Why the program at the coordinator's address hangs up; "" where it may be the network, or a dead tunnel."""
    if listener is Listener.CURVE and credentials is None:
        return _NEEDS_CURVE
    if listener is Listener.CURVE and credentials is not None and credentials.is_invite:
        return "its key is not the one in this invite, which another coordinator made; ask for another invite"
    if listener is Listener.CURVE and credentials is not None:
        whose = "this worker's own" if credentials.coordinator == credentials.own.public else "given"
        return (
            f"its key is not {credentials.coordinator} ({whose}); give the one that it prints (--coordinator-key), and "
            f"add this worker's {credentials.own.public} to security.allow there"
        )
    if listener is Listener.OTHER_ZMQ and credentials is not None:
        return _HAS_NO_CURVE
    return "another program listens there" if listener is Listener.STRANGER else ""


class Unanswered:
    """Messages to send again to a restarted coordinator, which may not have them; any thread may use it.

    These are the unanswered Prepare, the evaluation of the step before, and parts of incomplete checkpoints.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: dict[tuple[type[Message], int], Prepare | Evaluated | Snapshotted] = {}

    def sent(self, message: Message) -> None:
        """The worker sends this: keep it if it needs an answer."""
        if isinstance(message, Prepare | Evaluated | Snapshotted):
            with self._lock:
                self._messages[type(message), message.step] = message

    def received(self, message: Message) -> None:
        """The coordinator sends this: forget the messages that it answers."""
        match message:
            case Commit(step):
                known_before = {Prepare: step + 1, Evaluated: step}
            case Published(step):
                known_before = {Snapshotted: step + 1}
            case _:
                return
        with self._lock:
            for kind, step in list(self._messages):
                if step < known_before.get(kind, -1):
                    del self._messages[kind, step]

    def messages(self) -> list[Message]:
        """All that are kept, in the order in which they were sent."""
        with self._lock:
            return list(self._messages.values())
