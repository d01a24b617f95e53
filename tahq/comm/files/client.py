"""Asks a worker for a file that it has, in the caller's thread."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import zmq

from tahq.comm.files.sockets import asking_socket
from tahq.comm.files.transfer import FileSource, FileTransfer, Patience
from tahq.comm.keys import KeyPair
from tahq.comm.zmq.dialled import Dialled
from tahq.comm.zmq.socket_wait import has_input
from tahq.errors import PeerLostError, RemoteProtocolError

_LOOK_S = 0.2
"""How often is looked whether the file is still wanted."""


def pieces(
    source: FileSource,
    *,
    keys: KeyPair | None = None,
    offset: int = 0,
    rate_bits_per_s: float | None = None,
    patience: Patience | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[bytes]:
    """The bytes of a file, in order; ends early once it is not wanted any more.

    Nothing here says that they are the right ones: whoever takes them compares the SHA-256 at the end.

    Args:
        source: who has it.
        keys: of who asks; None: no CURVE.
        offset: the first byte that is wanted.
        rate_bits_per_s: at most so fast, counting the file's bytes; None: as fast as it goes.
        patience: how long silence is borne; a source that comes back before that goes on.
        is_wanted: asked all the time.

    Raises:
        PeerLostError: the source is silent, or does not have the file; it says so if keys are why.
        RemoteProtocolError: what it sends is not what was asked for, or is damaged.
        UserError: the source's address is none.
    """
    clock = time.monotonic
    transfer = FileTransfer(source, offset, rate_bits_per_s, patience or Patience(), clock())
    with asking_socket(source, keys) as dialled:
        dealer, poller = dialled.socket, zmq.Poller()
        for socket in (dealer, dialled.events):
            poller.register(socket, zmq.POLLIN)
        while not transfer.is_done and is_wanted():
            for request in _requests(transfer, dialled, clock()):
                with suppress(zmq.Again):  # it is not connected, nor trying; what was not asked is asked again
                    dealer.send(request, zmq.NOBLOCK)
            poller.poll(int(1000 * min(transfer.wait_s(clock()), _LOOK_S)) + 1)
            dialled.look()
            if not has_input(dealer):
                continue
            parts = dealer.recv_multipart(zmq.NOBLOCK)
            if len(parts) != 2:
                raise RemoteProtocolError(f"{source}: sent {len(parts)} message parts; expected 2")
            data = transfer.take(parts[0], parts[1], clock())
            if data:
                yield data


def _requests(transfer: FileTransfer, dialled: Dialled, now_s: float) -> list[bytes]:
    try:
        return transfer.requests(now_s)
    except PeerLostError as error:
        obstacle = dialled.obstacle
        raise PeerLostError(f"{error}; {obstacle}" if obstacle else str(error)) from error
