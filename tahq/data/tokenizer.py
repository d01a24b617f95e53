"""Text to token ids and back.

A tokenizer's `fingerprint` depends on its content alone, never on where it lies, so that workers on two machines can
compare theirs. No beginning-of-text token is ever added: documents are joined, each followed by `end_of_document` where
the tokenizer has one.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tahq.data.config import DataConfig
from tahq.errors import DataError

TokenArray = npt.NDArray[Any]
"""1-D array of uint8, uint16 or uint32, as `token_dtype` says."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that byte-level BPE writes as the Latin-1 character of the same number."""
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "\0",
    "pad_token": "\0",  # else Qwen2Tokenizer, which AutoTokenizer forces on its models, adds an id 256
    "unk_token": "\0",
    "clean_up_tokenization_spaces": False,
    "model_max_length": 10**30,
}


class Tokenizer(ABC):
    """The interface of tokenizers."""

    vocab_size: int
    """One above the highest id."""
    end_of_document: int | None
    """The id put after each document; None: the tokenizer has none."""
    fingerprint: str
    """Hex hash of what the tokenizer is made of."""
    cache_key: str | None
    """A key under which encodings may be cached; None: encoding is cheaper than reading a cache."""

    @abstractmethod
    def encode(self, text: str) -> TokenArray:
        """Token ids of a text, without special tokens around it; names of special tokens in it become those tokens."""

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        """Token ids of each text."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, special tokens included; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write files with which `transformers.AutoTokenizer.from_pretrained(folder)` makes the same ids."""


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names.

    Raises:
        DataError: there is no such file or folder, or it holds no tokenizer.
    """
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    from tahq.data.hf_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(Path(config.tokenizer).expanduser())


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest unsigned type that holds ids below `vocab_size`."""
    return np.dtype(np.uint8 if vocab_size <= 2**8 else np.uint16 if vocab_size <= 2**16 else np.uint32)


class BytesTokenizer(Tokenizer):
    """One token per byte of UTF-8: id = byte, 256 ids, and 0 after each document.

    Text files hold no NUL bytes, so 0 can end a document; text with one is refused. Exported, it is a byte-level BPE
    without merges in which the piece of id 0 is the character U+0000, so transformers makes the same ids for every
    text. (Exception: AutoTokenizer insists on Qwen2Tokenizer beside a config.json of model type qwen2, which first
    composes text to Unicode's NFC; `PreTrainedTokenizerFast.from_pretrained` does not.)
    """

    vocab_size = 256
    end_of_document = 0
    cache_key = None
    fingerprint = hashlib.blake2b(b"tahq bytes tokenizer, id = byte, end of document = 0", digest_size=16).hexdigest()

    def encode(self, text: str) -> TokenArray:
        """The bytes of the text as uint8; DataError if it holds a NUL."""
        if (position := text.find("\0")) >= 0:
            raise DataError(
                f"text holds a NUL character at position {position}, which is the end-of-document token of "
                "`tokenizer: bytes`; remove it or use another tokenizer"
            )
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`; ends of documents stay, as NUL."""
        return bytes(ids).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json for transformers."""
        import tokenizers

        folder.mkdir(parents=True, exist_ok=True)
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(_byte_pieces(), []))
        options = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(**options)
        backend.decoder = tokenizers.decoders.ByteLevel(**options)
        backend.add_special_tokens([tokenizers.AddedToken("\0", special=True, normalized=False)])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(_TOKENIZER_CONFIG, indent=1) + "\n", encoding="utf-8")


def _byte_pieces() -> dict[str, int]:
    """Vocabulary of byte-level BPE: unprintable bytes are written as U+0100 and up; NUL stays itself."""
    unprintable = [byte for byte in range(256) if byte not in _PRINTABLE]
    pieces = {chr(byte): byte for byte in _PRINTABLE}
    pieces |= {chr(0x100 + rank): byte for rank, byte in enumerate(unprintable) if byte != 0}
    return {"\0": 0, **pieces}
