"""Pairs of prompt and response from JSON Lines, as token ids.

A pair is the prompt's tokens, the response's, and the end-of-document token, if the tokenizer has one. An empty prompt
is replaced by the end-of-document token, so that the first token of the response follows something; without such a
token, that first token counts as the prompt. The two are tokenised separately and joined without a separator: a space
between them must belong to one of them.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tahq.data.sources import FoundFile, hash_documents, read_bytes
from tahq.data.tokenizer import TokenArray, Tokenizer
from tahq.errors import DataError

I64 = npt.NDArray[np.int64]


class TextPair(NamedTuple):
    """A line of a file."""

    prompt: str
    response: str
    place: str
    """``file:line``, for messages."""


class TokenPairs:
    """All pairs, end to end: pair i is tokens[starts[i]:starts[i+1]], its first prompt_lens[i] the prompt."""

    def __init__(self, tokens: TokenArray, starts: I64, prompt_lens: I64) -> None:
        self.tokens, self.starts, self.prompt_lens = tokens, starts, prompt_lens
        self.lengths = np.diff(starts)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    def tokens_of(self, index: int) -> TokenArray:
        """Prompt, response and end of pair `index`."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]


def read_pairs(files: Sequence[FoundFile]) -> list[TextPair]:
    """Every pair of JSON Lines files, in order; blank lines and other keys are skipped.

    Raises:
        DataError: a line is not such an object (the message has file and line), or there are no lines.
    """
    pairs = [
        _parse_line(line, f"{file.path}:{number}")
        for file in files
        for number, line in enumerate(read_bytes(file.path).split(b"\n"), start=1)
        if line.strip()
    ]
    if not pairs:
        raise DataError(f"data.jsonl: {len(files)} files hold no line, first {files[0].path}")
    return pairs


def hash_pairs(pairs: Sequence[TextPair]) -> str:
    """Hex BLAKE2b over prompts and responses with their lengths, not over file names."""
    return hash_documents(text for pair in pairs for text in (pair.prompt, pair.response))


def encode_pairs(pairs: Sequence[TextPair], tokenizer: Tokenizer) -> TokenPairs:
    """Token ids of all pairs."""
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    prompts = tokenizer.encode_all([pair.prompt for pair in pairs])
    responses = tokenizer.encode_all([pair.response for pair in pairs])
    ending = np.array(end, dtype=prompts[0].dtype)
    prompts = [prompt if len(prompt) else ending for prompt in prompts]
    rows = [part for pair in zip(prompts, responses, strict=True) for part in (*pair, ending)]
    prompt_lens = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    lengths = prompt_lens + np.array([len(response) + len(end) for response in responses], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return TokenPairs(np.concatenate(rows), starts, np.maximum(prompt_lens, 1))


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
        raise DataError(f"{place}: no key {key!r}, only {keys}; a line needs prompt and response")
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
