"""The receiving half of a session: pieces are put in order and become frames, frames are matched with posted ids.

Invariants: memory for a frame is allocated once, at its whole length, and only after that length was checked against
what was posted for its id, or against the bound on frames that were not posted yet; the pieces of a frame arrive in
order, in each lane (control, forward, backward, files) one frame after the other; an id is delivered once. Messages of
the control and files channels have no id: each is delivered when it is whole.
"""

from collections.abc import Callable

import numpy as np
import torch

from tahq.comm.link.frame import MAX_PIECE_NBYTES, Channel, Direction, Frame, FrameHeader, LogicalId, void_frame
from tahq.comm.link.spec import MESSAGE_WINDOW_NBYTES, SessionLimits
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.units import format_size

Allocate = Callable[[int], torch.Tensor]
"""Returns uninitialised memory for a frame of this many bytes."""


def pageable(nbytes: int) -> torch.Tensor:
    """Ordinary memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def memory_for(device: torch.device) -> Allocate:
    """Memory for received frames that this device decodes: pinned for a GPU.

    A copy from pageable memory goes through the driver's own pinned memory and waits for it; from pinned memory it is
    queued on the lane's stream. torch reuses a block only after the copies from it are done.
    """
    if device.type != "cuda":
        return pageable

    def pinned(nbytes: int) -> torch.Tensor:
        with torch.cuda.device(device):  # otherwise the receiving thread would start to use the first GPU
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    return pinned


_MAX_CONSUMED = 131_072
"""Delivered ids that are remembered, at about 200 bytes per id: a step's, and more where steps have few frames."""


class _Assembly:
    """A frame or message, of which the first `received` bytes have arrived.

    The memory of a frame is allocated at once; a frame without `payload` is being dropped. That of a message on another
    channel grows with what has come, not with what was announced.
    """

    def __init__(self, header: FrameHeader, payload: torch.Tensor | None) -> None:
        self.header = header
        self.payload = payload
        self.message = bytearray()
        self.received = 0
        self._bytes = None if payload is None else payload.numpy()

    def add(self, piece: bytes | memoryview) -> None:
        end = self.received + len(piece)
        if self.header.channel is not Channel.DATA:
            self.message += piece
        elif self._bytes is not None:
            # NumPy copies without the GIL; with it, page faults in new memory would stall all other threads.
            self._bytes[self.received : end] = np.frombuffer(piece, np.uint8)
        self.received = end

    def is_continued_by(self, header: FrameHeader, piece: bytes | memoryview) -> bool:
        """Whether this is the next piece."""
        own = self.header
        is_same = header is own or (
            (header.id, header.total_nbytes, header.shape) == (own.id, own.total_nbytes, own.shape)
            and (header.dtype, header.codec, header.shard) == (own.dtype, own.codec, own.shard)
        )
        return is_same and header.offset == self.received and (len(piece) > 0 or header.total_nbytes == 0)


