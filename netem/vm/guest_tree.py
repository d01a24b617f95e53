"""The files of the guest before they are packed, and the archive that Linux unpacks as its first root file system.

A path is added once; adding it again with other content is an error. Links of this machine stay links, and their
targets must be added as well. The archive is cpio, format "newc": one entry is a header of 110 ASCII characters, the
path, then the content, each padded to 4 bytes. Modification times are kept, because Python's compiled files are valid
only beside a source of the recorded time.
"""

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
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


class GuestTree:
    """A root file system, before it is packed."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __contains__(self, path: str) -> bool:
        return path.strip("/") in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def add_folder(self, path: str, mode: int = 0o755) -> None:
        """An empty folder, if there is none yet."""
        if path.strip("/") and path not in self:
            self._add(Entry(path.strip("/"), stat.S_IFDIR | mode))

    def add_bytes(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """A file with this content."""
        self._add(Entry(path.strip("/"), stat.S_IFREG | mode, content))

    def add_link(self, path: str, target: str) -> None:
        """A symbolic link."""
        self._add(Entry(path.strip("/"), stat.S_IFLNK | 0o777, target.encode()))

    def add_device(self, path: str, major: int, minor: int) -> None:
        """A character device."""
        self._add(Entry(path.strip("/"), stat.S_IFCHR | 0o600, device=(major, minor)))

    def add_file(self, source: Path, path: str | None = None) -> None:
        """A copy of this machine's file, with its permissions and time; under its own absolute path if none is given.

        A link is followed as far as it goes: each link on the way is added, then the file.
        """
        path = str(source) if path is None else path
        if path in self:
            return
        if source.is_symlink():
            target = os.readlink(source)
            self.add_link(path, target)
            self.add_file(_normal(source.parent / target), str(_normal(Path(path).parent / target)))
        else:
            found = source.stat()
            self._add(Entry(path.strip("/"), stat.S_IFREG | stat.S_IMODE(found.st_mode), source, int(found.st_mtime)))

    def add_copy_of_folder(self, source: Path, path: str, keep: Callable[[Path], bool]) -> None:
        """The files under a folder of this machine; `keep` gets a path relative to it, a folder's before its files'."""
        for folder, folder_names, file_names in os.walk(source):
            inside = Path(folder).relative_to(source)
            folder_names[:] = sorted(name for name in folder_names if keep(inside / name))
            for name in sorted(file_names):
                if keep(inside / name):
                    self.add_file(Path(folder, name), str(PurePosixPath(path) / inside / name))

    def _add(self, entry: Entry) -> None:
        if self._entries.get(entry.path, entry) != entry:
            raise ValueError(f"/{entry.path} of the guest would come from two places")
        self.add_folder(str(PurePosixPath(entry.path).parent).removeprefix("."))
        self._entries[entry.path] = entry


def _normal(path: Path) -> Path:
    return Path(os.path.normpath(path))
