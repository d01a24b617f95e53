"""HELLO's payload: who speaks, whom it means, over which connection, and how much may be on its way to it."""

import struct
from dataclasses import dataclass

from tahq.errors import RemoteProtocolError

MAX_CONNECTIONS = 16
DEFAULT_WINDOW_NBYTES = 64 * 1024 * 1024

_FIELDS = struct.Struct("<IIHHI")
_MAX_TEXT_NBYTES = 1024


def decode_text(data: bytes | memoryview) -> str:
    """Text from a peer, fit for a log."""
    return ascii(bytes(data[:_MAX_TEXT_NBYTES]).decode("utf-8", "replace"))[1:-1]


@dataclass(frozen=True, slots=True)
class Hello:
    """What the first message on a connection says."""

    stage: int
    peer_stage: int
    """The stage that is meant to hear it."""
    config_hash: str
    connection: int = 0
    """Which of the link's connections this is, from 0."""
    connections: int = 1
    window_nbytes: int = DEFAULT_WINDOW_NBYTES
    """Most that the hearer may have on its way, on all connections of the link, without an acknowledgement."""

    def pack(self) -> bytes:
        """The payload."""
        numbers = (self.stage, self.peer_stage, self.connection, self.connections, self.window_nbytes)
        return _FIELDS.pack(*numbers) + self.config_hash.encode()


def unpack_hello(payload: bytes | memoryview, peer: str) -> Hello:
    """What a HELLO says.

    Raises:
        RemoteProtocolError: it is too short, or names a connection or a window that cannot be.
    """
    if len(payload) < _FIELDS.size:
        raise RemoteProtocolError(f"{peer}: sent a HELLO of {len(payload)} bytes")
    stage, peer_stage, connection, connections, window_nbytes = _FIELDS.unpack_from(payload)
    if connection >= connections or window_nbytes == 0:
        raise RemoteProtocolError(
            f"{peer}: sent a HELLO of connection {connection} of {connections} with a window of {window_nbytes} bytes"
        )
    config_hash = decode_text(payload[_FIELDS.size :])
    return Hello(stage, peer_stage, config_hash, connection, connections, window_nbytes)
