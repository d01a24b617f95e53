"""Samples of `seq_len` tokens with their labels, numbered: training first, then validation.

labels[b, s] is the token that follows tokens[b, s], or −100 where there is no loss. Samples of text and token files are
consecutive windows: each token is an input once and a label once. Each pair of JSON Lines files is one sample, cut at
`seq_len` or padded at its end (harmless under a causal mask, and without loss): the tokens of the prompt, those of the
response, and the end-of-document token, if the tokenizer has one. An empty prompt is replaced by the end-of-document
token, so that the first token of the response follows something; without such a token, that first token counts as the
prompt. The two are tokenised separately and joined without a separator: a space between them belongs to one of them.

The split into training and validation depends on the size of the data and the share held out only, not on seed or
sequence length: a run resumed with other values of these never trains on its validation data. Tokens are divided into
at most 16 equal stripes, and the end of each stripe is held out: this spreads the validation set over the data, and
long stripes (at least 65,536 held-out tokens, else there are fewer) lose little when cut into windows. Windows never
cross a boundary, so no token of one part is an input or a label in the other.
"""

import hashlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tahq.data.config import DataConfig
from tahq.data.sources import FoundFile, as_patterns, find_files, hash_documents, read_bytes, read_documents
from tahq.data.token_stream import TokenStream, cached_tokens, check_vocabulary, hash_token_files, open_token_files
from tahq.data.tokenizer import TokenArray, Tokenizer, token_dtype
from tahq.errors import DataError

NO_LOSS = -100  # Label of a position that is not scored

I64 = npt.NDArray[np.int64]

_MAX_STRIPES = 16
_MIN_HELD_OUT = 2**16

_log = logging.getLogger(__name__)


