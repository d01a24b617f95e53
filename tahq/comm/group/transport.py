"""A link inside a site: payloads over process groups of torch.distributed, everything else over the ZMQ session.

`recv` waits for the ZMQ link's inbox, so every failure ends this transport as it would end that link. A broken group
does not say why: if the peer has died, its next process needs another group, so this end waits as it would over ZMQ,
until it is told to start over or gives the peer up; if the peer is still heard, the link is over.
"""

import logging
import threading
import time
from collections.abc import Callable

import torch

from tahq.comm.group.ends import ANNOUNCEMENT_NBYTES, GroupMessage, GroupReceiver, GroupSender, unpack_message
from tahq.comm.group.gloo_path import GroupBrokenError, PayloadPath
from tahq.comm.link.frame import Frame, LogicalId, check_sendable
from tahq.comm.transport import LinkCounter, LinkStats
from tahq.comm.zmq.transport import MAX_QUEUED_NBYTES, ZmqTransport
from tahq.errors import LocalProtocolError, PeerLostError, TahqError
from tahq.units import format_size

_log = logging.getLogger(__name__)
_JOIN_S = 1.0
"""Wait this long for a thread after an abort; one that half a payload holds longer ends by itself."""
_POLL_S = 0.02


class GroupTransport:
    """A Transport (tahq.comm.transport); made by `open_group`, used by one thread.

    Args:
        control: the ZMQ link between the same ends, connected; closed with this.
        run_id: of the frames.
        outgoing: path of the payloads that leave.
        incoming: path of those that come; may be the same.
        peer_timeout_s: of the ZMQ link.
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
        self._receiver = GroupReceiver(incoming, control.say, control.deliver, control, run_id)
        self._can_send, self._can_receive = threading.Event(), threading.Event()
        bodies = (self._send_all, self._take_messages, self._receiver.run)
        self._threads = [threading.Thread(target=self._run, args=(body,), daemon=True) for body in bodies]
        for name, thread in zip(("send", "answer", "receive"), self._threads, strict=True):
            thread.name = f"tahq-{name}-{self.link}"
            thread.start()

    def __str__(self) -> str:
        return str(self._control)

    def wait_open(self, timeout_s: float) -> None:
        """Block until both paths can carry payloads.

        Raises:
            PeerLostError: the other end was not ready in time, or is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        for is_open in (self._can_send, self._can_receive):
            while not is_open.wait(_POLL_S):
                self._check_usable()
                if time.monotonic() > deadline_s:
                    raise PeerLostError(f"{self}: its process group was not open after {timeout_s:g} s")

    # The contract

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Transport.expect.

        Raises:
            LocalProtocolError: the id was expected before, or the link is closed.
            RemoteProtocolError: the frame is here already, and is larger.
        """
        self._check_usable()
        try:
            self._receiver.expect(id, max_nbytes)
        except TahqError as error:
            self._control.fail(error)
            raise

    def send(self, frame: Frame) -> None:
        """Queue a frame; see Transport.send and ZmqTransport.send for what it raises."""
        check_sendable(frame, self.payload_device)
        self._check_usable()
        if frame.id.run != self._run_id:
            raise LocalProtocolError(f"{self}: {frame.id} is not of run {self._run_id}")
        if self._sender.queued_nbytes > MAX_QUEUED_NBYTES:
            raise LocalProtocolError(
                f"{self}: {format_size(self._sender.queued_nbytes)} are queued already; the peer receives them too "
                f"slowly for the number of micro-batches in flight"
            )
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
        if self._control.error is None:
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
        self._control.messages.put(None)
        self._outgoing.abort()
        self._incoming.abort()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _check_usable(self) -> None:
        if self._control.error is not None:
            raise self._control.error.with_traceback(None)

    # The threads

    def _send_all(self) -> None:
        self._outgoing.open()
        self._can_send.set()
        self._sender.run()

    def _take_messages(self) -> None:
        try:
            self._incoming.open()
            self._can_receive.set()
            while (message := self._control.messages.get()) is not None:
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
        while not self._is_over and not self._control.was_heard_after(verdict_at_s):
            time.sleep(_POLL_S)
        if not self._is_over:
            self._control.fail(PeerLostError(f"{self}: its process group broke: {why}"))

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._control.error is not None
