"""CURVE on ZMQ's sockets: who is at the other end of a connection is known, and nobody else reads what it carries."""

from typing import Final

import zmq

from tahq.comm.keys import KeyPair
from tahq.comm.zmq.socket_wait import Socket

HANDSHAKE_S: Final = 10.0
"""How long a new connection may take to say who it is: four round trips, also behind a queue of seconds."""
BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted; it may keep fewer (net.core.somaxconn)."""
CURVE_NBYTES: Final = 1024
"""More than CURVE adds to a message."""
DOMAIN: Final = b"tahq"


def limit_handshakes(socket: Socket) -> None:
    """Have it hang up on who does not say who he is; before it binds or connects, with CURVE and without."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
    socket.setsockopt(zmq.BACKLOG, BACKLOG)


def serve_curve(socket: Socket, keys: KeyPair) -> None:
    """Take only connections under CURVE, and of those only whom a Gate of the same context lets in; before it binds."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    # Without this, a socket whose gate has closed would let everybody in.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dial_curve(socket: Socket, keys: KeyPair, server_key: str) -> None:
    """Say who we are, and only to who has the secret key of `server_key`; before it connects."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.secret))


def peer_key(frame: zmq.Frame) -> str:
    """The public key of who sent this frame, as a Gate has found it; "" if it came without CURVE.

    Takes a frame that was received with ``copy=False``.
    """
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
