"""The archive that Linux unpacks as its first root file system: cpio, format "newc".

One entry is a header of 110 ASCII characters, the path, then the content, each padded to 4 bytes. The format has no
checksum and no compression; a kernel under emulation reads it faster as it is. Modification times are kept, because
Python's compiled files are valid only beside a source of the recorded time.
"""

import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

_MAGIC: Final = b"070701"
_TRAILER: Final = "TRAILER!!!"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder, link or device of the guest.

    Attributes:
        path: where in the guest, relative to its root, without a leading slash.
        mode: type and permissions, as `os.stat` gives them.
        content: bytes, or the file of this machine that has them; a link's target.
        mtime_s: seconds since 1970.
        device: major and minor number; only a device has them.
    """

    path: str
    mode: int
    content: bytes | Path = b""
    mtime_s: int = 0
    device: tuple[int, int] = (0, 0)


def write_archive(entries: Iterable[Entry], stream: BinaryIO) -> None:
    """Write entries in the order given; a folder must come before what is in it."""
    for number, entry in enumerate(entries, start=1):
        _write_entry(entry, number, stream)
    _write_entry(Entry(_TRAILER, 0), 0, stream)


def _write_entry(entry: Entry, inode: int, stream: BinaryIO) -> None:
    content = entry.content.read_bytes() if isinstance(entry.content, Path) else entry.content
    path = entry.path.encode() + b"\0"
    num_links = 2 if stat.S_ISDIR(entry.mode) else 1
    numbers = (
        *(inode, entry.mode, 0, 0, num_links, entry.mtime_s, len(content)),
        *(0, 0, *entry.device, len(path), 0),
    )
    header = _MAGIC + b"".join(b"%08x" % number for number in numbers)
    _write_padded(header + path, stream)
    _write_padded(content, stream)


def _write_padded(data: bytes, stream: BinaryIO) -> None:
    stream.write(data)
    stream.write(bytes(-len(data) % 4))
