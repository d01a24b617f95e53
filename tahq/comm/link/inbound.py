"""The receiving half of a session: pieces become frames, and frames are matched with what was posted.

Invariants: memory for a frame is allocated once, at its whole length, and only after that length was
checked against what was posted for its id, or against the bound on frames that nobody has posted yet;
the pieces of a frame arrive in order, and of each direction one frame after the other; an id is
delivered once.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tahq.comm.link.frame import Direction, Frame, FrameHeader, LogicalId
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.units import format_size

Allocate = Callable[[int], torch.Tensor]
"""Bytes, to be written, for a frame of so many."""


def pageable(nbytes: int) -> torch.Tensor:
    """Memory as any."""
    return torch.empty(nbytes, dtype=torch.uint8)


def memory_for(device: torch.device) -> Allocate:
    """What frames that this device decodes are best received in."""
    if device.type != "cuda":
        return pageable

    def pinned(nbytes: int) -> torch.Tensor:
        with torch.cuda.device(device):  # of the thread that receives, which else would start to use the first GPU
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    return pinned


@dataclass(frozen=True, slots=True)
class UnexpectedBound:
    """How many frames, and bytes of them, are kept for ids that nobody has posted yet."""

    frames: int = 1024
    nbytes: int = 1 << 30


_MAX_CONSUMED = 16_384
"""Consumed ids that are remembered: many steps' worth, at about 200 bytes an id."""


class _Assembly:
    """A frame of which the pieces up to `received` have come; without a buffer it is being dropped."""

    def __init__(self, header: FrameHeader, payload: torch.Tensor | None) -> None:
        self.header = header
        self.payload = payload
        self._bytes = None if self.payload is None else self.payload.numpy()
        self.received = 0

    def add(self, header: FrameHeader, piece: bytes | memoryview) -> None:
        end = self.received + len(piece)
        if self._bytes is not None:
            # NumPy copies without the GIL, which new memory, page by page, would hold up all other threads with.
            self._bytes[self.received : end] = np.frombuffer(piece, np.uint8)
        self.received = end

    @property
    def is_whole(self) -> bool:
        return self.received == self.header.total_nbytes

    def continues_with(self, header: FrameHeader) -> bool:
        return header.offset == self.received and _same_frame(header, self.header)


def _same_frame(one: FrameHeader, other: FrameHeader) -> bool:
    return (one.id, one.total_nbytes, one.shape, one.dtype, one.codec, one.shard) == (
        *(other.id, other.total_nbytes, other.shape, other.dtype, other.codec, other.shard),
    )


class Inbound:
    """Posted ids, frames that came before their time, and the frames that are coming in, one a direction."""

    def __init__(self, bound: UnexpectedBound, peer: str, allocate: Allocate = pageable) -> None:
        self._allocate = allocate
        self._bound = bound
        self._peer = peer
        self._posted: dict[LogicalId, int] = {}
        self._early: dict[LogicalId, Frame] = {}
        self._early_nbytes = 0
        self._admitted: dict[LogicalId, int] = {}
        self._consumed: dict[LogicalId, None] = {}
        self._assemblies: dict[Direction, _Assembly] = {}

    def begin_anew(self) -> None:
        """The peer's messages begin anew, with a frame: what has come of unfinished ones will come again."""
        self._assemblies.clear()
        self._admitted.clear()

    @property
    def has_early(self) -> bool:
        """Whether a frame is kept that nobody has posted yet."""
        return bool(self._early)

    def expect(self, id: LogicalId, max_nbytes: int) -> Frame | None:
        """Post a receive; the frame itself if it has come already.

        Raises:
            LocalProtocolError: the id is posted already, or was delivered already.
            RemoteProtocolError: it has come already, and is larger than `max_nbytes`.
        """
        if id in self._posted or id in self._consumed:
            raise LocalProtocolError(f"{self._peer}: {id} was expected before; an id is delivered once")
        if id in self._admitted:
            self._check_posted_size(id, self._admitted[id], max_nbytes)
        frame = self._early.get(id)
        if frame is None:
            self._posted[id] = max_nbytes
            return None
        self._check_posted_size(id, frame.payload.numel(), max_nbytes)
        self._early_nbytes -= self._early.pop(id).payload.numel()
        self._consume(id)
        return frame

    def accept(self, header: FrameHeader, piece: bytes | memoryview) -> Frame | None:
        """Take the next piece; the frame if it completes one that was posted.

        Raises:
            RemoteProtocolError: it is not the next piece of the frame before it, or too much.
        """
        assembly = self._assemblies.get(header.id.direction)
        if assembly is None:
            assembly = self._assemblies[header.id.direction] = self._begin(header)
        if not assembly.continues_with(header) or (not piece and header.total_nbytes):
            raise RemoteProtocolError(
                f"{self._peer}: sent bytes {header.offset} to {header.offset + len(piece)} of {header.id} when byte "
                f"{assembly.received} of {assembly.header.id} was next"
            )
        assembly.add(header, piece)
        return self._finish(self._assemblies.pop(header.id.direction)) if assembly.is_whole else None

    def _begin(self, header: FrameHeader) -> _Assembly:
        return _Assembly(header, self._allocate(header.total_nbytes) if self.admit(header) else None)

    def _finish(self, whole: _Assembly) -> Frame | None:
        return None if whole.payload is None else self.complete(whole.header, whole.payload)

    def admit(self, header: FrameHeader) -> bool:
        """Whether memory may be taken for this frame; no if its id is coming in, kept or delivered already.

        Raises:
            RemoteProtocolError: it is larger than was posted, or more than is kept for nobody.
        """
        id, max_nbytes = header.id, self._posted.get(header.id)
        if id in self._consumed or id in self._early or id in self._admitted:
            return False
        if max_nbytes is not None:
            self._check_posted_size(id, header.total_nbytes, max_nbytes)
        else:
            self._check_bound(header)
        self._admitted[id] = header.total_nbytes
        return True

    def complete(self, header: FrameHeader, payload: torch.Tensor) -> Frame | None:
        """A frame that was admitted is whole: the frame if it was posted, else it is kept."""
        frame = Frame(header.id, header.codec, header.dtype, header.shape, payload, header.shard)
        del self._admitted[header.id]
        if self._posted.pop(header.id, None) is None:
            self._early[header.id] = frame
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
            raise RemoteProtocolError(f"{self._peer}: sent {nbytes} bytes as {id}, where at most {max_nbytes} may come")

    def _check_bound(self, header: FrameHeader) -> None:
        coming = [nbytes for id, nbytes in self._admitted.items() if id not in self._posted]
        frames, nbytes = len(self._early) + len(coming) + 1, self._early_nbytes + sum(coming) + header.total_nbytes
        if frames > self._bound.frames or nbytes > self._bound.nbytes:
            raise RemoteProtocolError(
                f"{self._peer}: sent {frames} frames, {format_size(nbytes)}, that nobody here expects, {header.id} the "
                f"last; at most {self._bound.frames} and {format_size(self._bound.nbytes)} are kept"
            )


