"""DATA that has come over the connections of a link, put back into the order of its numbers.

Each connection keeps its order, so what has come over one says that all before it on the same one has come, or never
will; a HEARTBEAT or BYE says the same up to the number it names. What all connections are past and nobody has
brought was lost. With one connection this is: a number that is skipped was lost.

Invariants: pieces leave in the order of their numbers, each once; at most `bound_nbytes` wait for one before them.
"""

from collections.abc import Iterator, Sequence

from tahq.comm.frame import FrameHeader
from tahq.errors import PeerLostError, RemoteProtocolError
from tahq.units import format_size

Piece = tuple[FrameHeader, bytes | memoryview]


class Resequencer:
    """Pieces of one link, on their way from its connections to the frames that they are part of."""

    def __init__(self, connections: int, bound_nbytes: int, peer: str) -> None:
        self.received = 0
        """The highest number up to which everything has come."""
        self._passed = [0] * connections
        self._held: dict[int, Piece] = {}
        self._held_nbytes = 0
        self._bound_nbytes = bound_nbytes
        self._peer = peer

    @property
    def passed(self) -> Sequence[int]:
        """For each connection, the number up to which it has brought all that it will."""
        return self._passed

    def take(self, header: FrameHeader, payload: bytes | memoryview, connection: int) -> Iterator[Piece]:
        """Take a piece, and give what is next in order by now; one that has come before is dropped.

        Raises:
            PeerLostError: messages before it were lost.
            RemoteProtocolError: more waits for its turn than the peer may have on its way.
        """
        self.pass_on(header.sequence - 1, connection)
        self._passed[connection] = max(self._passed[connection], header.sequence)
        if header.sequence > self.received and header.sequence not in self._held:
            self._hold(header, payload)
        while (piece := self._held.pop(self.received + 1, None)) is not None:
            self.received += 1
            self._held_nbytes -= len(piece[1])
            yield piece

    def _hold(self, header: FrameHeader, payload: bytes | memoryview) -> None:
        self._held[header.sequence] = (header, payload)
        self._held_nbytes += len(payload)
        if self._held_nbytes > self._bound_nbytes:
            raise RemoteProtocolError(
                f"{self._peer}: sent {format_size(self._held_nbytes)} after message {self.received + 1}, which has not "
                f"come; at most {format_size(self._bound_nbytes)} may be on their way"
            )

    def pass_on(self, sequence: int, connection: int) -> None:
        """All up to `sequence` that goes over this connection has come, or never will.

        Raises:
            PeerLostError: messages were lost.
        """
        self._passed[connection] = max(self._passed[connection], sequence)
        complete = min(self._passed)
        if complete > self.received:
            raise PeerLostError(
                f"{self._peer}: messages {self.received + 1} to {complete} were lost on the way (a connection "
                f"that was reset?); resume the run from its last snapshot"
            )
