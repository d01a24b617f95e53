"""Tokenised text on disk, so that only the first start of a run pays for tokenising.

One .npy file of token ids for each (documents, tokenizer), under `tokens/` of the cache folder, opened
memory-mapped. A file appears whole or not at all (temporary file, fsync, rename), and its name is a hash
of what it was made from, so workers that start together may both write it: the content is the same.
Nothing depends on the cache: where it cannot be written or is damaged, tokens are made anew. It is never
pruned and may be deleted at any time.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tahq.data.tokenizer import TokenArray

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    """TAHQ_CACHE if set, else `tahq` in the user's cache folder (XDG_CACHE_HOME, ~/.cache)."""
    if own := os.environ.get("TAHQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tahq"


def cached_tokens(key: str, make: Callable[[], TokenArray]) -> TokenArray:
    """The tokens that `make` gives, from the cache if they were made before under `key`.

    Args:
        key: names everything that the tokens depend on.
        make: called on a miss.
    """
    name = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    path = cache_folder() / "tokens" / f"{name}.npy"
    try:
        return _load(path)
    except FileNotFoundError:
        tokens = make()
    except (OSError, EOFError, ValueError) as error:
        _log.warning("token cache: %s cannot be used (%s), tokenising anew", path, error)
        tokens = make()
    return _store(path, tokens)


def _load(path: Path) -> TokenArray:
    tokens: TokenArray = np.load(path, mmap_mode="r", allow_pickle=False)
    if tokens.ndim != 1 or tokens.dtype.kind != "u":
        raise ValueError(f"expected a flat array of unsigned integers, got {tokens.dtype} of shape {tokens.shape}")
    return tokens


def _store(path: Path, tokens: TokenArray) -> TokenArray:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_atomically(path, tokens)
        return _load(path)
    except OSError as error:
        _log.warning("token cache: %s cannot be written (%s), keeping tokens in memory", path, error)
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
