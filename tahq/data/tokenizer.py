"""Text to token ids and back.

A tokenizer's `fingerprint` depends on its content alone, never on where it lies, so that workers on two
machines can compare theirs. No beginning-of-text token is ever added: documents are joined, each
followed by `end_of_document` where the tokenizer has one.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tahq.data.config import DataConfig

TokenArray = npt.NDArray[Any]
"""1-D array of uint8, uint16 or uint32, as `token_dtype` says."""


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One above the highest id."""

    @property
    def end_of_document(self) -> int | None:
        """The id put after each document; None: the tokenizer has none."""

    @property
    def fingerprint(self) -> str:
        """Hex hash of what the tokenizer is made of."""

    @property
    def cache_key(self) -> str | None:
        """What encodings may be cached by; None: encoding is cheaper than reading a cache."""

    def encode(self, text: str) -> TokenArray:
        """Token ids of a text, without special tokens around it."""

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        """Token ids of each text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write what `transformers.AutoTokenizer.from_pretrained(folder)` needs to make the same ids."""


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        DataError: there is no such file or folder, or it holds no tokenizer.
    """
    if config.tokenizer == "bytes":
        from tahq.data.bytes_tokenizer import BytesTokenizer

        return BytesTokenizer()
    from tahq.data.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer.from_path(Path(config.tokenizer).expanduser())


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds ids below `vocab_size`."""
    return np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32)
