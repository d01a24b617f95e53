"""A link inside a site: frames over a process group of torch.distributed, everything else over ZMQ.

Each direction is a lane with a group, a sending and a receiving thread of its own, so that activations and
gradients never wait for each other. The ZMQ link between the same two ends goes on beside it: its heartbeats
tell a dead peer from a busy one, its BYE an end in order from a broken connection, and its inbox is
what `recv` waits for, so that every failure ends this transport as it would end that one. A group that
breaks says nothing about why. If the peer has died, its next process will want another group, so this end waits as it
would over ZMQ, until it is told to begin anew or gives the peer up; if the peer is still heard, the link is over.
"""

import time
from dataclasses import dataclass

import torch

from tahq.comm.group.message import ANNOUNCEMENT_NBYTES
from tahq.comm.group.receiver import GroupReceiver
from tahq.comm.group.sender import GroupSender
from tahq.comm.group.thread import Lane
from tahq.comm.link.frame import Frame, LogicalId, check_sendable
from tahq.comm.transport import LinkCounter, LinkStats
from tahq.comm.zmq.transport import MAX_QUEUED_NBYTES, ZmqTransport
from tahq.errors import LocalProtocolError, PeerLostError, TahqError
from tahq.units import format_size

_JOIN_S = 1.0
"""For a thread to end whose lane was aborted; one that a part of a payload holds longer is left to end by itself."""
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
            PeerLostError: the other end did not come to it in time, or is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        for end in (self._sender, self._receiver):
            while not end.is_open.wait(_POLL_S):
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
        if frame.id.run != self._lanes.outgoing.identity.run_id:
            raise LocalProtocolError(f"{self}: {frame.id} is not of run {self._lanes.outgoing.identity.run_id}")
        if self._sender.queued_nbytes > MAX_QUEUED_NBYTES:
            raise LocalProtocolError(
                f"{self}: {format_size(self._sender.queued_nbytes)} are queued already; the peer takes them too "
                f"slowly for what the schedule has in flight"
            )
        self._counter.count(frame)
        self._sender.send(frame)

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that is whole; see Transport.recv."""
        frame = self._control.recv(timeout_s)
        if frame.payload.is_cuda:
            # It was allocated on the lane's stream; its memory is not to be given away while this one reads it.
            frame.payload.record_stream(torch.cuda.current_stream(frame.payload.device))
        return frame

    def take_stats(self) -> list[LinkStats]:
        """What was sent since the last call; see Transport.take_stats."""
        return self._counter.take(self._sender.busy_s)

    def close(self, linger_s: float = 5.0) -> None:
        """Send what is queued, wait up to `linger_s` for receipts, say BYE, break the group; safe to call twice."""
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
        """Break the group without a word: other processes will take the place of this one, and of the peer."""
        self._is_closed = True
        self._sender.abandon()
        self._break()

    def _break(self) -> None:
        for lane in (self._lanes.outgoing, self._lanes.incoming):
            lane.abort()
        for thread in (self._sender.thread, *self._receiver.threads):
            thread.join(_JOIN_S)

    # Failures

    def _check_usable(self) -> None:
        if self._control.error is not None:
            raise self._control.error.with_traceback(None)

    def _on_broken(self, why: str) -> None:
        """A lane is broken: by our own close, by the peer's, or because it died; the ZMQ link knows which."""
        verdict_at_s = time.monotonic() + self._verdict_s
        while not self._is_over and not self._control.was_heard_after(verdict_at_s):
            time.sleep(_POLL_S)
        if not self._is_over:
            self._control.fail(PeerLostError(f"{self}: its process group broke: {why}"))

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._control.error is not None
