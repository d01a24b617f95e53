"""Asks a worker for a file that it has, in the caller's thread."""

import time
from collections.abc import Callable, Iterator

import zmq

from tahq.comm.file_sockets import asking_socket
from tahq.comm.file_transfer import FileSource, FileTransfer, Patience
from tahq.errors import RemoteProtocolError

_LOOK_S = 0.2
"""How often is looked whether the file is still wanted."""


def pieces(
    source: FileSource,
    *,
    offset: int = 0,
    rate_bits_per_s: float | None = None,
    patience: Patience | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Iterator[bytes]:
    """The bytes of a file, in order; ends early once it is not wanted any more.

    Nothing here says that they are the right ones: whoever takes them compares the SHA-256 at the end.

    Args:
        source: who has it.
        offset: the first byte that is wanted.
        rate_bits_per_s: at most so fast, counting the file's bytes; None: as fast as it goes.
        patience: how long silence is borne; a source that comes back before that goes on.
        is_wanted: asked all the time.

    Raises:
        PeerLostError: the source is silent, or does not have the file.
        RemoteProtocolError: what it sends is not what was asked for, or is damaged.
        UserError: the source's address is none.
    """
    clock = time.monotonic
    transfer = FileTransfer(source, offset, rate_bits_per_s, patience or Patience(), clock())
    with asking_socket(source.address) as dealer:
        while not transfer.is_done and is_wanted():
            for request in transfer.requests(clock()):
                dealer.send(request)
            if not dealer.poll(int(1000 * min(transfer.wait_s(clock()), _LOOK_S)) + 1):
                continue
            parts = dealer.recv_multipart(zmq.NOBLOCK)
            if len(parts) != 2:
                raise RemoteProtocolError(f"{source}: sent {len(parts)} message parts; expected 2")
            data = transfer.take(parts[0], parts[1], clock())
            if data:
                yield data
