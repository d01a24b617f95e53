"""The contract of a transport: one link to one peer, moving frames both ways.

Nothing here knows a model. A transport owns its sockets in one thread and is used from one other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tahq.comm.link.frame import HEADER_NBYTES, Direction, Frame, LogicalId
from tahq.comm.link.outbound import BusyClocks
from tahq.comm.link.session import Session
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


@dataclass(slots=True)
class _Count:
    frames: int = 0
    payload_bytes: int = 0
    wire_bytes: int = 0
    elements: int = 0
    busy_until_last_take_s: float = 0.0
    sending_until_last_take_s: float = 0.0


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

    def take_session(self, session: Session, now_s: float) -> list[LinkStats]:
        """Figures since the last call of a link whose frames go over this session."""
        outbound = session.outbound
        times = (outbound.take_piece_times(), session.heartbeats.recent)
        return self.take(outbound.busy, outbound.sending, now_s, *times)

    def take(
        self,
        busy: BusyClocks,
        sending: BusyClocks,
        now_s: float,
        pieces: Sequence[PieceTimes] = (),
        heartbeats: tuple[HeartbeatTimes, ...] = (),
    ) -> list[LinkStats]:
        """Figures since the last call, one entry per direction in which something was sent, or acknowledged.

        Args:
            busy: times in which something was queued or not acknowledged.
            sending: times in which bytes were on their way.
            now_s: now, by the clock of these.
            pieces: those acknowledged since the last call, evaluations and all.
            heartbeats: the last few that met nothing of the link on their way.
        """
        stats = []
        for direction, count in self._counts.items():
            own = tuple(piece for piece in pieces if piece.id.direction is direction)
            if not count.frames and not own:
                continue
            busy_s, sending_s = busy.total_s(direction, now_s), sending.total_s(direction, now_s)
            self._counts[direction] = _Count(busy_until_last_take_s=busy_s, sending_until_last_take_s=sending_s)
            stats.append(
                LinkStats(
                    *(self._link, direction, count.frames, count.payload_bytes, count.wire_bytes, count.elements),
                    busy_s=busy_s - count.busy_until_last_take_s,
                    sending_s=sending_s - count.sending_until_last_take_s,
                    pieces=own,
                    heartbeats=heartbeats,
                )
            )
        return stats
