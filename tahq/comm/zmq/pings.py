"""A connection over which nothing comes through is given up for a new one, long before its peer is.

Over a connection that has lost packets for a while TCP tries again ever more rarely, so half a minute may pass before
it notices that the network is back; and where that comes and goes, TCP may try only when it is gone, again and again.
Two things end that: the kernel closes a connection whose peer acknowledges nothing for a while, and ZMQ's pings end one
that is silent, since who only waits for the other end has nothing that could be acknowledged.
"""

import zmq

from tahq.comm.zmq.socket_wait import Socket

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
