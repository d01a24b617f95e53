"""A stream of tokens: an array in memory, or memory-mapped files end to end; and a cache of tokenised text.

Positions count tokens from the start of the first piece. Token files are flat and little-endian, without a header; only
pages that are read take memory.

With the cache only the first start of a run tokenises: it holds one .npy file of token ids per (documents, tokenizer),
under `tokens/` of the cache folder, opened memory-mapped. A file appears complete or not at all (temporary file, fsync,
rename), and its name is a hash of its inputs, so workers that start together may both write it: the content is the
same. Where the cache cannot be written or is damaged, text is tokenised again. It is never pruned and may be deleted
anytime.
"""

import hashlib
import logging
import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tahq.data.sources import FoundFile
from tahq.data.tokenizer import TokenArray
from tahq.errors import DataError, file_errors

_log = logging.getLogger(__name__)
_HASH_BLOCK_NBYTES = 2**16
_MAX_HASH_BLOCKS = 256


class TokenStream:
    """Pieces of tokens, read as if they were one array; `names` are the pieces' names in messages."""

    def __init__(self, pieces: Sequence[TokenArray], names: Sequence[str]) -> None:
        self.pieces = pieces
        self._names = names
        self._ends = list(accumulate(map(len, pieces)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Tokens start … start+count−1, int64, all within the stream."""
        parts = []
        while count > 0:
            number, offset = self._locate(start)
            parts.append(self.pieces[number][offset : offset + count])
            start += len(parts[-1])
            count -= len(parts[-1])
        return np.concatenate(parts, dtype=np.int64)

    def place(self, position: int) -> str:
        """``train.bin, token 17``: where a position lies, for a message."""
        number, offset = self._locate(position)
        return f"{self._names[number]}, token {offset}"

    def _locate(self, position: int) -> tuple[int, int]:
        number = bisect_right(self._ends, position)
        return number, position - (self._ends[number] - len(self.pieces[number]))


def open_token_files(files: Sequence[FoundFile], dtype: str) -> TokenStream:
    """Memory-map token files of `uint16` or `uint32`; DataError for a file that is empty, unreadable or cut off."""
    item = np.dtype(dtype).newbyteorder("<")
    return TokenStream([_map_file(file.path, item) for file in files], [str(file.path) for file in files])


def hash_token_files(stream: TokenStream, vocab_size: int) -> str:
    """Hex BLAKE2b over each piece's size and blocks of 64 KiB, whose tokens are checked as by `check_vocabulary`.

    At most 256 blocks per piece, the first and the last among them and the others evenly between: pieces of up to 16
    MiB are hashed whole, larger ones in a fraction of a second.
    """
    digest = hashlib.blake2b(digest_size=16)
    before = 0
    for piece in stream.pieces:
        digest.update(len(piece).to_bytes(8, "little") + piece.dtype.str.encode())
        for start, block in _sampled_blocks(piece):
            digest.update(block.tobytes())
            check_vocabulary(block, vocab_size, stream, before + start)
        before += len(piece)
    return digest.hexdigest()


def check_vocabulary(tokens: npt.NDArray[Any], vocab_size: int, stream: TokenStream, start: int) -> None:
    """Raise DataError, naming the place, if a token is not below `vocab_size`; tokens[0] lies at `start`."""
    index = int(tokens.argmax())
    if tokens[index] >= vocab_size:
        raise DataError(
            f"{stream.place(start + index)} is {tokens[index]}, but the tokenizer has {vocab_size} ids; set "
            "data.tokenizer to the one that made the tokens, and data.tokens_dtype to their type"
        )


def _sampled_blocks(piece: TokenArray) -> list[tuple[int, TokenArray]]:
    length = _HASH_BLOCK_NBYTES // piece.itemsize
    num_blocks = -(-len(piece) // length)
    num_taken = min(num_blocks, _MAX_HASH_BLOCKS)
    taken = [k * (num_blocks - 1) // max(num_taken - 1, 1) for k in range(num_taken)]
    return [(block * length, piece[block * length : (block + 1) * length]) for block in taken]


def _map_file(path: Path, item: np.dtype[Any]) -> TokenArray:
    with file_errors("read", path, DataError):
        nbytes = path.stat().st_size
        if nbytes == 0 or nbytes % item.itemsize:
            raise DataError(
                f"{path} has {nbytes} bytes, which is no {'positive ' if nbytes == 0 else ''}multiple of "
                f"{item.itemsize}, the size of a {item.name} token; see data.tokens_dtype"
            )
        return np.memmap(path, dtype=item, mode="r")


def cache_folder() -> Path:
    """TAHQ_CACHE if set, else `tahq` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    if own := os.environ.get("TAHQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tahq"


def cached_tokens(key: str, make: Callable[[], TokenArray]) -> TokenArray:
    """The tokens that `make` returns, from the cache if it has them under `key`, which covers all inputs."""
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    path = cache_folder() / "tokens" / f"{name}.npy"
    try:
        return _load(path)
    except FileNotFoundError:
        pass
    except (OSError, EOFError, ValueError) as error:
        _log.warning("token cache: %s cannot be used (%s), tokenising anew", path, error)
    tokens = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, tokens)
        return _load(path)
    except OSError as error:
        _log.warning("token cache: %s cannot be written (%s), keeping tokens in memory", path, error)
        return tokens


def _load(path: Path) -> TokenArray:
    tokens: TokenArray = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise ValueError(f"expected a flat array of unsigned integers, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _write_atomically(path: Path, tokens: TokenArray) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
        try:
            np.save(file, tokens, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
