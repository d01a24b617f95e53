"""Samples of `seq_len` tokens with their labels, numbered: training first, then validation.

labels[b, s] is the token that follows tokens[b, s], or −100 where there is no loss. Samples of text and token files are
consecutive windows: each token is an input once and a label once. Each record (`records.py`) is cut
at `seq_len`: the tokens of its parts, and behind a response the end-of-document token, if the tokenizer has one. A row,
which counts as one sample, has one record, or several that do not see each other (`packing.py`); the rest is padding,
harmless under a causal mask and without loss. An empty prompt is replaced by the end-of-document token, so that the
first token of the response follows something; without such a token, that first token counts as the prompt. Parts are
tokenised separately and joined without a separator: a space between them belongs to one of them.

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
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tahq.data.config import DataConfig
from tahq.data.packing import I64, packed_rows
from tahq.data.records import Record, find_record_files, read_records
from tahq.data.sources import as_patterns, find_files, hash_documents, read_documents
from tahq.data.token_stream import TokenStream, cached_tokens, check_vocabulary, hash_token_files, open_token_files
from tahq.data.tokenizer import TokenArray, Tokenizer, token_dtype
from tahq.errors import DataError

NO_LOSS = -100  # Label of a position that is not scored


_MAX_STRIPES = 16
_MIN_HELD_OUT = 2**16
_MIN_STEPS = 100  # Of an epoch of packed rows, where packing is not asked for

_log = logging.getLogger(__name__)


class Dataset(ABC):
    """Samples by number: 0 … num_train_samples−1, then num_validation_samples more.

    `fingerprint`: hex hash of content, tokenizer, sequence length and split; equal on machines that agree in these.
    `is_packed`: whether rows may have several records. `rows_per_sample`: 2 where a sample is a preference, the chosen
    answer and then the rejected one. `notes`: what the user should know of the data, a line each.
    """

    num_train_samples: int
    num_validation_samples: int
    is_packed = False
    rows_per_sample = 1

    def __init__(self, kind: str, content_hash: str, config: DataConfig, tokenizer: Tokenizer) -> None:
        self.seq_len, self.shuffle = config.seq_len, config.shuffle
        self.notes = list[str]()
        parts = [kind, content_hash, tokenizer.fingerprint, config.seq_len, repr(config.held_out)]
        self.fingerprint = hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @abstractmethod
    def gather(self, sample_ids: I64) -> tuple[I64, I64]:
        """Tokens and labels of samples' rows, each int64 [B, seq_len].

        DataError if a token is not in the vocabulary.
        """

    def positions(self, sample_ids: I64) -> I64 | None:
        """The position of each token in its record, int64 [B, seq_len]; None: each row is one record."""
        return None


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Samples of a dataset, from number `first` on, that no run trains on; the only set may have no name."""

    name: str
    dataset: Dataset
    first: int
    num_samples: int

    @classmethod
    def held_out(cls, dataset: Dataset, name: str = "") -> "ValidationSet":
        """The samples of the training data that are held out."""
        return cls(name, dataset, dataset.num_train_samples, dataset.num_validation_samples)


def load_validation(config: DataConfig, dataset: Dataset, tokenizer: Tokenizer) -> tuple[ValidationSet, ...]:
    """The validation sets beside `dataset`, the training data; DataError as of `load_dataset`.

    Records share rows, or are preferences, if those of the training data are. Of a dataset on the Hub, it is the split
    `validation`.
    """
    sets = []
    for name, each in config.validation_sets.items():
        if isinstance(each, float):
            sets.append(ValidationSet.held_out(dataset, name))
            continue
        key = f"data.validation{'.' * bool(name)}{name}"
        kind, paths = config.files[key]
        changes = dict.fromkeys(("text", "tokens", "records")) | {kind: paths}
        changes |= {"validation": 0.0, "split": "validation", "packing": dataset.is_packed}
        are_preferences = dataset.rows_per_sample > 1
        own = load_dataset(config.model_copy(update=changes), tokenizer, key=key, are_preferences=are_preferences)
        sets.append(ValidationSet(name, own, 0, own.num_train_samples))
    return tuple(sets)


def fingerprint_of(dataset: Dataset, sets: Sequence[ValidationSet]) -> str:
    """Hex hash of the training data and the validation sets: `dataset`'s own where these are a part of it."""
    others = [[each.name, each.dataset.fingerprint] for each in sets if each.dataset is not dataset]
    if not others:
        return dataset.fingerprint
    return hashlib.blake2b(json.dumps([dataset.fingerprint, *others]).encode(), digest_size=16).hexdigest()


