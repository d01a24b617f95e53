"""The sockets on which files go from worker to worker: made here, and nowhere else."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import zmq

from tahq.comm.files.transfer import WINDOW_PIECES, FileSource
from tahq.comm.files.wire import MAX_MESSAGE_NBYTES
from tahq.comm.keys import KeyPair
from tahq.comm.zmq.addresses import bind_router, dial_endpoint
from tahq.comm.zmq.dialled import Dialled
from tahq.comm.zmq.gate import Gate
from tahq.comm.zmq.socket_wait import Socket
from tahq.comm.zmq.sockets import CURVE_NBYTES, dial_curve, limit_handshakes, replace_stuck_connections
from tahq.errors import RemoteProtocolError

_WHERE = "port for files"
_PEER_TIMEOUT_S = 10.0
"""Well before a source that is silent is given up (`Patience`), so that a connection can be made again meanwhile."""
_HOLD_S = 3.0
"""How long somebody waits who asks before the coordinator has said that he would."""
_MAX_QUEUED = 2 * WINDOW_PIECES
"""Replies that are kept for a client that does not read; what is beyond is dropped."""
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 5000


@contextmanager
def serving_socket(bind: str, keys: KeyPair | None) -> Iterator[tuple[Socket, Gate, int]]:
    """A ROUTER that listens, the gate before it, which lets nobody in yet under CURVE, and the port that it has.

    Raises:
        UserError: the address is malformed, not this machine's, or in use.
    """
    with _socket(zmq.ROUTER) as router:
        gate = Gate(router, keys, where=_WHERE, hold_s=_HOLD_S)
        try:
            yield router, gate, bind_router(router, bind, _WHERE)
        finally:
            gate.close()


@contextmanager
def asking_socket(source: FileSource, keys: KeyPair | None) -> Iterator[Dialled]:
    """A DEALER that dials who has a file, again and again if need be.

    Raises:
        UserError: its address is none.
        RemoteProtocolError: CURVE is on at one end and off at the other, as we were told.
    """
    if bool(source.public_key) != (keys is not None):
        raise RemoteProtocolError(f"{source}: CURVE is on at one end and off at the other")
    endpoint = dial_endpoint(source.address, "who has a file")
    with _socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        limit_handshakes(dealer)
        if keys is not None:
            dial_curve(dealer, keys, source.public_key)
        dialled = Dialled(dealer, endpoint, _Asked(source))
        try:
            yield dialled
        finally:
            dialled.close()


@dataclass(slots=True)
class _Asked:
    spec: FileSource
    obstacle: str = ""

    def reconnected(self, connection: int) -> None:
        """What was lost is asked for again in time (`FileTransfer`)."""


@contextmanager
def _socket(kind: int) -> Iterator[Socket]:
    context: zmq.Context[Socket] = zmq.Context()
    try:
        socket = context.socket(kind)
        for option, value in ((zmq.SNDHWM, _MAX_QUEUED), (zmq.RCVHWM, _MAX_QUEUED), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES + CURVE_NBYTES)
        replace_stuck_connections(socket, _PEER_TIMEOUT_S)
        yield socket
    finally:
        context.destroy(linger=0)
