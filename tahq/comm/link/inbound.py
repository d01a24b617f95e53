"""The receiving half of a session: pieces become frames, and frames are matched with what was posted.

Invariants: memory for a frame is allocated once, at its whole length, and only after that length was
checked against what was posted for its id, or against the bound on frames that nobody has posted yet;
the pieces of a frame arrive in order, and of each direction one frame after the other; an id is
delivered once.
"""

from dataclasses import dataclass

import numpy as np
import torch

from tahq.comm.link.frame import Direction, Frame, FrameHeader, LogicalId
from tahq.comm.link.receive_memory import Allocate, pageable
from tahq.errors import LocalProtocolError, RemoteProtocolError
from tahq.units import format_size


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
