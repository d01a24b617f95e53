"""The sockets on which files go from worker to worker: made here, and nowhere else."""

from collections.abc import Iterator
from contextlib import contextmanager

import zmq

from tahq.comm.addresses import bind_router, dial_endpoint
from tahq.comm.file_wire import MAX_MESSAGE_NBYTES, MAX_PIECE_NBYTES
from tahq.comm.socket_wait import Socket

WINDOW_PIECES = 64
"""Requests that a client may have under way: 16 MiB in pieces of full size, a second at 134 Mbit/s."""
WINDOW_NBYTES = WINDOW_PIECES * MAX_PIECE_NBYTES
_MAX_QUEUED = 2 * WINDOW_PIECES
"""Replies that are kept for a client that does not read; what is beyond is dropped."""
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 5000


@contextmanager
def serving_socket(bind: str) -> Iterator[tuple[Socket, int]]:
    """A ROUTER that listens, and the port that it has.

    Raises:
        UserError: the address is malformed, not this machine's, or in use.
    """
    with _socket(zmq.ROUTER) as router:
        yield router, bind_router(router, bind, "port for files")


@contextmanager
def asking_socket(address: str) -> Iterator[Socket]:
    """A DEALER that dials host:port, again and again if need be; UserError if that is no address."""
    with _socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        dealer.connect(dial_endpoint(address, "who has a file"))
        yield dealer


@contextmanager
def _socket(kind: int) -> Iterator[Socket]:
    context: zmq.Context[Socket] = zmq.Context()
    try:
        socket = context.socket(kind)
        for option, value in ((zmq.SNDHWM, _MAX_QUEUED), (zmq.RCVHWM, _MAX_QUEUED), (zmq.LINGER, 0), (zmq.IPV6, 1)):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_NBYTES)
        yield socket
    finally:
        context.destroy(linger=0)
