"""A file that is there whole, and survives a power cut, or is not there at all.

Content goes under a temporary name, is forced to the disk, and gets its real name by a rename, which is
atomic; then the folder is forced to the disk too, or the name itself could be lost.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tahq.errors import SnapshotError

TEMPORARY_SUFFIX = ".tmp"


def write_durably(temporary: Path, write: Callable[[BinaryIO], str]) -> Path:
    """Write a file beside its final place and move it there when it is durable.

    Args:
        temporary: where it grows; its folder is made if need be. One writer at a time: what a killed one
            left under this name is overwritten.
        write: puts the content into the open file and returns the name that it shall have.

    Returns:
        The final path.

    Raises:
        SnapshotError: the disk would not take it (full, read-only, over a quota); the temporary file is
            gone, and what stood under the final name is untouched.
    """
    try:
        _make_folder(temporary.parent)
        with temporary.open("wb") as file:
            name = write(file)
            file.flush()
            os.fsync(file.fileno())
        final = temporary.replace(temporary.with_name(name))
        sync_folder(final.parent)
    except OSError as error:
        raise SnapshotError(
            f"cannot write {temporary}: {error.strerror}; free space there, or set run.dir to another disk "
            "(what was there before is untouched)"
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


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)
