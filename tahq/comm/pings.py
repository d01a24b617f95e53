"""ZMQ's own pings: a connection that is silent is given up for a new one, long before its peer is.

Over a connection that has lost packets for a while TCP tries again ever more rarely, so half a minute may pass before
it notices that the network is back.
"""

import zmq

from tahq.comm.socket_wait import Socket

_PING_S = 1.0
_SILENT_S = 5.0
_CONNECT_TIMEOUT_MS = 2000
"""Of one try; TCP by itself would wait ever longer for an answer to ever fewer packets."""


def replace_silent_connections(socket: Socket, peer_timeout_s: float) -> None:
    """Set it up before it binds or connects; `peer_timeout_s` of silence ends the peer, half of it a connection."""
    silent_s = min(_SILENT_S, peer_timeout_s / 2)
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1e3 * min(_PING_S, silent_s / 2))))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1e3 * silent_s)))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
