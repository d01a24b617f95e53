"""What listens at an address, by the first bytes that every ZMQ socket sends; asked when handshakes fail."""

import socket
from enum import Enum

from tahq.comm.zmq.addresses import parse_address
from tahq.errors import UserError

_NBYTES = 64
_MECHANISM = slice(12, 32)
_BEGINNING = b"\xff" + bytes(8) + b"\x7f" + b"\x03"
"""Of a greeting, up to the version: enough for the other end to say all of its own, and nothing to disagree with."""


class Listener(Enum):
    """Who answers."""

    CURVE = "a ZMQ socket with CURVE"
    OTHER_ZMQ = "a ZMQ socket without CURVE"
    STRANGER = "another program"
    NOBODY = "nobody"
    """Or a tunnel whose other end reaches nobody."""


def who_listens(address: str, timeout_s: float = 2.0) -> Listener:
    """Connect to host:port and see how it introduces itself; takes at most about twice the time."""
    try:
        with socket.create_connection(parse_address(address, "address"), timeout_s) as connection:
            connection.sendall(_BEGINNING)
            said = b""
            while len(said) < _NBYTES and (piece := connection.recv(_NBYTES - len(said))):
                said += piece
    except (OSError, UserError):
        return Listener.NOBODY
    if not said:
        return Listener.NOBODY
    if len(said) < _NBYTES or said[0] != 0xFF or not said[9] & 1:
        return Listener.STRANGER
    return Listener.CURVE if said[_MECHANISM].rstrip(b"\0") == b"CURVE" else Listener.OTHER_ZMQ