Piece = tuple[FrameHeader, bytes | memoryview]


class Resequencer:
    """Pieces of one link, on their way from its connections to the frames that they are part of."""

    def __init__(self, connections: int, bound_nbytes: int, peer: str) -> None:
        self.received = 0
        """The highest number up to which everything has come."""
        self.round = 0
        """The latest round; everything comes in round 0 at first."""
        self.has_lost = False
        """Whether something was lost that nobody has asked for yet."""
        self._is_precaution = False
        """Whether the latest round was begun without anything being known to be lost."""
        self._rounds = [0] * connections
        self._passed = [0] * connections
        self._held: dict[int, Piece] = {}
        self._held_nbytes = 0
        self._bound_nbytes = bound_nbytes
        self._peer = peer

    @property
    def passed(self) -> Sequence[int]:
        """For each connection, the number up to which it has brought all that it will."""
        return self._passed

    @property
    def is_waiting(self) -> bool:
        """Whether something was lost and has not begun to come again on all connections."""
        return self.has_lost or (min(self._rounds) < self.round and not self._is_precaution)

    def take(self, header: FrameHeader, payload: bytes | memoryview, connection: int) -> Iterator[Piece]:
        """Take a piece, and give what is next in order by now; one that has come before is dropped.

        Raises:
            RemoteProtocolError: more waits for its turn than the peer may have on its way.
        """
        if header.sequence > self.received and header.sequence not in self._held:
            self._hold(header, payload)
        while (piece := self._held.pop(self.received + 1, None)) is not None:
            self.received += 1
            self._held_nbytes -= len(piece[1])
            yield piece
        self.pass_on(header.sequence, connection)

    def _hold(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        self._held[header.sequence] = (header, payload)
        self._held_nbytes += len(payload)
        if self._held_nbytes > self._bound_nbytes:
            raise RemoteProtocolError(
                f"{self._peer}: sent {format_size(self._held_nbytes)} after message {self.received + 1}, which has not "
                f"come; at most {format_size(self._bound_nbytes)} may be on their way"
            )

    def pass_on(self, sequence: int, connection: int) -> None:
        """All up to `sequence` that goes over this connection, in the round that it is in, has come or never will."""
        if self._rounds[connection] == self.round:
            self._passed[connection] = max(self._passed[connection], sequence)
            self.has_lost |= min(self._passed) > self.received

    def begin_round(self, *, is_precaution: bool = False) -> None:
        """What was lost is to come in another round; or, as a precaution, what may have been."""
        self._is_precaution = is_precaution and not self.is_waiting
        self.round += 1
        self.has_lost = False
        self._passed = [0] * len(self._passed)

    def join_round(self, number: int, sequence: int, connection: int) -> bool:
        """All up to `sequence` was sent on this connection before, or in, the round of this number.

        Returns:
            Whether that is the latest round; if not, the peer does not know of that.

        Raises:
            RemoteProtocolError: nobody has asked for such a round.
        """
        if number > self.round:
            raise RemoteProtocolError(f"{self._peer}: is in round {number} of sending; {self.round} is the latest")
        if number == self.round:
            self._rounds[connection] = number
            self.pass_on(sequence, connection)
        return number == self.round
