"""Control messages carry a number, so that one lost when a connection was reset is noticed, and sent again.

A control message is two parts on the wire: 25 bytes, and what `encode_message` made of it. The first part is its
number (u64, little-endian, from 1), up to which number everything has come the other way (u64), which process of the
coordinator it comes from or is for (u64, drawn when that starts; 0 from a worker that has heard none yet), and whether
the message after those that have come was lost (u8). A coordinator that was started again is known by that, and both
ends count anew. Each direction between a worker and the coordinator counts for itself. What was not
acknowledged is kept; heartbeats see to it that this is not much, and that a loss shows soon.
"""

import struct
from collections import deque

from tahq.errors import PeerLostError, RemoteProtocolError

_MAX_KEPT = 1 << 16
"""Heartbeats of a day, which a peer that is gone never acknowledges."""

_HEAD = struct.Struct("<QQQB")


def coordinator_of(head: bytes, peer: str) -> int:
    """Which process of the coordinator a message comes from or is for; 0: any.

    Raises:
        RemoteProtocolError: it is no first part of a control message.
    """
    if len(head) != _HEAD.size:
        raise RemoteProtocolError(f"{peer}: sent a number of {len(head)} bytes; expected {_HEAD.size}")
    return int(_HEAD.unpack(head)[2])


class Numbering:
    """The numbers of both directions, and what may have to go again, as one end keeps them.

    Args:
        coordinator: the process of the coordinator that it is with; 0: not known yet.
    """

    def __init__(self, coordinator: int = 0) -> None:
        self.coordinator = coordinator
        self._sent = 0
        self._received = 0
        self._acknowledged = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_MAX_KEPT)
        """Messages with their numbers that the peer has not said it has."""
        self._is_asked = False
        self._has_gap = False
        """Messages before one that has come were lost, and have not come again."""
        self.must_ask = False
        """Whether nothing has gone yet that asks for them."""

    def wrap(self, message: bytes) -> list[bytes]:
        """The parts of the next message to go."""
        self._sent += 1
        self._kept.append((self._sent, message))
        return self._parts(self._sent, message)

    def take(self, head: bytes, peer: str) -> bool:
        """Take the first part of a message that has come: whether it is the next one; if not, it is of no use.

        Raises:
            PeerLostError: one of both ends was started again, and does not know what the other speaks of.
            RemoteProtocolError: it cannot be.
        """
        process = coordinator_of(head, peer)
        self.coordinator = self.coordinator or process
        number, acknowledged, _, asks = _HEAD.unpack(head)
        if acknowledged < self._acknowledged or (self._received == 0 and acknowledged > self._sent):
            raise PeerLostError(f"{peer}: has another past than this end; one of both was started again")
        if acknowledged > self._sent or asks > 1 or number == 0:
            raise RemoteProtocolError(
                f"{peer}: sent control message {number} and has message {acknowledged} of {self._sent}, it says"
            )
        self._acknowledged = acknowledged
        while self._kept and self._kept[0][0] <= acknowledged:
            self._kept.popleft()
        self._is_asked |= bool(asks)
        if number == self._received + 1:
            self._received, self._has_gap, self.must_ask = number, False, False
            return True
        if number > self._received and not self._has_gap:
            self._has_gap = self.must_ask = True
        return False

    def ask(self) -> None:
        """A connection was lost, and perhaps what it carried: have the next message ask for that."""
        self._has_gap = self.must_ask = True

    def again(self) -> list[list[bytes]]:
        """The parts of what the peer wants to have again, the oldest first; nothing if it has not asked since."""
        asked, self._is_asked = self._is_asked, False
        return [self._parts(number, message) for number, message in self._kept] if asked else []

    def _parts(self, number: int, message: bytes) -> list[bytes]:
        self.must_ask = False
        return [_HEAD.pack(number, self._received, self.coordinator, self._has_gap), message]
