"""The sending end of a lane: announces each frame, sends its payload when the receiver says so, awaits the receipt.

Frames are announced ahead, up to a window, so that a receiver has its answers on their way while a payload comes in;
payloads go one after another, each after its answer, so a receiver that refuses a frame never meets its bytes.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tahq.comm.group.message import (
    ANSWER_NBYTES,
    Answer,
    checksum_of,
    header_of,
    pack_announcement,
    unpack_answer,
)
from tahq.comm.group.thread import GroupThread, Lane
from tahq.comm.link.frame import Direction, Frame, FrameHeader, FrameKind, LogicalId, Purpose
from tahq.comm.link.outbound import BusyClocks
from tahq.errors import RemoteProtocolError, TahqError

_WINDOW_FRAMES = 16
_WINDOW_NBYTES = 64 * 1024 * 1024
"""What is announced and has no receipt; one frame always may be."""


@dataclass(frozen=True, slots=True)
class _Queued:
    frame: Frame
    mark: torch.cuda.Event | None


class GroupSender:
    """A queue and the thread that empties it."""

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
        """Payload bytes that were given to `send` and have no receipt."""
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
        """End the thread after what is queued, and tell the receiver that nothing more will come."""
        self._queue.put(None)

    def abandon(self) -> None:
        """End the thread when it next looks at the queue, and say nothing: nobody is there to hear it."""
        self._is_abandoned = True
        self._queue.put(None)

    # The thread

    def _run(self) -> None:
        self._lane.path.open()
        self.is_open.set()
        while self._announce_ahead():
            self._take_answer()
        if not self._is_abandoned:
            self._say_end()

    def _announce_ahead(self) -> bool:
        """Announce what is queued, up to the window, waiting if nothing is on its way; whether anything is."""
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
        """The next frame; None: there is none now, or, having waited, there will be none."""
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