class Dataset(ABC):
    """Samples by number: 0 … num_train_samples−1, then num_validation_samples more.

    `fingerprint`: hex hash of content, tokenizer, sequence length and split; equal on machines that agree in these.
    """

    num_train_samples: int
    num_validation_samples: int

    def __init__(self, kind: str, content_hash: str, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.seq_len, self.shuffle = config.seq_len, config.shuffle
        parts = [kind, content_hash, tokenizer.fingerprint, config.seq_len, repr(config.validation)]
        self.fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @abstractmethod
    def gather(self, sample_ids: I64) -> tuple[I64, I64]:
        """Tokens and labels of samples, each int64 [B, seq_len]; DataError if a token is not in the vocabulary."""


def load_dataset(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """The data that `data:` describes.

    Raises:
        DataError: a pattern matches nothing, a file cannot be read or has the wrong format, a token is out of the
            vocabulary, or there is too little data for one sample.
    """
    dataset: Dataset
    if config.text is not None:
        dataset = _load_text(as_patterns(config.text), config, tokenizer)
    elif config.tokens is not None:
        stream = open_token_files(
            find_files(as_patterns(config.tokens), key="data.tokens", suffix=".bin"), config.tokens_dtype
        )
        dataset = WindowDataset(stream, hash_token_files(stream, tokenizer.vocab_size), config, tokenizer)
    else:
        files = find_files(as_patterns(config.jsonl or ()), key="data.jsonl", suffix=".jsonl")
        dataset = PairDataset(_read_pairs(files), config, tokenizer)
    if config.validation > 0 and dataset.num_validation_samples == 0:
        _log.warning(
            "data.validation: a share of %g of so little data is less than one sample, so nothing is held out",
            config.validation,
        )
    return dataset


class Region(NamedTuple):
    """Tokens start … stop−1 of the data."""

    start: int
    stop: int


def split_tokens(num_tokens: int, validation: float) -> tuple[tuple[Region, ...], tuple[Region, ...]]:
    """Regions for training and for validation, in ascending order, disjoint, and together everything.

    Example:
        >>> split_tokens(100, 0.1)  # the share held out
        ((Region(start=0, stop=90),), (Region(start=90, stop=100),))
    """
    if validation == 0:
        return (Region(0, num_tokens),), ()
    num_stripes = min(max(int(num_tokens * validation) // _MIN_HELD_OUT, 1), _MAX_STRIPES)
    edges = [num_tokens * k // num_stripes for k in range(num_stripes + 1)]
    cuts = [stop - int((stop - start) * validation) for start, stop in pairwise(edges)]
    return tuple(map(Region, edges, cuts)), tuple(map(Region, cuts, edges[1:]))


def split_records(num_records: int, validation: float) -> I64:
    """Indices of the records held out: round(num_records · validation) of them, evenly spread, ascending."""
    num_held_out = round(num_records * validation)
    return np.arange(1, num_held_out + 1, dtype=np.int64) * num_records // max(num_held_out, 1) - 1


class WindowIndex:
    """Consecutive windows of `seq_len` tokens in regions, numbered across the regions."""

    def __init__(self, regions: tuple[Region, ...], seq_len: int) -> None:
        # each with the token after it as its last label
        counts = [max(region.stop - region.start - 1, 0) // seq_len for region in regions]
        self._seq_len = seq_len
        self._starts = [region.start for region in regions]
        self._before = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._before[-1])

    def start(self, number: int) -> int:
        """Position of the first token of window `number`."""
        region = int(np.searchsorted(self._before, number, side="right")) - 1
        return self._starts[region] + (number - int(self._before[region])) * self._seq_len


class WindowDataset(Dataset):
    """Consecutive windows of a stream of tokens."""

    def __init__(self, stream: TokenStream, content_hash: str, config: DataConfig, tokenizer: Tokenizer) -> None:
        super().__init__("windows", content_hash, config, tokenizer)
        self._stream = stream
        self._vocab_size = tokenizer.vocab_size
        training, validation = split_tokens(len(stream), config.validation)
        self._training, self._validation = WindowIndex(training, self.seq_len), WindowIndex(validation, self.seq_len)
        self.num_train_samples, self.num_validation_samples = len(self._training), len(self._validation)
        if not self.num_train_samples:
            raise DataError(
                f"{len(stream)} tokens are too few: with validation {config.validation:g}, no sample of "
                f"seq_len {self.seq_len} + 1 label is left to train on; give more data or a smaller seq_len"
            )

    def gather(self, sample_ids: I64) -> tuple[I64, I64]:
        """See `Dataset.gather`."""
        windows = np.stack([self._window(int(number)) for number in sample_ids])
        return windows[:, :-1], windows[:, 1:]

    def _window(self, number: int) -> I64:
        trained = number < len(self._training)
        start = self._training.start(number) if trained else self._validation.start(number - len(self._training))
        tokens = self._stream.read(start, self.seq_len + 1)
        check_vocabulary(tokens, self._vocab_size, self._stream, start)
        return tokens


class TextPair(NamedTuple):
    """A line of a file."""

    prompt: str
    response: str
    place: str  # ``file:line``, for messages


def _read_pairs(files: Sequence[FoundFile]) -> list[TextPair]:
    """Every pair of JSON Lines files, in order; blank lines and other keys are skipped."""
    pairs = [
        _parse_line(line, f"{file.path}:{number}")
        for file in files
        for number, line in enumerate(read_bytes(file.path).split(b"\n"), start=1)
        if line.strip()
    ]
    if not pairs:
        raise DataError(f"data.jsonl: all lines of {len(files)} files are empty, first {files[0].path}")
    return pairs


def _parse_line(line: bytes, place: str) -> TextPair:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected an object with prompt and response, got {type(record).__name__}")
    return TextPair(_text_of(record, "prompt", place), _text_of(record, "response", place), place)


def _text_of(record: dict[str, object], key: str, place: str) -> str:
    if key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        is_chat = not record.keys().isdisjoint(("messages", "conversations"))
        chat = "; chat data is not supported yet" if is_chat else ""
        raise DataError(f"{place}: no key {key!r}, only {keys}; a line needs prompt and response{chat}")
    value = record[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key} must be a string, got {type(value).__name__}")
    if "\0" in value:
        raise DataError(f"{place}: {key} holds a NUL character; remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{place}: {key} holds half a surrogate pair at character {error.start}") from error
    return value


class PairDataset(Dataset):
    """Prompts and responses, one pair per sample, with loss on the response and the end after it.

    The tokens of all pairs lie end to end: pair i is tokens[starts[i]:starts[i + 1]], its first prompt_lens[i] the
    prompt.
    """

    def __init__(self, texts: Sequence[TextPair], config: DataConfig, tokenizer: Tokenizer) -> None:
        content_hash = hash_documents(text for pair in texts for text in (pair.prompt, pair.response))
        super().__init__("pairs", content_hash, config, tokenizer)
        self._filler = tokenizer.end_of_document or 0
        self._encode(texts, tokenizer)
        lengths = np.diff(self._starts)
        # with at least one token of the response among the labels
        usable = (self._prompt_lens <= self.seq_len) & (lengths > self._prompt_lens)
        held_out = np.zeros(len(texts), dtype=bool)
        held_out[split_records(len(texts), config.validation)] = True
        training, validation = np.flatnonzero(usable & ~held_out), np.flatnonzero(usable & held_out)
        self._order = np.concatenate([training, validation])
        self.num_train_samples, self.num_validation_samples = len(training), len(validation)
        if not self.num_train_samples:
            raise DataError(
                f"none of {len(texts)} pairs is left to train on: {int(usable.sum())} have a response that begins "
                f"within seq_len {self.seq_len}, and {len(validation)} of these are held out for validation"
            )
        if not usable.all():
            _log.warning(
                "%d of %d pairs are left out, because their prompt fills seq_len %d or their response is empty; "
                "first %s", (~usable).sum(), len(texts), self.seq_len, texts[int(usable.argmin())].place,
            )  # fmt: skip
        if num_cut := int((usable & (lengths > self.seq_len + 1)).sum()):
            _log.warning("%d of %d responses are cut at seq_len %d", num_cut, len(texts), self.seq_len)

    def _encode(self, texts: Sequence[TextPair], tokenizer: Tokenizer) -> None:
        end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        prompts = tokenizer.encode_all([pair.prompt for pair in texts])
        responses = tokenizer.encode_all([pair.response for pair in texts])
        ending = np.array(end, dtype=prompts[0].dtype)
        rows = [
            (prompt if len(prompt) else ending, response, ending)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        self._tokens = np.concatenate([part for row in rows for part in row])
        self._starts = np.cumsum([0, *(sum(map(len, row)) for row in rows)], dtype=np.int64)
        self._prompt_lens = np.array([max(len(row[0]), 1) for row in rows], dtype=np.int64)

    def gather(self, sample_ids: I64) -> tuple[I64, I64]:
        """See `Dataset.gather`."""
        tokens = np.full((len(sample_ids), self.seq_len), self._filler, dtype=np.int64)
        labels = np.full_like(tokens, NO_LOSS)
        for row, number in enumerate(self._order[sample_ids]):
            pair = self._tokens[self._starts[number] : self._starts[number + 1]][: self.seq_len + 1]
            scored_from = self._prompt_lens[number] - 1
            tokens[row, : min(len(pair), self.seq_len)] = pair[: self.seq_len]
            labels[row, scored_from : len(pair) - 1] = pair[scored_from + 1 :]
        return tokens, labels


def _load_text(patterns: tuple[str, ...], config: DataConfig, tokenizer: Tokenizer) -> WindowDataset:
    documents = read_documents(find_files(patterns, key="data.text", stdlib=True))
    content_hash = hash_documents(documents)

    def encode() -> TokenArray:
        end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        ending = np.array(end, dtype=token_dtype(tokenizer.vocab_size))
        return np.concatenate([part for tokens in tokenizer.encode_all(documents) for part in (tokens, ending)])

    cache_key = tokenizer.cache_key
    tokens = encode() if cache_key is None else cached_tokens(f"{content_hash} {cache_key}", encode)
    return WindowDataset(TokenStream([tokens], ["data.text"]), content_hash, config, tokenizer)
