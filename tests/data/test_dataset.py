"""Datasets of text: documents joined, cut into windows, fingerprinted by content."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tahq.data.config import DataConfig
from tahq.data.dataset import Dataset, load_dataset
from tahq.data.tokenizer import load_tokenizer
from tahq.errors import DataError

Load = Callable[..., Dataset]


def test_documents_are_each_followed_by_the_end_token(tmp_path: Path, byte_dataset: Load) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "b.txt").write_text("de")
    tokens, labels = byte_dataset(text=str(tmp_path), seq_len=6, validation=0.0).gather(np.array([0]))
    assert bytes(tokens[0].astype(np.uint8)) == b"abc\0de"
    assert bytes(labels[0].astype(np.uint8)) == b"bc\0de\0"


def test_every_token_is_an_input_once_in_training_or_validation(text_file: Path, byte_dataset: Load) -> None:
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


def test_stdlib_loads_as_thousands_of_samples() -> None:
    config = DataConfig(text="stdlib")
    dataset = load_dataset(config, load_tokenizer(config))
    assert dataset.num_train_samples > 10_000
    share = dataset.num_validation_samples / (dataset.num_train_samples + dataset.num_validation_samples)
    assert abs(share - config.validation) < 0.005


def test_fingerprint_depends_on_content_and_not_on_place(text_file: Path, tmp_path: Path, byte_dataset: Load) -> None:
    copy = tmp_path / "elsewhere" / "renamed.md"
    copy.parent.mkdir()
    shutil.copy(text_file, copy)
    changed = tmp_path / "changed.txt"
    changed.write_text(text_file.read_text().replace("399", "398"))
    original, moved, other = (byte_dataset(text=str(p)).fingerprint for p in (text_file, copy, changed))
    assert original == moved != other


def test_fingerprint_depends_on_length_split_and_tokenizer(
    text_file: Path, bpe_folder: Path, byte_dataset: Load
) -> None:
    config = DataConfig(text=str(text_file), tokenizer=str(bpe_folder), seq_len=64)
    prints = {
        byte_dataset(text=str(text_file), seq_len=64).fingerprint,
        byte_dataset(text=str(text_file), seq_len=65).fingerprint,
        byte_dataset(text=str(text_file), seq_len=64, validation=0.1).fingerprint,
        load_dataset(config, load_tokenizer(config)).fingerprint,
    }
    assert len(prints) == 4


def test_too_little_text_is_refused_with_numbers(tmp_path: Path, byte_dataset: Load) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"6 tokens are too few: .* seq_len 256 \+ 1 label"):
        byte_dataset(text=str(tmp_path))


def test_validation_of_less_than_a_sample_is_warned_of(
    tmp_path: Path, byte_dataset: Load, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("x" * 300)
    with caplog.at_level(logging.WARNING):
        dataset = byte_dataset(text=str(tmp_path), seq_len=64)
    assert dataset.num_validation_samples == 0
    assert "nothing is held out" in caplog.text


def test_missing_text_is_refused_by_name(byte_dataset: Load) -> None:
    with pytest.raises(DataError, match=r"data.text: no such file or folder: missing.txt"):
        byte_dataset(text="missing.txt")


@pytest.mark.parametrize("section", [{}, {"text": "a", "tokens": "b"}])
def test_section_needs_exactly_one_source(section: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs exactly one of text, tokens, jsonl"):
        DataConfig(**section)
