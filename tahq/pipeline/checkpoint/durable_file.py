"""Writes files that are complete and survive a power cut, or do not exist; reads files that others may have replaced.

Content goes to a temporary name, is forced to the disk, and gets its final name by a rename, which is atomic; then the
folder is forced to the disk too, or the name itself could be lost.
"""

import errno
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from tahq.errors import SnapshotError, UserError
from tahq.units import counted, format_size

TEMPORARY_SUFFIX = ".tmp"
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 5.0
_PIECE_NBYTES = 2**22

log = logging.getLogger(__name__)
T = TypeVar("T")


class DiskFullError(SnapshotError):
    """The disk has no room, or a quota is used up."""


def write_durably(temporary: Path, write: Callable[[BinaryIO], str]) -> Path:
    """Write a file under a temporary name, and move it to the name that `write` returns when it is durable.

    The folder is made if it does not exist. One writer at a time; the remains of a killed one are overwritten.

    Returns:
        The final path.

    Raises:
        SnapshotError: the file cannot be written; the temporary file is removed, and the file that had the final name
            before is untouched. DiskFullError if that is for lack of room.
    """
    try:
        if not temporary.parent.is_dir():
            temporary.parent.mkdir(parents=True, exist_ok=True)
            sync_folder(temporary.parent.parent)
        with temporary.open("wb") as file:
            name = write(file)
            file.flush()
            os.fsync(file.fileno())
        final = temporary.replace(temporary.with_name(name))
        sync_folder(final.parent)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = DiskFullError if is_full else SnapshotError
        hint = "free space there" if is_full or error.errno == errno.EFBIG else "make it writable"
        raise kind(
            f"cannot write {error.filename2 or temporary}: {error.strerror}; {hint}, or set run.dir to another disk "
            "(the previous file is untouched)"
        ) from error
    finally:
        with suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)
    return final


def write_text_durably(path: Path, text: str) -> None:
    """`write_durably` for a small text file."""

    def write(file: BinaryIO) -> str:
        file.write(text.encode())
        return path.name

    write_durably(path.with_name(path.name + TEMPORARY_SUFFIX), write)


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path, working: Callable[[str], None]) -> str:
    """The SHA-256 (hex) of a checkpoint's file; `working` is called with the bytes that have been read."""
    digest, verified = hashlib.sha256(), counted(working, "verifying the checkpoint", path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(_PIECE_NBYTES):
            digest.update(piece)
            verified(len(piece))
    return digest.hexdigest()


def read_bounded(path: Path, max_nbytes: int) -> bytes:
    """The content of a small regular file; never blocks, as opening a FIFO would.

    Raises:
        FileNotFoundError: there is no such file.
        SnapshotError: it cannot be read, is not a regular file, or is larger than `max_nbytes`.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            content = file.read(max_nbytes + 1) if is_regular else b""
    except FileNotFoundError:
        raise
    except OSError as error:
        raise SnapshotError(f"cannot read {path}: {error.strerror}") from error
    if not is_regular:
        raise SnapshotError(f"cannot read {path}: it is not a regular file; remove it")
    if len(content) > max_nbytes:
        raise SnapshotError(f"cannot read {path}: it is larger than {format_size(max_nbytes)}; remove it")
    return content


def check_room(folder: Path, nbytes: int) -> None:
    """Refuse to start a run whose checkpoints, of `nbytes` each, do not fit on the disk where `folder` is or will be.

    Raises:
        UserError: less is free.
    """
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    free_nbytes = shutil.disk_usage(existing).free
    if free_nbytes < nbytes:
        raise UserError(
            f"a checkpoint of this run takes {nbytes:,} bytes ({format_size(nbytes)}), but {folder} has "
            f"{free_nbytes:,} bytes ({format_size(free_nbytes)}) free; free space there, or set run.dir to another disk"
        )


def wait_for_room(attempt: Callable[[], T], give_up_s: float, pause: Callable[[float], None] = time.sleep) -> T:
    """Repeat an attempt to write until the disk has room for it, for `give_up_s` seconds at most (`run.give_up`).

    `pause` sleeps; it may raise to end the wait.

    Raises:
        DiskFullError: there was no room in time.
    """
    waited_s, pause_s = 0.0, FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except DiskFullError as error:
            if waited_s >= give_up_s:
                raise DiskFullError(f"{error}; there was no room within {give_up_s:.0f} s (run.give_up)") from error
            if not waited_s:
                log.warning("%s; waiting for room, for at most %.0f s (run.give_up)", error, give_up_s)
        pause_s = min(pause_s, give_up_s - waited_s)
        pause(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
