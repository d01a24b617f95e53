"""CURVE on ZMQ's sockets: who is at the other end of a connection is known, and nobody else reads what it carries."""

import resource
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


_PING_S = 1.0
_SILENT_PART = 0.5
"""Of the peer's timeout."""
_UNACKNOWLEDGED_PART = 0.2
"""From when TCP first sends something again, which is after 0.2 to 1 s. Long enough for it to try once or twice more
before that, and for a round trip; what is merely slow is acknowledged all the time."""
_KEEPALIVE_S = 1
"""Of a connection over which nothing goes, as when an answer in the handshake was lost: is the other end there?"""
_CONNECT_TIMEOUT_MS = 2000
"""Of one try; TCP by itself would wait ever longer for an answer to ever fewer packets."""


def replace_silent_connections(socket: Socket, peer_timeout_s: float) -> None:
    """Set it up before it binds or connects; `peer_timeout_s` of silence ends the peer, half of it a connection."""
    replace_stuck_connections(socket, peer_timeout_s)
    silent_s = _SILENT_PART * peer_timeout_s
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1e3 * min(_PING_S, silent_s / 2))))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1e3 * silent_s)))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)


def replace_stuck_connections(socket: Socket, peer_timeout_s: float) -> None:
    """As `replace_silent_connections`, without pings: for an end whose peer says something all the time."""
    socket.setsockopt(zmq.TCP_MAXRT, max(1, int(1e3 * _UNACKNOWLEDGED_PART * peer_timeout_s)))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)


ENOUGH: Final = 16_384
"""Some thousand connections that never say who they are, and all that a process needs beside them."""


def raise_descriptor_limit() -> None:
    """Allow this process as many as `ENOUGH`, if whoever runs the machine does; what it has is not lowered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
