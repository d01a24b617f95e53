"""Datasets of text and of pairs: samples, labels, fingerprints; and the split for validation."""

import json
import logging
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.dataset import RecordDataset, Region, WindowIndex, load_dataset, split_records, split_tokens
from tahq.data.records import Part, Record
from tahq.data.tokenizer import BytesTokenizer, load_tokenizer
from tahq.errors import DataError


def test_documents_are_each_followed_by_the_end_token(tmp_path, byte_dataset):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("de")
    tokens, labels = byte_dataset(text=str(tmp_path), seq_len=6, validation=0.0).gather(np.array([0]))
    assert bytes(tokens[0].astype(np.uint8)) == b"abc\0de"
    assert bytes(labels[0].astype(np.uint8)) == b"bc\0de\0"


def test_every_token_is_an_input_once_in_training_or_validation(text_file, byte_dataset):
    dataset = byte_dataset(text=str(text_file), seq_len=32, validation=0.1)
    data = text_file.read_bytes() + b"\0"
    num_samples = dataset.num_train_samples + dataset.num_validation_samples
    tokens, labels = dataset.gather(np.arange(num_samples))
    cut = len(data) - int(len(data) * 0.1)
    train = tokens[: dataset.num_train_samples].reshape(-1).astype(np.uint8).tobytes()
    held_out = tokens[dataset.num_train_samples :].reshape(-1).astype(np.uint8).tobytes()
    assert data[:cut].startswith(train)
    assert data[cut:].startswith(held_out)
    assert 0 < cut - len(train) <= 32
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    assert tokens.dtype == labels.dtype == np.int64


def test_stdlib_loads_as_thousands_of_samples():
    config = DataConfig(text="stdlib")
    dataset = load_dataset(config, load_tokenizer(config))
    assert dataset.num_train_samples > 10_000
    share = dataset.num_validation_samples / (dataset.num_train_samples + dataset.num_validation_samples)
    assert abs(share - config.validation) < 0.005


def test_fingerprint_depends_on_content_and_not_on_place(text_file, tmp_path, byte_dataset):
    copy = tmp_path / "elsewhere" / "renamed.md"
    copy.parent.mkdir()
    shutil.copy(text_file, copy)
    changed = tmp_path / "changed.txt"
    changed.write_text(text_file.read_text().replace("399", "398"))
    original, moved, other = (byte_dataset(text=str(p)).fingerprint for p in (text_file, copy, changed))
    assert original == moved != other


def test_fingerprint_depends_on_length_split_and_tokenizer(text_file, bpe_folder, byte_dataset):
    config = DataConfig(text=str(text_file), tokenizer=str(bpe_folder), seq_len=64)
    prints = {
        byte_dataset(text=str(text_file), seq_len=64).fingerprint,
        byte_dataset(text=str(text_file), seq_len=65).fingerprint,
        byte_dataset(text=str(text_file), seq_len=64, validation=0.1).fingerprint,
        load_dataset(config, load_tokenizer(config)).fingerprint,
    }
    assert len(prints) == 4


def test_too_little_text_is_refused_with_numbers(tmp_path, byte_dataset):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"6 tokens are too few: .* seq_len 256 \+ 1 label"):
        byte_dataset(text=str(tmp_path))


def test_validation_share_below_one_sample_logs_a_warning(tmp_path, byte_dataset, caplog):
    (tmp_path / "a.txt").write_text("x" * 300)
    with caplog.at_level(logging.WARNING):
        dataset = byte_dataset(text=str(tmp_path), seq_len=64)
    assert dataset.num_validation_samples == 0
    assert "nothing is held out" in caplog.text


@pytest.mark.parametrize("section", [{}, {"text": "a", "tokens": "b"}])
def test_section_needs_exactly_one_source(section):
    with pytest.raises(ValueError, match="needs exactly one of text, tokens, records"):
        DataConfig(**section)


# -- the split --

shares = st.floats(0, 0.99)


@given(num_tokens=st.integers(0, 10**10), validation=shares)
def test_regions_are_disjoint_cover_everything_and_hold_out_the_share(num_tokens, validation):
    training, held_out = split_tokens(num_tokens, validation)
    regions = sorted((*training, *held_out), key=lambda region: (region.start, region.stop))
    assert regions[0].start == 0
    assert regions[-1].stop == num_tokens
    assert all(left.stop == right.start for left, right in pairwise(regions))
    # each of at most 16 stripes rounds its share down, and one more for the rounding of its edges
    assert -32 <= sum(region.stop - region.start for region in held_out) - num_tokens * validation <= 16


def test_small_data_holds_out_its_end_and_large_data_the_end_of_sixteen_stripes():
    assert [len(split_tokens(n, 0.05)[1]) for n in (100, 2_000_000, 10_000_000, 10**9)] == [1, 1, 7, 16]
    assert split_tokens(1000, 0.0) == ((Region(0, 1000),), ())


@given(num_tokens=st.integers(2, 300_000), validation=shares, seq_len=st.integers(20, 400))
def test_windows_never_share_a_label_or_an_input_across_the_split(num_tokens, validation, seq_len):
    seen = np.zeros((2, num_tokens), dtype=np.int64)  # by split: 1 for inputs and 1 for labels
    for uses, regions in zip(seen, split_tokens(num_tokens, validation), strict=True):
        index = WindowIndex(regions, seq_len)
        for start in map(index.start, range(len(index))):
            assert start + seq_len < num_tokens
            uses[start : start + seq_len] += 1
            uses[start + 1 : start + seq_len + 1] += 1
    assert seen.max(initial=0) <= 2  # an input once, a label once
    assert not (seen[0] * seen[1]).any()