def load_dataset(
    config: DataConfig,
    tokenizer: Tokenizer,
    global_batch: int = 1,
    key: str | None = None,
    *,
    are_preferences: bool = False,
) -> Dataset:
    """The data that `data:` describes; `global_batch`: samples per step.

    Messages say that its files are named by `key`, None: by its own keys. `are_preferences`: the samples are pairs of
    answers, for `training.dpo`.

    Raises:
        DataError: a pattern matches nothing, a file cannot be read or has the wrong format, a token is out of the
            vocabulary, or there is too little data for one sample.
    """
    dataset: Dataset
    if are_preferences and config.records is None:
        raise DataError(f"{key or 'data'}: training.dpo needs records with prompt, chosen and rejected")
    if config.text is not None:
        dataset = _load_text(as_patterns(config.text), config, tokenizer, key or "data.text")
    elif config.tokens is not None:
        stream = open_token_files(
            find_files(as_patterns(config.tokens), key=key or "data.tokens", suffix=".bin"), config.tokens_dtype
        )
        dataset = WindowDataset(stream, hash_token_files(stream, tokenizer.vocab_size), config, tokenizer)
    else:
        files = find_record_files(config, key or "data.records")
        records = read_records(files, tokenizer.chat_template, are_preferences=are_preferences)
        rows_per_sample = 2 if are_preferences else 1
        dataset = RecordDataset(records, config, tokenizer, global_batch, rows_per_sample=rows_per_sample)
    if config.held_out > 0 and dataset.num_validation_samples == 0:
        dataset.notes.append(
            f"data.validation: a share of {config.held_out:g} of so little data is less than one sample, so nothing "
            "is held out"
        )
    for note in dataset.notes:
        _log.warning("%s%s", f"{key}: " if key else "", note)
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
        training, validation = split_tokens(len(stream), config.held_out)
        self._training, self._validation = WindowIndex(training, self.seq_len), WindowIndex(validation, self.seq_len)
        self.num_train_samples, self.num_validation_samples = len(self._training), len(self._validation)
        if not self.num_train_samples:
            raise DataError(
                f"{len(stream)} tokens are too few: with validation {config.held_out:g}, no sample of "
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


class RecordDataset(Dataset):
    """Records of texts with loss on some of their parts, one or several per row, or two rows of one each per sample.

    The tokens of all records lie end to end, each with whether it is a label with loss: record i is
    tokens[starts[i]:starts[i + 1]], of which a row has counts[i] tokens from begins[i] on. Row i has the records
    members[row_starts[i]:row_starts[i + 1]].
    """

    def __init__(
        self,
        records: Sequence[Record],
        config: DataConfig,
        tokenizer: Tokenizer,
        global_batch: int = 1,
        *,
        rows_per_sample: int = 1,
    ) -> None:
        self.rows_per_sample = size = rows_per_sample
        are_pairs = all(len(each.parts) == 2 and each.ends for each in records)
        texts = (text for each in records for text in _hashed(each, are_pairs=are_pairs))
        kind = "preferences" if size > 1 else "pairs" if are_pairs else "records"
        super().__init__(kind, hash_documents(texts), config, tokenizer)
        self._filler = tokenizer.end_of_document or 0
        self._encode(records, tokenizer)
        training, validation = self._usable(records, config)
        rows = self._packed(training, validation, config, global_batch)
        self.is_packed = rows is not None
        rules = ["packed"] * self.is_packed + [config.truncation] * (config.truncation != "end")
        if rules:  # else as before there were any
            self.fingerprint = hash_documents([self.fingerprint, *rules])
        if rows is None:
            self._counts = np.minimum(self._starts[1:] - self._begins, self.seq_len)
            parts = ((training, range(size)), (validation, range(size)))
            rows = [[[size * number + place] for number in numbers for place in places] for numbers, places in parts]
        self.num_train_samples, self.num_validation_samples = (len(part) // size for part in rows)
        self._members = np.array([number for part in rows for row in part for number in row], dtype=np.int64)
        self._row_starts = np.cumsum([0, *(len(row) for part in rows for row in part)], dtype=np.int64)

    @property
    def summary(self) -> str:
        """The size of the training data."""
        num_rows = self.num_train_samples * self.rows_per_sample
        members = self._members[: self._row_starts[num_rows]]
        filled = self._counts[members].sum() / (num_rows * self.seq_len)
        num_records = len(members) // self.rows_per_sample
        rows = f"{num_rows:,} rows of {self.seq_len} tokens"
        return f"{num_records:,} records to train on in {rows}, of which {filled:.0%} are filled"

    def _usable(self, records: Sequence[Record], config: DataConfig) -> tuple[I64, I64]:
        """Numbers of the records to train on and to validate with: those with a label with loss that is not cut off.

        Of preferences, those with such a label in both answers. Sets `_begins` and `_counts`: the tokens up to the last
        label, those that `data.truncation` cuts left out.
        """
        scored = [np.flatnonzero(self._scored[a:b]) for a, b in pairwise(self._starts)]
        first = np.array([each[0] if len(each) else self.seq_len + 1 for each in scored])
        last = np.array([each[-1] if len(each) else 0 for each in scored])
        is_long, drops = last > self.seq_len, config.truncation == "drop"
        if config.truncation == "error" and is_long.any():
            place, length = records[int(is_long.argmax())].place, int(last[is_long.argmax()])
            raise DataError(
                f"{place}: {length} tokens are longer than data.seq_len {self.seq_len}, as are {is_long.sum() - 1} "
                "other records, and data.truncation is error; raise seq_len, or use end, start or drop"
            )
        skipped = np.where(is_long & (config.truncation == "start"), last - self.seq_len, 0)
        self._begins, self._counts = self._starts[:-1] + skipped, np.minimum(last, self.seq_len)
        size = self.rows_per_sample
        fits = (first <= skipped + self.seq_len) & ~(is_long & drops)
        usable: npt.NDArray[np.bool_] = np.logical_and.reduce(fits.reshape(-1, size), axis=1)
        is_cut = np.logical_or.reduce(is_long.reshape(-1, size), axis=1)
        held_out = np.zeros(len(usable), dtype=bool)
        held_out[split_records(len(usable), config.held_out)] = True
        training, validation = np.flatnonzero(usable & ~held_out), np.flatnonzero(usable & held_out)
        if not len(training):
            raise DataError(
                f"none of {len(usable)} records is left to train on: {int(usable.sum())} have a response that begins "
                f"within seq_len {self.seq_len}, and {len(validation)} of these are held out for validation"
            )
        if not usable.all():
            fault = "they are longer than" if drops else "their prompt fills"
            self.notes.append(
                f"{(~usable).sum()} of {len(usable)} records are left out, because {fault} seq_len {self.seq_len} or "
                f"their response is empty; first {records[size * int(usable.argmin())].place}"
            )
        if num_cut := int((usable & is_cut).sum()):
            end = "beginnings" if config.truncation == "start" else "responses"
            self.notes.append(f"{num_cut} of {len(usable)} {end} are cut at seq_len {self.seq_len}")
        return training, validation

    def _packed(
        self, training: I64, validation: I64, config: DataConfig, global_batch: int
    ) -> list[list[list[int]]] | None:
        """Rows of records, by their numbers, to train on and to validate with; None: one record per row."""
        if config.packing is False or self.rows_per_sample > 1:
            return None
        rows = [
            [[int(numbers[item]) for item in row] for row in packed_rows(self._counts[numbers], self.seq_len)]
            for numbers in (training, validation)
        ]
        if config.packing == "auto" and len(rows[0]) < _MIN_STEPS * global_batch:
            if 2 * len(rows[0]) <= len(training):
                self.notes.append(
                    f"{len(training)} rows of data.seq_len {self.seq_len} are mostly padding; data.packing: true puts "
                    f"the records into {len(rows[0])}, which auto does from {_MIN_STEPS} steps an epoch on"
                )
            return None
        return rows

    def _encode(self, records: Sequence[Record], tokenizer: Tokenizer) -> None:
        encoded = iter(tokenizer.encode_all([part.text for each in records for part in each.parts]))
        ending = np.array([tokenizer.end_of_document or 0], dtype=token_dtype(tokenizer.vocab_size))
        has_end = tokenizer.end_of_document is not None
        tokens: list[TokenArray] = []
        scored: list[npt.NDArray[np.bool_]] = []
        starts = [0]
        for record in records:
            rows = [(next(encoded), part.is_scored) for part in record.parts]
            if has_end and not len(rows[0][0]):
                rows[0] = (ending, False)  # so that the first token with loss follows something
            if has_end and record.ends:
                rows.append((ending, True))
            own = [np.full(len(row), is_scored) for row, is_scored in rows]
            next(each for each in (*own, np.zeros(1, bool)) if len(each))[0] = False  # which nothing precedes
            tokens += [row for row, _ in rows]
            scored += own
            starts.append(starts[-1] + sum(map(len, own)))
        self._tokens, self._scored = np.concatenate(tokens), np.concatenate(scored)
        self._starts = np.array(starts, dtype=np.int64)

    def gather(self, sample_ids: I64) -> tuple[I64, I64]:
        """See `Dataset.gather`."""
        size = self.rows_per_sample
        numbers = np.add.outer(size * np.asarray(sample_ids), np.arange(size)).ravel()
        tokens = np.full((len(numbers), self.seq_len), self._filler, dtype=np.int64)
        labels = np.full_like(tokens, NO_LOSS)
        for row, number in enumerate(numbers):
            place = 0
            for record in self._records_of(number):
                begin, count = self._begins[record], self._counts[record]
                own = self._tokens[begin : min(begin + count + 1, self._starts[record + 1])].astype(np.int64)
                scored = self._scored[begin + 1 : begin + len(own)]
                tokens[row, place : place + count] = own[:count]
                labels[row, place : place + len(scored)] = np.where(scored, own[1:], NO_LOSS)
                place += count
        return tokens, labels

    def positions(self, sample_ids: I64) -> I64 | None:
        """See `Dataset.positions`; padding continues the last record."""
        if not self.is_packed:
            return None
        positions = np.tile(np.arange(self.seq_len, dtype=np.int64), (len(sample_ids), 1))
        for row, number in enumerate(sample_ids):
            for place in np.cumsum(self._counts[self._records_of(number)[:-1]]):
                positions[row, place:] = np.arange(self.seq_len - place)
        return positions

    def _records_of(self, number: np.int64) -> I64:
        return self._members[self._row_starts[number] : self._row_starts[number + 1]]


def _hashed(record: Record, *, are_pairs: bool) -> list[str]:
    """What tells a record from others; that of prompts and responses as before there were others."""
    if are_pairs:
        return [part.text for part in record.parts]
    return [json.dumps([record.parts, record.ends])]


def shown_samples(dataset: RecordDataset, tokenizer: Tokenizer, count: int = 3) -> list[str]:
    """The first samples as the model sees them, also those in one row; what has no loss is in ⟦brackets⟧.

    Of preferences the chosen and the rejected answer of each.
    """
    numbers = np.arange(min(count, dataset.num_train_samples))
    tokens, labels = dataset.gather(numbers)
    positions, rows = dataset.positions(numbers), range(len(tokens))
    starts = [[0] if positions is None else np.flatnonzero(positions[row] == 0).tolist() for row in rows]
    samples = (
        _shown(tokens[row, start:stop], labels[row, start:stop], tokenizer)
        for row in rows
        for start, stop in pairwise([*starts[row], dataset.seq_len])
    )
    return list(islice(samples, count * dataset.rows_per_sample))


def _shown(tokens: I64, labels: I64, tokenizer: Tokenizer) -> str:
    """A sample's text; its last label is the token behind it."""
    scored = labels != NO_LOSS
    length = int(scored.nonzero()[0][-1]) + 1
    whole = [*tokens[:length].tolist(), int(labels[length - 1])]
    has_loss = [False, *scored[:length].tolist()]
    runs = [[*run] for _, run in groupby(zip(whole, has_loss, strict=True), key=lambda each: each[1])]
    texts = [(tokenizer.decode(token for token, _ in run), run[0][1]) for run in runs]
    return "".join(text if has_loss else f"⟦{text}⟧" for text, has_loss in texts)


def _load_text(patterns: tuple[str, ...], config: DataConfig, tokenizer: Tokenizer, key: str) -> WindowDataset:
    documents = read_documents(find_files(patterns, key=key, stdlib=True))
    content_hash = hash_documents(documents)

    def encode() -> TokenArray:
        end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
        ending = np.array(end, dtype=token_dtype(tokenizer.vocab_size))
        return np.concatenate([part for tokens in tokenizer.encode_all(documents) for part in (tokens, ending)])

    cache_key = tokenizer.cache_key
    tokens = encode() if cache_key is None else cached_tokens(f"{content_hash} {cache_key}", encode)
    return WindowDataset(TokenStream([tokens], [key]), content_hash, config, tokenizer)
