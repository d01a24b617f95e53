"""The receiving end of a lane: takes memory for a frame only after its header was checked against what was posted.

Three threads meet here: the one that computes posts (`expect`), one answers announcements, and one takes payloads as
they become whole, so that answers never wait for payloads. What they share, the matching of frames with posts, is
under a lock.
"""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tahq.comm.group.message import ANNOUNCEMENT_NBYTES, Answer, checksum_of, unpack_announcement
from tahq.comm.group.thread import GroupThread, Lane
from tahq.comm.link.frame import Frame, FrameHeader, FrameKind, LogicalId
from tahq.comm.link.inbound import Inbound
from tahq.comm.link.spec import SessionLimits
from tahq.errors import RemoteProtocolError, TahqError


@dataclass(frozen=True, slots=True)
class _Coming:
    """A frame whose payload the sender was told to send; `arrived` waits for it."""

    header: FrameHeader
    checksum: int
    payload: torch.Tensor
    arrived: Callable[[], None]


class GroupReceiver:
    """What was posted, and the threads that receive it."""

    def __init__(
        self,
        lane: Lane,
        deliver: Callable[[Frame], None],
        fail: Callable[[TahqError], None],
        broken: Callable[[str], None],
    ) -> None:
        self._lane = lane
        self._deliver = deliver
        self._lock = threading.Lock()
        self._inbound = Inbound(SessionLimits(), lane.peer)
        self._sequence = 0
        self._coming: queue.SimpleQueue[_Coming | bool] = queue.SimpleQueue()
        self.is_open = threading.Event()
        """Set when payloads can be received."""
        self.threads = [
            GroupThread(f"tahq-{name}-{lane.link}", lane, body, fail, broken)
            for name, body in (("answer", self._answer_all), ("receive", self._receive_all))
        ]

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive; see Inbound.expect for what it raises."""
        with self._lock:
            early = self._inbound.expect(id, max_nbytes)
        if early is not None:
            self._deliver(early)

    # The thread that answers

    def _answer_all(self) -> None:
        ends_in_order = False
        try:
            self._lane.path.open()
            self.is_open.set()
            message, arrived = self._post_announcement()
            while not ends_in_order:
                arrived()
                header, checksum = unpack_announcement(message, self._lane.peer)
                self._check_place(header)
                ends_in_order = header.kind is FrameKind.BYE
                if not ends_in_order:
                    message, arrived = self._post_announcement()
                    self._answer_one(header, checksum)
        finally:
            self._coming.put(ends_in_order)

    def _post_announcement(self) -> tuple[torch.Tensor, Callable[[], None]]:
        message = torch.empty(ANNOUNCEMENT_NBYTES, dtype=torch.uint8)
        return message, self._lane.group.post_announcement(message)

    def _answer_one(self, header: FrameHeader, checksum: int) -> None:
        with self._lock:
            is_wanted = self._inbound.admit(header)
        if not is_wanted:
            self._answer(Answer.HAVE_IT)
            return
        payload = self._lane.path.allocate(header.total_nbytes)
        arrived = self._lane.path.post(payload)
        self._answer(Answer.SEND)  # first: an empty payload is here at once, and its receipt must not overtake this
        self._coming.put(_Coming(header, checksum, payload, arrived))

    # The thread that receives

    def _receive_all(self) -> None:
        while isinstance(coming := self._coming.get(), _Coming):
            self._receive(coming)
        if coming:
            self._answer(Answer.RECEIVED)

    def _receive(self, coming: _Coming) -> None:
        coming.arrived()
        if checksum_of(coming.payload) != coming.checksum:
            raise RemoteProtocolError(
                f"{self._lane.peer}: sent {coming.header.id} damaged: its checksum does not match"
            )
        with self._lock:
            frame = self._inbound.complete(coming.header, coming.payload)
        if frame is not None:
            self._deliver(frame)
        self._answer(Answer.RECEIVED)

    # Both

    def _answer(self, answer: Answer) -> None:
        self._lane.group.answer(torch.tensor([answer], dtype=torch.uint8))

    def _check_place(self, header: FrameHeader) -> None:
        identity = self._lane.identity
        sequence = self._sequence + (header.kind is FrameKind.DATA)
        got = (header.id.run, header.epoch, header.link, header.sequence)
        expected = (identity.run_id, identity.epoch, self._lane.link, sequence)
        if got != expected:
            raise RemoteProtocolError(
                f"{self._lane.peer}: announced (run, epoch, link, frame) {got}; expected {expected}"
            )
        self._sequence = sequence
