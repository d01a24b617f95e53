"""DATA that has come over the connections of a link, put back into the order of its numbers.

Each connection keeps its order, so what has come over one says that all before it on the same one has come, or never
will; a HEARTBEAT or BYE says the same up to the number it names. What all connections are past and nobody has
brought was lost. With one connection this is: a number that is skipped was lost.

What was lost is asked for, and all after it comes again, in a new *round*: on each connection behind a RESUME that
names the round, with the same numbers as before. What comes over a connection that is not in the latest round yet is
of use, but says nothing about what was lost. A HEARTBEAT names its round, too, so a RESUME may be lost.

Invariants: pieces leave in the order of their numbers, each once; at most `bound_nbytes` wait for one before them.
"""

from collections.abc import Iterator, Sequence

from tahq.comm.link.frame import FrameHeader
from tahq.errors import RemoteProtocolError
from tahq.units import format_size

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
