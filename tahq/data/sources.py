"""The files that a pattern of `data:` matches, in the same order on every machine, and text files as documents.

A pattern is `stdlib`, a file, a folder (all of its files, at any depth) or a glob (`**` at any depth). Patterns keep
their listed order; within one, files are sorted by their path below the folder, part by part. A file that several
patterns match counts once, at its first place. Hidden files and folders are left out of folders.
"""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tahq.errors import DataError, file_errors

_log = logging.getLogger(__name__)

STDLIB = "stdlib"

_STDLIB_LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "__pycache__", "lib-dynload",
    "test", "tests", "idle_test",  # which some distributions leave out
    "encodings", "pydoc_data",  # generated tables
})  # fmt: skip


class FoundFile(NamedTuple):
    """A file to read; `named` if the user named the file rather than a folder or glob."""

    path: Path
    named: bool


def as_patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern or a list of them, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def find_files(
    patterns: Sequence[str], *, key: str, suffix: str | tuple[str, ...] = "", stdlib: bool = False
) -> list[FoundFile]:
    """The files that patterns (files, folders, globs) match, in order, each once; DataError if a pattern matches none.

    `key`: the setting's name in messages, such as `data.text`. `suffix`: required ending of files in a folder, or
    several; a file that is named needs none. `stdlib`: whether the pattern `stdlib` means the standard library.
    """
    found: dict[Path, FoundFile] = {}
    for pattern in patterns:
        files = _stdlib_files() if stdlib and pattern == STDLIB else _match(pattern, suffix)
        if not files and os.path.isdir(os.path.expanduser(pattern)):
            kinds = ", ".join(f"*{each}" for each in ((suffix,) if isinstance(suffix, str) else suffix) if each)
            raise DataError(f"{key}: the folder {pattern} holds no {kinds or 'file'}")
        if not files:
            kind = "glob matches no file" if glob.has_magic(pattern) else "no such file or folder"
            raise DataError(f"{key}: {kind}: {pattern} (relative to {Path.cwd()})")
        for file in files:
            found.setdefault(file.path.resolve(), file)
    if not found:
        raise DataError(f"{key} is an empty list; name at least one file, folder or glob")
    return list(found.values())


def _match(pattern: str, suffix: str | tuple[str, ...]) -> list[FoundFile]:
    path = Path(os.path.expanduser(pattern))
    if os.path.isfile(path):  # Path.is_file raises where a name is too long
        return [FoundFile(path, named=True)]
    if os.path.isdir(path):
        below = _files_below(path, lambda name: not name.startswith(".") and name != "__pycache__")
        return [FoundFile(file, named=False) for file in below if file.name.endswith(suffix)]
    matched = (Path(name) for name in glob.glob(str(path), recursive=True))
    return [FoundFile(file, named=False) for file in sorted(matched, key=lambda p: p.parts) if file.is_file()]


def _files_below(folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = filter(wanted, folders)
        found += (Path(parent, name) for name in filter(wanted, names))
    return sorted(found, key=lambda file: file.parts)


def _stdlib_files() -> list[FoundFile]:
    """Python files of the standard library, without tests, tables and files that differ by build or site."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        FoundFile(file, named=False)
        for file in _files_below(folder, lambda name: name not in _STDLIB_LEFT_OUT)
        if file.suffix == ".py"
        and not file.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
        and not file.parent.name.startswith("config-")
    ]
    if not files:
        raise DataError(
            f"text: stdlib needs the source files of Python's library; {folder} has none, so name other text"
        )
    return files


def read_documents(files: Sequence[FoundFile]) -> list[str]:
    """The text of each file, in order; DataError for an unreadable file, a named one that is not text, or no text."""
    documents: list[str] = []
    skipped: list[Path] = []
    for file in files:
        text = _read_text(file)
        if text is None:
            skipped.append(file.path)
        elif text:
            documents.append(text)
    if skipped:
        _log.warning("skipped %d of %d files that are not UTF-8 text, first %s", len(skipped), len(files), skipped[0])
    if not documents:
        raise DataError(f"data.text: none of {len(files)} files holds text ({len(skipped)} binary, the others empty)")
    return documents


def hash_documents(documents: Iterable[str]) -> str:
    """Hex BLAKE2b over the documents with their lengths, not over file names."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; DataError if it cannot be read."""
    with file_errors("read", path, DataError):
        return path.read_bytes()


def _read_text(file: FoundFile) -> str | None:
    """The text of a file, None for a binary one; DataError if the user named it and it is binary."""
    data = read_bytes(file.path)
    try:
        text = data.decode("utf-8")
        offset, reason = data.find(0), "a NUL byte"
    except UnicodeDecodeError as error:
        text, offset, reason = "", error.start, f"byte 0x{data[error.start]:02x} is not UTF-8"
    if offset < 0:
        return text
    if file.named:
        raise DataError(f"{file.path}: {reason}, at byte offset {offset}; convert it (iconv -t UTF-8) or leave it out")
    return None