class Inbound:
    """Posted ids, frames that came before they were posted, and the frame that is coming in on each lane."""

    def __init__(self, limits: SessionLimits, peer: str, allocate: Allocate = pageable) -> None:
        self._allocate = allocate
        self._limits = limits
        self._peer = peer
        self._posted: dict[LogicalId, int] = {}
        self.early: dict[LogicalId, Frame] = {}
        """Frames that were not posted yet."""
        self._early_nbytes = 0
        self._admitted: dict[LogicalId, int] = {}
        self._consumed: dict[LogicalId, None] = {}
        self._assemblies: dict[tuple[Channel, Direction], _Assembly] = {}
        self._abandoned_step = -1

    def has_already(self, id: LogicalId) -> bool:
        """Whether a post of this id may be answered at once; any thread may call it."""
        return bool(self.early) or self._is_abandoned(id)

    def abandon(self, step: int) -> list[Frame]:
        """A step's training frames will not come: void ones instead, for what is posted now and from now on."""
        self._abandoned_step = step
        ids = [id for id in self._posted if self._is_abandoned(id)]
        for id in ids:
            del self._posted[id]
            self._consume(id)
        return [void_frame(id) for id in ids]

    def _is_abandoned(self, id: LogicalId) -> bool:
        return id.step == self._abandoned_step and not id.is_evaluation

    def begin_anew(self) -> None:
        """The peer starts again with a new frame: parts of unfinished frames will come again."""
        self._assemblies.clear()
        self._admitted.clear()

    def expect(self, id: LogicalId, max_nbytes: int) -> Frame | None:
        """Post a receive; the frame itself if it has come already.

        LocalProtocolError: the id was posted before. RemoteProtocolError: the frame is larger than `max_nbytes`.
        """
        if id in self._posted or id in self._consumed:
            raise LocalProtocolError(f"{self._peer}: {id} was expected before; an id is delivered once")
        if id in self._admitted:
            self._check_posted_size(id, self._admitted[id], max_nbytes)
        frame = self.early.get(id)
        if frame is None and self._is_abandoned(id):
            self._consume(id)
            return void_frame(id)
        if frame is None:
            self._posted[id] = max_nbytes
            return None
        self._check_posted_size(id, frame.payload.numel(), max_nbytes)
        self._early_nbytes -= self.early.pop(id).payload.numel()
        self._consume(id)
        return frame

    def accept(self, header: FrameHeader, piece: bytes | memoryview) -> Frame | tuple[Channel, bytes] | None:
        """Take the next piece (else RemoteProtocolError); the posted frame, or the message, that it completes."""
        lane = (header.channel, header.id.direction)
        assembly = self._assemblies.get(lane)
        if assembly is None:
            assembly = self._assemblies[lane] = _Assembly(header, self._memory_for(header))
        if not assembly.is_continued_by(header, piece):
            raise RemoteProtocolError(
                f"{self._peer}: sent bytes {header.offset} to {header.offset + len(piece)} of {header.id}; expected "
                f"byte {assembly.received} of {assembly.header.id}"
            )
        assembly.add(piece)
        if assembly.received < header.total_nbytes:
            return None
        del self._assemblies[lane]
        if header.channel is not Channel.DATA:
            return header.channel, bytes(assembly.message)
        return None if assembly.payload is None else self.complete(assembly.header, assembly.payload)

    def _memory_for(self, header: FrameHeader) -> torch.Tensor | None:
        if header.channel is Channel.DATA:
            return self._allocate(header.total_nbytes) if self.admit(header) else None
        if header.total_nbytes > self._limits.max_message_nbytes:
            raise RemoteProtocolError(
                f"{self._peer}: sent a message of {header.total_nbytes} bytes on the channel for "
                f"{header.channel.name.lower()}; at most {self._limits.max_message_nbytes}"
            )
        return None

    def admit(self, header: FrameHeader) -> bool:
        """Whether memory may be taken for this frame; no if its id is coming in, kept or delivered already.

        RemoteProtocolError: it is larger than was posted, or exceeds the bound on frames that were not posted.
        """
        id, max_nbytes = header.id, self._posted.get(header.id)
        if id in self._consumed or id in self.early or id in self._admitted:
            return False
        if max_nbytes is not None:
            self._check_posted_size(id, header.total_nbytes, max_nbytes)
        else:
            self._check_bound(header)
        self._admitted[id] = header.total_nbytes
        return True

    def complete(self, header: FrameHeader, payload: torch.Tensor) -> Frame | None:
        """A frame that was admitted is whole: the frame if it was posted, else it is kept, unless it was abandoned."""
        frame = header.frame(payload)
        del self._admitted[header.id]
        if header.id in self._consumed:
            return None
        if self._posted.pop(header.id, None) is None:
            self.early[header.id] = frame
            self._early_nbytes += header.total_nbytes
            return None
        self._consume(header.id)
        return frame

    def _consume(self, id: LogicalId) -> None:
        self._consumed[id] = None
        if len(self._consumed) > _MAX_CONSUMED:
            del self._consumed[next(iter(self._consumed))]

    def _check_posted_size(self, id: LogicalId, nbytes: int, max_nbytes: int) -> None:
        if nbytes > max_nbytes:
            raise RemoteProtocolError(f"{self._peer}: sent {nbytes} bytes as {id}; at most {max_nbytes} were expected")

    def has_room(self, header: FrameHeader) -> bool:
        """Whether a frame was posted, is not needed, or is within the bound on frames that were not posted."""
        known = (self._posted, self._consumed, self.early, self._admitted)
        return any(header.id in ids for ids in known) or self._unexpected(header)[2]

    def _unexpected(self, header: FrameHeader) -> tuple[int, int, bool]:
        """Number and bytes of frames that were not posted, this one included, and whether so many are allowed."""
        coming = [nbytes for id, nbytes in self._admitted.items() if id not in self._posted]
        frames, nbytes = len(self.early) + len(coming) + 1, self._early_nbytes + sum(coming) + header.total_nbytes
        return frames, nbytes, frames <= self._limits.unexpected_frames and nbytes <= self._limits.unexpected_nbytes

    def _check_bound(self, header: FrameHeader) -> None:
        frames, nbytes, is_allowed = self._unexpected(header)
        most_frames, most_nbytes = self._limits.unexpected_frames, self._limits.unexpected_nbytes
        if not is_allowed:
            raise RemoteProtocolError(
                f"{self._peer}: sent {frames} unexpected frames, {format_size(nbytes)}, {header.id} the "
                f"last; at most {most_frames} and {format_size(most_nbytes)} are kept"
            )


