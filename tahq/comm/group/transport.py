"""A link inside a site: frames over a process group of torch.distributed, everything else over ZMQ.

Each direction is a lane with its own group, sending thread and receiving threads, so that activations and
gradients never wait for each other. The ZMQ link between the same two ends goes on beside it: its heartbeats
tell a dead peer from a busy one, its BYE an orderly end from a broken connection, and `recv` waits for its inbox, so
that every failure ends this transport as it would end that link. A broken group does not say why. If the peer has
died, its next process needs another group, so this end waits as it would over ZMQ, until it is told to start over or
gives the peer up; if the peer is still heard, the link is over.
"""

import time
from dataclasses import dataclass

import torch

from tahq.comm.group.lane import ANNOUNCEMENT_NBYTES, Lane
from tahq.comm.group.lane_ends import GroupReceiver, GroupSender
from tahq.comm.link.frame import Frame, LogicalId, check_sendable
from tahq.comm.transport import LinkCounter, LinkStats
from tahq.comm.zmq.transport import MAX_QUEUED_NBYTES, ZmqTransport
from tahq.errors import LocalProtocolError, PeerLostError, TahqError
from tahq.units import format_size

_JOIN_S = 1.0
"""Wait this long for a thread of an aborted lane; one that half a payload holds longer ends by itself."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Lanes:
    """Both directions of a link, as this end uses them."""

    outgoing: Lane
    incoming: Lane


class GroupTransport:
    """A Transport (tahq.comm.transport); made by `open_group`, used by one thread."""

    def __init__(self, control: ZmqTransport, lanes: Lanes, peer_timeout_s: float) -> None:
        """Start the threads.

        Args:
            control: the ZMQ link between the same ends, connected; closed with this.
            lanes: connected.
            peer_timeout_s: of the ZMQ link.
        """
        self.link = control.link
        self.payload_device = lanes.outgoing.path.device
        self._control = control
        self._lanes = lanes
        self._verdict_s = min(1.0, peer_timeout_s / 2)
        self._is_closed = False
        self._counter = LinkCounter(self.link, None, ANNOUNCEMENT_NBYTES)
        self._sender = GroupSender(lanes.outgoing, control.fail, self._on_broken)
        self._receiver = GroupReceiver(lanes.incoming, control.deliver, control.fail, self._on_broken)

    def __str__(self) -> str:
        return str(self._control)

    def wait_open(self, timeout_s: float) -> None:
        """Block until both lanes can carry payloads.

        Raises:
            PeerLostError: the other end was not ready in time, or is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        for end in (self._sender, self._receiver):
            while not end.is_open.wait(_POLL_S):
                self._check_usable()
                if time.monotonic() > deadline_s:
                    raise PeerLostError(f"{self}: its process group was not open after {timeout_s:g} s")

    # -- the contract -------------------------------------------------------------------------

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
        if frame.id.run != self._lanes.outgoing.identity.run_id:
            raise LocalProtocolError(f"{self}: {frame.id} is not of run {self._lanes.outgoing.identity.run_id}")
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
            # It was allocated on the lane's stream; its memory must not be reused while this stream reads it.
            frame.payload.record_stream(torch.cuda.current_stream(frame.payload.device))
        return frame

    def take_stats(self) -> list[LinkStats]:
        """See Transport.take_stats."""
        return self._counter.take(self._sender.busy_s)

    def close(self, linger_s: float = 5.0) -> None:
        """Send queued frames, wait up to `linger_s` for receipts, say BYE, break the group; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._control.error is None:
            self._sender.close()
            self._sender.thread.join(linger_s)
        self._sender.abandon()
        self._control.close(linger_s)
        self._break()

    def abandon(self) -> None:
        """Break the group without a message: other processes will replace this one and the peer."""
        self._is_closed = True
        self._sender.abandon()
        self._break()

    def _break(self) -> None:
        for lane in (self._lanes.outgoing, self._lanes.incoming):
            lane.abort()
        for thread in (self._sender.thread, *self._receiver.threads):
            thread.join(_JOIN_S)

    # -- failures -----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._control.error is not None:
            raise self._control.error.with_traceback(None)

    def _on_broken(self, why: str) -> None:
        """A lane is broken, by our close, by the peer's, or because the peer died; the ZMQ link tells which."""
        verdict_at_s = time.monotonic() + self._verdict_s
        while not self._is_over and not self._control.was_heard_after(verdict_at_s):
            time.sleep(_POLL_S)
        if not self._is_over:
            self._control.fail(PeerLostError(f"{self}: its process group broke: {why}"))

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._control.error is not None
