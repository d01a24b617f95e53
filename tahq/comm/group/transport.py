"""A link inside a site: payloads over process groups of torch.distributed, everything else over the ZMQ session.

To make the groups (`open_group`) the end that dialled says from which of its addresses it dialled; the other one opens
a TCPStore on the address that its own machine has towards that, and says where. So no interface has to be configured,
and nothing listens outside the network of the link.

`recv` waits for the ZMQ link's inbox, so every failure ends this transport as it would end that link. A broken group
does not say why: if the peer has died, its next process needs another group, so this end waits as it would over ZMQ,
until it is told to start over or gives the peer up; if the peer is still heard, the link is over.
"""

import ipaddress
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

import torch

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES, GroupMessage, GroupReceiver, GroupSender, unpack_message
from tahq.comm.group.paths import GlooPath, GroupBrokenError, NcclPath, PayloadPath, Store, c10d, check_nccl
from tahq.comm.link.frame import Frame, LogicalId, check_sendable
from tahq.comm.link.outbound import LinkCounter
from tahq.comm.link.spec import PeerIdentity
from tahq.comm.transport import LinkStats
from tahq.comm.zmq.addresses import format_address, local_address_towards, parse_address
from tahq.comm.zmq.transport import MAX_QUEUED_NBYTES, ZmqTransport
from tahq.errors import LocalProtocolError, PeerLostError, RemoteProtocolError, TahqError, UserError

_log = logging.getLogger(__name__)
_JOIN_S = 1.0
"""Wait this long for a thread after an abort; one that half a payload holds longer ends by itself."""
_POLL_S = 0.02
_POSTED = b""
"""Among the peer's messages: a receive was posted here."""


class GroupTransport:
    """A Transport (tahq.comm.transport); made by `open_group`, used by one thread.

    `control` is the ZMQ link between the same ends, connected; it is closed with this. Payloads leave over `outgoing`
    and come over `incoming`, which may be the same path.
    """

    def __init__(
        self, control: ZmqTransport, run_id: int, outgoing: PayloadPath, incoming: PayloadPath, peer_timeout_s: float
    ) -> None:
        self.link = control.link
        self.payload_device = outgoing.device
        self._control = control
        self._run_id = run_id
        self._outgoing = outgoing
        self._incoming = incoming
        self._verdict_s = min(1.0, peer_timeout_s / 2)
        self._is_closed = False
        self._counter = LinkCounter(self.link, None, ANNOUNCEMENT_NBYTES)
        self._sender = GroupSender(outgoing, control.say, control)
        self._receiver = GroupReceiver(incoming, control.say, control.end.inbox.put, control, run_id)
        self._can_send, self._can_receive = threading.Event(), threading.Event()
        bodies = (self._send_all, self._take_messages, self._receiver.run)
        self._threads = [threading.Thread(target=self._run, args=(body,), daemon=True) for body in bodies]
        for name, thread in zip(("send", "answer", "receive"), self._threads, strict=True):
            thread.name = f"tahq-{name}-{self.link}"
            thread.start()

    def __str__(self) -> str:
        return str(self._control)

    def wait_open(self, timeout_s: float) -> None:
        """Block until both paths can carry payloads; PeerLostError if the peer was not ready in time, or is gone."""
        deadline_s = time.monotonic() + timeout_s
        for is_open in (self._can_send, self._can_receive):
            while not is_open.wait(_POLL_S):
                self._check_usable()
                if time.monotonic() > deadline_s:
                    raise PeerLostError(f"{self}: its process group was not open after {timeout_s:g} s")

    # The contract

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect and Inbound.expect."""
        self._check_usable()
        try:
            self._receiver.expect(id, max_nbytes)
        except TahqError as error:
            self._control.fail(error)
            raise
        if self._receiver.unanswered:
            self._control.end.messages.put(_POSTED)

    def send(self, frame: Frame) -> None:
        """Queue a frame, once the peer has taken enough of what is queued; see ZmqTransport.send for what it raises."""
        check_sendable(frame, self.payload_device)
        self._check_usable()
        if frame.id.run != self._run_id:
            raise LocalProtocolError(f"{self}: {frame.id} is not of run {self._run_id}")
        while self._sender.queued_nbytes > MAX_QUEUED_NBYTES:
            time.sleep(_POLL_S)
            self._check_usable()
        self._counter.count(frame)
        self._sender.send(frame)

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that has arrived; see Transport.recv."""
        frame = self._control.recv(timeout_s)
        if frame.payload.is_cuda:
            # It was allocated on the path's stream; its memory must not be reused while this stream reads it.
            frame.payload.record_stream(torch.cuda.current_stream(frame.payload.device))
        return frame

    def take_stats(self) -> list[LinkStats]:
        """See Transport.take_stats."""
        return self._counter.take(self._sender.busy, self._sender.busy, time.monotonic())

    def close(self, linger_s: float = 5.0) -> None:
        """Send queued frames, wait up to `linger_s` for receipts, say BYE, break the group; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._control.end.inbox.error is None:
            self._sender.close()
            self._threads[0].join(linger_s)
        self._control.close(linger_s)
        self._break()

    def abandon(self) -> None:
        """Break the group without a message: other processes will replace this one and the peer."""
        self._is_closed = True
        self._break()

    def _break(self) -> None:
        self._sender.abandon()
        self._control.end.messages.put(None)
        self._outgoing.abort()
        self._incoming.abort()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _check_usable(self) -> None:
        if self._control.end.inbox.error is not None:
            raise self._control.end.inbox.error.with_traceback(None)

    # The threads

    def _send_all(self) -> None:
        self._outgoing.open()
        self._can_send.set()
        self._sender.run()

    def _take_messages(self) -> None:
        try:
            self._incoming.open()
            self._can_receive.set()
            while (message := self._control.end.messages.get()) is not None:
                if message == _POSTED:
                    self._receiver.go_on()
                    continue
                kind, rest = unpack_message(message, self)
                if kind is GroupMessage.ANNOUNCE:
                    self._receiver.answer(rest)
                else:
                    self._sender.answers.put(kind)
        finally:
            self._receiver.end()
            self._sender.answers.put(None)

    def _run(self, body: Callable[[], None]) -> None:
        try:
            body()
        except TahqError as error:
            self._control.fail(error)
        except GroupBrokenError as error:
            self._on_broken(str(error))
        except Exception as error:
            _log.exception("%s: a thread of its process group failed", self)
            self._control.fail(TahqError(f"{self}: a thread of its process group failed: {error!r}"))

    def _on_broken(self, why: str) -> None:
        """A path is broken, by our close, by the peer's, or because the peer died; the ZMQ link tells which."""
        verdict_at_s = time.monotonic() + self._verdict_s
        while not self._is_over and not self._control.end.session.was_heard_after(verdict_at_s):
            time.sleep(_POLL_S)
        if not self._is_over:
            self._control.fail(PeerLostError(f"{self}: its process group broke: {why}"))

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._control.end.inbox.error is not None


