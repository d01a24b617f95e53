"""Prompt and response: where the loss is, how pairs are cut and filled, and what is refused."""

import json
import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.dataset import PairDataset, TextPair, load_dataset
from tahq.data.tokenizer import BytesTokenizer, load_tokenizer
from tahq.errors import DataError

words = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=12)


@pytest.fixture
def load(jsonl_file, byte_dataset):
    """load(records, …): the data set of these lines, with other keys of `data:`; nothing held out."""
    return lambda records, **keys: byte_dataset(jsonl=str(jsonl_file(records)), **({"validation": 0.0} | keys))


def pair(prompt: str, response: str) -> dict[str, str]:
    return {"prompt": prompt, "response": response}


@pytest.mark.parametrize(
    ("prompt", "response", "seq_len", "tokens", "labels"),
    [
        ("ab", "cd", 6, [97, 98, 99, 100, 0, 0], [-100, 99, 100, 0, -100, -100]),
        ("abcd", "xyz", 4, [97, 98, 99, 100], [-100, -100, -100, ord("x")]),
        ("", "ab", 4, [0, 97, 98, 0], [97, 98, 0, -100]),
        ("ab", "", 3, [97, 98, 0], [-100, 0, -100]),
    ],
    ids=["loss on response and end only", "prompt fills the sample", "empty prompt", "empty response"],
)
def test_tokens_and_labels_of_a_pair(load, prompt, response, seq_len, tokens, labels):
    got = load([pair(prompt, response)], seq_len=seq_len).gather(np.array([0]))
    assert [each.tolist() for each in got] == [[tokens], [labels]]


def test_response_is_cut_at_seq_len_and_counted(load, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = load([pair("ab", "cdefgh"), pair("a", "b")], seq_len=4)
    tokens, labels = dataset.gather(np.array([0]))
    assert tokens.tolist() == [[97, 98, 99, 100]]
    assert labels.tolist() == [[-100, 99, 100, 101]]
    assert "1 of 2 responses are cut at seq_len 4" in caplog.text


def test_pair_without_room_for_its_response_is_left_out_with_its_line(load, caplog):
    with caplog.at_level(logging.WARNING):
        dataset = load([pair("a", "b"), pair("abcde", "x"), pair("c", "d")], seq_len=4)
    assert dataset.num_train_samples == 2
    assert "1 of 3 pairs are left out, because their prompt fills seq_len 4 or their response is empty" in caplog.text
    assert "pairs.jsonl:2" in caplog.text
    assert dataset.gather(np.array([1]))[0][0, 0] == ord("c")


def test_no_pair_left_is_refused_with_numbers(load):
    with pytest.raises(DataError, match="none of 3 pairs is left to train on: 0 have a prompt short enough"):
        load([pair("abcde", "x")] * 3, seq_len=4, validation=0.05)


class Endless(BytesTokenizer):
    """Bytes, without an end of a document."""

    end_of_document = None  # type: ignore[assignment]


@given(
    pairs=st.lists(st.tuples(words, words), min_size=1, max_size=8), seq_len=st.integers(1, 20), endless=st.booleans()
)
def test_labels_are_the_response_after_the_prompt_for_any_pairs(pairs, seq_len, endless):
    tokenizer = Endless() if endless else BytesTokenizer()
    end = [] if endless else [0]
    texts = [TextPair(*pair, place="") for pair in pairs]
    config = DataConfig(jsonl="x", seq_len=seq_len, validation=0.0)
    expected = []
    for prompt, response in pairs:
        start = list(prompt.encode()) or end
        whole = [*start, *response.encode(), *end]
        scored = [-100] * (max(len(start), 1) - 1) + whole[max(len(start), 1) :]
        row = (scored + [-100] * seq_len)[:seq_len]
        if any(label != -100 for label in row):
            expected.append(((whole + [0] * seq_len)[:seq_len], row))
    if not expected:
        with pytest.raises(DataError, match="left to train on"):
            PairDataset(texts, config, tokenizer)
        return
    dataset = PairDataset(texts, config, tokenizer)
    tokens, labels = dataset.gather(np.arange(dataset.num_train_samples))
    assert list(zip(tokens.tolist(), labels.tolist(), strict=True)) == expected


def test_split_of_pairs_is_disjoint_complete_and_evenly_spread(load):
    dataset = load([pair(f"{i:04d}", "x") for i in range(100)], seq_len=8, validation=0.2)
    assert (dataset.num_train_samples, dataset.num_validation_samples) == (80, 20)
    tokens, _ = dataset.gather(np.arange(100))
    numbers = [int(bytes(row[:4])) for row in tokens.astype(np.uint8)]
    assert sorted(numbers) == list(range(100))
    assert numbers[80:] == list(range(4, 100, 5))


def test_same_pairs_are_held_out_for_every_seq_len(load):
    records = [pair("p" * (i % 7) + chr(65 + i), "response") for i in range(40)]
    short, long = (load(records, seq_len=n, validation=0.25) for n in (4, 30))

    def held_out(dataset):
        ids = dataset.num_train_samples + np.arange(dataset.num_validation_samples)
        return {int(row[row != ord("p")][0]) for row in dataset.gather(ids)[0]}

    assert short.num_validation_samples < long.num_validation_samples == 10
    assert held_out(short) < held_out(long)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object with prompt and response, got list"),
        ('{"prompt": "a", "answer": "b"}', "no key 'response', only 'prompt', 'answer'"),
        ('{"prompt": 1, "response": "b"}', "prompt must be a string, got int"),
        ('{"prompt": "a\\u0000", "response": "b"}', "prompt holds a NUL"),
        ('{"prompt": "a", "response": "b\\ud800"}', "half a surrogate pair at character 1"),
        ("[" * 100_000, "not JSON"),
        (b'{"prompt": "\xe9", "response": "b"}', "not JSON"),
    ],
)
def test_malformed_line_is_refused_with_file_and_line(load, line, problem):
    with pytest.raises(DataError, match=problem) as caught:
        load([pair("a", "b"), "", line])
    assert "pairs.jsonl:3: " in str(caught.value)


def test_file_without_a_line_is_refused(load):
    with pytest.raises(DataError, match=r"1 files hold no line, first .*pairs.jsonl"):
        load(["", "  "])


def test_extra_keys_and_windows_line_ends_are_ignored(load):
    assert load([json.dumps({**pair("a", "b"), "source": 7}) + "\r"]).num_train_samples == 1


def test_fingerprint_depends_on_where_prompt_and_response_meet(load):
    assert len({load([pair(*texts)]).fingerprint for texts in (("ab", "c"), ("a", "bc"), ("", "abc"))}) == 3


def test_pairs_with_a_hugging_face_tokenizer_join_the_two_encodings(jsonl_file, bpe_folder):
    path = jsonl_file([pair("Sentence 1 says", " that 1 is")])
    config = DataConfig(jsonl=str(path), tokenizer=str(bpe_folder), seq_len=32, validation=0.0)
    tokenizer = load_tokenizer(config)
    tokens, labels = load_dataset(config, tokenizer).gather(np.array([0]))
    response = tokenizer.encode(" that 1 is").tolist()
    prompt = tokenizer.encode("Sentence 1 says").tolist()
    assert tokens[0].tolist()[: len(prompt + response)] == prompt + response
    assert labels[0][labels[0] != -100].tolist() == [*response, 0]
