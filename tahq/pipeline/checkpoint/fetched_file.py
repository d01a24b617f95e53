"""A file of a snapshot that comes from another worker: whole, durable and the right one, or not there at all.

What has come of it so far grows under another name and is gone on with the next time, in this process or another.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tahq.errors import RemoteProtocolError, SnapshotError
from tahq.pipeline.checkpoint.durable_file import sync_folder

PARTIAL_SUFFIX = ".partial"

Pieces = Callable[[int], Iterator[bytes]]
"""The bytes of the file from an offset on; they end early if it is not wanted any more."""


def has_file(path: Path, sha256: str) -> bool:
    """Whether the file is there, and is the one with this hash (hex)."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == sha256
    except OSError:
        return False


def fetch_file(path: Path, sha256: str, pieces: Pieces, is_wanted: Callable[[], bool] = lambda: True) -> bool:
    """Have a file at its place, durably.

    Args:
        path: where; its folder is made if need be. One process at a time fetches it.
        sha256: its hash, in hex.
        pieces: where it comes from.
        is_wanted: whether it is still wanted once the pieces have ended.

    Returns:
        False: it is not wanted any more; what has come is kept.

    Raises:
        RemoteProtocolError: what came is not what it should be, or has another hash; nothing is kept of it.
        SnapshotError: the disk would not take it.
        PeerLostError: as `pieces` does; what has come is kept.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("a+b") as file:
            digest = _grow(file, pieces)
            if not is_wanted():
                return False
            file.flush()
            os.fsync(file.fileno())
        if digest != sha256:
            raise RemoteProtocolError(
                f"what came as {path.name} has the SHA-256 {digest[:16]}…, expected {sha256[:16]}…; it is not kept"
            )
        partial.replace(path)
        sync_folder(path.parent)
    except RemoteProtocolError:
        with suppress(OSError):  # the first error is the one to report
            partial.unlink(missing_ok=True)
        raise
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise SnapshotError(f"cannot write {partial}: {error.strerror}; free space there") from error
    return True


def _grow(file: BinaryIO, pieces: Pieces) -> str:
    """Put what is lacking at the end; returns the SHA-256 of it all."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    for piece in pieces(file.seek(0, os.SEEK_END)):
        digest.update(piece)
        file.write(piece)
    return digest.hexdigest()
