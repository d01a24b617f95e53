"""The two ends of a lane: the sender announces frames and sends their payloads, the receiver checks and takes them.

Frames are announced ahead, up to a window, so that answers are on their way while a payload is received. Payloads go
one after another, each after its answer, so a frame that the receiver refuses is never sent. The receiver takes memory
for a frame only after its header was checked against the posted receives.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tahq.comm.group.lane import (
    ANNOUNCEMENT_NBYTES,
    ANSWER_NBYTES,
    Answer,
    GroupThread,
    Lane,
    checksum_of,
    header_of,
    pack_announcement,
    unpack_announcement,
    unpack_answer,
)
from tahq.comm.link.frame import Direction, Frame, FrameHeader, FrameKind, LogicalId, Purpose
from tahq.comm.link.inbound import Inbound
from tahq.comm.link.outbound import BusyClocks
from tahq.comm.link.spec import SessionLimits
from tahq.errors import RemoteProtocolError, TahqError

_WINDOW_FRAMES = 16
_WINDOW_NBYTES = 64 * 1024 * 1024
"""Most bytes announced without a receipt, or one frame."""


@dataclass(frozen=True, slots=True)
class _Queued:
    frame: Frame
    mark: torch.cuda.Event | None


class GroupSender:
    """A queue of frames and the thread that sends them."""

    def __init__(self, lane: Lane, fail: Callable[[TahqError], None], broken: Callable[[str], None]) -> None:
        self._lane = lane
        self._queue: queue.SimpleQueue[_Queued | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._busy = BusyClocks()
        self._queued_nbytes = 0
        self._sequence = 0
        self._is_abandoned = False
        self._announced: deque[_Queued] = deque()
        self._sent: deque[_Queued] = deque()
        self.is_open = threading.Event()
        """Set when payloads can be sent."""
        self.thread = GroupThread(f"tahq-send-{lane.link}", lane, self._run, fail, broken)

    @property
    def queued_nbytes(self) -> int:
        """Payload bytes given to `send` that have no receipt."""
        return self._queued_nbytes

    def send(self, frame: Frame) -> None:
        """Queue a frame."""
        with self._lock:
            self._busy.start(frame.id, time.monotonic())
            self._queued_nbytes += frame.payload.numel()
        self._queue.put(_Queued(frame, self._lane.path.mark()))

    def busy_s(self, direction: Direction) -> float:
        """Seconds in which anything sent that way was queued or had no receipt."""
        with self._lock:
            return self._busy.total_s(direction, time.monotonic())

    def close(self) -> None:
        """End the thread after the queued frames, and tell the receiver that they were the last."""
        self._queue.put(None)

    def abandon(self) -> None:
        """End the thread when it next looks at the queue, without a message to the peer."""
        self._is_abandoned = True
        self._queue.put(None)

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._lane.path.open()
        self.is_open.set()
        while self._announce_ahead():
            self._take_answer()
        if not self._is_abandoned:
            self._say_end()

    def _announce_ahead(self) -> bool:
        """Announce queued frames up to the window, waiting if none is under way; returns whether any is."""
        while self._has_room() and (queued := self._next(wait=not self._outstanding)) is not None:
            self._sequence += 1
            header = header_of(queued.frame, self._lane.identity, self._lane.link, self._sequence)
            self._lane.group.announce(pack_announcement(header, checksum_of(queued.frame.payload)))
            self._announced.append(queued)
        return self._outstanding > 0

    @property
    def _outstanding(self) -> int:
        return len(self._announced) + len(self._sent)

    def _has_room(self) -> bool:
        nbytes = sum(queued.frame.payload.numel() for queued in (*self._announced, *self._sent))
        return not self._outstanding or (self._outstanding < _WINDOW_FRAMES and nbytes < _WINDOW_NBYTES)

    def _next(self, wait: bool) -> _Queued | None:
        """The next frame; None: none is queued, or, after waiting, none will come."""
        if self._is_abandoned:
            return None
        try:
            queued = self._queue.get(block=wait)
        except queue.Empty:
            return None
        if queued is None and not wait:
            self._queue.put(None)
        return queued

    def _take_answer(self) -> None:
        answer = self._await()
        if answer is Answer.RECEIVED and self._sent:
            self._finish(self._sent.popleft())
        elif answer is Answer.HAVE_IT and self._announced:
            self._finish(self._announced.popleft())
        elif answer is Answer.SEND and self._announced:
            queued = self._announced.popleft()
            self._lane.path.send(queued.frame.payload, queued.mark)
            self._sent.append(queued)
        else:
            raise RemoteProtocolError(f"{self._lane.peer}: answered {answer.name} about a frame that was not announced")

    def _say_end(self) -> None:
        identity, link = self._lane.identity, self._lane.link
        id = LogicalId(identity.run_id, 0, 0, Purpose.TRAIN, 0, 0, Direction.FORWARD)
        header = FrameHeader(FrameKind.BYE, identity.epoch, link, self._sequence, id)
        self._lane.group.announce(pack_announcement(header, 0))
        if self._await() is not Answer.RECEIVED:
            raise RemoteProtocolError(f"{self._lane.peer}: did not acknowledge the end of its frames")

    def _await(self) -> Answer:
        message = torch.empty(ANSWER_NBYTES, dtype=torch.uint8)
        self._lane.group.wait_answer(message)
        return unpack_answer(message, self._lane.peer)

    def _finish(self, queued: _Queued) -> None:
        frame = queued.frame
        with self._lock:
            self._busy.stop(frame.id, time.monotonic())
            self._queued_nbytes -= frame.payload.numel()


@dataclass(frozen=True, slots=True)
class _Coming:
    """A frame whose payload was asked for; `arrived` waits for it."""

    header: FrameHeader
    checksum: int
    payload: torch.Tensor
    arrived: Callable[[], None]


class GroupReceiver:
    """The posted receives, and the threads that fulfil them.

    The computing thread posts (`expect`), one thread answers announcements, and one takes payloads as they arrive, so
    that answers never wait for payloads. A lock protects the matching of frames with posts.
    """

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

    # -- the thread that answers ---------------------------------------------------------------

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
        self._answer(Answer.SEND)  # first: an empty payload arrives at once, and its receipt must not overtake this
        self._coming.put(_Coming(header, checksum, payload, arrived))

    # -- the thread that receives --------------------------------------------------------------

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

    # -- both ---------------------------------------------------------------------------------

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
