"""Which frame a host sends next, of all that wait on all its links: `links.first`.

Links share the host's uplink, and what enters it is chosen anew whenever it is free, so the unit is the
piece: a frame that is to go first goes between the pieces of another.
"""

import math
from collections.abc import Iterable
from typing import Literal, TypeVar

from tahq.comm.link.frame import Direction

First = Literal["oldest", "activations", "gradients"]
"""What goes first: the frame that was queued first, or all of one direction, the oldest of them first."""

Rank = tuple[int, float]
"""The lower, the sooner: whether it has to stand back, and since when it has been waiting (s)."""

FAREWELL: Rank = (-1, 0.0)
"""The rank of a BYE, which comes after all frames of its own link and need not wait for those of others."""

AGAIN: Rank = (0, -math.inf)
"""The rank of what is sent again: the peer waits for it."""

_PREFERRED = {"oldest": None, "activations": Direction.FORWARD, "gradients": Direction.BACKWARD}

Sender = TypeVar("Sender")


def rank_of(direction: Direction, queued_s: float, first: First) -> Rank:
    """The rank of a frame that was queued at `queued_s`."""
    preferred = _PREFERRED[first]
    return (int(preferred is not None and direction is not preferred), queued_s)


def next_to_send(candidates: Iterable[tuple[Rank | None, Sender]]) -> Sender | None:
    """Whose turn it is; of equals the first one. None as a rank: has nothing that may go now."""
    best: tuple[Rank, Sender] | None = None
    for rank, sender in candidates:
        if rank is not None and (best is None or rank < best[0]):
            best = (rank, sender)
    return None if best is None else best[1]
