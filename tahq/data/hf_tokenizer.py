"""A Hugging Face tokenizer from a local folder; nothing is ever downloaded.

Read in this order of preference: tokenizer.json; GPT-2's vocab.json and merges.txt; other folders with transformers
(slow to import, so only then). Truncation and padding in a tokenizer.json are switched off: a document is never cut.
The end of a document is the eos token of tokenizer_config.json or special_tokens_map.json, else the first usual name in
the vocabulary.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tahq.data.sources import read_bytes
from tahq.data.tokenizer import TokenArray, Tokenizer, token_dtype
from tahq.errors import DataError

_log = logging.getLogger(__name__)

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_VOCABULARIES = (
    "tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.txt",
)  # fmt: skip
_EXTRAS = ("chat_template.jinja",)
_BATCH_CHARACTERS = 2**22


class HuggingFaceTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer` from a folder, or from a file in the format of tokenizer.json.

    `cache_key` has the library's version, since a new version may tokenise differently.

    Raises:
        DataError: nothing is there, or it is not a tokenizer.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise DataError(
                f"data.tokenizer: no such folder: {path} (relative to {Path.cwd()}); tokenizers are local, "
                "nothing is downloaded; `bytes` needs no folder"
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

    def _array(self, encoding: tokenizers.Encoding) -> TokenArray:
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


def _batches(texts: Sequence[str]) -> Iterable[list[str]]:
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


def _load_backend(path: Path, names: set[str]) -> tokenizers.Tokenizer:
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


def _load_byte_level_bpe(folder: Path) -> tokenizers.Tokenizer:
    """GPT-2's form: pieces of bytes, merged within the words that its regular expression finds."""
    model = tokenizers.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    eos = _find_eos(folder, backend.get_vocab())
    if eos is not None:
        backend.add_special_tokens([tokenizers.AddedToken(eos, special=True, normalized=False)])
    return backend


def _load_with_transformers(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ValueError(f"{type(loaded).__name__} has no fast form; save it as tokenizer.json with transformers")
    return backend


def _find_eos(folder: Path, vocab: dict[str, int]) -> str | None:
    for name in _SETTINGS:
        named = _read_object(folder / name).get("eos_token")
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str) and token in vocab:
            return token
    return next((token for token in _USUAL_EOS if token in vocab), None)


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