Piece = tuple[FrameHeader, bytes | memoryview]


class Resequencer:
    """Puts pieces that came over the connections of a link back into the order of their numbers, each once.

    Each connection keeps its order, so a piece that came over one says that all before it on the same one has come, or
    never will; a HEARTBEAT or BYE says the same up to the number it names. A number that all connections have passed
    and none has brought was lost. It is asked for, and everything after it comes again, in a new *round*: on each
    connection behind a RESUME that names the round, with the same numbers as before. A piece that comes over a
    connection that has not reached the latest round is used, but says nothing about losses. HEARTBEAT names its round,
    too, so a RESUME may be lost.
    """

    def __init__(self, limits: SessionLimits, peer: str) -> None:
        self.received = 0
        """The highest number up to which everything has come."""
        self.round = 0
        """The latest round; everything comes in round 0 at first."""
        self.has_lost = False
        """Whether something was lost that was not asked for yet."""
        self.passed = [0] * limits.connections
        """For each connection, the number up to which it has brought all that it will."""
        self._is_precaution = False
        """Whether the latest round was begun without anything being known to be lost."""
        self._rounds = [0] * limits.connections
        self._held: dict[int, Piece] = {}
        self._held_nbytes = 0
        self._bound_nbytes = limits.receive_window_nbytes + 2 * MESSAGE_WINDOW_NBYTES + MAX_PIECE_NBYTES
        self._peer = peer

    @property
    def is_waiting(self) -> bool:
        """Whether something was lost and has not begun to come again on all connections."""
        return self.has_lost or (min(self._rounds) < self.round and not self._is_precaution)

    def take(self, header: FrameHeader, payload: bytes | memoryview, connection: int) -> list[Piece]:
        """Take a piece, and return those that are next in order now; one that has come before is dropped."""
        ready: list[Piece] = []
        if header.sequence == self.received + 1:
            self.received += 1
            ready.append((header, payload))
            while (piece := self._held.pop(self.received + 1, None)) is not None:
                self.received += 1
                self._held_nbytes -= len(piece[1])
                ready.append(piece)
        elif header.sequence > self.received and header.sequence not in self._held:
            self._hold(header, payload)
        self.pass_on(header.sequence, connection)
        return ready

    def _hold(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        self._held[header.sequence] = (header, payload)
        self._held_nbytes += len(payload)
        if self._held_nbytes > self._bound_nbytes:
            raise RemoteProtocolError(
                f"{self._peer}: sent {format_size(self._held_nbytes)} after message {self.received + 1}, which has not "
                f"come; at most {format_size(self._bound_nbytes)} may be on their way"
            )

    def pass_on(self, sequence: int, connection: int) -> None:
        """Everything up to `sequence` that this connection carries in its current round has come, or never will."""
        if self._rounds[connection] == self.round:
            self.passed[connection] = max(self.passed[connection], sequence)
            self.has_lost |= min(self.passed) > self.received

    def begin_round(self, *, is_precaution: bool = False) -> None:
        """Begin a round in which messages come again that were lost or, as a precaution, may have been."""
        self._is_precaution = is_precaution and not self.is_waiting
        self.round += 1
        self.has_lost = False
        self.passed = [0] * len(self.passed)

    def join_round(self, number: int, sequence: int, connection: int) -> bool:
        """All up to `sequence` was sent on this connection before, or in, the round of this number.

        Returns whether that is the latest round. RemoteProtocolError: no such round was asked for.
        """
        if number > self.round:
            raise RemoteProtocolError(
                f"{self._peer}: names round {number}; {self.round} is the latest that was asked for"
            )
        if number == self.round:
            self._rounds[connection] = number
            self.pass_on(sequence, connection)
        return number == self.round