Backend = Literal["gloo", "nccl"]
_CONNECT_S = 60.0
"""Time limit for the peer to open this link's group; meanwhile the ZMQ link tells whether it lives."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """Settings of a group, besides its ZMQ link."""

    backend: Backend
    identity: PeerIdentity
    """This end's, in the plan's epoch."""
    dial: str
    """host:port at which this end dialled the ZMQ link; empty: the other end dialled."""
    device: torch.device
    timeout_s: float
    """How long the peer may be silent."""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Shared by all links with this peer in the plan's epoch: their payloads over NCCL take turns."""


def open_group(control: ZmqTransport, spec: GroupSpec) -> GroupTransport:
    """Make the group of a link whose ZMQ part is connected; blocks until both ends have done so.

    Every worker opens links with groups in the order of their numbers, so that no cycle of waits arises. PeerLostError:
    the peer is gone, or did not open the group in time. ConfigError: this machine lacks what the backend needs.
    """
    if spec.backend == "nccl":
        check_nccl(spec.device)
    try:
        address, store = _meet(control, spec)
        outgoing, incoming = _paths(spec, store, address, is_lower=spec.identity.stage < control.end.spec.peer_stage)
    except (GroupBrokenError, c10d.DistError) as error:
        raise PeerLostError(f"{control}: its {spec.backend} group could not be made: {error}") from error
    transport = GroupTransport(control, spec.identity.run_id, outgoing, incoming, spec.timeout_s)
    transport.wait_open(_CONNECT_S)
    return transport


def _meet(control: ZmqTransport, spec: GroupSpec) -> tuple[str, Store]:
    """Our address towards the peer, and the store that both ends share."""
    if spec.dial:
        address = local_address_towards(spec.dial)
        control.say(bytes([GroupMessage.ADDRESS]) + address.encode())
        host, port = _peer_address(control)
        return address, _store(host, port, None)
    peer, _ = _peer_address(control)
    address = local_address_towards(format_address(peer, 9))
    listener = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
    port = listener.getsockname()[1]
    store = _store(address, port, listener)
    control.say(bytes([GroupMessage.ADDRESS]) + format_address(address, port).encode())
    return address, store


def _store(host: str, port: int, listener: socket.socket | None) -> Store:
    master = {"is_master": listener is not None, "master_listen_fd": None if listener is None else listener.detach()}
    return c10d.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=_CONNECT_S), **master)


def _paths(spec: GroupSpec, store: Store, address: str, is_lower: bool) -> tuple[PayloadPath, PayloadPath]:
    rank = 0 if is_lower else 1
    if spec.backend == "gloo":
        path = GlooPath(store, rank, address, _CONNECT_S, spec.timeout_s)
        return path, path
    turn = spec.turn if is_lower else None
    forward = NcclPath(store, "forward", rank, spec.device, sends=is_lower, turn=turn)
    backward = NcclPath(store, "backward", rank, spec.device, sends=not is_lower, turn=turn)
    return (forward, backward) if is_lower else (backward, forward)


def _peer_address(control: ZmqTransport) -> tuple[str, int]:
    """The peer's IP address and port; port 0 if it sends none."""
    try:
        message = control.end.messages.get(timeout=_CONNECT_S)
    except queue.Empty:
        raise PeerLostError(f"{control}: sent no address for its process group in {_CONNECT_S:g} s") from None
    if message is None:
        raise (control.end.inbox.error or PeerLostError(f"{control}: the link is closed")).with_traceback(None)
    kind, rest = unpack_message(message, control)
    text = rest.decode("ascii", "replace")
    try:
        host, port = (text, 0) if _is_ip(text) else parse_address(text, str(control))
    except UserError:
        host, port = "", 0
    if kind is not GroupMessage.ADDRESS or not _is_ip(host):
        raise RemoteProtocolError(f"{control}: sent {kind.name} {text!a}; expected the address of its process group")
    return host, port


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
