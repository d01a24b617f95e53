"""Which piece a host sends next, of all that wait on all its links.

Links share the host's uplink. Whenever it is free the next piece is chosen, so a frame that goes first passes between
the pieces of another: control messages, then activations and gradients in the order of `links.first`, then files.
"""

import math
from typing import Literal

from tahq.comm.link.frame import Channel, Direction

First = Literal["oldest", "activations", "gradients"]
"""Which data goes first: the frame that was queued first, or all of one direction, the oldest of them first."""

Rank = tuple[int, float]
"""Priority class and time since when it has been waiting (s); the lowest goes first."""

_PREFERRED = {"oldest": None, "activations": Direction.FORWARD, "gradients": Direction.BACKWARD}
_CONTROL, _DATA, _OTHER_DATA, _FILES = -1, 0, 1, 2

FAREWELL: Rank = (-2, 0.0)
"""The rank of a BYE, which comes after all frames of its own link and need not wait for those of others."""
DATA_AGAIN: Rank = (_DATA, -math.inf)
"""The rank of pieces that are sent again, before anything else of their link, since the peer waits for them."""
FILES_AGAIN: Rank = (_FILES, -math.inf)


def rank_of(direction: Direction, queued_s: float, first: First, channel: Channel = Channel.DATA) -> Rank:
    """The rank of a frame that was queued at `queued_s`."""
    if channel is Channel.DATA:
        preferred = _PREFERRED[first]
        return (_DATA if preferred is None or direction is preferred else _OTHER_DATA, queued_s)
    return (_CONTROL if channel is Channel.CONTROL else _FILES, queued_s)
