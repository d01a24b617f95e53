"""Datasets of text: documents joined, cut into windows, fingerprinted by content; and the split for validation."""

import logging
import shutil
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tahq.data.config import DataConfig
from tahq.data.dataset import Region, WindowIndex, load_dataset, split_records, split_tokens
from tahq.data.tokenizer import load_tokenizer
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
    with pytest.raises(ValueError, match="needs exactly one of text, tokens, jsonl"):
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
