"""Which files a pattern of `data:` means, in an order that every machine agrees on.

A pattern is `stdlib`, a file, a folder (all of its files, at any depth) or a glob (`**` at any depth).
Patterns keep the order in which they are listed; within one, files are sorted by their path below the
folder, part by part. A file that several patterns name counts once, where it came first. Hidden files
and folders are left out of folders.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tahq.errors import DataError

STDLIB = "stdlib"

_STDLIB_LEFT_OUT = frozenset({
    "site-packages", "dist-packages", "__pycache__", "lib-dynload",
    "test", "tests", "idle_test",  # whole or absent, as the distribution likes
    "encodings", "pydoc_data",  # generated tables
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file to read; `named` when the user named it itself rather than a folder or glob it is in."""

    path: Path
    named: bool


def as_patterns(value: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern or a list of them, as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value)


def find_files(patterns: Sequence[str], *, key: str, suffix: str = "", stdlib: bool = False) -> list[FoundFile]:
    """The files that patterns mean, in order, each once.

    Args:
        patterns: files, folders and globs; relative ones are seen from the working directory.
        key: what to call the setting in messages, such as `data.text`.
        suffix: ending that files of a folder must have; a file that is named needs none.
        stdlib: whether the pattern `stdlib` means the standard library.

    Raises:
        DataError: a pattern matches nothing.
    """
    found: dict[Path, FoundFile] = {}
    for pattern in patterns:
        files = _stdlib_files() if stdlib and pattern == STDLIB else _match(pattern, suffix)
        if not files:
            raise DataError(_nothing_matched(pattern, key, suffix))
        for file in files:
            found.setdefault(file.path.resolve(), file)
    if not found:
        raise DataError(f"{key} is an empty list; name at least one file, folder or glob")
    return list(found.values())


def _match(pattern: str, suffix: str) -> list[FoundFile]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [FoundFile(file, named=False) for file in _files_below(path) if file.name.endswith(suffix)]
    if path.is_file():
        return [FoundFile(path, named=True)]
    matched = (Path(name) for name in glob.glob(str(path), recursive=True))
    return [FoundFile(file, named=False) for file in sorted(matched, key=lambda p: p.parts) if file.is_file()]


def _files_below(folder: Path) -> list[Path]:
    def visible(name: str) -> bool:
        return not name.startswith(".") and name != "__pycache__"

    return sorted(_walk(folder, visible), key=lambda file: file.relative_to(folder).parts)


def _walk(folder: Path, wanted: Callable[[str], bool]) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = filter(wanted, folders)
        yield from (Path(parent, name) for name in filter(wanted, names))


def _stdlib_files() -> list[FoundFile]:
    """Python files of the standard library, without tests, tables and what differs by build or site."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [file for file in _walk(folder, lambda name: name not in _STDLIB_LEFT_OUT) if _is_stdlib_source(file)]
    if not files:
        raise DataError(f"text: stdlib needs Python's library as source files; {folder} has none, name other text")
    return [FoundFile(file, named=False) for file in sorted(files, key=lambda p: p.relative_to(folder).parts)]


def _is_stdlib_source(file: Path) -> bool:
    built_here = file.name.startswith(("_sysconfigdata", "sitecustomize", "usercustomize"))
    return file.suffix == ".py" and not built_here and not file.parent.name.startswith("config-")


def _nothing_matched(pattern: str, key: str, suffix: str) -> str:
    if Path(pattern).expanduser().is_dir():
        return f"{key}: the folder {pattern} holds no {'*' + suffix + ' ' if suffix else ''}file"
    kind = "glob matches no file" if glob.has_magic(pattern) else "no such file or folder"
    return f"{key}: {kind}: {pattern} (relative paths are seen from {Path.cwd()})"
