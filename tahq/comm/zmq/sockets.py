"""How the sockets of tahq are set up: limits, CURVE, and the replacement of connections that carry nothing any more.

After a connection has lost packets for a while TCP tries again ever more rarely, so half a minute may pass before it
notices that the network is back. Two things end that: the kernel closes a connection whose peer acknowledges nothing
for a while, and ZMQ's pings, which the other end echoes, end one over which nothing comes.
"""

import errno
import os
import resource
from typing import Final

import zmq

from tahq.comm.keys import KeyPair
from tahq.comm.link.frame import MAX_PIECE_NBYTES
from tahq.comm.relay.tickets import RelayTicket
from tahq.comm.zmq.socket_wait import Socket
from tahq.errors import UserError

HANDSHAKE_S: Final = 10.0
"""Time limit of a new connection's handshake: four round trips, even behind a queue of seconds."""
BACKLOG: Final = 1024
"""Connections that the kernel keeps until they are accepted; it may keep fewer (net.core.somaxconn)."""
_CURVE_NBYTES = 1024
"""More than CURVE adds to a message."""
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 2000
DOMAIN: Final = b"tahq"


def open_router(context: zmq.Context[Socket], peer_timeout_s: float) -> Socket:
    """A ROUTER, not bound yet."""
    router = _socket(context, zmq.ROUTER, peer_timeout_s)
    # A peer whose connection broke may be back before the old one is known to be dead.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return router


def open_dealer(
    context: zmq.Context[Socket],
    name: bytes,
    peer_timeout_s: float,
    keys: KeyPair | None,
    server_key: str,
    relay: RelayTicket | None = None,
) -> Socket:
    """A DEALER, not connected yet; `server_key` is the peer's public key where `keys`, our own, are given.

    Over a relay both ends are DEALERs; the one that does not take the part of the dialling end is CURVE's server.
    """
    dealer = _socket(context, zmq.DEALER, peer_timeout_s)
    # Unguessable, so that a stranger cannot take a peer's place by its routing id.
    dealer.setsockopt(zmq.ROUTING_ID, name[:200] + b"#" + os.urandom(12).hex().encode())
    dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    limit_handshakes(dealer)
    if relay is not None:
        dealer.setsockopt_string(zmq.SOCKS_PROXY, relay.address)
    if keys is not None and (relay is None or relay.dials):
        dial_curve(dealer, keys, server_key)
    elif keys is not None:
        serve_curve(dealer, keys)
    return dealer


def _socket(context: zmq.Context[Socket], kind: int, peer_timeout_s: float) -> Socket:
    try:
        socket = context.socket(kind)
    except zmq.ZMQError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise too_few_descriptors() from None
        raise
    for option, value in ((zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.LINGER, 0), (zmq.IPV6, 1)):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PIECE_NBYTES + _CURVE_NBYTES)
    replace_silent_connections(socket, peer_timeout_s)
    return socket


def limit_handshakes(socket: Socket) -> None:
    """Have it close connections whose handshake takes too long; call before bind or connect, with CURVE or without."""
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1000 * HANDSHAKE_S))
    socket.setsockopt(zmq.BACKLOG, BACKLOG)


def serve_curve(socket: Socket, keys: KeyPair) -> None:
    """Accept only CURVE connections, and of these only peers that a Gate of the same context admits; before bind."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    # Without this, a socket whose gate has closed would admit every peer.
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dial_curve(socket: Socket, keys: KeyPair, server_key: str) -> None:
    """Authenticate with `keys`, and only to the owner of `server_key`; call before connect."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(keys.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(keys.secret))


def peer_key(frame: zmq.Frame) -> str:
    """The sender's public key, as a Gate has found it, of a frame received with ``copy=False``; "" without CURVE."""
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
"""Interval of probes on an idle connection, as when an answer in the handshake was lost."""
_CONNECT_TIMEOUT_MS = 2000
"""Of one try; TCP by itself would wait ever longer for an answer to ever fewer packets."""


def replace_silent_connections(socket: Socket, peer_timeout_s: float) -> None:
    """Call before bind or connect; `peer_timeout_s` of silence ends a link, half of it a connection."""
    silent_s = _SILENT_PART * peer_timeout_s
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(1e3 * min(_PING_S, silent_s / 2))))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(1e3 * silent_s)))
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
    socket.setsockopt(zmq.TCP_MAXRT, max(1, int(1e3 * _UNACKNOWLEDGED_PART * peer_timeout_s)))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)


ENOUGH: Final = 16_384
"""Open files: thousands of connections that never finish a handshake, and all that a process needs besides."""
LEAST: Final = 256
"""With fewer a process cannot work."""


def raise_descriptor_limit() -> None:
    """Allow this process `ENOUGH` open files, or as many as the system permits (UserError if they are too few)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < LEAST:
        raise too_few_descriptors()


def too_few_descriptors() -> UserError:
    """The error of a process that may not open as many files and connections as it needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UserError(
        f"this process may have {hard} files and connections open, and needs more: at least {LEAST}, better {ENOUGH}; "
        f"raise the limit (ulimit -Hn, or LimitNOFILE of a systemd unit)"
    )
