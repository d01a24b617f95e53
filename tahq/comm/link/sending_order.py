"""Which piece a host sends next, of all that wait on all its links.

Links share the host's uplink. Whenever it is free the next piece is chosen, so a frame that goes first passes between
the pieces of another: control messages, then activations and gradients in the order of `links.first`, then files.
"""

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

from tahq.comm.link.frame import Channel, Direction

First = Literal["oldest", "activations", "gradients"]
"""Which data goes first: the frame that was queued first, or all of one direction, the oldest of them first."""

Rank = tuple[int, float]
"""Priority class and time since when it has been waiting (s); the lowest goes first."""

FAREWELL: Rank = (-2, 0.0)
"""The rank of a BYE, which comes after all frames of its own link and need not wait for those of others."""

_PREFERRED = {"oldest": None, "activations": Direction.FORWARD, "gradients": Direction.BACKWARD}
_CONTROL, _DATA, _OTHER_DATA, _FILES = -1, 0, 1, 2

Sender = TypeVar("Sender")


def rank_of(direction: Direction, queued_s: float, first: First, channel: Channel = Channel.DATA) -> Rank:
    """The rank of a frame that was queued at `queued_s`."""
    if channel is Channel.DATA:
        preferred = _PREFERRED[first]
        return (_DATA if preferred is None or direction is preferred else _OTHER_DATA, queued_s)
    return (_CONTROL if channel is Channel.CONTROL else _FILES, queued_s)


def rank_again(channels: Iterable[Channel]) -> Rank:
    """The rank of pieces that are sent again, before anything else of their link, since the peer waits for them."""
    return (_FILES if all(channel is Channel.FILES for channel in channels) else _DATA, -math.inf)


def next_to_send(candidates: Iterable[tuple[Rank | None, Sender]]) -> Sender | None:
    """The sender with the lowest rank, the first of equals; a rank of None means that it has nothing to send now."""
    best: tuple[Rank, Sender] | None = None
    for rank, sender in candidates:
        if rank is not None and (best is None or rank < best[0]):
            best = (rank, sender)
    return None if best is None else best[1]
