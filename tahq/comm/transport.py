"""The contract of a transport: one link to one peer, moving frames both ways.

Nothing here knows a model. A transport owns its sockets in one thread and is used from one other.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tahq.comm.link.frame import Direction, Frame, LogicalId
from tahq.comm.link.wire_time import HeartbeatTimes, PieceTimes


@dataclass(frozen=True, slots=True)
class LinkStats:
    """What one link has sent in one direction since the last call of `take_stats`, evaluations left out.

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
    """When each piece left and arrived, where the transport knows; evaluations included, since they occupy the wire
    while others wait."""
    heartbeats: tuple[HeartbeatTimes, ...] = ()
    """The last few that had the link to themselves, where the transport knows."""


class Transport(Protocol):
    """One link. `link` is its number: the cut it crosses."""

    link: int
    payload_device: torch.device
    """The device of the payloads that it takes and returns."""

    def expect(self, id: LogicalId, max_nbytes: int) -> None:
        """Post a receive: a frame with this id and at most this payload may arrive.

        Frames arrive in any order; unexpected ones are kept up to a bound (a peer may run ahead), and one that is
        larger than was posted is a RemoteProtocolError.
        """

    def send(self, frame: Frame) -> None:
        """Queue a frame; only over a group it may wait for the peer. The payload must not change afterwards."""

    def recv(self, timeout_s: float | None = None) -> Frame:
        """The next expected frame that is whole, in order of completion.

        Raises:
            TimeoutError: none came in time; one may still come.
            PeerLostError: the peer is gone; the message names it.
            RemoteProtocolError: the peer sent what it must not; the message names it.
        """

    def take_stats(self) -> list[LinkStats]:
        """What was sent since the last call, one entry per direction that had traffic."""

    def close(self) -> None:
        """Send what is queued, say goodbye, release the sockets; safe to call twice."""
