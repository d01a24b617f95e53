"""Files read as documents of text.

Text is what decodes as UTF-8 and holds no NUL byte. Among the files of a folder or a glob, others are
taken for binary ones and skipped, with their number logged; a file that the user named must be text.
Empty files are no documents. Nothing is normalised: line ends and byte order marks stay.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from tahq.data.sources import FoundFile
from tahq.errors import DataError

_log = logging.getLogger(__name__)


def read_documents(files: Sequence[FoundFile]) -> list[str]:
    """The text of each file, in order.

    Raises:
        DataError: a named file is not text, a file cannot be read, or nothing is left.
    """
    documents: list[str] = []
    skipped: list[Path] = []
    for file in files:
        text = _read_text(file)
        if text is None:
            skipped.append(file.path)
        elif text:
            documents.append(text)
    if skipped:
        _log.warning("skipped %d of %d files that are no UTF-8 text, first %s", len(skipped), len(files), skipped[0])
    if not documents:
        raise DataError(f"data.text: none of {len(files)} files holds text ({len(skipped)} binary, the others empty)")
    return documents


def hash_documents(documents: Iterable[str]) -> str:
    """Hex BLAKE2b over the documents and where each ends; file names have no part in it."""
    digest = hashlib.blake2b(digest_size=16)
    for document in documents:
        data = document.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def read_bytes(path: Path) -> bytes:
    """The content of a file; DataError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _read_text(file: FoundFile) -> str | None:
    """The text of a file, None for a binary one; DataError if the user named it and it is binary."""
    data = read_bytes(file.path)
    try:
        text = data.decode("utf-8")
        offset, reason = data.find(0), "a NUL byte, which no text file has"
    except UnicodeDecodeError as error:
        text, offset, reason = "", error.start, f"byte 0x{data[error.start]:02x} is not UTF-8"
    if offset < 0:
        return text
    if file.named:
        raise DataError(f"{file.path}: {reason}, at byte offset {offset}; convert it (iconv -t UTF-8) or leave it out")
    return None
