"""The contract of a transport: one link to one peer, moving frames both ways.

Nothing here knows a model. A transport owns its sockets in one thread and is used from one other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tahq.comm.link.frame import HEADER_NBYTES, Direction, Frame, LogicalId
from tahq.comm.link.wire_time import HeartbeatTimes, PieceTimes


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What one link has moved in one direction since its counters were last taken, evaluations left out.

    `busy_s` is the time during which something sent was queued or not yet acknowledged, so
    payload_bytes * 8 / busy_s is the goodput that a sender sees, one round trip included.
    """

    link: int
    direction: Direction
    frames: int
    payload_bytes: int
    wire_bytes: int
    elements: int
    busy_s: float
    sending_s: float = 0.0
    """Of `busy_s`, while its bytes were on their way; the rest it was queued behind other data."""
    pieces: tuple[PieceTimes, ...] = ()
    """When each piece left and came, where the transport knows; those of evaluations, too, since they have
    the wire while others wait for it."""
    heartbeats: tuple[HeartbeatTimes, ...] = ()
    """The link's last few that met nothing of it on their way, where the transport knows."""


class Transport(Protocol):
    """One link. `link` is its number: the cut it crosses."""

    link: int
    payload_device: torch.device
    """Where the payloads lie that it takes and gives."""

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive: a frame with this id and at most this payload may arrive.

        Frames arrive in any order; one that nobody expects is kept up to a bound (a peer may run
        ahead), one that is larger than was posted is a RemoteProtocolError.
        """

    def send(self, frame: Frame) -> None:
        """Queue a frame; returns at once. The payload must not change afterwards."""

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that is whole, in order of completion.

        Raises:
            TimeoutError: none came in time; one may still come.
            PeerLostError: the peer is gone; the message names it.
            RemoteProtocolError: the peer sent what it must not; the message names it.
        """

    def take_stats(self) -> list[LinkStats]:
        """What was sent since the last call, one entry a direction that had traffic."""

    def close(self) -> None:
        """Send what is queued, say goodbye, release the sockets; safe to call twice."""


class _Count:
    def __init__(self) -> None:
        self.frames = self.payload_bytes = self.wire_bytes = self.elements = 0
        self.busy_until_last_take_s = self.sending_until_last_take_s = 0.0


class LinkCounter:
    """Counts frames by direction; used by the thread that sends.

    Args:
        link: its number.
        piece_nbytes: the longest payload that one header goes with; None: a frame has one header, whatever its length.
        header_nbytes: of each header.
    """

    def __init__(self, link: int, piece_nbytes: int | None, header_nbytes: int = HEADER_NBYTES) -> None:
        self._link = link
        self._piece_nbytes = piece_nbytes
        self._header_nbytes = header_nbytes
        self._counts = {direction: _Count() for direction in Direction}

    def count(self, frame: Frame) -> None:
        """A frame was sent; those of evaluations are in no step's figures."""
        if frame.id.is_evaluation:
            return
        count = self._counts[frame.id.direction]
        nbytes = frame.payload.numel()
        count.frames += 1
        count.payload_bytes += nbytes
        pieces = 1 if self._piece_nbytes is None else max(1, math.ceil(nbytes / self._piece_nbytes))
        count.wire_bytes += nbytes + self._header_nbytes * pieces
        count.elements += math.prod(frame.shape)

    def take(
        self,
        busy_s: Callable[[Direction], float],
        sending_s: Callable[[Direction], float] | None = None,
        pieces: Sequence[PieceTimes] = (),
        heartbeats: tuple[HeartbeatTimes, ...] = (),
    ) -> list[LinkStats]:
        """Figures since the last call, one entry a direction in which something was sent, or acknowledged.

        Args:
            busy_s: seconds since the start in which something was queued or not acknowledged.
            sending_s: likewise, in which bytes were on their way; None: not known, taken for `busy_s`.
            pieces: what was acknowledged since the last call, evaluations and all.
            heartbeats: the last few that met nothing of the link on their way.
        """
        sending_s = sending_s or busy_s
        return [
            replace(self._take(direction, busy_s(direction), sending_s(direction), pieces), heartbeats=heartbeats)
            for direction, count in self._counts.items()
            if count.frames or any(piece.id.direction is direction for piece in pieces)
        ]

    def _take(self, direction: Direction, busy_s: float, sending_s: float, pieces: Sequence[PieceTimes]) -> LinkStats:
        old, new = self._counts[direction], _Count()
        new.busy_until_last_take_s, new.sending_until_last_take_s = busy_s, sending_s
        self._counts[direction] = new
        return LinkStats(
            link=self._link,
            direction=direction,
            frames=old.frames,
            payload_bytes=old.payload_bytes,
            wire_bytes=old.wire_bytes,
            elements=old.elements,
            busy_s=busy_s - old.busy_until_last_take_s,
            sending_s=sending_s - old.sending_until_last_take_s,
            pieces=tuple(piece for piece in pieces if piece.id.direction is direction),
        )
