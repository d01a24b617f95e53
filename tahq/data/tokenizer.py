"""Text to token ids and back: by bytes, or by a Hugging Face tokenizer from files here or on the Hub.

A tokenizer's `fingerprint` depends on its content alone, never on its path, so that workers on two machines can
compare theirs. No beginning-of-text token is ever added: documents are joined, each followed by `end_of_document` where
the tokenizer has one.
"""

import hashlib
import json
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tahq.data.config import DataConfig
from tahq.data.records import ChatTemplate
from tahq.data.sources import read_bytes
from tahq.errors import DataError, ModelError
from tahq.hub import local_folder

if TYPE_CHECKING:  # imported only when a tokenizer needs it
    import tokenizers

_log = logging.getLogger(__name__)

TokenArray = npt.NDArray[Any]  # 1-D array of uint8, uint16 or uint32, as `token_dtype` says
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

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARIES = (
    "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt",
)  # fmt: skip
_EXTRAS = ("chat_template.jinja",)
_BATCH_CHARACTERS = 2**22


class Tokenizer(ABC):
    """The interface of tokenizers."""

    vocab_size: int  # One above the highest id
    end_of_document: int | None  # The id put after each document; None: the tokenizer has none
    fingerprint: str  # Hex hash of the tokenizer's content
    chat_template: ChatTemplate | None = None
    cache_key: str | None  # A key under which encodings may be cached; None: encoding is cheaper than reading a cache

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
        """Write files that `transformers.AutoTokenizer.from_pretrained(folder)` loads with the same ids."""


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names; DataError if it cannot be read."""
    if config.tokenizer == "bytes":
        return BytesTokenizer()
    try:
        return HuggingFaceTokenizer(local_folder(config.tokenizer))
    except ModelError as error:
        raise DataError(str(error).replace("model.path", "data.tokenizer", 1)) from error


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


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` from a folder, or a file in the format of tokenizer.json; DataError if there is none.

    Read in this order of preference: tokenizer.json; GPT-2's vocab.json and merges.txt; other folders with transformers
    (slow to import, so only then). Truncation and padding are switched off: a document is never cut. The end of a
    document is the eos token of tokenizer_config.json or special_tokens_map.json, else the first usual name in the
    vocabulary. `cache_key` has the library's version, since a new version may tokenise differently.
    """

    def __init__(self, path: Path) -> None:
        import tokenizers

        if not os.path.exists(path):  # Path.exists raises where a name is too long
            raise DataError(
                f"data.tokenizer: no such folder: {path} (relative to {Path.cwd()}); "
                "expected one, or a name on the Hub (OWNER/NAME); `bytes` needs none"
            )
        folder = path if path.is_dir() else path.parent
        vocabulary = [folder / name for name in _VOCABULARIES] if path.is_dir() else [path]
        self._files = [file for file in vocabulary if file.is_file()]
        if not self._files:
            raise DataError(f"data.tokenizer: {path} holds no tokenizer, none of {', '.join(_VOCABULARIES)}")
        self._backend = _load_backend(path, {file.name for file in self._files})
        self._backend.no_truncation()
        self._backend.no_padding()
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self._eos = _find_eos(folder, vocab)
        if self._eos is None:
            _log.warning("tokenizer %s has no end-of-document token; documents are joined without one", path)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.end_of_document = None if self._eos is None else vocab[self._eos]
        self.fingerprint = _fingerprint(self._files, self.vocab_size, self._eos)
        self.chat_template = _chat_template(folder, self._backend)
        self.cache_key = f"{self.fingerprint} tokenizers {tokenizers.__version__}"

    def encode(self, text: str) -> TokenArray:
        """See `Tokenizer.encode`."""
        return self._array(self._backend.encode(text, add_special_tokens=False))

    def encode_all(self, texts: Sequence[str]) -> list[TokenArray]:
        """Token ids of each text, in batches on all cores."""
        encoded: list[TokenArray] = []
        for batch in _batches(texts):
            encoded.extend(map(self._array, self._backend.encode_batch_fast(batch, add_special_tokens=False)))
        return encoded

    def _array(self, encoding: "tokenizers.Encoding") -> TokenArray:
        return np.asarray(encoding.ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids: Iterable[int]) -> str:
        """See `Tokenizer.decode`."""
        return str(self._backend.decode([int(i) for i in ids], skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files; write tokenizer.json and its settings where they are missing."""
        folder.mkdir(parents=True, exist_ok=True)
        source = self._files[0].parent
        configured = (source / "tokenizer_config.json").is_file()
        copied = (*self._files, *(source / name for name in (*_SETTINGS, *_EXTRAS))) if configured else ()
        for file in filter(Path.is_file, copied):
            shutil.copyfile(file, folder / file.name)
        self._backend.save(str(folder / "tokenizer.json"))
        if not configured:
            settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            settings |= {} if self._eos is None else {"eos_token": self._eos}
            text = json.dumps(settings, indent=1, ensure_ascii=False)
            (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Runs of texts of about four million characters: enough for all cores, bounded in memory."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _load_backend(path: Path, names: set[str]) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        if "tokenizer.json" in names:
            return tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        if {"vocab.json", "merges.txt"} <= names:
            return _load_byte_level_bpe(path)
        return _load_with_transformers(path)
    except DataError:
        raise
    except Exception as error:  # the libraries raise bare Exception, OSError, ValueError, ImportError, …
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"data.tokenizer: no tokenizer can be read from {path}: {reason}") from error


def _load_byte_level_bpe(folder: Path) -> "tokenizers.Tokenizer":
    """GPT-2's form: pieces of bytes, merged within the words that its regular expression finds."""
    import tokenizers

    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    eos = _find_eos(folder, backend.get_vocab())
    if eos is not None:
        backend.add_special_tokens([tokenizers.AddedToken(eos, special=True, normalized=False)])
    return backend


def _load_with_transformers(folder: Path) -> "tokenizers.Tokenizer":
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not loaded.is_fast:
        raise ValueError(f"{type(loaded).__name__} has no fast form; save it as tokenizer.json with transformers")
    return loaded.backend_tokenizer


def _find_eos(folder: Path, vocab: dict[str, int]) -> str | None:
    for name in _SETTINGS:
        named = _read_object(folder / name).get("eos_token")
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str) and token in vocab:
            return token
    return next((token for token in _USUAL_EOS if token in vocab), None)


def _chat_template(folder: Path, backend: "tokenizers.Tokenizer") -> ChatTemplate | None:
    settings, file = _read_object(folder / _SETTINGS[0]), folder / _EXTRAS[0]
    template = read_bytes(file).decode() if file.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {each.get("name"): each.get("template") for each in template}.get("default")
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return ChatTemplate(template, settings, special) if isinstance(template, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(read_bytes(path))
    except RecursionError:
        raise DataError(f"data.tokenizer: {path}: its JSON is nested too deeply") from None
    except ValueError as error:
        raise DataError(f"data.tokenizer: {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"data.tokenizer: {path} must hold a JSON object, got {type(content).__name__}")
    return content


def _fingerprint(files: Iterable[Path], vocab_size: int, eos: str | None) -> str:
    digest = hashlib.blake2b(json.dumps([vocab_size, eos]).encode(), digest_size=16)
    for file in files:
        digest.update(hashlib.blake2b(read_bytes(file)).digest())
    return digest.hexdigest()