@given(num_records=st.integers(0, 3000), validation=shares)
def test_records_held_out_are_as_many_as_asked_for_and_evenly_spread(num_records, validation):
    held_out = split_records(num_records, validation)
    assert len(held_out) == round(num_records * validation)
    if len(held_out):
        gaps = np.diff(np.concatenate([[-1], held_out]))
        assert gaps.min() > 0
        assert gaps.max() - gaps.min() <= 1
        assert held_out[-1] == num_records - 1


words = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=12)


@pytest.fixture
def load(jsonl_file, byte_dataset):
    """load(records, …): the data set of these lines, with other keys of `data:`; nothing held out."""
    return lambda records, **keys: byte_dataset(records=str(jsonl_file(records)), **({"validation": 0.0} | keys))


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
    assert "1 of 3 records are left out, because their prompt fills seq_len 4 or their response is empty" in caplog.text
    assert "pairs.jsonl:2" in caplog.text
    assert dataset.gather(np.array([1]))[0][0, 0] == ord("c")


@pytest.mark.parametrize(
    ("truncation", "expected", "note"),
    [
        ("end", [(b"abcd", b"..de"), (b"x", b"y")], "1 of 2 responses are cut at seq_len 4"),
        ("start", [(b"defg", b"efg\0"), (b"x", b"y")], "1 of 2 beginnings are cut at seq_len 4"),
        ("drop", [(b"x", b"y")], "1 of 2 records are left out, because they are longer than seq_len 4 or their resp"),
    ],
)
@pytest.mark.parametrize("packing", [False, True])
def test_record_that_is_too_long_is_cut_or_dropped_as_configured(load, truncation, expected, note, packing):
    records = [pair("abc", "defg"), pair("x", "y")]
    dataset = load(records, seq_len=4, truncation=truncation, packing=packing)
    tokens, labels = dataset.gather(np.arange(dataset.num_train_samples))
    for (own, of_own), row, of_row in zip(expected, tokens, labels, strict=True):
        assert bytes(row[: len(own)].astype(np.uint8)) == own
        scored = "".join("." if label == -100 else chr(label) for label in of_row[: len(of_own)])
        assert scored.encode() == of_own
    assert dataset.notes[0].startswith(note)
    prints = {load(records, seq_len=4, truncation=each, packing=packing).fingerprint for each in (truncation, "end")}
    assert len(prints) == (1 if truncation == "end" else 2)


def test_record_that_is_too_long_is_an_error_where_that_is_asked_for(load):
    with pytest.raises(DataError, match=r"pairs.jsonl:2: 7 tokens are longer than data.seq_len 4, as are 0 other"):
        load([pair("x", "y"), pair("abc", "defg")], seq_len=4, truncation="error")
    assert load([pair("x", "y")], seq_len=4, truncation="error").num_train_samples == 1


def test_no_pair_left_is_refused_with_numbers(load):
    with pytest.raises(
        DataError, match="none of 3 records is left to train on: 0 have a response that begins within seq_len 4"
    ):
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
    records = [Record((Part(prompt, False), Part(response, True)), True, "") for prompt, response in pairs]
    config = DataConfig(records="x", seq_len=seq_len, validation=0.0)
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
            RecordDataset(records, config, tokenizer)
        return
    dataset = RecordDataset(records, config, tokenizer)
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
        ("[1]", "expected an object with prompt and response, .*; got list"),
        ('{"prompt": "a", "answer": "b"}', "no key 'response', only 'prompt', 'answer'"),
        ('{"messages": []}', "a chat needs a tokenizer with a chat template"),
        ('{"instruction": "a"}', "no key 'output', only 'instruction'"),
        ('{"text": 1}', "text must be a string, got int"),
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
    with pytest.raises(DataError, match=r"1 files have no record, first .*pairs.jsonl"):
        load(["", "  "])


def test_extra_keys_and_windows_line_ends_are_ignored(load):
    assert load([json.dumps({**pair("a", "b"), "source": 7}) + "\r"]).num_train_samples == 1


def test_fingerprint_depends_on_where_prompt_and_response_meet(load):
    assert len({load([pair(*texts)]).fingerprint for texts in (("ab", "c"), ("a", "bc"), ("", "abc"))}) == 3


def test_pairs_with_a_hugging_face_tokenizer_join_the_two_encodings(jsonl_file, bpe_folder):
    path = jsonl_file([pair("Sentence 1 says", " that 1 is")])
    config = DataConfig(records=str(path), tokenizer=str(bpe_folder), seq_len=32, validation=0.0)
    tokenizer = load_tokenizer(config)
    tokens, labels = load_dataset(config, tokenizer).gather(np.array([0]))
    response = tokenizer.encode(" that 1 is").tolist()
    prompt = tokenizer.encode("Sentence 1 says").tolist()
    assert tokens[0].tolist()[: len(prompt + response)] == prompt + response
    assert labels[0][labels[0] != -100].tolist() == [*response, 0]
