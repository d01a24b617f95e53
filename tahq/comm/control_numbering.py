"""Control messages carry a number, so that one lost when a connection was reset is noticed, not waited for.

A control message is two parts on the wire: its number (u64, little-endian, from 1) and what
`encode_message` made of it. Each direction between a worker and the coordinator counts for itself.
"""

import struct

from tahq.errors import PeerLostError, RemoteProtocolError

_NUMBER = struct.Struct("<Q")


class Numbering:
    """The numbers of both directions, as one end keeps them."""

    def __init__(self) -> None:
        self._sent = 0
        self._received = 0

    def next_number(self) -> bytes:
        """The first part of the next message to go."""
        self._sent += 1
        return _NUMBER.pack(self._sent)

    def check(self, part: bytes, peer: str) -> None:
        """Take the first part of a message that has come.

        Raises:
            PeerLostError: messages before it are missing.
            RemoteProtocolError: it is no number, or one that has come before.
        """
        if len(part) != _NUMBER.size:
            raise RemoteProtocolError(f"{peer}: sent a number of {len(part)} bytes; expected {_NUMBER.size}")
        (number,) = _NUMBER.unpack(part)
        expected = self._received + 1
        if number < expected:
            raise RemoteProtocolError(f"{peer}: sent control message {number} again; expected {expected}")
        if number > expected:
            raise PeerLostError(
                f"{peer}: control messages {expected} to {number - 1} were lost on the way (a connection that was "
                f"reset?); resume the run from its last snapshot"
            )
        self._received = number
